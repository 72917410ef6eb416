"""Flow-OPD and its cold start through the loop, on the toy flow model in float64: identities and degenerate cases."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from toy_flow import Network, ToyFlow, flow_config, gradient, move

import visual_grpo as vg
from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.sd3 import SD3Adapter
from visual_grpo.api import plan
from visual_grpo.build import build_trainer
from visual_grpo.config import ModelConfig, to_yaml
from visual_grpo.distributed import Ranks
from visual_grpo.errors import UserError
from visual_grpo.loss import LossInputs, make_micro
from visual_grpo.metrics import Stats
from visual_grpo.run_folder import RunFolder
from visual_grpo.testbed.word_reader import correlations
from visual_grpo.testbed.words import WORDS, draw_word
from visual_grpo.trainer import Trainer

STACK = "flow_grpo"


@pytest.fixture
def teachers(tmp_path: Path) -> dict[str, str]:
    """Two exports of the toy network, each moved elsewhere; `same` is the start of every run."""
    found = {}
    for name, seed in (("left", 1), ("right", 2), ("same", None)):
        network = Network().double()
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        (tmp_path / name).mkdir()
        save_file(dict(network.state_dict()), tmp_path / name / "model.safetensors")
        found[name] = str(tmp_path / name)
    return found


def two_tasks(folder: Path, method: Any, **over: Any) -> dict[str, Any]:
    """The toy's prompts as two tasks of the same file's halves."""
    config = flow_config(folder, method, **over)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    sources = {}
    for number, task in enumerate(("left", "right")):
        (folder / f"{task}.jsonl").write_text("".join(lines[2 * number : 2 * number + 2]))
        (folder / f"{task}_test.jsonl").write_text(f'{{"prompt": "held {task}", "tag": "t"}}\n')
        sources[task] = {"source": str(folder / f"{task}.jsonl"), "heldout": str(folder / f"{task}_test.jsonl")}
    return config | {"data": {"sources": sources, "balance": "task"}, "eval": {**config["eval"], "source": None}}


def trainer(folder: Path, options: dict[str, Any], **over: Any) -> Trainer:
    """A trainer of Flow-OPD on both tasks that has not started."""
    made = plan(two_tasks(folder, [STACK, {"flow_opd": options}], **over))
    run = RunFolder.create(folder / "runs", "flow", config_yaml=to_yaml(made.config))
    return build_trainer(made, run, Ranks())


def both(teachers: dict[str, str]) -> dict[str, str]:
    return {task: teachers[task] for task in ("left", "right")}


def rows_of(made: Trainer) -> LossInputs:
    rollouts, rewards = made.collect(made._draw())
    rewards.values = torch.tensor([0.9, 0.2, 0.4, 0.1, 0.3, 0.8, 0.5, 0.55])[:, None]
    rows, _ = made.prepare(rollouts, rewards, Stats())
    return rows


def flat(made: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in made.policy.trainable.values()])


# -- identities ---------------------------------------------------------------------------------------------------------------


def test_the_direct_gradient_is_that_of_the_weighted_velocities_each_row_by_its_teacher(
    tmp_path: Path, teachers: Any
) -> None:
    made = trainer(tmp_path, {"teachers": both(teachers), "anchor_beta": 0.0})
    rows = rows_of(made)
    found, loss = gradient(made, rows)
    data, sigmas = rows.rollouts.data, rows.rollouts.shared["sigmas"]
    units = data["latents"].shape[1]
    codes = made.policy.adapter.encode_texts(rows.rollouts.prompts.prompts, made.state.sampling)["code"].double()
    total = torch.zeros((), dtype=torch.float64)
    tasks = rows.rollouts.prompts.tags["task"]
    assert sorted(tasks.tolist()) == [0] * 4 + [1] * 4
    experts = []
    for task in ("left", "right"):
        experts.append(Network().double())
        experts[-1].load_state_dict(load_file(Path(teachers[task]) / "model.safetensors"))
    for unit in range(units):
        sigma, dt = sigmas[unit].double(), (sigmas[unit] - sigmas[unit + 1]).double()
        ceiling = sigmas[1].double() if sigma == 1 else sigma
        std = 0.7 * (sigma / (1 - ceiling)).sqrt()
        weight = dt**2 / 2 * (std * (1 - sigma) / (2 * sigma) + 1 / std) ** 2
        levels = sigma.expand(len(rows))
        own = made.policy.adapter.network(data["latents"][:, unit], levels, codes)
        with torch.no_grad():
            wanted = torch.stack(
                [
                    experts[int(task)](data["latents"][i : i + 1, unit], levels[:1], codes[i : i + 1])[0]
                    for i, task in enumerate(tasks)
                ]
            )
        total = total + (weight * (own - wanted).square().flatten(1).mean(1)).sum()
    total = total / (len(rows) * units)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(made.policy.trainable.values()))])
    assert loss == pytest.approx(float(total.detach()), abs=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("form", ["direct", "released", "sampled"])
def test_a_teacher_like_the_student_teaches_nothing(tmp_path: Path, teachers: Any, form: str) -> None:
    same = {"left": teachers["same"], "right": teachers["same"]}
    made = trainer(tmp_path, {"teachers": same, "opd_reward": form, "anchor_beta": 0.0})
    found, loss = gradient(made, rows_of(made))
    assert loss == 0.0
    assert float(found.abs().max()) == 0.0


def test_released_is_direct_plus_detached(tmp_path: Path, teachers: Any) -> None:
    """At ratio 1, where the noise of the detached form has no gradient on average."""
    found = {}
    for form in ("direct", "released", "detached"):
        made = trainer(tmp_path, {"teachers": both(teachers), "opd_reward": form, "anchor_beta": 0.0})
        found[form], _ = gradient(made, rows_of(made))
    torch.testing.assert_close(found["released"], found["direct"] + found["detached"], rtol=1e-9, atol=1e-14)
    assert float(found["detached"].norm()) > 0


def test_the_detached_form_averages_to_nothing_and_the_sampled_one_to_the_direct(tmp_path: Path, teachers: Any) -> None:
    """Projected on the direct gradient, over 24 batches of 32 rows, within 4 standard errors."""
    sizes = {"train": {"group_size": 16, "micro_batch": 32}}
    shares: dict[str, list[float]] = {"detached": [], "sampled": []}
    makers = {
        form: trainer(tmp_path, {"teachers": both(teachers), "opd_reward": form, "anchor_beta": 0.0}, **sizes)
        for form in ("direct", *shares)
    }
    for step in range(24):
        found = {}
        for form, made in makers.items():
            made.state.step = step
            made._drawn, made.source.cursor = 0, 2 * step
            rollouts, rewards = made.collect(made._draw())
            rows, _ = made.prepare(rollouts, rewards, Stats())
            found[form], _ = gradient(made, rows)
        square = found["direct"].square().sum()
        for form, values in shares.items():
            values.append(float((found[form] * found["direct"]).sum() / square))
    for form, expected in (("detached", 0.0), ("sampled", 1.0)):
        values = torch.tensor(shares[form], dtype=torch.float64)
        error = float(values.std() / len(values) ** 0.5)
        assert abs(float(values.mean()) - expected) < 4 * error, (form, values.mean(), error)
        assert error < 0.25


def test_task_only_is_the_surrogate_of_flow_grpo_and_mixed_adds_the_kl(tmp_path: Path, teachers: Any) -> None:
    found = {}
    for mode in ("task_only", "mixed", "kl_only", "gkd"):
        made = trainer(tmp_path, {"teachers": both(teachers), "reward_mode": mode, "anchor_beta": 0.0})
        rows = rows_of(made)
        move(made, 1e-4)
        found[mode], _ = gradient(made, rows)
    config = two_tasks(tmp_path, [STACK], advantage={"drop_flat": False})
    plain = build_trainer(
        plan(config), RunFolder.create(tmp_path / "runs", "flow", config_yaml=to_yaml(plan(config).config)), Ranks()
    )
    rows = rows_of(plain)
    move(plain, 1e-4)
    expected, _ = gradient(plain, rows)
    torch.testing.assert_close(found["task_only"], expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found["mixed"], found["task_only"] + found["kl_only"], rtol=1e-9, atol=1e-14)
    assert torch.equal(found["gkd"], found["kl_only"])


def test_mixed_rewards_add_up_before_the_clamp(tmp_path: Path, teachers: Any) -> None:
    options = {"teachers": both(teachers), "reward_mode": "mixed", "opd_reward": "detached", "anchor_beta": 0.0}
    made = trainer(tmp_path, {**options, "kl_scale": -3.0})
    rows = rows_of(made)
    units = torch.arange(rows.rollouts.num_units)
    log_prob = made.policy.log_prob(rows.rollouts, units)
    micro = make_micro(made.stack, rows, units, log_prob, made.state)
    loss, figures = made.stack.surrogate(micro, made.state)
    method = made.stack.methods["flow_opd"]
    target = method._targets(micro, made.state)
    assert log_prob.mean is not None
    assert log_prob.kl_std is not None
    kl = ((log_prob.mean - target).square().flatten(2).mean(2) / (2 * log_prob.kl_std.square())).detach()
    torch.testing.assert_close(
        loss.detach(), -(rows.advantages[:, None] - 3.0 * kl).clamp(-5, 5), rtol=1e-9, atol=1e-12
    )
    total, count = figures["flow_opd/kl"]
    assert float(total / count) == pytest.approx(float(kl.mean()))
    left = rows.rollouts.prompts.tags["task"] == 0
    total, count = figures["flow_opd/kl/left"]
    assert float(total / count) == pytest.approx(float(kl[left].mean()))


def test_a_normalised_kl_meets_normalised_advantages_of_the_task(tmp_path: Path, teachers: Any) -> None:
    options = {"teachers": both(teachers), "reward_mode": "mixed", "opd_reward": "detached", "anchor_beta": 0.0}
    made = trainer(tmp_path, {**options, "kl_norm": "global", "kl_scale": -3.0})
    rows = rows_of(made)
    units = torch.arange(rows.rollouts.num_units)
    log_prob = made.policy.log_prob(rows.rollouts, units)
    micro = make_micro(made.stack, rows, units, log_prob, made.state)
    loss, _ = made.stack.surrogate(micro, made.state)
    target = made.stack.methods["flow_opd"]._targets(micro, made.state)
    assert log_prob.mean is not None
    assert log_prob.kl_std is not None
    kl = ((log_prob.mean - target).square().flatten(2).mean(2) / (2 * log_prob.kl_std.square())).detach()
    task = rows.advantages[:, None].expand_as(kl).clamp(-5, 5)
    one, other = ((x - x.mean(0)) / (x.std(0) + 1e-4) for x in (task, kl))
    assert float(one.std(0)[0]) == pytest.approx(1, abs=1e-3)
    torch.testing.assert_close(loss.detach(), -(one - 3.0 * other).clamp(-5, 5), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["direct", "released", "sampled", "detached"])
def test_the_split_into_micro_batches_and_steps_changes_nothing(tmp_path: Path, teachers: Any, form: str) -> None:
    options = {"teachers": both(teachers), "anchor": teachers["left"], "opd_reward": form}
    found = []
    for size, units in ((8, None), (3, 1)):
        made = trainer(tmp_path, options, train={"micro_batch": size, "units_per_pass": units})
        rows = rows_of(made)
        move(made)
        found.append(gradient(made, rows))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-9, atol=1e-14)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-9)


def test_the_anchor(tmp_path: Path, teachers: Any) -> None:
    """MAR is `beta` times the KL to the anchor; without a path that is the start; with beta 0 there is none."""
    options = {"teachers": both(teachers)}
    made = trainer(tmp_path, {**options, "anchor": teachers["left"], "anchor_beta": 0.3})
    rows = rows_of(made)
    whole, loss = gradient(made, rows)
    off = trainer(tmp_path, {**options, "anchor_beta": 0.0})
    bare, bare_loss = gradient(off, rows_of(off))
    alone = trainer(tmp_path, {"teachers": {"left": teachers["left"], "right": teachers["left"]}, "anchor_beta": 0.0})
    pull, pull_loss = gradient(alone, rows_of(alone))
    torch.testing.assert_close(whole, bare + 0.3 * pull, rtol=1e-9, atol=1e-14)
    assert loss == pytest.approx(bare_loss + 0.3 * pull_loss)
    start = trainer(tmp_path, {**options, "anchor_beta": 5.0})
    found, _ = gradient(start, rows_of(start))
    torch.testing.assert_close(found, bare, rtol=1e-9, atol=1e-14)  # the student is the anchor still
    lora = {"lora": {"rank": 2, "alpha": 4}}
    with pytest.raises(UserError, match="holds no LoRA, but this run trains a LoRA"):
        trainer(tmp_path, options, model=lora)
    free = trainer(tmp_path, {"reward_mode": "task_only", "anchor_beta": 1.0}, model=lora)
    assert not free.policy._fixed  # the anchor is the base, switched to and not copied
    rows = rows_of(free)
    at_base, base_loss = gradient(free, rows)
    move(free, 0.3)
    _, moved_loss = gradient(free, rows)
    assert moved_loss > base_loss
    assert bool(torch.isfinite(at_base).all())


# -- degenerate ---------------------------------------------------------------------------------------------------------------


def test_what_is_not_finite_drops_its_sample(tmp_path: Path, teachers: Any) -> None:
    made = trainer(tmp_path, {"teachers": both(teachers), "anchor_beta": 0.0})
    rows = rows_of(made)
    whole, _ = gradient(made, rows)
    right = (rows.rollouts.prompts.tags["task"] == 1).nonzero().flatten()
    for key in made.policy._fixed["teacher/left"]:
        made.policy._fixed["teacher/left"][key] = torch.full_like(made.policy._fixed["teacher/left"][key], torch.nan)
    broken, loss = gradient(made, rows)
    assert np.isfinite(loss)
    assert bool(torch.isfinite(broken).all())
    half, _ = gradient(made, rows.select(right))
    torch.testing.assert_close(broken, 0.5 * half, rtol=1e-9, atol=1e-14)
    assert not torch.allclose(broken, whole)
    # Latents that are not finite: the row is not trained at all.
    rollouts, rewards = made.collect(made._draw())
    rollouts.data["next_latents"][2, 1] = torch.inf
    kept, _ = made.prepare(rollouts, rewards, Stats())
    assert len(kept) == 7


def test_equal_task_rewards_are_trained_and_single_samples_are_enough(tmp_path: Path, teachers: Any) -> None:
    made = trainer(tmp_path, {"teachers": both(teachers)}, train={"prompts_per_step": 4, "group_size": 1})
    rollouts, rewards = made.collect(made._draw())
    rewards.values = torch.full((4, 1), 0.5)
    rows, _ = made.prepare(rollouts, rewards, Stats())
    assert len(rows) == 4
    found, _ = gradient(made, rows)
    assert float(found.norm()) > 0


@pytest.mark.parametrize(
    ("options", "over", "message"),
    [
        ({"teachers": {"left": "x"}}, {}, "has no teacher for task 'right'"),
        ({"teachers": {"left": "x", "rihgt": "y"}}, {}, "has no teacher for task 'right'. Did you mean 'rihgt'"),
        ({"teachers": {"left": "x", "right": "y", "up": "z"}}, {}, "names 'up', which is no task of data.sources"),
        ({}, {}, "has no teacher for task 'left'"),
        ({"teachers": "both", "opd_reward": "exact"}, {}, "method.flow_opd.opd_reward"),
        ({"teachers": "both", "kl_norm": "global"}, {}, "kl_norm=global normalises the KL as a reward"),
        ({"teachers": "both", "reward_mode": "gkd", "opd_reward": "sampled"}, {}, "gkd is the direct loss"),
        ({"teachers": "both", "reward_mode": "mixed"}, {"train": {"group_size": 1}}, "set train.group_size to 2"),
        (
            {"teachers": "both", "opd_reward": "sampled"},
            {"sampling": {"reduction": "sum"}},
            "scaled for mean log-probs, but sampling.reduction is 'sum'",
        ),
        ({"teachers": "both"}, {"sampling": {"solver": "ode"}}, "solver is 'ode'"),
        ({"teachers": "both"}, {"sampling": {"reduction": "channel_mean"}}, "which leaves a map: use mean"),
        ({"teachers": "both"}, {"advantage": {"drop_flat": True}}, "advantage.drop_flat drops them"),
        (
            {"teachers": "both", "opd_reward": "released", "kl_norm": "global"},
            {"train": {"micro_batch": 1}},
            "train.micro_batch is 1, so every reward would be 0",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_weights_are_loaded(
    tmp_path: Path, options: dict[str, Any], over: dict[str, Any], message: str
) -> None:
    if options.get("teachers") == "both":
        options = {**options, "teachers": {"left": "x", "right": "y"}}
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        plan(two_tasks(tmp_path, [STACK, {"flow_opd": options}], **over))


def test_a_stack_that_cannot_distil_says_so(tmp_path: Path) -> None:
    """Before: a traceback with vipo's maps, and rows that were dropped for equal rewards behind flow_grpo."""
    options = {"teachers": {"left": "x", "right": "y"}}
    with pytest.raises(UserError, match=r"no method that needs maps \(vipo\)"):
        plan(two_tasks(tmp_path, [STACK, {"flow_opd": options}, {"vipo": {"maps": "colours"}}]))
    with pytest.raises(UserError, match=r"method=\[flow_grpo, flow_opd\]"):
        plan(two_tasks(tmp_path, [{"flow_opd": options}, STACK]))
    plan(
        two_tasks(
            tmp_path, [STACK, {"flow_opd": {**options, "reward_mode": "task_only"}}, {"vipo": {"maps": "colours"}}]
        )
    )


def test_an_empty_window_of_mixgrpo_distils_nothing_in_that_step(tmp_path: Path, teachers: Any) -> None:
    window = {"mixgrpo": {"window": 2, "shift_every": 1, "stride": 10, "shrink": True}}
    config = two_tasks(tmp_path, [window, {"flow_opd": {"teachers": both(teachers)}}], train={"steps": 2})
    result = vg.train(config, out=tmp_path / "out")
    norms = [line["metrics"]["grad_norm"] for line in RunFolder(result.folder).read_metrics("train")]
    assert norms[0] > 0
    assert norms[1] == 0


def test_equal_rewards_are_no_fault_where_no_reward_is_read(tmp_path: Path, teachers: Any) -> None:
    """One sample a prompt: every group is flat, which once raised an alarm after five steps."""
    said = {}
    for mode, size in (("kl_only", 1), ("task_only", 2)):
        folder = tmp_path / mode
        folder.mkdir()
        config = two_tasks(
            folder,
            [STACK, {"flow_opd": {"teachers": both(teachers), "reward_mode": mode}}],
            train={"steps": 2, "group_size": size},
            alarms={"flat_groups_steps": 2},
        )
        result = RunFolder(vg.train(config | {"rewards": {"test_distillation:equal": 1.0}}, out=folder / "out").folder)
        checks = [check["name"] for check in json.loads(result.self_test.read_text())]
        said[mode] = [line["name"] for line in result.read_metrics("alarm")], "groups with unequal rewards" in checks
    assert said["kl_only"] == ([], False)
    assert "flat_groups" in said["task_only"][0]
    assert said["task_only"][1]


def equal(images: Tensor, prompts: list[str]) -> list[float]:
    """A reward that is the same for all."""
    return [0.5] * len(images)


def test_a_resume_keeps_the_micro_batches_that_the_loss_depends_on(tmp_path: Path, teachers: Any) -> None:
    def config(norm: str) -> dict[str, Any]:
        options = {"teachers": both(teachers), "opd_reward": "released", "kl_norm": norm}
        return two_tasks(tmp_path, [STACK, {"flow_opd": options}], train={"steps": 1})

    for norm in ("none", "per_sample"):
        out = tmp_path / norm
        vg.train(config(norm), out=out)
        over = {"train.micro_batch": 2, "train.steps": 2}
        if norm == "none":
            assert vg.train(config(norm), out=out, resume=True, overrides=over).step == 2
            continue
        with pytest.raises(UserError, match=r"train\.micro_batch: 8 in the run, 2 now"):
            vg.train(config(norm), out=out, resume=True, overrides=over)


def test_exports_that_do_not_fit_are_named(tmp_path: Path, teachers: Any) -> None:
    with pytest.raises(UserError, match=r"method\.flow_opd\.teachers\.right '/nowhere' is no folder here"):
        trainer(tmp_path, {"teachers": {"left": teachers["left"], "right": "/nowhere"}})
    (tmp_path / "other").mkdir()
    values = load_file(Path(teachers["left"]) / "model.safetensors")
    save_file({"first.weight": values["first.weight"]}, tmp_path / "other/model.safetensors")
    with pytest.raises(
        UserError, match=r"anchor '.*other' lacks 3 of the 4 trained parameters, for example 'first.bias'"
    ):
        trainer(tmp_path, {"teachers": both(teachers), "anchor": str(tmp_path / "other")})
    save_file({**values, "first.bias": torch.zeros(2)}, tmp_path / "other/model.safetensors")
    with pytest.raises(UserError, match=r"first.bias has shape \[2\], but \[16\] in this run"):
        trainer(tmp_path, {"teachers": both(teachers), "anchor": str(tmp_path / "other")})
    single = flow_config(tmp_path, [STACK, {"flow_opd": {"teachers": both(teachers)}}])
    with pytest.raises(UserError, match="a run on one prompt set needs one"):
        plan(single)


# -- runs ---------------------------------------------------------------------------------------------------------------------


def test_a_run_comes_nearer_to_its_teachers_and_holds_them_in_no_checkpoint(tmp_path: Path, teachers: Any) -> None:
    one = dict.fromkeys(("left", "right"), teachers["left"])  # 16 units cannot tell the prompts of two experts apart
    options = {"teachers": one, "anchor": teachers["same"], "anchor_beta": 0.0}
    config = two_tasks(
        tmp_path,
        [STACK, {"flow_opd": options}, "task_cycle"],
        train={"steps": 24, "optimizer": {"lr": 0.01, "weight_decay": 0.0}},
        checkpoint={"every": 12},
    )
    vg.train(config | {"train": {**config["train"], "steps": 12}}, out=tmp_path / "run")
    vg.train(config, out=tmp_path / "run", resume=True)
    folder = RunFolder(tmp_path / "run")
    steps = [line["metrics"] for line in folder.read_metrics("train")]
    assert len(steps) == 24
    for task, lines in (("left", steps[0::2]), ("right", steps[1::2])):
        values = [line[f"flow_opd/kl/{task}"] for line in lines]
        assert max(values[-3:]) < 0.5 * values[0], (task, values)
    saved = {path.name for path in folder.checkpoints.rglob("set-*")}
    assert not saved


# -- the supervised cold start ------------------------------------------------------------------------------------------------


def sft(folder: Path, options: dict[str, Any], **over: Any) -> Trainer:
    made = plan(two_tasks(folder, [{"flow_sft": options}], **over))
    run = RunFolder.create(folder / "runs", "flow", config_yaml=to_yaml(made.config))
    return build_trainer(made, run, Ranks())


def test_rows_of_the_cold_start_are_the_teachers_samples(tmp_path: Path, teachers: Any) -> None:
    made = sft(tmp_path, {"teachers": both(teachers), "pairs": 3})
    rows = rows_of(made)
    tasks = rows.rollouts.prompts.tags["task"].tolist()
    for number, task in enumerate(("left", "right")):
        with made.policy.weights(f"teacher/{task}"):
            own = made.policy.sample(rows.rollouts.prompts, seed=0, sampling=made.state.sampling)
        chosen = torch.tensor([i for i, t in enumerate(tasks) if t == number])
        torch.testing.assert_close(rows.rollouts.data["final"][chosen], own.data["final"][chosen])
    data = rows.rollouts.data
    sigma, noise, final = data["pair_sigma"], data["pair_noise"], data["final"]
    assert sigma.shape == (8, 3)
    assert bool(((sigma > 0) & (sigma < 1)).all())
    found, loss = gradient(made, rows)
    mixed = (1 - sigma)[..., None, None, None] * final[:, None] + sigma[..., None, None, None] * noise
    codes = made.policy.adapter.encode_texts(rows.rollouts.prompts.prompts, made.state.sampling)["code"].double()
    velocity = made.policy.adapter.network(mixed.flatten(0, 1), sigma.flatten(), codes.repeat_interleave(3))
    total = (velocity - (noise - final[:, None]).flatten(0, 1)).square().mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(made.policy.trainable.values()))])
    assert loss == pytest.approx(float(total.detach()))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
    again = rows_of(sft(tmp_path, {"teachers": both(teachers), "pairs": 3}))
    assert torch.equal(again.rollouts.data["pair_sigma"], sigma)


def test_levels_are_logit_normal(tmp_path: Path, teachers: Any) -> None:
    made = sft(tmp_path, {"teachers": both(teachers), "pairs": 200}, train={"group_size": 32, "prompts_per_step": 4})
    rollouts, _ = made.collect(made._draw())
    logits = rollouts.data["pair_sigma"].logit().flatten()
    assert abs(float(logits.mean())) < 0.03
    assert abs(float(logits.std()) - 1) < 0.03


def test_the_cold_start_can_take_the_pictures_of_the_data_set(tmp_path: Path) -> None:
    """The tiny SD3's autoencoder gives drawn words and scenes back; a row without a picture is named."""
    adapter = SD3Adapter.load(
        ModelConfig(adapter="sd3", path="testbed/sd3_tiny"),
        device=torch.device("cpu"),
        sampling=DiffusionSampling(solver="ode"),
    )
    drawn = torch.stack([torch.from_numpy(draw_word(word).copy()).permute(2, 0, 1) / 255 for word in WORDS])
    latents = adapter.encode_images(drawn)
    again = adapter.decode_latents(latents).detach()
    assert float((again - drawn).abs().mean()) < 0.02
    read, _ = correlations(again.clamp(0, 1))
    assert read.argmax(1).tolist() == list(range(len(WORDS)))
    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match="ToyFlow cannot encode pictures"):
        pictured(tmp_path, str(tmp_path / "a.png"))
    with pytest.raises(UserError, match="has no picture in column 'image'"):
        pictured(tmp_path, None)
    with pytest.raises(UserError, match=r"cannot read picture '/nowhere\.png'"):
        pictured(tmp_path, "/nowhere.png")


class Encoding(ToyFlow):
    """With an encoder, and a network that knows levels from 0.2 to 0.6 only, as a UNet knows none beyond 0.94."""

    level_range = (0.2, 0.6)

    def encode_images(self, images: Tensor) -> Tensor:
        return images.to(self.step_dtype)

    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        assert 0.2 <= float(sigma.min()) <= float(sigma.max()) <= 0.6
        return super().predict_velocity(latents, sigma, condition)


def test_pictures_have_the_size_that_is_sampled_and_levels_are_those_of_the_network(tmp_path: Path) -> None:
    for name, size in (("a", (4, 4)), ("b", (4, 4)), ("wide", (8, 4)), ("large", (8, 8))):
        Image.fromarray(np.full((*size, 3), 51, dtype=np.uint8)).save(tmp_path / f"{name}.png")
    adapter = "test_distillation:Encoding"
    rows = pictured(tmp_path, *[str(tmp_path / f"{name}.png") for name in "abab"], adapter=adapter)
    torch.testing.assert_close(rows.data["final"], torch.full((8, 3, 4, 4), 0.2, dtype=torch.float64))
    sigma = rows.data["pair_sigma"]
    assert float(sigma.min()) == pytest.approx(0.2)
    assert float(sigma.max()) == pytest.approx(0.6)
    mixed = [str(tmp_path / f"{name}.png") for name in ("a", "wide")] * 2
    with pytest.raises(UserError, match=r"has (4 x 4|8 x 4) pixels, and .* (4 x 4|8 x 4): give all pictures one size"):
        pictured(tmp_path, *mixed, adapter=adapter)
    with pytest.raises(
        UserError, match=r"8 x 8 pixels give latents \[3, 8, 8\], but the model is sampled at \[3, 4, 4\]"
    ):
        pictured(tmp_path, *[str(tmp_path / "large.png")] * 4, adapter=adapter)


def pictured(folder: Path, *pictures: str | None, adapter: str = "toy_flow:ToyFlow") -> Any:
    """Draw a batch whose prompts name `pictures`, one or four."""
    config = flow_config(folder, {"flow_sft": {"pairs": 16}}, model={"adapter": adapter})
    given = pictures * (4 // len(pictures))
    for split in ("train", "test"):
        lines = [
            json.dumps({"prompt": f"{split} {word}"} | ({} if picture is None else {"image": picture})) + "\n"
            for word, picture in zip("abcd", given, strict=True)
        ]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    made = plan(config)
    ready = build_trainer(made, RunFolder.create(folder / "runs", "flow", config_yaml=to_yaml(made.config)), Ranks())
    rollouts, _ = ready.collect(ready._draw())
    return rollouts
