"""Schedules: noise levels, which steps are trained, EMA decay, learning-rate multipliers. Pure functions.

Random choices take a `torch.Generator` that the caller owns, so that all ranks draw the same.
"""

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

LrSchedule = Literal["constant", "linear", "cosine"]


def _shifted(level: Tensor, shift: float) -> Tensor:
    return shift * level / (1 + (shift - 1) * level)


def _check_steps(steps: int, shift: float) -> None:
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}")
    if shift <= 0:
        raise ValueError(f"shift must be > 0 (1 leaves the levels evenly spaced), got {shift}")


def flow_match_sigmas(steps: int, shift: float = 3.0, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Noise levels of diffusers' `FlowMatchEulerDiscreteScheduler` with a static shift (SD3.5: 3).

    With f(u) = shift u / (1 + (shift - 1) u): `steps` values evenly spaced from 1 down to f(0.001), f applied to each
    (so the shift acts twice on the lower end), and a final 0.

    Args:
        steps: sampling steps T >= 1.
        shift: static shift; the model's timestep input is `1000 * sigma`.
        dtype: of the result; computed in float64.

    Returns:
        [T + 1], falling from 1 to 0.

    Example:
        >>> flow_match_sigmas(4)
        tensor([1.0000, 0.8577, 0.6022, 0.0089, 0.0000])
    """
    _check_steps(steps, shift)
    lowest = float(_shifted(torch.tensor(0.001, dtype=torch.float64), shift))
    levels = _shifted(torch.linspace(1.0, lowest, steps, dtype=torch.float64), shift)
    return torch.cat([levels, levels.new_zeros(1)]).to(dtype)


def linear_shift_sigmas(steps: int, shift: float = 3.0, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Noise levels of DanceGRPO and MixGRPO: `u = 1 - i / T`, i = 0..T, shifted; no end point at 0.001.

    Args:
        steps: sampling steps T >= 1.
        shift: 3 for images, 5 for video.
        dtype: of the result; computed in float64.

    Returns:
        [T + 1], falling from 1 to 0.

    Example:
        >>> linear_shift_sigmas(4)
        tensor([1.0000, 0.9000, 0.7500, 0.5000, 0.0000])
    """
    _check_steps(steps, shift)
    return _shifted(torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64), shift).to(dtype)


def shortened_tail(
    steps: int, done: int, ratio: float, shift: float = 3.0, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Noise levels of the rest of a `linear_shift_sigmas` schedule on fewer points (MixGRPO-Flash, arXiv 2507.21802).

    The `n = steps - done + 1` points that are left become `max(int(n ratio), 2)`, evenly spaced before the shift: one step
    less than points, and always one to the end.

    Args:
        steps: of the whole schedule.
        done: steps that were taken, 1 .. steps - 1.
        ratio: share of the points to keep, in (0, 1].
        shift: of the schedule.
        dtype: of the result; computed in float64.

    Returns:
        [m], falling from the level after step `done` to 0.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> shortened_tail(4, 2, 0.7, shift=1.0)
        tensor([0.5000, 0.0000])
    """
    _check_steps(steps, shift)
    if not 1 <= done < steps or not 0 < ratio <= 1:
        raise ValueError(f"need 1 <= done < steps and 0 < ratio <= 1, got done {done}, steps {steps} and ratio {ratio}")
    points = max(int((steps - done + 1) * ratio), 2)
    return _shifted(torch.linspace(1 - done / steps, 0.0, points, dtype=torch.float64), shift).to(dtype)


def stratified_strata(num_steps: int, pairs: int) -> list[range]:
    """Split the steps 0..num_steps-1 into `pairs` consecutive chunks (V-GRPO, arXiv 2604.23380).

    Sizes differ by at most one and the longer chunks come first.

    Raises:
        ValueError: not `1 <= pairs <= num_steps`.

    Example:
        >>> [list(chunk) for chunk in stratified_strata(10, 4)]
        [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    """
    if not 1 <= pairs <= num_steps:
        raise ValueError(f"pairs ({pairs}) must be between 1 and the number of sampling steps ({num_steps})")
    size, longer = divmod(num_steps, pairs)
    starts = [i * size + min(i, longer) for i in range(pairs + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def draw_stratified(num_steps: int, pairs: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw one step index uniformly from each chunk of `stratified_strata`: [pairs] int64 on the CPU, ascending."""
    chunks = stratified_strata(num_steps, pairs)
    draws = [int(torch.randint(chunk.start, chunk.stop, (1,), generator=generator)) for chunk in chunks]
    return torch.tensor(draws, dtype=torch.int64)


def training_window(
    num_steps: int, size: int, low: int = 0, high: int | None = None, generator: torch.Generator | None = None
) -> range:
    """Choose the noisy, trained steps of Flow-GRPO-Fast; all other steps are ODE.

    The start is uniform on the integers `low .. high - size`, BOTH ends included. One call a rollout batch.

    Args:
        num_steps: sampling steps T.
        size: number of trained steps; 0 means steps 0..T-2 (the last step is never noisy).
        low: first step that may be trained.
        high: end (exclusive) of the steps that may be trained; `None` means T - 1.
        generator: of the start.

    Returns:
        The consecutive step indices.

    Raises:
        ValueError: the window does not fit.

    Example:
        >>> training_window(10, 3, 0, 3)
        range(0, 3)
    """
    end = num_steps - 1 if high is None else high
    if num_steps < 2:
        raise ValueError(f"a training window needs at least 2 sampling steps, got {num_steps}")
    if size == 0:
        return range(num_steps - 1)
    if not (0 <= low <= end <= num_steps) or not 1 <= size <= end - low:
        raise ValueError(
            f"a window of {size} steps does not fit into [{low}, {end}) of {num_steps} sampling steps; "
            "need 0 <= low, low + size <= high <= steps"
        )
    start = int(torch.randint(low, end - size + 1, (1,), generator=generator))
    return range(start, start + size)


def ema_decay(updates: int, maximum: float = 0.9) -> float:
    """Decay of the moving average after `updates` optimizer steps: `min((1 + n) / (10 + n), maximum)`.

    Example:
        >>> ema_decay(0), ema_decay(1000)
        (0.1, 0.9)
    """
    if updates < 0 or not 0 <= maximum <= 1:
        raise ValueError(f"need updates >= 0 and maximum in [0, 1], got {updates} and {maximum}")
    return min((1 + updates) / (10 + updates), maximum)


def ema_is_due(updates: int, every: int = 8) -> bool:
    """Tell whether the moving average is updated at optimizer step `updates` (0-based): `(n + 1) % every == 0`."""
    if every < 1:
        raise ValueError(f"every must be >= 1, got {every}")
    return (updates + 1) % every == 0


def lr_multiplier(
    schedule: LrSchedule, step: int, *, total_steps: int, warmup_steps: int = 0, final: float = 0.0
) -> float:
    """Factor of the learning rate at optimizer step `step` (0-based).

    Warm-up rises linearly as `(step + 1) / warmup_steps`, so the first step is never wasted on a rate of 0 (unlike
    transformers). Afterwards: constant 1; or linear, or half a cosine, from 1 down to `final` at `total_steps`.

    Raises:
        ValueError: unknown schedule or a negative number.

    Example:
        >>> [lr_multiplier("linear", s, total_steps=6, warmup_steps=2) for s in (0, 1, 2, 4, 6)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if schedule not in ("constant", "linear", "cosine"):
        raise ValueError(f"learning-rate schedule must be 'constant', 'linear' or 'cosine', got {schedule!r}")
    if step < 0 or warmup_steps < 0 or total_steps < 1 or not 0 <= final <= 1:
        raise ValueError(
            f"need step, warmup_steps >= 0, total_steps >= 1 and final in [0, 1], "
            f"got {step}, {warmup_steps}, {total_steps} and {final}"
        )
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    fall = progress if schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1.0 + (final - 1.0) * fall
