"""The conditions of the benchmark text_methods: what a method's paper says goes wrong, made to be so on the tiny LM.

Every arm of a condition has the same prompts, batch, learning rate, sampling and core options; the vanilla arm takes those of the
variant (aggregation, std, clip range, KL), so that the method itself is what differs. What a condition claims is measured in its
own runs: `shows` names the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CONDITIONS", "Arm", "Condition"]

Row = Mapping[str, Any]
"""One held-out sample: `values`, `tag`, `index`, `text`."""
Prompts = tuple[list[dict[str, Any]], list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of a comparison."""

    method: list[Any]
    over: dict[str, Any] = field(default_factory=dict)
    """its own settings, on top of the condition's."""
    by_time: bool = False
    """its steps cost more than the vanilla arm's: it stops after as many seconds as that one took."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Arms that are compared with each other."""

    holds: str
    """what is true of it, one sentence."""
    steps: int
    arms: dict[str, Arm]
    """the first one is vanilla."""
    over: dict[str, Any] = field(default_factory=dict)
    prompts: Callable[[], Prompts] | None = None
    """(train, held-out); None: testbed/arithmetic."""
    value: Callable[[Row], float] = lambda row: float(row["values"]["exact_match"])
    """what is compared: the mean over held-out samples."""
    measures: str = "pass@1"
    shows: tuple[str, ...] = ()
    """means of training figures over the run, which show that the condition holds and what the method did."""
    says: Callable[[Sequence[Row]], dict[str, float]] | None = None
    """further figures of the last held-out answers."""
    warm_up: tuple[str, dict[str, Any]] | None = None
    """(recipe, overrides) of a run, done once, whose model all arms and seeds start from."""

    @property
    def vanilla(self) -> str:
        """Name of the arm that the others are compared with."""
        return next(iter(self.arms))


HASHES = {"exact_match": {"params": {"extraction": "hashes"}}}
"""Only what follows #### is an answer, so a working that is cut off is wrong."""
WARM_UP = {"eval": {"every": 0, "samples": 100, "final_samples": 200, "batch": 200}}
CLIP_HIGH = {"ratio": {"clip_low": 0.2, "clip_high": 0.28}}
TOKEN_MEAN = {"loss": {"aggregation": "token_mean"}}


def _first(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first `count` of each kind."""
    kinds = dict.fromkeys(row["tag"] for row in rows)
    return [row for kind in kinds for row in [r for r in rows if r["tag"] == kind][:count]]


def _few_held_out() -> Prompts:
    """All training questions, and 60 held-out ones, so that each gets several answers."""
    from visual_grpo.testbed.arithmetic import split_prompts

    train, heldout = split_prompts()
    return train, _first(heldout, 15)


def _unsolvable() -> Prompts:
    """48 training questions, half of them of kinds that the model has never seen and never solves; 60 held out of the others."""
    from visual_grpo.testbed.arithmetic import Kind, split_prompts

    strange = (
        Kind(name="add3", operators="+", digits=3, other_digits=3),
        Kind(name="mul3", operators="*", digits=3, other_digits=1),
    )
    train, heldout = _few_held_out()
    return _first(train, 6) + _first(split_prompts(kinds=strange)[0], 12), heldout


CONDITIONS: dict[str, Condition] = {
    "worked answers": Condition(
        holds="questions of four kinds, solved in steps, that the base answers in many ways (entropy of a group's answers: "
        "`seed_grpo/entropy`)",
        steps=10,
        over={"advantage": {"std": "none"}, "loss": {"aggregation": "fixed_length"}},
        arms={
            "grpo": Arm(method=["grpo"]),
            "seed_grpo": Arm(method=[{"seed_grpo": {"strength": 0.7}}]),
            "grail": Arm(method=[{"grail": {"span": "hashes"}}], by_time=True),
        },
        shows=("seed_grpo/entropy", "seed_grpo/factor", "grail/weight", "grail/answer_weight"),
    ),
    "shared beginnings": Condition(
        holds="temperature 0.75: the answers of a group begin alike (mean weight of a token: `lambda_grpo/weight`)",
        steps=10,
        over=TOKEN_MEAN | {"sampling": {"temperature": 0.75}},
        arms={"grpo": Arm(method=["grpo"]), "lambda_grpo": Arm(method=["lambda_grpo"])},
        shows=("lambda_grpo/weight",),
    ),
    "wrong answers are longer": Condition(
        holds="at most 14 tokens: workings are cut off and wrong, right answers are brief (tokens of wrong over right answers: "
        "`balanced_aggregation/tokens_negative_over_positive`)",
        steps=16,
        over={"sampling": {"max_new_tokens": 14}, "rewards": HASHES},
        arms={
            "grpo": Arm(method=["grpo"]),
            "grpo, token mean": Arm(method=["grpo"], over=TOKEN_MEAN),
            "balanced_aggregation": Arm(method=["balanced_aggregation"]),
        },
        shows=("balanced_aggregation/tokens_negative_over_positive", "length"),
    ),
    "short of room": Condition(
        holds="at most 24 tokens, when products need up to 32: good answers are longer than the room (share of cut "
        "answers: `truncated`)",
        steps=10,
        over={"sampling": {"max_new_tokens": 24}, "rewards": HASHES} | TOKEN_MEAN | CLIP_HIGH,
        arms={
            "grpo": Arm(method=["grpo"]),
            "microcoder_grpo": Arm(
                method=[{"microcoder_grpo": {"repeat_window": 4, "complete_detail": "exact_match/answered"}}]
            ),
        },
        shows=("truncated", "microcoder_grpo/masked", "length"),
    ),
    "noisy labels": Condition(
        holds="a fifth of the verdicts is wrong, in training only (`reward/label_noise/flipped`)",
        steps=10,
        over={
            "rewards": {
                "label_noise": {"params": {"flip": 0.2}},
                "exact_match": {"eval_only": True},
            },
            "advantage": {"std": "bessel", "eps": 1e-8},
            "loss": {"aggregation": "fixed_length"},
        },
        arms={
            "grpo": Arm(method=["grpo"]),
            "s_grpo": Arm(method=[{"s_grpo": {"flip_probability": 0.2}}]),
        },
        shows=("reward/label_noise/flipped", "s_grpo/weight", "s_grpo/dropped"),
    ),
    "rarely right": Condition(
        holds="at most 6 tokens, so no room for a working: about 5 % of the base's answers are right, and most groups are all "
        "wrong (`flat_groups`)",
        steps=30,
        prompts=_few_held_out,
        over={"sampling": {"max_new_tokens": 6}, "rewards": HASHES},
        arms={
            "grpo": Arm(method=["grpo"]),
            "lens": Arm(method=["lens"]),
            "redit": Arm(method=["redit"]),
        },
        shows=("flat_groups", "lens/negative_groups", "redit/noise_only_groups", "zero_gradient", "grad_norm_spread"),
    ),
    "half unsolvable": Condition(
        holds="48 questions, half of kinds that are never solved, with a KL of 0.02 (groups without a signal: `flat_groups`)",
        steps=12,
        prompts=_unsolvable,
        over={
            "data": {"balance": None},
            "kl": {"beta": 0.02, "estimator": "k3"},
            "advantage": {"std": "population", "eps": 1e-6},
        }
        | TOKEN_MEAN,
        arms={
            "grpo": Arm(method=["grpo"]),
            # A question comes about four times, not thirty as in the paper: its rate moves faster and the Gaussian is narrower.
            "fg_expo": Arm(method=[{"fg_expo": {"decay": 0.3, "sigma": 0.2}}]),
        },
        shows=("flat_groups", "reward/total", "fg_expo/kl_beta"),
    ),
    "two scales": Condition(
        holds="four tasks, one of them (sums) paid a tenth (largest advantage: `tmn_reweight/advantage_max`)",
        steps=10,
        over={
            "rewards": {
                "others": {"reward": "exact_match", "applies": {"tag": ["mul", "sub", "mixed"]}},
                "sums": {"reward": "exact_match", "applies": {"tag": "add"}, "weight": 0.1},
                "exact_match": {"eval_only": True},
            },
        }
        | TOKEN_MEAN
        | CLIP_HIGH,
        arms={
            "grpo": Arm(method=["grpo"]),
            "tmn_reweight": Arm(method=["tmn_reweight"]),
        },
        shows=("advantage_abs", "tmn_reweight/advantage_max"),
    ),
    "stale samples": Condition(
        holds="four updates a rollout, so that ratios leave 1 (`ratio_max`)",
        steps=10,
        over={"train": {"updates_per_step": 4, "micro_batch": 32, "optimizer": {"lr": 4e-4}}},
        arms={"grpo": Arm(method=["grpo"]), "real": Arm(method=["real"])},
        shows=("ratio_max", "clip_fraction", "row_weight_max"),
    ),
}


SHORT_RIGHT, THINK_RIGHT, WRONG = 1.0, 0.5, -1.0
"""Rewards by mode, as degrpo's own."""


def _mode_reward(row: Row) -> float:
    if float(row["values"]["exact_match"]) < 1:
        return WRONG
    mode = _mode(row["text"])
    return WRONG if mode is None else SHORT_RIGHT if mode == "short" else THINK_RIGHT


def _mode(text: str) -> str | None:
    return next((mode for mode in ("short", "think") if text.startswith(f"<{mode}>")), None)


def _modes(rows: Sequence[Row]) -> dict[str, float]:
    """Share of right answers, and of answers that think: in all and by kind."""

    def think(some: Sequence[Row]) -> float:
        return sum(_mode(row["text"]) == "think" for row in some) / len(some)

    kinds = dict.fromkeys(row["tag"] for row in rows)
    right = sum(row["value"] > 0 for row in rows) / len(rows)
    by_kind = {f"think, {kind}": think([row for row in rows if row["tag"] == kind]) for kind in kinds}
    return {"right": right, "think": think(rows), **by_kind}


CONDITIONS["two modes"] = Condition(
    holds="a model that was taught to answer at once or after a working (`sft_text_tiny`), paid 1 for a right brief answer, 0.5 "
    "for a right long one and -1 else; GRPO averages the token that chooses with all others",
    steps=12,
    warm_up=("sft_text_tiny", WARM_UP),
    over={
        "data": {"source": "testbed/arithmetic_modes"},
        "rewards": HASHES,
        "sampling": {"max_new_tokens": 40},
    },
    arms={
        "grpo": Arm(method=[{"degrpo": {"control_tokens": 0, "mode_rewards": {}}}]),
        "degrpo": Arm(method=[{"degrpo": {"control_weight": 0.1, "mode_rewards": {}}}]),
    },
    value=_mode_reward,
    measures="reward by mode",
    shows=("degrpo/short", "degrpo/think", "length"),
    says=_modes,
)


def variants() -> dict[str, str]:
    """Condition of each arm that is not vanilla."""
    return {
        name: title for title, condition in CONDITIONS.items() for name in condition.arms if name != condition.vanilla
    }


def chosen(methods: Sequence[str] | None) -> dict[str, list[str]]:
    """Arms to run by condition, vanilla first, for the variants `methods` (None: all).

    Raises:
        UserError: an unknown variant.
    """
    from visual_grpo.errors import UserError, did_you_mean

    known = variants()
    for name in methods or ():
        if name not in known:
            raise UserError(
                f"methods: no arm {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}; each runs with its vanilla GRPO"
            )
    wanted = set(known if methods is None else methods)
    arms = {
        title: [name for name in condition.arms if name == condition.vanilla or name in wanted]
        for title, condition in CONDITIONS.items()
    }
    return {title: names for title, names in arms.items() if len(names) > 1}
