"""Noise levels, strata, training windows, EMA decay and learning-rate multipliers."""

import collections
import doctest

import pytest
import torch

from visual_grpo import schedules
from visual_grpo.schedules import (
    draw_stratified,
    ema_decay,
    ema_is_due,
    flow_match_sigmas,
    linear_shift_sigmas,
    lr_multiplier,
    stratified_strata,
    training_window,
)


def test_docstring_examples() -> None:
    result = doctest.testmod(schedules)
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("steps", [1, 4, 10, 40])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_match_sigmas_are_those_of_diffusers(steps: int, shift: float) -> None:
    import diffusers

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    torch.testing.assert_close(flow_match_sigmas(steps, shift), scheduler.sigmas, rtol=0, atol=2e-7)
    torch.testing.assert_close(1000 * flow_match_sigmas(steps, shift)[:-1], scheduler.timesteps, rtol=0, atol=2e-4)


@pytest.mark.parametrize("function", [flow_match_sigmas, linear_shift_sigmas])
@pytest.mark.parametrize("steps", [1, 2, 25])
def test_sigmas_fall_from_one_to_zero(function, steps: int) -> None:
    sigmas = function(steps, 3.0)
    assert sigmas.shape == (steps + 1,)
    assert sigmas.dtype == torch.float32
    assert sigmas[0] == 1
    assert sigmas[-1] == 0
    assert bool((sigmas.diff() < 0).all())
    with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
        function(0, 3.0)
    with pytest.raises(ValueError, match="shift must be > 0"):
        function(4, 0.0)


def test_linear_shift_values() -> None:
    expected = torch.tensor([1, 0.9, 0.75, 0.5, 0], dtype=torch.float64)
    torch.testing.assert_close(linear_shift_sigmas(4, 3.0, dtype=torch.float64), expected)
    even = torch.tensor([1, 0.75, 0.5, 0.25, 0], dtype=torch.float64)
    torch.testing.assert_close(linear_shift_sigmas(4, 1.0, dtype=torch.float64), even)


@pytest.mark.parametrize(
    ("steps", "pairs", "sizes"),
    [(16, 4, [4] * 4), (40, 10, [4] * 10), (10, 4, [3, 3, 2, 2]), (7, 1, [7]), (5, 5, [1] * 5)],
)
def test_strata_cover_the_schedule_once(steps: int, pairs: int, sizes: list[int]) -> None:
    strata = stratified_strata(steps, pairs)
    assert [len(chunk) for chunk in strata] == sizes
    assert [index for chunk in strata for index in chunk] == list(range(steps))


@pytest.mark.parametrize("pairs", [0, 11])
def test_strata_refuse_a_wrong_number_of_pairs(pairs: int) -> None:
    with pytest.raises(ValueError, match=rf"pairs \({pairs}\) must be between 1 and .* \(10\)"):
        stratified_strata(10, pairs)


def test_draws_are_uniform_in_their_stratum_and_repeatable() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([draw_stratified(10, 4, generator) for _ in range(600)])
    for column, chunk in enumerate(stratified_strata(10, 4)):
        counts = collections.Counter(draws[:, column].tolist())
        assert set(counts) == set(chunk)
        assert min(counts.values()) > 600 / len(chunk) * 0.75
    first, second = (draw_stratified(40, 10, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.dtype == torch.int64


def test_training_window_starts_at_both_ends() -> None:
    generator = torch.Generator().manual_seed(0)
    starts = {training_window(10, 3, 0, 5, generator).start for _ in range(100)}
    assert starts == {0, 1, 2}
    assert {training_window(6, 3, 0, 3, generator).start for _ in range(20)} == {0}
    assert list(training_window(10, 0)) == list(range(9))
    whole_range = {training_window(5, 2, generator=generator) for _ in range(60)}
    assert whole_range == {range(2), range(1, 3), range(2, 4)}


@pytest.mark.parametrize("arguments", [(10, 6, 0, 5), (10, 3, 5, 4), (10, 3, -1, 5), (10, 3, 0, 11), (10, -1, 0, 5)])
def test_training_window_that_does_not_fit_is_refused(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        training_window(*arguments)
    with pytest.raises(ValueError, match="at least 2"):
        training_window(1, 0)


def test_ema_decay_and_its_rhythm() -> None:
    assert ema_decay(0) == 0.1
    assert ema_decay(8) == 0.5
    assert ema_decay(10_000) == 0.9
    assert ema_decay(10_000, maximum=0.995) == 0.995
    assert [n for n in range(20) if ema_is_due(n)] == [7, 15]
    assert all(ema_is_due(n, every=1) for n in range(3))
    with pytest.raises(ValueError, match="updates >= 0"):
        ema_decay(-1)
    with pytest.raises(ValueError, match="every must be >= 1"):
        ema_is_due(0, every=0)


def test_lr_multipliers() -> None:
    def curve(name: str, **options: object) -> list[float]:
        return [round(lr_multiplier(name, step, total_steps=4, **options), 6) for step in range(6)]

    assert curve("constant") == [1] * 6
    assert curve("constant", warmup_steps=2) == [0.5, 1, 1, 1, 1, 1]
    assert curve("linear") == [1, 0.75, 0.5, 0.25, 0, 0]
    assert curve("linear", final=0.5) == [1, 0.875, 0.75, 0.625, 0.5, 0.5]
    assert curve("cosine") == [1, 0.853553, 0.5, 0.146447, 0, 0]
    assert curve("cosine", warmup_steps=10) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert lr_multiplier("cosine", 4, total_steps=4, warmup_steps=4) == 1
    with pytest.raises(ValueError, match="'constant', 'linear' or 'cosine', got 'step'"):
        lr_multiplier("step", 0, total_steps=1)
    with pytest.raises(ValueError, match="total_steps >= 1"):
        lr_multiplier("linear", 0, total_steps=0)
