"""An option that a method, a sampler or a loss would not read is refused, and so is a combination that cannot work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from toy_flow import flow_config

import visual_grpo as vg
from visual_grpo.api import plan
from visual_grpo.errors import RunError, UserError


def opd(**options: Any) -> list[Any]:
    return ["flow_grpo", {"flow_opd": {"teachers": {"t": "weights"}, **options}}]


@pytest.mark.parametrize(
    ("method", "over", "message"),
    [
        # of the loss
        (
            ["diffusion_nft"],
            {"loss": {"surrogate": "sapo"}},
            "'diffusion_nft' has a loss of its own, .* loss.surrogate",
        ),
        (["flow_sft"], {"ratio": {"dual_clip": 3.0}}, "'flow_sft' has a loss of its own, .* ratio.dual_clip"),
        (opd(), {"ratio": {"level": "sequence"}}, "'flow_opd' has a loss of its own, .* ratio.level"),
        (opd(), {"ratio": {"delta": 2.0}, "loss": {"surrogate": "vespo"}}, "ratio.delta and loss.surrogate"),
        ("mixgrpo", {"loss": {"surrogate": "sapo"}, "ratio": {"dual_clip": 3.0}}, "bounds the ratio of .*clipped"),
        ("mixgrpo", {"loss": {"surrogate": "vespo"}, "ratio": {"level": "sequence"}}, "reads no ratio.level"),
        ("mixgrpo", {"loss": {"max_length": 9}}, "loss.max_length is the divisor of fixed_length"),
        ("mixgrpo", {"loss": {"mask_truncated": True}}, "pictures have none"),
        # of the sampler
        ("v_grpo", {"sampling": {"reduction": "sum"}}, r"sampling.reduction \(sum\) is of a noisy step"),
        ("diffusion_nft", {"sampling": {"reduction": "channel_mean"}}, "this method trains noise pairs"),
        ("flow_grpo", {"sampling": {"self_normalize": False}}, "self_normalize is of noise pairs"),
        ("diffusion_nft", {"sampling": {"self_normalize": False}}, "always divides"),
        ("flow_sft", {"sampling": {"self_normalize": False}}, "never divided"),
        (
            "diffusion_nft",
            {"sampling": {"schedule": "linear", "shift": 3.0, "tail_ratio": 0.4}},
            "solver 'dpm' has none",
        ),
        ("flow_grpo", {"sampling": {"schedule": "linear", "shift": 3.0, "tail_ratio": 0.4}}, "flow_grpo.window"),
        ("dancegrpo", {"sampling": {"tail_ratio": 0.4}}, "dancegrpo has noise on all but the last"),
        ("mixgrpo", {"eval": {"sampling": {"tail_ratio": 0.4}}}, "eval.sampling.tail_ratio"),
        ("flow_grpo", {"sampling": {"negative_prompt": "ugly"}}, "sampling.guidance is 1"),
        ("diffusion_nft", {"sampling": {"same_noise": True}}, "solver 'dpm' adds none, so they would be equal"),
        (
            "v_grpo",
            {"sampling": {"noise_scale": 0.5}},
            r"noise_scale \(0.5\) is of noisy steps, and solver 'ode' has none",
        ),
        # of the run
        ("flow_grpo", {"combine": {"batch_step": False}}, "second step of combine.how=gdpo; sum has none"),
        (["flow_grpo", "gdpo"], {"combine": {"zero_flat": False}}, "combine.how=gdpo combine.level=tokens alone"),
        ("flow_grpo", {"combine": {"closed": -1.0}}, "combine.gate names none"),
        ("flow_grpo", {"eval": {"features": "dino"}}, "eval.features=dino is of the figure diversity"),
        ("flow_grpo", {"model": {"lora": {"rank": 2}, "train_layers": ["first"]}}, "train_layers chooses among full"),
        ("flow_grpo", {"data": {"system_prompt": "Draw."}}, "this model takes plain prompts"),
        (
            "flow_grpo",
            {"data": {"source": None, "sources": {"a": "a.txt", "b": "b.txt"}, "limit": 5}},
            "give sources.TASK.limit",
        ),
        # of the methods
        ("flow_grpo", {"sampling": {"steps": 1}}, "sampling.steps is 1: use 2 or more"),
        (
            {"flow_grpo": {"window": 2, "window_high": 6}},
            {"sampling": {"solver": "cps"}},
            r"window_high \(6\) reaches the last step",
        ),
        ({"flow_grpo": {"window_high": 3}}, {}, "window is null"),
        ({"flow_grpo": {"window_low": 1}}, {}, "window is null"),
        ({"mixgrpo": {"order": "random", "shift_every": 3, "roll_back": True}}, {}, "shift_every and roll_back"),
        ({"mixgrpo": {"decay_rate": 0.5}}, {}, "order=progressive does not read decay_rate"),
        (["flow_grpo", {"vipo": {"maps": "colours", "edge": 28}}], {}, "edge is of maps=dinov2"),
        (["flow_grpo", {"vipo": {"maps": "dinov2", "patch": 5}}], {}, "patch is of maps=colours"),
        (["flow_grpo", {"vipo": {"maps": "ones", "components": 2}}], {}, "components shapes a map"),
    ],
)
def test_what_nothing_would_read_is_refused(tmp_path: Path, method: Any, over: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(flow_config(tmp_path, method, **over))


@pytest.mark.parametrize(
    ("method", "over"),
    [
        ("v_grpo", {"sampling": {"self_normalize": False}}),
        ("flow_grpo", {"sampling": {"negative_prompt": "ugly", "guidance": 4.0}}),
        ("mixgrpo", {"sampling": {"tail_ratio": 0.4}}),
        ({"flow_grpo": {"window": 2}}, {"sampling": {"schedule": "linear", "shift": 3.0, "tail_ratio": 0.4}}),
        ("v_grpo", {"sampling": {"noise_scale": 0.5, "solver": "dance_sde"}}),
        ("flow_grpo", {"eval": {"features": "dino", "group_size": 2}}),
        ({"mixgrpo": {"order": "exp_decay", "decay_rate": 0.5, "shift_every": 3}}, {}),
        ("flow_grpo", {"loss": {"surrogate": "sapo"}, "ratio": {"level": "sequence"}}),
        ("flow_grpo", {"loss": {"aggregation": "fixed_length", "max_length": 5}}),
    ],
)
def test_what_is_read_is_not(tmp_path: Path, method: Any, over: dict[str, Any]) -> None:
    plan(flow_config(tmp_path, method, **over))


@pytest.mark.parametrize(
    ("method", "over", "message"),
    [
        ("mixgrpo", {}, r"sampling.schedule=scheduler sampling.shift=null"),
        ("dancegrpo", {"sampling": {"schedule": "scheduler"}}, r"sampling.shift \(3.0\) are of flow-matching"),
        ("flow_grpo", {"eval": {"sampling": {"shift": 3.0}}}, "eval.sampling.schedule=scheduler"),
        ("flow_grpo", {"sampling": {"max_sequence_length": 77}}, "CLIP's length is fixed"),
    ],
)
@pytest.mark.parametrize("adapter", ["sd15", "sdxl"])
def test_unets_keep_their_own_schedule(
    tmp_path: Path, adapter: str, method: Any, over: dict[str, Any], message: str
) -> None:
    """Refused before any weights are read, with the settings that work."""
    model = {"adapter": adapter, "path": "nowhere", "dtype": "float32"}
    with pytest.raises(UserError, match=message):
        plan(flow_config(tmp_path, method, model=model, **over))
    own = {"schedule": "scheduler", "shift": None, "max_sequence_length": None}
    plan(flow_config(tmp_path, method, model=model, sampling=own))


@pytest.mark.parametrize("sampling", [{"solver": "ode"}, {"steps": 1}])
def test_plain_grpo_without_a_noisy_step_says_what_to_change(tmp_path: Path, sampling: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="no unit may be trained; check sampling"):
        vg.train(flow_config(tmp_path, "grpo", sampling=sampling), out=tmp_path / "out")


def test_prompts_are_not_balanced_by_a_column_that_none_has(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.balance is 'tga', .* Did you mean 'tag'.* set data\.balance=null"):
        vg.train(flow_config(tmp_path, "flow_grpo", data={"balance": "tga"}), out=tmp_path / "out")
