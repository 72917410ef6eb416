r"""GRAIL: "Gradient-Reweighted Advantages for Reinforcement Learning with Verifiable Rewards", arXiv 2606.04889.

What differs from GRPO: each token's loss is weighted by how much the marked final answer depends on it. The negative
log-likelihood of that answer is differentiated by the input embeddings in one more forward and backward pass; gradient times
embedding, on a normalised log scale, is the weight. Advantages are centred only, divisor and clip range are Dr. GRPO's and
DAPO's, truncated answers are masked out.

As in the reference, a token's score is that of the position that predicts it, and the answer itself gets its fixed weights
also in rows that fall back to 1; `align` and `override_on_fallback` turn both off. Departures: spans are found by decoding
prefixes; no extra pass where every advantage is 0; a row with a gradient that is not finite falls back. `span=hashes` is for
models that end in `#### answer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig, Needs
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.types import MicroBatch, RolloutBatch

OUTSIDE, MARKER, CONTENT, AFTER = 0, 1, 2, 3
"""Parts of an answer's units: the marker includes the closing brace."""
BOXED = "\\boxed{"
EPS = 1e-8


class GrailConfig(MethodConfig):
    """Options of GRAIL."""

    weight_mean: float = Field(1.0, gt=0)
    weight_std: float = Field(0.5, ge=0)
    weight_min: float = Field(0.5, ge=0)
    weight_max: float = Field(5.0, gt=0, description="also the weight of the answer's own tokens")
    mode: Literal["wrong", "correct", "both"] = Field(
        "wrong", description="rows that are weighted: those of negative advantages, of positive ones, or all"
    )
    span: Literal["boxed", "hashes"] = "boxed"
    leaf: Literal["embeddings", "first", "middle", "last"] = Field("embeddings", description="see Policy.input_scores")
    align: Literal["predictor", "own"] = Field("predictor", description="whose input a token's score is")
    normalise_over: Literal["all", "until_span_end"] = "all"
    override_on_fallback: bool = True


class Grail(Method[GrailConfig]):
    """Tokens weighted by the gradient of the final answer."""

    Config: ClassVar[type[MethodConfig]] = GrailConfig
    # The weights of a unit come from the whole row, so a pass over a chunk of units may not ask for them again.
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"token"}), input_gradients=True, couples_units=True)
    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": {"std": "none"},
        "ratio": {"clip_low": 0.2, "clip_high": 0.28},
        "loss": {"aggregation": "fixed_length", "mask_truncated": True},
        "kl": {"beta": 0.0},
    }

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Weights need a range, and a block's output cannot be cut where activations are made again."""
        if not self.config.weight_min <= self.config.weight_max:
            raise UserError(
                f"method.grail.weight_min ({self.config.weight_min:g}) must be at most weight_max ({self.config.weight_max:g})"
            )
        if self.config.leaf != "embeddings" and run.model.gradient_checkpointing:
            raise UserError(
                f"method.grail.leaf={self.config.leaf} needs model.gradient_checkpointing=false; or use leaf=embeddings"
            )

    def live_weights(self, weights: Tensor, micro: MicroBatch, state: LoopState) -> Tensor:
        """Multiply by the saliency weights under the present policy."""
        if not bool((micro.advantages != 0).any()):
            return weights
        parts = torch.stack(
            [part.to(micro.mask.device) for part in answer_parts(micro.rollouts, state, self.config.span)]
        )
        chosen = (parts == MARKER) | (parts == CONTENT)
        scores = state.policy.input_scores(micro.rollouts, chosen, leaf=self.config.leaf)
        scores = scores[:, :-1] if self.config.align == "predictor" else scores[:, 1:]
        mask = micro.rollouts.unit_mask.to(parts.device)
        advantages = micro.advantages.expand_as(micro.mask)
        found = saliency_weights(
            scores[:, micro.units], parts[:, micro.units], mask[:, micro.units], advantages, self.config
        )
        trained = micro.mask != 0
        state.figure("grail/weight", found.weights, trained)
        state.figure("grail/answer_weight", found.weights, trained & chosen[:, micro.units])
        state.figure("grail/fallback", found.fallback.double(), trained.any(1))
        return weights * found.weights


@dataclass(frozen=True, kw_only=True)
class Saliency:
    """What `saliency_weights` gives."""

    weights: Tensor
    """[n, T], 0 outside the mask."""
    fallback: Tensor
    """[n] bool, rows whose weights are 1 but for the answer."""


def saliency_weights(scores: Tensor, parts: Tensor, mask: Tensor, advantages: Tensor, config: GrailConfig) -> Saliency:
    """Weights of units from the scores of their inputs.

    `u = log(score + 1e-8)` is standardised over the row's units (population variance, 1e-8 under the root), then
    `w = clip(mean + std z, min, max)`; rows without a span, of the other sign than `mode`, or with a
    score that is not finite get 1.

    Args:
        scores: [n, T], at least 0.
        parts: [n, T] int64, see `OUTSIDE`.
        mask: [n, T] bool, real units.
        advantages: [n, T].
        config: of the method.
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)
    broken = (~torch.isfinite(scores) & mask).any(1)
    logs = (torch.where(torch.isfinite(scores), scores, 0.0).to(dtype) + EPS).log()
    counted = (mask if config.normalise_over == "all" else mask & (parts != AFTER)).to(dtype)
    count = counted.sum(1, keepdim=True).clamp(min=1)
    mean = (logs * counted).sum(1, keepdim=True) / count
    variance = ((logs - mean).square() * counted).sum(1, keepdim=True) / count
    standard = (logs - mean) * (variance + EPS).rsqrt()
    weights = (config.weight_mean + config.weight_std * standard).clamp(config.weight_min, config.weight_max)
    spanned = ((parts == CONTENT) | (parts == MARKER)).any(1)
    other_sign = torch.zeros_like(mask)
    if config.mode != "both":
        other_sign = advantages > 0 if config.mode == "wrong" else advantages <= 0
    plain = ~spanned[:, None] | broken[:, None] | other_sign
    weights = torch.where(plain, 1.0, weights)
    override = spanned[:, None] & (~plain | config.override_on_fallback)
    weights = torch.where(override & (parts == CONTENT), config.weight_max, weights)
    weights = torch.where(override & ((parts == MARKER) | (parts == AFTER)), config.weight_mean, weights)
    return Saliency(weights=torch.where(mask, weights, 0.0), fallback=plain.all(1))


def answer_parts(rollouts: RolloutBatch, state: LoopState, span: Literal["boxed", "hashes"]) -> list[Tensor]:
    """Part of every unit of each row, n tensors [T] int64; OUTSIDE throughout in a row without a complete answer."""
    assert rollouts.texts is not None
    rows = []
    for row, text in enumerate(rollouts.texts):
        part = torch.zeros(rollouts.num_units, dtype=torch.int64)
        found = boxed_span(text) if span == "boxed" else hashes_span(text)
        if found is not None:
            start, content, closing, end = state.policy.adapter.first_units(rollouts, row, found)
            part[start:end], part[content:closing], part[end:] = MARKER, CONTENT, AFTER
        rows.append(part)
    return rows


def boxed_span(text: str) -> tuple[int, int, int, int] | None:
    r"""Where the first complete `\boxed{...}` starts, its content starts and ends, and it ends; None without one.

    Example:
        >>> boxed_span(r"so \boxed{x^{2}}."), boxed_span(r"so \boxed{x^{2}")
        ((3, 10, 15, 16), None)
    """
    opened: list[int] = []
    found: list[tuple[int, int]] = []
    for place, letter in enumerate(text):
        if letter == "{":
            opened.append(place)
        elif letter == "}" and opened and text.endswith(BOXED, 0, (start := opened.pop()) + 1):
            found.append((start, place))
    if not found:
        return None
    start, closing = min(found)
    return start + 1 - len(BOXED), start + 1, closing, closing + 1


def hashes_span(text: str) -> tuple[int, int, int, int] | None:
    """The same for the first `#### answer`, which goes to the end of its line.

    Example:
        >>> hashes_span("1+1=2 #### 2"), hashes_span("####")
        ((6, 11, 12, 12), None)
    """
    start = text.find("####")
    if start < 0:
        return None
    end = text.find("\n", start)
    end = len(text) if end < 0 else end
    content = start + 4
    while content < end and text[content] == " ":
        content += 1
    return None if content == end else (start, content, end, end)


def grail_text_tiny() -> RunConfig:
    """GRAIL on the tiny LM's arithmetic, whose answers follow ####."""
    return arithmetic(
        "grail_text_tiny",
        [{"grail": {"span": "hashes"}}],
        "GRAIL on the tiny LM's arithmetic: tokens that the answer depends on weigh more",
    )


def grail_qwen3_4b() -> RunConfig:
    """GRAIL on Qwen3-4B: DeepMath-103K, no thinking mode, 32 prompts x 8, four passes over a rollout, lr 1e-6.

    The reference counts 200 optimizer steps, four to a rollout batch, on four devices with 8 x 8 answers each.
    """
    return RunConfig(
        name="grail_qwen3_4b",
        summary="GRAIL on Qwen3-4B, the reference's settings",
        model=ModelConfig(adapter="text_lm", path="Qwen/Qwen3-4B", dtype="bfloat16", gradient_checkpointing=True),
        method=["grail"],
        data=DataConfig(
            source="data/deepmath_103k.jsonl",
            answer_column="answer",
            system_prompt="Reason step by step and put the final answer in \\boxed{}.",
        ),
        rewards={"math_verify": RewardConfig()},
        sampling={
            "max_new_tokens": 4096,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 50,
            "chat_template_kwargs": {"enable_thinking": False},
        },
        train=TrainConfig(
            steps=50,
            prompts_per_step=32,
            group_size=8,
            epochs_per_step=4,
            micro_batch=8,
            optimizer=OptimizerConfig(lr=1e-6, warmup_steps=20, grad_norm=1.0),
        ),
        eval=EvalConfig(source="data/math500.jsonl", every=10, samples=500, final_samples=500, batch=64),
    )
