"""How sure a mean is: bootstrap intervals of a mean, and of the difference of two systems on the same items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "Difference",
    "Interval",
    "bootstrap_interval",
    "paired_bootstrap",
    "paired_difference",
    "stratified_interval",
]

Values = Sequence[float] | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its interval."""

    mean: float
    low: float
    high: float
    count: int
    """independent items (prompts, problems)."""


@dataclass(frozen=True, kw_only=True)
class Difference(Interval):
    """Mean of b - a with its interval."""

    p_value: float
    """two-sided; the share of evidence that the difference has the other sign or none."""


def _items(values: Values, clusters: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts of each independent item: [P], [P]."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or numbers.size == 0:
        raise ValueError(f"an interval needs a list of at least one number; got shape {list(numbers.shape)}")
    if not np.isfinite(numbers).all():
        raise ValueError("an interval needs finite numbers; leave out the rows that have no score first")
    if clusters is None:
        return numbers, np.ones_like(numbers)
    if len(clusters) != numbers.size:
        raise ValueError(f"clusters has {len(clusters)} entries for {numbers.size} values; it needs one a value")
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    return np.bincount(index, weights=numbers), np.bincount(index).astype(np.float64)


def _resampled_means(sums: np.ndarray, counts: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Means [resamples] over items drawn with replacement; drawn in parts, so that memory stays small."""
    generator = np.random.default_rng(seed)
    size = len(sums)
    means = []
    for start in range(0, resamples, 256):
        drawn = generator.integers(0, size, size=(min(256, resamples - start), size))
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    return np.concatenate(means)


def bootstrap_interval(
    values: Values,
    *,
    clusters: Sequence[int] | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of a mean.

    Args:
        values: [N] finite scores.
        clusters: [N] ids; values of one id are drawn together (the images of one prompt are not independent).
        level: coverage.
        resamples: how many times the items are drawn again.
        seed: of the drawing.
    """
    sums, counts = _items(values, clusters)
    means = _resampled_means(sums, counts, resamples, seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean=float(sums.sum() / counts.sum()), low=float(low), high=float(high), count=len(sums))


def stratified_interval(
    values: Values,
    strata: Sequence[str],
    *,
    clusters: Sequence[int] | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Bootstrap of the unweighted mean of the strata's means (GenEval's overall score), drawing within each stratum.

    >>> stratified_interval([1, 1, 1, 0], ["a", "a", "a", "b"]).mean
    0.5
    """
    if len(strata) != len(values):
        raise ValueError(f"strata has {len(strata)} entries for {len(values)} values; it needs one a value")
    kinds = list(dict.fromkeys(strata))
    means, drawn, count = [], np.zeros(resamples), 0
    for number, kind in enumerate(kinds):
        rows = [i for i, stratum in enumerate(strata) if stratum == kind]
        ids = None if clusters is None else [clusters[i] for i in rows]
        sums, counts = _items([float(values[i]) for i in rows], ids)
        means.append(sums.sum() / counts.sum())
        drawn += _resampled_means(sums, counts, resamples, seed + number) / len(kinds)
        count += len(sums)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean=float(np.mean(means)), low=float(low), high=float(high), count=count)


def paired_bootstrap(
    a: Values,
    b: Values,
    *,
    clusters: Sequence[int] | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Difference:
    """Bootstrap of the mean of b - a, two systems scored on the same items.

    >>> result = paired_bootstrap([0, 0, 1, 0] * 25, [1, 0, 1, 1] * 25)
    >>> result.mean, result.low > 0
    (0.5, True)
    """
    sums, counts = _items(_differences(a, b), clusters)
    means = _resampled_means(sums, counts, resamples, seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    # One is added to both, so that a finite number of draws never claims certainty.
    sides = (np.count_nonzero(means <= 0) + 1, np.count_nonzero(means >= 0) + 1)
    p_value = min(1.0, 2 * min(sides) / (resamples + 1))
    mean = float(sums.sum() / counts.sum())
    return Difference(mean=mean, low=float(low), high=float(high), count=len(sums), p_value=float(p_value))


def paired_difference(a: Values, b: Values, *, level: float = 0.95) -> Difference:
    """Student's t interval of the mean of b - a: for few items, such as the same seeds of two methods."""
    from scipy import stats

    sums, _ = _items(_differences(a, b), None)
    if len(sums) < 2:
        raise ValueError("a paired interval needs at least two pairs")
    mean, error = float(sums.mean()), float(sums.std(ddof=1) / np.sqrt(len(sums)))
    if error == 0:
        return Difference(mean=mean, low=mean, high=mean, count=len(sums), p_value=1.0 if mean == 0 else 0.0)
    reach = error * float(stats.t.ppf((1 + level) / 2, len(sums) - 1))
    p_value = 2 * float(stats.t.sf(abs(mean) / error, len(sums) - 1))
    return Difference(mean=mean, low=mean - reach, high=mean + reach, count=len(sums), p_value=p_value)


def _differences(a: Values, b: Values) -> np.ndarray:
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if left.shape != right.shape:
        raise ValueError(f"a paired comparison needs the same items twice; got {left.size} and {right.size} values")
    return right - left
