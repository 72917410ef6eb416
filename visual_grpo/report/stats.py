"""Before against after on the same held-out samples: differences with intervals.

Samples of one prompt resemble each other, so the interval resamples prompts, not samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Paired", "Sample", "mean_interval", "mean_of_tags", "paired"]

_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One score of one held-out sample."""

    prompt: int
    """index of the prompt."""
    sample: int
    """which of the prompt's samples."""
    tag: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Means over the samples that both evaluations have, and the interval of their difference."""

    n: int
    prompts: int
    before: float
    after: float
    interval: tuple[float, float] | None
    """95 % interval of `difference`; None with a single prompt."""

    @property
    def difference(self) -> float:
        """After minus before."""
        return self.after - self.before

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `unclear` when the interval holds zero or there is none."""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return "unclear"
        return "better" if self.interval[0] > 0 else "worse"


def paired(before: Iterable[Sample], after: Iterable[Sample]) -> Paired | None:
    """Compare two evaluations on the samples that both have; None where there are none.

    >>> a = [Sample(prompt=p, sample=0, tag="", value=0.0) for p in range(4)]
    >>> b = [Sample(prompt=p, sample=0, tag="", value=1.0) for p in range(4)]
    >>> paired(a, b).difference, paired(a, b).verdict
    (1.0, 'better')
    """
    pairs = _match(before, after)
    if not pairs:
        return None
    first, last = (np.array([side.value for side in sides]) for sides in zip(*pairs, strict=True))
    return Paired(
        n=len(pairs),
        prompts=len({a.prompt for a, _ in pairs}),
        before=float(first.mean()),
        after=float(last.mean()),
        interval=_ends(_resampled([a.prompt for a, _ in pairs], last - first)),
    )


def mean_of_tags(before: Sequence[Sample], after: Sequence[Sample]) -> Paired | None:
    """As `paired`, for the unweighted mean of the tags' means (GenEval's overall score): prompts are drawn within each tag."""
    by_tag: dict[str, list[tuple[Sample, Sample]]] = {}
    for a, b in _match(before, after):
        by_tag.setdefault(a.tag, []).append((a, b))
    if not by_tag:
        return None
    rng = np.random.default_rng(0)  # one for all tags: equal draws in two tags would tie their errors together
    firsts, lasts, draws = [], [], []
    for pairs in by_tag.values():
        first, last = (np.array([side.value for side in sides]) for sides in zip(*pairs, strict=True))
        firsts.append(first.mean())
        lasts.append(last.mean())
        drawn = _resampled([a.prompt for a, _ in pairs], last - first, rng)
        draws.append(drawn if drawn is not None else np.full(_RESAMPLES, (last - first).mean()))
    pairs = [pair for group in by_tag.values() for pair in group]
    return Paired(
        n=len(pairs),
        prompts=len({a.prompt for a, _ in pairs}),
        before=float(np.mean(firsts)),
        after=float(np.mean(lasts)),
        interval=_ends(np.mean(draws, axis=0)),
    )


def mean_interval(samples: Sequence[Sample]) -> tuple[float, float, float] | None:
    """(mean, low, high) of one evaluation; the ends equal the mean with a single prompt. None where there are no samples."""
    if not samples:
        return None
    values = np.array([s.value for s in samples])
    mean = float(values.mean())
    return mean, *(_ends(_resampled([s.prompt for s in samples], values)) or (mean, mean))


def _match(before: Iterable[Sample], after: Iterable[Sample]) -> list[tuple[Sample, Sample]]:
    first: Mapping[tuple[int, int], Sample] = {(s.prompt, s.sample): s for s in before}
    return [(first[s.prompt, s.sample], s) for s in after if (s.prompt, s.sample) in first]


def _resampled(prompts: Sequence[int], values: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray | None:
    """Means of `values` under resampling of whole prompts, seeded; None with a single prompt."""
    _, index = np.unique(np.asarray(prompts), return_inverse=True)
    count = int(index.max()) + 1
    if count < 2:
        return None
    sums, sizes = np.bincount(index, weights=values), np.bincount(index)
    drawn = (rng or np.random.default_rng(0)).multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)
    return (drawn @ sums) / (drawn @ sizes)


def _ends(draws: np.ndarray | None) -> tuple[float, float] | None:
    if draws is None:
        return None
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)
