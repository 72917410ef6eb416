"""The shared denoising loop, replay and noise, on a toy family whose velocity is a small function of latents, level and text."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from visual_grpo.adapters.conditions import TextCache
from visual_grpo.adapters.diffusion import DiffusionAdapter
from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.noise import row_noise, row_seed
from visual_grpo.errors import UserError
from visual_grpo.schedules import flow_match_sigmas
from visual_grpo.types import RolloutBatch

SOLVERS = ["flow_sde", "dance_sde", "cps"]


class ToyNetwork(nn.Module):
    """velocity = scale * x + shift * (text + sigma)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=dtype))
        self.shift = nn.Parameter(torch.tensor(0.3, dtype=dtype))


class ToyDiffusion(DiffusionAdapter):
    """Latents of any rank; a prompt's code is its length."""

    lora_targets = ("none",)

    def __init__(self, shape: tuple[int, ...] = (4, 2, 3), dtype: torch.dtype = torch.float64, **options: Any) -> None:
        super().__init__(DiffusionSampling(**options))
        self.shape, self.network = shape, ToyNetwork(dtype).requires_grad_(False)
        self.calls: list[tuple[int, bool]] = []  # rows of each network call, and whether it recorded a graph
        self.encoded: list[str] = []

    load = load_meta = plan_memory = save = None  # type: ignore[assignment]

    @property
    def trainable_module(self) -> nn.Module:
        return self.network

    def latent_shape(self, sampling: DiffusionSampling) -> tuple[int, ...]:
        return self.shape

    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        self.calls.append((len(latents), torch.is_grad_enabled()))
        drive = (condition["length"] + sigma).view(-1, *[1] * len(self.shape))
        return self.network.scale * latents + self.network.shift * drive

    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        self.encoded += texts
        return {"length": torch.tensor([float(len(text)) / 10 for text in texts])}

    def decode_latents(self, latents: Tensor) -> Tensor:
        return latents[:, :3]


@pytest.fixture
def prompts(contract: Any) -> Any:
    return contract.prompts_of(["a cat", "two dogs"])


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("solver", SOLVERS)
def test_contract(contract: Any, prompts: Any, solver: str, guidance: float) -> None:
    options = DiffusionSampling(steps=5, solver=solver, guidance=guidance)
    contract.check_adapter(ToyDiffusion(dtype=torch.float32), prompts, options, trained="s")


@pytest.mark.parametrize("shape", [(4, 8), (6, 4, 2, 2), (2, 3, 2, 2)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "channel_mean", "channel_sum", "none"])
def test_latents_of_any_rank_and_every_reduction(contract: Any, prompts: Any, shape: Any, reduction: str) -> None:
    adapter = ToyDiffusion(shape)
    rows = adapter.sample(prompts, seed=0, sampling=DiffusionSampling(steps=4, reduction=reduction))
    tail = {"mean": (), "sum": (), "none": shape}.get(reduction, shape[1:])
    assert rows.old_log_prob is not None
    assert rows.old_log_prob.shape == (4, 3, *tail)
    contract.check_ratio_is_one(adapter, rows, 1e-9)


def test_euler_steps_by_hand(prompts: Any) -> None:
    options = DiffusionSampling(steps=3, solver="ode", shift=2.0)
    adapter = ToyDiffusion()
    rows = adapter.sample(prompts, seed=5, sampling=options)
    x = row_noise(5, prompts.row_ids, adapter.shape, "initial").double()
    sigmas = flow_match_sigmas(3, 2.0, dtype=torch.float64)
    length = torch.tensor([0.5, 0.5, 0.8, 0.8], dtype=torch.float64).view(-1, 1, 1, 1)
    for sigma, following in itertools.pairwise(sigmas):
        x = x + (0.7 * x + 0.3 * (length + sigma)) * (following - sigma)
    assert torch.allclose(rows.data["final"], x, atol=1e-6)
    assert rows.unit_mask.shape == (4, 0)
    assert rows.old_log_prob is None
    assert set(rows.data) == {"final"}


def test_first_sde_step_by_hand(prompts: Any) -> None:
    options = DiffusionSampling(steps=4, solver="flow_sde", noise_scale=0.7, shift=3.0)
    adapter = ToyDiffusion()
    rows = adapter.sample(prompts, seed=5, sampling=options)
    sigmas, x = rows.shared["sigmas"], rows.data["latents"][:, 0]
    assert torch.equal(x, row_noise(5, prompts.row_ids, adapter.shape, "initial").double())
    dt, std = float(sigmas[1] - sigmas[0]), 0.7 * math.sqrt(1 / (1 - float(sigmas[1])))
    replay = adapter.log_prob(rows, torch.tensor([0]))
    assert replay.mean is not None
    assert replay.std is not None
    assert replay.kl_std is not None
    assert replay.prediction is not None
    velocity = replay.prediction[:, 0]
    assert torch.allclose(replay.mean[:, 0], x * (1 + std**2 / 2 * dt) + velocity * dt, atol=1e-9)
    assert torch.allclose(replay.std, torch.full((4, 1), std * math.sqrt(-dt), dtype=torch.float64))
    assert torch.allclose(replay.kl_std, torch.full((4, 1), std, dtype=torch.float64))
    density = torch.distributions.Normal(replay.mean[:, 0], float(replay.std[0, 0]))
    expected = density.log_prob(rows.data["next_latents"][:, 0]).flatten(1).mean(1)
    assert torch.allclose(replay.value[:, 0], expected, atol=1e-9)


def test_second_order_steps_by_hand(prompts: Any) -> None:
    """Solver dpm: each clean prediction is extended by the one before it; nothing is stored to train."""
    adapter = ToyDiffusion()
    options = DiffusionSampling(steps=4, solver="dpm", shift=2.0)
    rows = adapter.sample(prompts, seed=5, sampling=options)
    levels = flow_match_sigmas(4, 2.0, dtype=torch.float64).tolist()
    x = row_noise(5, prompts.row_ids, adapter.shape, "initial").double()
    drive = torch.tensor([len(text) / 10 for text in prompts.prompts]).double().view(-1, 1, 1, 1)
    before = None
    for sigma, sigma_next in itertools.pairwise(levels):
        clean = x - sigma * (0.7 * x + 0.3 * (drive + sigma))
        target = clean
        if before is not None and before[1] < 1 and sigma_next > 0:
            logs = [math.log((1 - s) / s) for s in (before[1], sigma, sigma_next)]
            target = clean + (logs[2] - logs[1]) / (2 * (logs[1] - logs[0])) * (clean - before[0])
        x = sigma_next / sigma * x + (1 - sigma_next / sigma) * target
        before = clean, sigma
    torch.testing.assert_close(rows.data["final"], x, rtol=0, atol=1e-6)
    assert (rows.num_units, set(rows.data)) == (0, {"final"})


@pytest.mark.parametrize("solver", SOLVERS)
def test_window_stores_its_steps_and_the_rest_is_ode(contract: Any, prompts: Any, solver: str) -> None:
    adapter, options = ToyDiffusion(), DiffusionSampling(steps=6, solver=solver)
    rows = adapter.sample(prompts, seed=0, sampling=options, units=torch.tensor([1, 3]))
    assert rows.unit_tags["step_index"].tolist() == [[1, 3]] * 4
    assert rows.data["latents"].shape == (4, 2, *adapter.shape)
    contract.check_ratio_is_one(adapter, rows, 1e-9)
    contract.check_subsets(adapter, rows)
    none = adapter.sample(prompts, seed=0, sampling=options, units=torch.tensor([], dtype=torch.int64))
    ode = adapter.sample(prompts, seed=0, sampling=options.model_copy(update={"solver": "ode"}))
    assert torch.equal(none.data["final"], ode.data["final"])
    # Before the window both runs are the same ODE.
    sigma, following = rows.shared["sigmas"][0].expand(4), rows.shared["sigmas"][1].expand(4)
    start = row_noise(0, prompts.row_ids, adapter.shape, "initial").double()
    condition = adapter.encode(prompts.prompts, options).inputs(torch.arange(4))
    first = start + adapter.predict_velocity(start, sigma, condition.tensors) * (following - sigma).view(-1, 1, 1, 1)
    assert torch.allclose(rows.data["latents"][:, 0], first, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "units", "message"),
    [
        ({"solver": "ode"}, [0], "has no stochastic steps"),
        ({"solver": "cps"}, [3], "within 0..2"),
        ({}, [4], "within 0..3"),
        ({}, [2, 1], "ascending"),
        ({}, [1, 1], "distinct"),
    ],
)
def test_steps_that_cannot_be_trained(prompts: Any, options: Any, units: list[int], message: str) -> None:
    sampling = DiffusionSampling(steps=4, **options)
    with pytest.raises(UserError, match=message):
        ToyDiffusion().sample(prompts, seed=0, sampling=sampling, units=torch.tensor(units))


def test_the_last_sde_step_may_be_trained(contract: Any, prompts: Any) -> None:
    adapter = ToyDiffusion()
    rows = adapter.sample(prompts, seed=0, sampling=DiffusionSampling(steps=4), units=torch.arange(4))
    contract.check_ratio_is_one(adapter, rows, 1e-9)


def test_guidance_is_u_plus_scale_times_difference(prompts: Any) -> None:
    adapter = ToyDiffusion()
    options = DiffusionSampling(steps=3, guidance=3.0, negative_prompt="no")
    rows = adapter.sample(prompts, seed=0, sampling=options)
    assert all(rows_in_call == 8 for rows_in_call, _ in adapter.calls)
    velocity = adapter.log_prob(rows, torch.tensor([1])).prediction
    assert velocity is not None
    x, sigma = rows.data["latents"][:, 1], rows.shared["sigmas"][1]
    bound, free = (
        0.7 * x + 0.3 * (torch.tensor(d).double().view(-1, 1, 1, 1) + sigma) for d in ([0.5, 0.5, 0.8, 0.8], [0.2] * 4)
    )
    assert torch.allclose(velocity[:, 0], free + 3.0 * (bound - free), atol=1e-6)
    adapter.calls.clear()
    adapter.sample(prompts, seed=0, sampling=DiffusionSampling(steps=3, guidance=1.0))
    assert all(rows_in_call == 4 for rows_in_call, _ in adapter.calls)


def test_guidance_gradient_of_the_conditional_branch_only(prompts: Any) -> None:
    adapter = ToyDiffusion()
    adapter.network.requires_grad_(True)
    gradients = {}
    for mode in ("both", "cond"):
        options = DiffusionSampling(steps=3, guidance=3.0, guidance_gradient=mode)
        rows = adapter.sample(prompts, seed=0, sampling=options)
        adapter.calls.clear()
        value = adapter.log_prob(rows, torch.arange(2)).value
        assert torch.allclose(value, rows.old_log_prob, atol=1e-9)
        gradients[mode] = torch.autograd.grad(value.sum(), adapter.network.scale)[0]
        assert adapter.calls == ([(16, True)] if mode == "both" else [(8, True), (8, False)])
    # d velocity / d scale = x in both branches: through both it is x, through the conditional one 3 x.
    assert torch.allclose(gradients["cond"], 3 * gradients["both"], rtol=1e-6)


def test_conditional_log_prob_leaves_guidance_out(prompts: Any) -> None:
    adapter = ToyDiffusion()
    options = DiffusionSampling(steps=3, guidance=3.0, logprob_mode="cond")
    rows = adapter.sample(prompts, seed=0, sampling=options)
    adapter.calls.clear()
    replay = adapter.log_prob(rows, torch.tensor([0]))
    assert [count for count, _ in adapter.calls] == [4]
    assert rows.old_log_prob is not None
    assert not torch.allclose(replay.value, rows.old_log_prob[:, :1])


def test_replay_follows_the_rollout_and_not_the_present_options(prompts: Any) -> None:
    adapter = ToyDiffusion(guidance=9.0, solver="cps", noise_scale=0.5)
    rows = adapter.sample(prompts, seed=0, sampling=DiffusionSampling(steps=4))
    assert torch.allclose(adapter.log_prob(rows, torch.arange(3)).value, rows.old_log_prob, atol=1e-9)


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_forward_batch_changes_nothing(prompts: Any, batch: int) -> None:
    adapter, whole = ToyDiffusion(), DiffusionSampling(steps=4, guidance=2.0)
    chunked = whole.model_copy(update={"forward_batch": batch})
    first, second = (adapter.sample(prompts, seed=0, sampling=options) for options in (whole, chunked))
    assert first.old_log_prob is not None
    assert second.old_log_prob is not None
    assert torch.allclose(first.data["final"], second.data["final"], atol=1e-12)
    assert torch.allclose(first.old_log_prob, second.old_log_prob, atol=1e-12)
    adapter.calls.clear()
    value = adapter.log_prob(second, torch.arange(3)).value
    assert max(count for count, _ in adapter.calls) <= 2 * batch
    assert torch.allclose(value, first.old_log_prob, atol=1e-12)


@pytest.mark.parametrize("self_normalize", [True, False])
def test_noise_pairs_by_hand(prompts: Any, self_normalize: bool) -> None:
    adapter = ToyDiffusion(self_normalize=self_normalize)
    generator = torch.Generator().manual_seed(0)
    x0 = torch.randn(4, *adapter.shape, generator=generator, dtype=torch.float64)
    noise = torch.randn(4, 3, *adapter.shape, generator=generator, dtype=torch.float64)
    sigma = torch.tensor([[1.0, 0.5, 0.1]] * 4, dtype=torch.float64)
    rows = RolloutBatch(
        prompts=prompts,
        unit_kind="noise_pair",
        unit_mask=torch.ones(4, 3, dtype=torch.bool),
        data={"final": x0, "pair_sigma": sigma, "pair_noise": noise},
    )
    units = torch.tensor([2, 0])
    replay = adapter.log_prob(rows, units)
    length = torch.tensor([0.5, 0.5, 0.8, 0.8], dtype=torch.float64).view(-1, 1, 1, 1)
    assert replay.prediction is not None
    for slot, unit in enumerate(units.tolist()):
        s = sigma[0, unit]
        z = (1 - s) * x0 + s * noise[:, unit]
        prediction = z - s * (0.7 * z + 0.3 * (length + s))
        error = (prediction - x0).flatten(1)
        loss = error.square().mean(1) / (error.abs().mean(1) if self_normalize else 1.0)
        assert torch.allclose(replay.prediction[:, slot], prediction, atol=1e-7)
        assert torch.allclose(replay.value[:, slot], -loss, atol=1e-7)


def test_the_training_context_is_replayed(prompts: Any) -> None:
    adapter, options = ToyDiffusion(), DiffusionSampling(steps=3)
    hinted = replace(prompts, contexts={"behaviour": ["longer than before"] * 4, "training": list(prompts.prompts)})
    rows = adapter.sample(hinted, seed=0, sampling=options)
    plain = replace(rows, prompts=replace(hinted, contexts={"training": ["longer than before"] * 4}))
    assert torch.allclose(adapter.log_prob(plain, torch.arange(2)).value, rows.old_log_prob, atol=1e-9)
    assert not torch.allclose(adapter.log_prob(rows, torch.arange(2)).value, rows.old_log_prob, atol=1e-3)


def test_same_noise_is_one_noise_a_group(prompts: Any) -> None:
    adapter = ToyDiffusion()
    start = adapter.sample(prompts, seed=0, sampling=DiffusionSampling(steps=3, same_noise=True)).data["latents"][:, 0]
    assert torch.equal(start[0], start[1])
    assert torch.equal(start[2], start[3])
    assert not torch.equal(start[0], start[2])


def test_row_noise_is_a_function_of_seed_row_and_stream() -> None:
    rows = torch.tensor([3, 1, 3])
    noise = row_noise(0, rows, (5, 7))
    assert torch.equal(noise[0], noise[2])
    assert torch.equal(noise[1:2], row_noise(0, rows[1:2], (5, 7)))
    assert not torch.equal(noise, row_noise(1, rows, (5, 7)))
    assert not torch.equal(noise, row_noise(0, rows, (5, 7), "steps"))
    many = row_noise(0, torch.arange(400), (64,))
    assert abs(float(many.mean())) < 0.02
    assert abs(float(many.std()) - 1) < 0.02
    assert len({row_seed(seed, row) for seed in range(50) for row in range(50)}) == 2500


def test_texts_are_encoded_once_and_the_oldest_go() -> None:
    cache, seen = TextCache(), []

    def encoder(texts: list[str]) -> dict[str, Tensor]:
        seen.extend(texts)
        return {"code": torch.tensor([[float(ord(text))] for text in texts])}

    def encode(texts: str, limit: int = 3, key: int = 0) -> Tensor:
        condition = cache.encode(
            list(texts), encoder, key=key, limit=limit, device=torch.device("cpu"), dtype=torch.float32
        )
        return condition.inputs(torch.arange(len(texts))).tensors["code"][:, 0]

    assert encode("abab").tolist() == [97, 98, 97, 98]
    assert seen == ["a", "b"]
    encode("ca")
    assert seen == ["a", "b", "c"]
    encode("d")  # b is the least recently used
    encode("acd")
    assert seen == ["a", "b", "c", "d"]
    encode("b")
    assert seen[-1] == "b"
    encode("b", key=1)
    assert seen[-2:] == ["b", "b"]
    assert encode("efghij", limit=2).tolist() == [float(ord(c)) for c in "efghij"]
    assert len(cache) == 2


def test_rows_of_one_prompt_are_encoded_once(prompts: Any) -> None:
    adapter, options = ToyDiffusion(), DiffusionSampling(steps=3, guidance=2.0)
    rows = adapter.sample(prompts, seed=0, sampling=options)
    adapter.log_prob(rows, torch.arange(2))
    assert sorted(adapter.encoded) == ["", "a cat", "two dogs"]


def test_pictures_are_clamped_and_decoded_in_parts(prompts: Any) -> None:
    adapter = ToyDiffusion()
    rows = adapter.sample(prompts, seed=0, sampling=DiffusionSampling(steps=3, decode_batch=3))
    images = adapter.decode(rows).images
    assert images is not None
    assert torch.equal(images, rows.data["final"][:, :3].clamp(0, 1).float())


def test_options_refuse_what_cannot_be() -> None:
    for wrong in (
        {"noise_scale": 0.0},
        {"solver": "cps", "noise_scale": 1.2},
        {"steps": 0},
        {"guidance": -1},
        {"nope": 1},
    ):
        with pytest.raises(ValidationError):
            DiffusionSampling(**wrong)


def test_log_prob_refuses_what_it_cannot_replay(prompts: Any) -> None:
    adapter = ToyDiffusion()
    rows = adapter.sample(prompts, seed=0, sampling=DiffusionSampling(steps=3))
    with pytest.raises(UserError, match="no token entropy"):
        adapter.log_prob(rows, torch.arange(1), entropy=True)
    with pytest.raises(UserError, match="kind 'token'"):
        adapter.log_prob(replace(rows, unit_kind="token"), torch.arange(1))


def test_a_record_with_a_system_message_is_refused() -> None:
    adapter = ToyDiffusion()
    adapter.check_prompts(["a cat"], [{"tag": "x", "system": None}], adapter.sampling)
    with pytest.raises(UserError, match="'a dog' has a system message, and ToyDiffusion takes plain prompts"):
        adapter.check_prompts(["a cat", "a dog"], [{}, {"system": "Draw well."}], adapter.sampling)
