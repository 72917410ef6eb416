"""Latents with a time axis through the denoising loop, transitions, noise pairs and ViPO's maps: a tiny Wan transformer."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from loss_rows import state_of

from visual_grpo.adapters.diffusion import DiffusionAdapter
from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.loss import LossInputs, passes, step_totals
from visual_grpo.objectives import elbo_pair_loss
from visual_grpo.pipelines.flow.vipo import Vipo, VipoConfig
from visual_grpo.stack import MethodStack
from visual_grpo.transitions import Transition, transition_kl
from visual_grpo.types import RolloutBatch

SHAPE = (4, 3, 4, 6)
"""Channels, frames, height, width of the latents."""


class TinyVideo(DiffusionAdapter):
    """`WanTransformer3DModel` of random weights; a prompt is encoded as its letters, and latents are shown as they are."""

    lora_targets = ("to_q",)
    load = load_meta = plan_memory = save = None  # type: ignore[assignment]

    def __init__(self, **options: Any) -> None:
        from diffusers import WanTransformer3DModel

        super().__init__(DiffusionSampling(**options))
        torch.manual_seed(0)
        self.network = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
            text_dim=16, freq_dim=32, ffn_dim=32, num_layers=1, cross_attn_norm=True,
            qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
        ).eval()  # fmt: skip

    @property
    def trainable_module(self) -> nn.Module:
        return self.network

    def latent_shape(self, sampling: DiffusionSampling) -> tuple[int, ...]:
        return SHAPE

    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(latents, 1000 * sigma, condition["tokens"], return_dict=False)[0]

    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        letters = [[float(ord(c) % 7) for c in text.ljust(5)[:5]] for text in texts]
        return {"tokens": torch.tensor(letters)[..., None].expand(-1, -1, 16).sin()}

    def decode_latents(self, latents: Tensor) -> Tensor:
        return latents[:, :3].sigmoid()


def rollouts_of(contract: Any, adapter: TinyVideo) -> RolloutBatch:
    prompts = contract.prompts_of(["a cat", "a dog"])
    return adapter.decode(adapter.sample(prompts, seed=0, sampling=adapter.sampling))


@pytest.mark.parametrize(
    ("solver", "reduction"),
    [
        ("flow_sde", "mean"),
        ("flow_sde", "channel_mean"),
        ("dance_sde", "mean"),
        ("cps", "mean"),
        ("ddim", "channel_sum"),
    ],
)
def test_transitions_of_clips(contract: Any, solver: str, reduction: str) -> None:
    adapter = TinyVideo(steps=3, solver=solver, noise_scale=0.3, reduction=reduction)
    rows = rollouts_of(contract, adapter)
    assert rows.data["latents"].shape == (4, 2, *SHAPE)
    assert rows.old_log_prob is not None
    assert rows.old_log_prob.shape == (4, 2, *(() if reduction == "mean" else SHAPE[1:]))
    contract.check_ratio_is_one(adapter, rows, 1e-4)
    found = adapter.log_prob(rows, torch.arange(2)).value.sum()
    (slope,) = torch.autograd.grad(found, [adapter.network.patch_embedding.weight])
    assert float(slope.abs().max()) > 0


def test_a_frame_counts_like_a_column_of_pixels(contract: Any) -> None:
    """The log-prob of a clip is that of the same numbers without a time axis; so is the KL of two steps."""
    adapter = TinyVideo(steps=3)
    rows = rollouts_of(contract, adapter)
    replay = adapter.log_prob(rows, torch.arange(2))
    assert replay.mean is not None
    assert replay.std is not None
    normal = torch.distributions.Normal(replay.mean, replay.std[..., None, None, None, None])
    expected = normal.log_prob(rows.data["next_latents"]).mean(dim=(2, 3, 4, 5))
    torch.testing.assert_close(replay.value, expected, atol=1e-5, rtol=0)
    clips = Transition(mean=replay.mean[:, 0], std=replay.std[:, 0], kl_factor=torch.ones(4))
    other = replace(clips, mean=clips.mean + 0.1 * clips.mean.sin())
    flat, flat_other = (replace(one, mean=one.mean.flatten(2)) for one in (clips, other))
    torch.testing.assert_close(transition_kl(clips, other), transition_kl(flat, flat_other))


def test_rows_of_clips_are_chosen_and_joined(contract: Any) -> None:
    adapter = TinyVideo(steps=3)
    rows = rollouts_of(contract, adapter)
    joined = RolloutBatch.concat([rows.select(torch.tensor([2, 3])), rows.select(torch.tensor([0, 1]))])
    assert joined.images is not None
    assert rows.images is not None
    assert torch.equal(joined.images[2:], rows.images[:2])
    assert torch.equal(joined.data["latents"], rows.data["latents"][[2, 3, 0, 1]])
    one_each = rows.select_units(torch.tensor([[1], [0], [1], [0]]), "latents", "next_latents")
    assert one_each.data["latents"].shape == (4, 1, *SHAPE)
    found = adapter.log_prob(one_each, torch.arange(1)).value
    everything = adapter.log_prob(rows, torch.arange(2)).value
    torch.testing.assert_close(found[:, 0], everything[torch.arange(4), torch.tensor([1, 0, 1, 0])], atol=1e-5, rtol=0)


def test_noise_pairs_of_clips(contract: Any) -> None:
    adapter = TinyVideo(steps=3, solver="dpm")
    rows = rollouts_of(contract, adapter)
    pairs = {"pair_sigma": torch.tensor([[0.9, 0.4]]).expand(4, -1), "pair_noise": torch.ones(4, 2, *SHAPE)}
    rows.unit_kind, rows.data = "noise_pair", {"final": rows.data["final"], **pairs}
    found = adapter.log_prob(rows, torch.arange(2))
    assert found.value.shape == (4, 2)
    assert found.velocity is not None
    assert found.prediction is not None
    noised = 0.1 * rows.data["final"] + 0.9
    torch.testing.assert_close(found.prediction[:, 0], noised - 0.9 * found.velocity[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.value, -elbo_pair_loss(found.prediction, rows.data["final"], floor=1e-5))


def test_maps_of_clips_weigh_their_advantages(contract: Any) -> None:
    adapter = TinyVideo(steps=3, reduction="channel_mean")
    rows = rollouts_of(contract, adapter)
    assert rows.images is not None
    assert rows.images.shape == (4, 3, *SHAPE[1:])
    method, state = Vipo(VipoConfig(maps="colours", patch=1)), SimpleNamespace(policy=SimpleNamespace(adapter=adapter))
    rows = method.after_rollout(rows, state)  # type: ignore[arg-type]
    maps = rows.data["structure_map"]
    assert maps.shape == (4, *SHAPE[1:])
    dense = method.adjust_advantages(torch.tensor([1.0, -1.0, 0.5, 0.0]), None, rows, state)  # type: ignore[arg-type]
    assert dense.shape == (4, 1, *SHAPE[1:])
    torch.testing.assert_close(dense[1, 0], -maps[1])


def gradient(adapter: TinyVideo, rows: RolloutBatch, advantages: Tensor, method: Any) -> Tensor:
    """Of the loss of all rows, to the network's first layer."""
    state = state_of(method=method)
    state.policy = SimpleNamespace(log_prob=adapter.log_prob, adapter=adapter)  # type: ignore[assignment]
    state.sampling = adapter.sampling
    inputs = LossInputs(rollouts=rows, advantages=advantages, weights=torch.ones(rows.unit_mask.shape).double())
    weight = adapter.network.patch_embedding.weight
    total = torch.zeros_like(weight)
    for loss, _ in passes(MethodStack.build(state.config), inputs, step_totals(inputs, 1), state):
        total += torch.autograd.grad(loss, weight)[0]
    return total


def test_a_constant_map_of_clips_is_scalar_grpo(contract: Any) -> None:
    """On-policy, ViPO's loss over frames, rows and columns has the gradient of Flow-GRPO's over whole clips."""
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    found = {}
    for reduction, method in (("mean", ["flow_grpo"]), ("channel_mean", ["flow_grpo", {"vipo": {"maps": "ones"}}])):
        adapter = TinyVideo(steps=3, reduction=reduction)
        rows = rollouts_of(contract, adapter)
        given = advantages
        if reduction == "channel_mean":
            vipo, state = Vipo(VipoConfig(maps="ones")), SimpleNamespace(policy=SimpleNamespace(adapter=adapter))
            rows = vipo.after_rollout(rows, state)  # type: ignore[arg-type]
            given = vipo.adjust_advantages(advantages, None, rows, state)  # type: ignore[arg-type]
            assert given.shape == (4, 1, *SHAPE[1:])
        found[reduction] = gradient(adapter, rows, given, method)
    assert float(found["mean"].abs().max()) > 1e-6
    torch.testing.assert_close(found["channel_mean"], found["mean"], rtol=1e-3, atol=1e-6)
