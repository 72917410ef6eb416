"""DiffusionNFT, ViPO and MV-GRPO through the loop, on a tiny random SD3 in float64: identities and degenerate batches."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "rewards"))
sys.path.insert(0, str(Path(__file__).parent))
from judges import JudgeServer, text_of
from test_flow_methods import SCORES, gradient, make, model, move, rows_of  # noqa: F401 (fixtures)

from visual_grpo.api import plan
from visual_grpo.config import merge
from visual_grpo.errors import UserError
from visual_grpo.metrics import Stats
from visual_grpo.pipelines.flow.structure_maps import colour_patches, structure_map
from visual_grpo.pipelines.flow.vipo import Vipo, VipoConfig
from visual_grpo.rewards.image_features import DinoPatches
from visual_grpo.testbed.detector import SceneDetector
from visual_grpo.testbed.scene_views import described, neighbours, training_entries
from visual_grpo.testbed.scenes import BACKGROUND, draw_prompt, split_prompts
from visual_grpo.types import RewardStatus

FLAT = torch.full((8,), 0.5)
SAMPLER = "sampler"


def weights_of(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.policy.trainable.items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, two[name]) for name, value in one.items())


# -- DiffusionNFT -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [1.0, 0.1])
def test_nft_first_gradient_is_advantage_weighted_flow_matching(make: Any, strength: float) -> None:  # noqa: F811
    """Trained and sampling weights equal: the gradient of mean A * Lhat, whatever the strength; 0 for equal rewards."""
    trainer = make({"diffusion_nft": {"strength": strength}}, kl={"beta": 0.0})
    rows, _ = rows_of(trainer)
    assert rows.rollouts.num_units == 3
    found = gradient(trainer, rows)[0]
    losses = -trainer.policy.log_prob(rows.rollouts, torch.arange(3)).value
    (losses.mean(1) * rows.advantages).mean().backward()
    wanted = torch.cat([p.grad.flatten() for p in trainer.policy.trainable.values() if p.grad is not None])
    trainer.optimizer.zero_grad()
    assert float(wanted.abs().max()) > 1e-6
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    flat, advantages = rows_of(trainer, FLAT)
    assert len(flat) == 8
    assert bool((advantages == 0).all())
    assert float(gradient(trainer, flat)[0].abs().max()) < 1e-14


def test_nft_does_not_depend_on_the_split_and_pulls_to_the_reference(make: Any) -> None:  # noqa: F811
    """Off-policy, with the velocity KL: micro-batches and levels one by one give the same gradient (1e-12)."""
    found = []
    for micro, units in ((8, None), (3, 1)):
        trainer = make(
            "diffusion_nft",
            sampling={"steps": 5},
            kl={"beta": 0.5},
            train={"micro_batch": micro, "units_per_pass": units},
        )
        rows, _ = rows_of(trainer)
        move(trainer, 0.01)
        found.append(gradient(trainer, rows))
    assert float(found[0][0].abs().max()) > 1e-6
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-12)
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-12)
    units = torch.arange(rows.rollouts.num_units)
    with torch.no_grad(), trainer.policy.reference():
        ref = trainer.policy.log_prob(rows.rollouts, units).velocity
    with torch.no_grad():
        now = trainer.policy.log_prob(rows.rollouts, units)
    noised = now.velocity * rows.rollouts.data["pair_sigma"][..., None, None, None] + now.prediction
    sigma = rows.rollouts.data["pair_sigma"][..., None, None, None].double()
    final, noise = rows.rollouts.data["final"][:, None], rows.rollouts.data["pair_noise"]
    torch.testing.assert_close(noised, (1 - sigma) * final + sigma * noise)
    trainer.state.config = trainer.state.config.model_copy(
        update={"kl": trainer.state.config.kl.model_copy(update={"beta": 0.0})}
    )
    without = gradient(trainer, rows)[1]
    assert found[1][1] - without == pytest.approx(0.5 * float((now.velocity - ref).square().mean()), rel=1e-6)


def test_nft_levels_are_drawn_without_repeats_for_each_row(make: Any) -> None:  # noqa: F811
    trainer = make({"diffusion_nft": {"levels": 2, "noisy_share": 0.75}}, sampling={"solver": "ode"})
    rollouts, _ = trainer.collect(trainer._draw())
    sigmas, noise = rollouts.data["pair_sigma"], rollouts.data["pair_noise"]
    allowed = rollouts.shared["sigmas"][:3].tolist()
    assert all(len(set(row)) == 2 and set(row) <= set(allowed) for row in sigmas.tolist())
    assert len({tuple(row) for row in sigmas.tolist()}) > 1
    assert len({float(value) for value in noise[:, :, 0, 0, 0].flatten()}) == noise.shape[0] * noise.shape[1]
    prompts = trainer._draw()
    whole, half = trainer._generate(prompts), trainer._generate(prompts.select(torch.arange(4, 8)))
    for name in ("pair_sigma", "pair_noise", "final"):  # whatever process a row is on
        torch.testing.assert_close(half.data[name], whole.data[name][4:], rtol=0, atol=1e-12)
    with pytest.raises(UserError, match=r"levels \(4\) must be at most 3"):
        make({"diffusion_nft": {"levels": 4, "noisy_share": 0.75}})


def test_nft_samples_with_the_slow_weights(make: Any) -> None:  # noqa: F811
    trainer = make("diffusion_nft")
    prompts = trainer._draw()
    before = trainer.stack.rollout(prompts, trainer.state).data["final"]
    move(trainer, 0.05)
    moved = weights_of(trainer)
    assert torch.equal(trainer.stack.rollout(prompts, trainer.state).data["final"], before)
    assert same(weights_of(trainer), moved)
    trainer.policy.snapshot(SAMPLER)
    assert not torch.equal(trainer.stack.rollout(prompts, trainer.state).data["final"], before)


@pytest.mark.parametrize(("rate", "limit"), [(0.0, 0.5), (1.0, 1.0), (0.25, 0.5)])
def test_nft_slow_weights_follow_after_the_step(make: Any, rate: float, limit: float) -> None:  # noqa: F811
    """Decay 0 copies, decay 1 never moves (so the optimizer does not touch them), 0.25 mixes."""
    trainer = make({"diffusion_nft": {"old_decay_rate": rate, "old_decay_max": limit}})
    start = weights_of(trainer)
    trainer.iteration()
    end, slow = weights_of(trainer), trainer.policy.sets[SAMPLER]
    assert not same(start, end)
    assert same(slow, end) == (rate == 0.0)
    assert same(slow, start) == (rate == 1.0)
    for name, value in slow.items():
        torch.testing.assert_close(value, rate * start[name] + (1 - rate) * end[name], rtol=0, atol=1e-12)


def test_nft_refusals() -> None:
    base = {"model": {"adapter": "sd3", "path": "x"}, "data": {"source": "x.jsonl"}, "rewards": {"brightness": 1.0}}
    for over, told in (
        ({"advantage": {"clip": None}}, r"advantage\.clip; set it"),
        ({"ratio": {"level": "sequence"}}, r"leave ratio\.level out"),
        ({"kl": {"estimator": "k3"}}, "use velocity or prediction"),
        ({"model": {"adapter": "toy"}}, "cannot train adapter 'toy'"),
    ):
        with pytest.raises(UserError, match=told):
            plan(merge({**base, "method": "diffusion_nft"}, over))
    with pytest.raises(UserError, match=r"flow_grpo trains noisy steps, but sampling\.solver is 'dpm'"):
        plan({**base, "method": "flow_grpo", "sampling": {"solver": "dpm"}})


def test_nft_published_hyperparameters() -> None:
    """The card's table: GenEval, OCR and the three preference rewards."""
    geneval, ocr, multi = (plan(f"diffusion_nft_sd35_medium_{name}").config for name in ("geneval", "ocr", "multi"))
    for made in (geneval, ocr, multi):
        assert (made.train.prompts_per_step, made.train.group_size, made.train.optimizer.lr) == (48, 24, 3e-4)
        assert (made.advantage.scope, made.advantage.std, made.advantage.clip) == ("batch", "population", 5.0)
        assert (made.kl.beta, made.kl.estimator, made.sampling["guidance"]) == (1e-4, "velocity", 1.0)
        assert (made.sampling["solver"], made.eval.sampling) == ("dpm", {"solver": "ode", "steps": 40})
    assert [made.sampling["steps"] for made in (geneval, ocr, multi)] == [10, 10, 40]
    assert [made.method[0]["diffusion_nft"]["strength"] for made in (geneval, ocr, multi)] == [1.0, 0.1, 0.1]
    assert [made.train.updates_per_step for made in (geneval, ocr, multi)] == [1, 2, 1]
    assert set(multi.rewards) == {"pickscore", "hps_v2", "clip_score"}


# -- ViPO -----------------------------------------------------------------------------------------------------------------------

COLOURS = ["flow_grpo", {"vipo": {"maps": "colours", "patch": 2}}]


def broken(images: Tensor) -> Tensor:
    """A backbone that fails."""
    raise RuntimeError("no such layer")


def test_vipo_with_a_constant_map_is_scalar_grpo_while_the_ratio_is_one(make: Any) -> None:  # noqa: F811
    """And it is not afterwards: positions are clipped one by one."""
    found, later = [], []
    for method, reduction in (("flow_grpo", "mean"), (["flow_grpo", {"vipo": {"maps": "ones"}}], "channel_mean")):
        trainer = make(method, sampling={"reduction": reduction}, kl={"beta": 0.3})
        rows, _ = rows_of(trainer)
        found.append(gradient(trainer, rows))
        move(trainer, 0.01)
        trainer.state.on_policy = False
        later.append(gradient(trainer, rows)[0])
    assert rows.advantages.shape == (8, 1, 8, 8)
    assert float(found[0][0].abs().max()) > 1e-6
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-9, atol=1e-12)
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-9)
    assert float((later[0] - later[1]).abs().max()) > 1e-6


def test_vipo_maps_spread_the_advantage_and_the_split_does_not_matter(make: Any) -> None:  # noqa: F811
    found = []
    for micro, units in ((8, None), (3, 1)):
        trainer = make(
            COLOURS,
            ratio={"clip_low": 1e-3, "clip_high": 1e-3},
            train={"micro_batch": micro, "units_per_pass": units},
        )
        rows, advantages = rows_of(trainer)
        move(trainer, 0.01)
        trainer.state.on_policy = False
        found.append(gradient(trainer, rows))
    assert float(found[0][0].abs().max()) > 1e-6
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-10)
    maps = rows.rollouts.data["structure_map"]
    assert rows.rollouts.old_log_prob.shape == (8, 3, 8, 8)
    assert (float(maps.min()), float(maps.max())) == (0.0, 1.0)
    plain = (SCORES - SCORES.view(2, 4).mean(1).repeat_interleave(4)).sign()
    assert bool((advantages * plain.view(8, 1, 1, 1) >= 0).all())
    peak = (SCORES.double() - SCORES.double().view(2, 4).mean(1).repeat_interleave(4)).abs() / (
        SCORES.double().std(correction=0) + 1e-4
    )
    torch.testing.assert_close(advantages.abs().flatten(1).amax(1).double(), peak, rtol=1e-5, atol=1e-6)
    trainer.stack.after_score(rows.rollouts, rewards := trainer._score(rows.rollouts), trainer.state)
    assert bool((rewards.details["vipo/found"] == 1).all())
    flat, zero = rows_of(trainer, FLAT)
    assert len(flat) == 0
    assert float(zero.abs().max()) == 0.0


def test_vipo_without_a_backbone_goes_on_with_ones_and_one_warning(make: Any, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    trainer = make(["flow_grpo", {"vipo": {"maps": "test_flow_plugins:broken"}}])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            rollouts, rewards = trainer.collect(trainer._draw())
    assert bool((rollouts.data["structure_map"] == 1).all())
    told = [r.getMessage() for r in caplog.records if "map of ones" in r.getMessage()]
    assert len(told) == 1
    assert "no such layer" in told[0]
    trainer.stack.after_score(rollouts, rewards, trainer.state)
    assert float(rewards.details["vipo/found"].max()) == 0.0


def test_vipo_refusals() -> None:
    base = {"model": {"adapter": "sd3", "path": "x"}, "data": {"source": "x.jsonl"}, "rewards": {"brightness": 1.0}}
    for over, told in (
        ({"sampling": {"reduction": "mean"}}, r"sampling\.reduction is 'mean'; use channel_mean"),
        ({"method": [{"vipo": {"maps": "ones"}}, "flow_grpo"]}, r"method=\[flow_grpo, vipo\]"),
        ({"ratio": {"level": "sequence"}}, "one ratio a position"),
        ({"kl": {"beta": 0.1, "estimator": "k3"}}, r"allows no kl\.estimator=k3"),
        ({"method": ["flow_grpo", {"vipo": {"maps": "sam"}}]}, "maps is 'sam'; known: dinov2, colours, ones"),
    ):
        with pytest.raises(UserError, match=told):
            plan(merge({**base, "method": ["flow_grpo", {"vipo": {"maps": "ones"}}]}, over))


def test_vipo_border_orientation_finds_the_shapes() -> None:
    """Mean of the map inside the shape more than twice that outside, for at least 95 % of scenes with one shape."""
    draws = np.random.default_rng(3)
    entries = [e for e in training_entries().values() if e["tag"] in ("single_object", "colors")]
    good = 0
    for entry in entries:
        image = torch.from_numpy(draw_prompt(entry, draws)).permute(2, 0, 1) / 255
        shape = ((image - BACKGROUND / 255).abs().amax(0) > 0.2).float()
        inside = torch.nn.functional.adaptive_avg_pool2d(shape[None], (24, 24))[0]
        found, _ = structure_map(colour_patches(image[None], 3)[0], (24, 24))
        mean = (found * inside).sum() / inside.sum(), (found * (1 - inside)).sum() / (1 - inside).sum()
        good += bool(mean[0] > 2 * mean[1])
    assert good >= 0.95 * len(entries)


def test_vipo_maps_of_packed_tokens_and_of_clips() -> None:
    method = Vipo(VipoConfig(maps="colours", patch=4, mean_one=True))
    images = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    packed, found, centre = method.maps(images, (24,))
    assert (packed.shape, found.tolist(), centre.shape) == ((2, 24), [True, True], (2,))
    torch.testing.assert_close(packed, method.maps(images, (4, 6))[0].flatten(1))
    torch.testing.assert_close(packed.mean(1), torch.ones(2))
    with pytest.raises(UserError, match="make no grid"):
        method.maps(images, (23,))
    clips = torch.rand(2, 3, 5, 32, 48, generator=torch.Generator().manual_seed(1))
    video, found, _ = Vipo(VipoConfig(maps="colours", patch=4)).maps(clips, (2, 4, 6))
    assert (video.shape, found.tolist()) == ((2, 2, 4, 6), [True, True])
    assert video.flatten(1).amin(1).tolist() == [0, 0]
    assert video.flatten(1).amax(1).tolist() == [1, 1]


def test_vipo_reads_dinov2(tmp_path: Path) -> None:
    """A small random DINOv2 with its pipeline: whole patches, the class token left out, at the picture's proportions."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    network = Dinov2Model(
        Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    ).eval()
    network.save_pretrained(tmp_path)
    images = torch.rand(3, 3, 42, 28, generator=torch.Generator().manual_seed(0))
    features = DinoPatches(model=str(tmp_path), batch=2)(images)
    assert features.shape == (3, 3, 2, 16)
    mean, std = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    with torch.no_grad():
        wanted = network(pixel_values=(images - mean) / std).last_hidden_state[:, 1:].unflatten(1, (3, 2))
    torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-4)
    assert DinoPatches(model=str(tmp_path), edge=56)(images).shape == (3, 6, 4, 16)
    maps, found, _ = Vipo(VipoConfig(model=str(tmp_path), edge=56)).maps(images, (21, 14))
    assert (maps.shape, found.all().item()) == ((3, 21, 14), True)
    with pytest.raises(UserError, match="could not be loaded from"):
        Vipo(VipoConfig(model=str(tmp_path / "none"))).maps(images, (21, 14))


# -- MV-GRPO -----------------------------------------------------------------------------------------------------------------


def spelled(prompt: str, images: Tensor, count: int) -> list[str]:
    """Captions that a random text encoder tells apart; one comes twice and one is empty."""
    return ["xyz " + prompt, "", "XYZ " + prompt + ".", "qrs " + prompt][: count + 2]


def parrot(prompt: str, images: Tensor, count: int) -> list[str]:
    """The prompt itself."""
    return [prompt] * count


def matches(prompts: list[str], images: list[Any]) -> list[float]:
    """A reward that reads its caption."""
    return [code(text) * float(np.asarray(image).mean()) for text, image in zip(prompts, images, strict=True)]


def code(text: str) -> int:
    return sum(text.encode()) % 7 + 1


GROUP = {"advantage": {"scope": "group", "drop_flat": False}}


def views(enhancer: str, captions: int = 2, **options: Any) -> list[Any]:
    return ["flow_grpo", {"mv_grpo": {"enhancer": f"test_flow_plugins:{enhancer}", "captions": captions, **options}}]


def test_mv_without_captions_is_the_base_method_bit_for_bit(make: Any) -> None:  # noqa: F811
    found = []
    for method in ("flow_grpo", ["flow_grpo", {"mv_grpo": {"captions": 0, "enhancer": "scenes"}}]):
        trainer = make(method, **GROUP)
        found.append(gradient(trainer, rows_of(trainer)[0]))
    assert float(found[0][0].abs().max()) > 1e-6
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_mv_identical_captions_leave_the_loss(make: Any, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    """Two copies of every row; and the run says that such a reward makes no use of further captions."""
    base = make("flow_grpo", **GROUP)
    wanted = gradient(base, rows_of(base)[0])
    trainer = make(views("parrot", 1, deduplicate=False), **GROUP)
    rollouts, rewards = trainer.collect(trainer._draw())
    with caplog.at_level(logging.WARNING):
        trainer.stack.after_score(rollouts, rewards, trainer.state)
    assert "ignore the text" in caplog.text
    assert len(rollouts) == 16
    rewards.values = SCORES[rollouts.prompts.row_ids][:, None]
    found = gradient(trainer, trainer.prepare(rollouts, rewards, Stats())[0])
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-9, atol=1e-12)
    assert found[1] == pytest.approx(wanted[1], abs=1e-12)


def test_mv_rows_have_their_own_caption_reward_group_and_old_log_prob(make: Any) -> None:  # noqa: F811
    trainer = make(views("spelled"), rewards={"test_flow_plugins:matches": 1.0}, train={"updates_per_step": 2})
    rollouts, rewards = trainer.collect(trainer._draw())
    prompts, tags = rollouts.prompts, rollouts.prompts.tags
    assert len(rollouts) == 8 * 3
    assert tags["view"].tolist() == ([0] * 4 + [1] * 4 + [2] * 4) * 2
    assert prompts.group_ids.tolist() == [g for g in (0, 1, 2, 3, 4, 5) for _ in range(4)]
    own = prompts.context("behaviour")
    for text, sampled, view in zip(prompts.prompts, own, tags["view"].tolist(), strict=True):
        assert text == [sampled, "xyz " + sampled, "qrs " + sampled][view]
    for row in range(4):
        assert torch.equal(rollouts.data["latents"][row], rollouts.data["latents"][row + 4])
        ratio = float(rewards.values[row + 4] / rewards.values[row])
        assert ratio == pytest.approx(code(prompts.prompts[4]) / code(own[0]), rel=1e-5)
    units = torch.arange(3)
    with torch.no_grad():
        again = trainer.policy.log_prob(rollouts, units).value
    torch.testing.assert_close(rollouts.old_log_prob, again, rtol=0, atol=1e-9)
    assert float((again[:4] - again[4:8]).abs().max()) > 1e-6, "the captions must matter for this test to say anything"
    # one failed pair, one flat view: the pair goes, the view stays with advantage 0
    rewards.values = (torch.arange(24).float() * 0.37).sin()[:, None]
    rewards.values[8:12] = 0.5
    rewards.status[5] = int(RewardStatus.FAILED)
    rows, advantages = trainer.prepare(rollouts, rewards, Stats())
    assert rows.rollouts.group_ids.bincount().tolist() == [4, 3, 4, 4, 4, 4]
    assert advantages[7:11].tolist() == [0, 0, 0, 0]
    scores = rewards.values[[4, 6, 7], 0].double()
    torch.testing.assert_close(advantages[4:7], (scores - scores.mean()) / (scores.std(correction=0) + 1e-4))


def test_mv_does_not_depend_on_the_split_and_weighs_its_views(make: Any) -> None:  # noqa: F811
    found = {}
    for name, micro, weight in (("whole", 24, 1.0), ("cut", 5, 1.0), ("own", 24, 0.0)):
        trainer = make(
            views("spelled", view_weight=weight),
            ratio={"clip_low": 1e-3, "clip_high": 1e-3},
            train={"micro_batch": micro, "epochs_per_step": 2, "units_per_pass": None if micro == 24 else 2},
        )
        rollouts, rewards = trainer.collect(trainer._draw())
        rewards.values = (torch.arange(24).float() * 0.37).sin()[:, None]
        rows = trainer.prepare(rollouts, rewards, Stats())[0]
        move(trainer, 0.01)
        trainer.state.on_policy = False
        found[name] = gradient(trainer, rows)
        if name == "own":
            rows.rollouts = replace(
                rows.rollouts, unit_mask=rows.rollouts.unit_mask & (rollouts.prompts.tags["view"] == 0)[:, None]
            )
            rows.weights = torch.ones_like(rows.weights)
            masked = gradient(trainer, rows)
    torch.testing.assert_close(found["cut"][0], found["whole"][0], rtol=0, atol=1e-10)
    assert float((found["own"][0] - found["whole"][0]).abs().max()) > 1e-6
    torch.testing.assert_close(found["own"][0], masked[0], rtol=0, atol=1e-12)


def test_mv_trains_through_the_whole_loop(make: Any) -> None:  # noqa: F811
    """Two iterations with one update each: the first self-tests every view, the second stores no old log-probs."""
    trainer = make(views("spelled"), rewards={"test_flow_plugins:matches": 1.0})
    start = weights_of(trainer)
    trainer.iteration()
    assert not same(start, weights_of(trainer))
    trainer.state.step = 1
    assert trainer._generate(trainer._draw()).old_log_prob is None


def test_mv_refusals() -> None:
    base = {"model": {"adapter": "sd3", "path": "x"}, "data": {"source": "x.jsonl"}, "rewards": {"brightness": 1.0}}
    for method, over, told in (
        ("llm", {"advantage": {"scope": "batch"}}, r"set advantage\.scope to group"),
        ({"enhancer": "vlm", "captions": 9}, {}, r"captions \(9\) must be at most 8"),
        ({"enhancer": "gpt"}, {}, "enhancer is 'gpt'; known: llm, vlm, scenes"),
        ({"enhancer": "scenes", "options": {"model": "m"}}, {}, "enhancer 'scenes' takes none"),
        ({"enhancer": "llm", "options": {"modle": "m"}}, {}, "Did you mean 'model'"),
        ({"enhancer": "test_flow_plugins:code"}, {}, r"must take \(prompt, images"),
    ):
        options = {"enhancer": method} if isinstance(method, str) else method
        with pytest.raises(UserError, match=told):
            plan(merge({**base, "method": ["flow_grpo", {"mv_grpo": options}]}, over))


def test_mv_scenes_stay_in_the_training_split_and_are_judged_by_their_own_metadata() -> None:
    from visual_grpo.pipelines.flow.enhancers import build_enhancer

    train, heldout = split_prompts()
    unseen = {entry["prompt"] for entry in heldout}
    for entry in train:
        texts = neighbours(entry)
        assert len(texts) >= 2
        assert not unseen & set(texts)
        assert entry["prompt"] not in texts
    draws = np.random.default_rng(0)
    chosen = [entry for tag in ("color_attr", "position", "counting") for entry in train if entry["tag"] == tag][::60]
    images = torch.stack([torch.from_numpy(draw_prompt(e, draws)).permute(2, 0, 1) / 255 for e in chosen])
    for entry, objects in zip(chosen, SceneDetector().detect(images), strict=True):
        assert entry["prompt"] in described(objects)
        assert entry["prompt"] not in described(objects, str(entry["prompt"]))
    made = build_enhancer("scenes_seen", {})(
        [str(entry["prompt"]) for entry in chosen], chosen, [image[None] for image in images], 3,
        [torch.Generator().manual_seed(i) for i in range(len(chosen))],
    )  # fmt: skip
    for entry, image, found in zip(chosen, images, made, strict=True):
        assert all(metadata == training_entries()[text] for text, metadata in found)
        seen = described(SceneDetector().detect(image[None])[0], str(entry["prompt"]))
        assert not seen or found[0][0] in seen
    with pytest.raises(UserError, match="testbed/scenes only"):
        build_enhancer("scenes", {})(["a cat"], [{}], [images[:1]], 1, [torch.Generator()])


@pytest.mark.parametrize("name", ["llm", "vlm"])
def test_mv_asks_a_model_behind_an_endpoint(name: str) -> None:
    """Empty and repeated captions are asked for once more, with other attributes; a captioner sees a sample."""
    from visual_grpo.pipelines.flow.enhancers import ATTRIBUTES, build_enhancer

    asked: list[Any] = []

    def answer(body: dict[str, Any]) -> str:
        asked.append(body)
        word = next(word for word in ATTRIBUTES if word in text_of(body))
        same = len(asked) <= 2
        return (
            "<think>hm</think>"
            if len(asked) == 3
            else f'<think>so</think>\n"A dog {"" if same else word}"\nThat is all.'
        )

    server = JudgeServer(answer)
    try:
        enhance = build_enhancer(name, {"endpoint": server.endpoint, "model": "m", "concurrency": 1})
        images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        (found,) = enhance(["a dog on grass"], [{"id": 1}], [images], 3, [torch.Generator().manual_seed(0)])
    finally:
        server.close()
    texts = [text for text, _ in found]
    assert len(asked) == 5
    assert texts[0] == "A dog"
    assert len(set(texts)) == 3
    assert all(metadata == {"id": 1} for _, metadata in found)
    assert all("a dog on grass" in text_of(body) for body in asked)
    assert all(("image_url" in str(body)) == (name == "vlm") for body in asked)
