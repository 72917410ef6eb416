"""Rubric: a judge checks each criterion of a list on the answer; the value is the weighted share that is met.

Source: the static rubric reward of POW3R (arXiv 2605.20164) and HealthBench; card pow3r, section 3: in each category the
weighted mean of the verdicts, then the mean over categories (`combine: flat`: over all criteria at once). A criterion with
negative points counts as met when it is NOT met, with the size of its weight. A missing verdict leaves numerator and
denominator, a category without verdicts leaves the mean, a row without any verdict has failed. Range [0, 1]. Rows without a
rubric are not applicable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.judge import Failure, JudgeReward, Question, render

__all__ = ["Criterion", "Rubric", "read_rubric", "rubric_value"]

Combine = Literal["category", "flat"]
_VERDICT = re.compile(r"Verdict:[\s*]*(yes|no)\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One line of a rubric."""

    text: str
    weight: float = 1.0
    """importance; below 0: it speaks against the answer."""
    category: str = ""
    required: bool = False


def read_rubric(given: Any) -> list[Criterion]:
    """Read a list of texts, or of objects with text (or criterion, description), weight (or points), category, required.

    Raises:
        UserError: an entry is neither, or has weight 0 or none that is finite.
    """
    criteria = []
    for item in given if isinstance(given, (list, tuple)) else [given]:
        entry = item if isinstance(item, Mapping) else {"text": item}
        text = next((entry[key] for key in ("text", "criterion", "description") if entry.get(key)), None)
        weight: Any = entry.get("weight", entry.get("points", 1.0))
        try:
            number = float(weight)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = math.nan
        if not isinstance(text, str) or not math.isfinite(number) or number == 0:
            raise UserError(
                f"rubric: {item!r} is no criterion; give a text, or an object with text and a weight that is not 0."
            )
        category, required = str(entry.get("category") or ""), bool(entry.get("required", False))
        criteria.append(Criterion(text=text, weight=number, category=category, required=required))
    return criteria


def rubric_value(
    verdicts: np.ndarray, weights: Sequence[float], categories: Sequence[Any], combine: Combine = "category"
) -> np.ndarray:
    """Combine verdicts.

    Args:
        verdicts: [N, M] in [0, 1] after the sign of negative criteria was taken care of; NaN where missing.
        weights: [M], above 0.
        categories: [M] labels.
        combine: mean over categories of their weighted means, or one weighted mean.

    Returns:
        Values [N]; NaN for rows without a verdict.

    >>> rubric_value(np.array([[1.0, 0.0, np.nan]]), [3.0, 1.0, 2.0], ["a", "a", "b"]).tolist()
    [0.75]
    """
    labels = np.array([str(label) if combine == "category" else "" for label in categories])
    there = ~np.isnan(verdicts)
    points = np.where(there, verdicts, 0.0) * np.asarray(weights, dtype=float)
    possible = there * np.asarray(weights, dtype=float)
    means = []
    for label in dict.fromkeys(labels.tolist()):
        own = labels == label
        total = possible[:, own].sum(1)
        means.append(np.where(total > 0, points[:, own].sum(1) / np.where(total > 0, total, 1.0), np.nan))
    table = np.stack(means, axis=1)
    counted = (~np.isnan(table)).sum(1)
    values: np.ndarray = np.where(counted > 0, np.nansum(table, axis=1) / np.maximum(counted, 1), np.nan)
    return values


@register_reward("rubric")
class Rubric(JudgeReward):
    """Weighted share of met criteria; one question a row and criterion.

    Details: `criterion_J`, the verdict (0/1, before the sign of its weight; NaN where missing or where the row's rubric is
    shorter), `missing`, how many verdicts are missing, and `complete`, 1 where every required criterion is met.
    """

    needs = frozenset({"texts"})
    rows_per_call = 4  # each asks a question a criterion
    label = "rubric"
    default_model = "Qwen/Qwen3-8B"
    prompt_name = "rubric"
    prompt_fields = ("criterion",)

    def __init__(
        self,
        criteria: Sequence[Any] | None = None,
        *,
        rubric_key: str = "rubric",
        combine: Combine = "category",
        media: Literal["texts", "images"] = "texts",
        device: Any = None,
        **judge: Any,
    ) -> None:
        """Choose the criteria.

        Args:
            criteria: one rubric for all rows, see `read_rubric`; None: that of metadata column `rubric_key`.
            rubric_key: see `criteria`.
            combine: "category" (each category the same share) or "flat".
            media: what is judged; "images" asks a vision-language model about the generated image.
            device: of a local judge.
            judge: see `JudgeSettings`. A prompt file may hold {prompt}, {completion} and must hold {criterion}.
        """
        if combine not in get_args(Combine) or media not in ("texts", "images"):
            raise UserError(
                f"rubric: combine is {combine!r} and media {media!r}; give category or flat, and texts or images."
            )
        self.of_images = media == "images"
        if self.of_images:
            judge = {"model": "Qwen/Qwen2.5-VL-7B-Instruct", **judge}
        super().__init__(device=device, prompt_name="rubric_image" if self.of_images else "rubric", **judge)
        self.criteria = None if criteria is None else read_rubric(criteria)
        if self.criteria == []:
            raise UserError("rubric: criteria is empty; name at least one, or leave it out for the column of each row.")
        self.rubric_key, self.combine = rubric_key, combine
        self.needs = frozenset({media})  # type: ignore[misc]

    def __call__(self, request: RewardRequest) -> RewardOutput:
        rubrics = [self._rubric(row) for row in request.metadata]
        asked = [(row, j) for row, criteria in enumerate(rubrics) for j in range(len(criteria))]
        replies = self.judge.generate([self._question(request, row, rubrics[row][j].text) for row, j in asked])
        verdicts = np.full((len(request), max(map(len, rubrics), default=0)), math.nan)
        failures = []
        for (row, j), reply in zip(asked, replies, strict=True):
            found = [] if isinstance(reply, Failure) else _VERDICT.findall(reply)
            if found:
                verdicts[row, j] = float(found[-1].lower() == "yes")
            else:
                failures.append(reply if isinstance(reply, Failure) else Failure(f"no verdict in {reply[-120:]!r}"))
        self.report(failures, len(asked))
        values = [self._value(verdicts[row, : len(own)], own) if own else None for row, own in enumerate(rubrics)]
        missing = [float(np.isnan(verdicts[row, : len(own)]).sum()) for row, own in enumerate(rubrics)]
        details = {f"criterion_{j}": verdicts[:, j].tolist() for j in range(verdicts.shape[1])}
        complete = [_complete(verdicts[row, : len(own)], own) for row, own in enumerate(rubrics)]
        return RewardOutput.from_list(values, {**details, "missing": missing, "complete": complete})

    def _rubric(self, row: Mapping[str, Any]) -> list[Criterion]:
        if self.criteria is not None:
            return self.criteria
        given = row.get(self.rubric_key)
        return [] if given is None else read_rubric(given)

    def _question(self, request: RewardRequest, row: int, criterion: str) -> Question:
        text = "" if request.texts is None else request.texts[row]
        filled = render(self.template, prompt=request.prompts[row], completion=text, criterion=criterion)
        return Question(text=filled, images=(request.pil_images[row],) if self.of_images else ())

    def _value(self, verdicts: np.ndarray, criteria: Sequence[Criterion]) -> float:
        signs = np.array([criterion.weight < 0 for criterion in criteria])
        weights = [abs(criterion.weight) for criterion in criteria]
        met = np.where(signs, 1 - verdicts, verdicts)[None]
        return float(rubric_value(met, weights, [criterion.category for criterion in criteria], self.combine)[0])


def _complete(verdicts: np.ndarray, criteria: Sequence[Criterion]) -> float:
    """1 if every required criterion is met (a negative one: not met), NaN if a verdict on one is missing."""
    required = [
        1 - verdict if criterion.weight < 0 else verdict
        for verdict, criterion in zip(verdicts, criteria, strict=True)
        if criterion.required
    ]
    if not criteria or any(np.isnan(required)):
        return math.nan
    return float(all(value == 1 for value in required))
