"""Surrogates: degenerate batches, gradients, ratio levels, maps, masks of units."""

import doctest
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from visual_grpo import objectives
from visual_grpo.aggregation import AGGREGATION_MODES, AggregationMode, Totals, aggregate
from visual_grpo.objectives import (
    LOG_RATIO_LIMIT,
    cispo_surrogate,
    clip_is_active,
    clipped_surrogate,
    elbo_pair_loss,
    entropy_threshold,
    importance_log_ratio,
    off_policy_sequence_mask,
    sapo_surrogate,
    top_entropy_mask,
    vespo_surrogate,
)

NAN, INF = float("nan"), float("inf")
LEVELS = ["token", "sequence", "sequence_token"]
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.2, -0.6, -0.8, 0.5], dtype=torch.float64)
SURROGATES: dict[str, Callable] = {
    **{f"clipped-{level}": lambda *a, level=level, **k: clipped_surrogate(*a, level=level, **k) for level in LEVELS},
    "dual": lambda *a: clipped_surrogate(*a, dual_clip=3.0, delta=1.5),
    **{f"cispo-{level}": lambda *a, level=level: cispo_surrogate(*a, level=level) for level in LEVELS},
    **{f"sapo-{level}": lambda *a, level=level: sapo_surrogate(*a, level=level) for level in LEVELS},
    "vespo": vespo_surrogate,
}


def log_probs(shape: tuple[int, ...] = (4, 4), seed: int = 0, spread: float = 0.1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(shape, generator=generator, dtype=torch.float64) - 0.1
    new = old + spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    return new.requires_grad_(), old


def close(actual: Tensor, expected: object, tolerance: float = 1e-12) -> None:
    wanted = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual.detach(), wanted.detach(), rtol=0, atol=tolerance)


def total(loss: Tensor, mask: Tensor = MASK, mode: AggregationMode = "sequence_mean_token_mean") -> Tensor:
    return aggregate(loss, mask, Totals.of_mask(mask), mode=mode, max_length=4)


def test_docstring_examples() -> None:
    result = doctest.testmod(objectives)
    assert result.failed == 0
    assert result.attempted > 0


# --- degenerate batches ----------------------------------------------------------------------------------------------


def degenerate(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, old = log_probs()
    new, advantages, mask = new.detach(), ADVANTAGES, MASK
    if name == "flat":
        advantages = torch.zeros(4, dtype=torch.float64)
    elif name == "no kept unit":
        mask = torch.zeros_like(MASK)
    elif name == "absent log-probs are nan":
        new, old = torch.where(MASK != 0, new, NAN), torch.where(MASK != 0, old, NAN)
    elif name == "absent log-probs are -inf":
        new, old = torch.where(MASK != 0, new, -INF), torch.where(MASK != 0, old, -INF)
    elif name == "one row":
        new, old, advantages, mask = new[:1], old[:1], advantages[:1], mask[:1]
    elif name in ("30", "1000", "-30", "-1000"):
        new = old + float(name)
    return new.requires_grad_(), old, advantages, mask


DEGENERATE = [
    "flat", "no kept unit", "absent log-probs are nan", "absent log-probs are -inf", "one row",
    "30", "1000", "-30", "-1000",
]  # fmt: skip


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_degenerate_batches_stay_finite(surrogate: str, case: str, mode: AggregationMode) -> None:
    new, old, advantages, mask = degenerate(case)
    unit_loss, metrics = SURROGATES[surrogate](new, old, advantages, mask)
    loss = total(unit_loss, mask, mode)
    loss.backward()
    assert bool(loss.isfinite())
    assert bool(new.grad.isfinite().all())
    assert not bool(new.grad[mask == 0].any())
    assert not bool(unit_loss[mask == 0].any())
    for value, count in metrics.values():
        assert bool(value.isfinite())
        assert int(count) == int(mask.sum())
    if case in ("flat", "no kept unit"):
        assert loss == 0
        assert not bool(new.grad.any())


@pytest.mark.parametrize("level", LEVELS)
def test_far_ratio_is_clamped_not_infinite(level: str) -> None:
    new, old = torch.full((1, 3), 1000.0, dtype=torch.float16).requires_grad_(), torch.zeros(1, 3, dtype=torch.float16)
    ratio = importance_log_ratio(new, old, torch.ones(1, 3), level=level)
    assert ratio.dtype == torch.float32
    assert ratio.detach().max() == LOG_RATIO_LIMIT
    ratio.exp().sum().backward()
    assert not bool(new.grad.any())


# --- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", [name for name in SURROGATES if name != "vespo"])
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_gradient_at_ratio_one_is_minus_advantage_times_coefficient(surrogate: str, mode: AggregationMode) -> None:
    _, old = log_probs()
    new = old.clone().requires_grad_()
    mask = MASK[:3] if "sequence" not in surrogate else torch.ones(3, 4, dtype=torch.float64)
    unit_loss, _ = SURROGATES[surrogate](new[:3], old[:3], ADVANTAGES[:3], mask)
    total(unit_loss, mask, mode).backward()
    coefficients = torch.zeros(4, 4, dtype=torch.float64)
    probe = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    total(probe, mask, mode).backward()
    coefficients[:3] = -ADVANTAGES[:3, None] * probe.grad
    close(new.grad, coefficients)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("at_one", [True, False])
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_clipped_gradient_against_finite_differences(level: str, at_one: bool, mode: AggregationMode) -> None:
    new, old = log_probs(spread=0.0 if at_one else 0.3)

    def loss(value: Tensor) -> Tensor:
        return total(clipped_surrogate(value, old, ADVANTAGES, MASK, level=level)[0], mode=mode)

    assert torch.autograd.gradcheck(loss, (new,))


@pytest.mark.parametrize("surrogate", ["sapo-token", "sapo-sequence", "dual"])
def test_other_gradients_against_finite_differences(surrogate: str) -> None:
    new, old = log_probs(spread=0.3)
    assert torch.autograd.gradcheck(lambda v: total(SURROGATES[surrogate](v, old, ADVANTAGES, MASK)[0]), (new,))


def test_sequence_token_has_the_value_and_gradient_of_sequence() -> None:
    results = []
    for level in ("sequence", "sequence_token"):
        new, old = log_probs(spread=0.4)
        loss = total(clipped_surrogate(new, old, ADVANTAGES, MASK, level=level, clip_low=0.1, clip_high=0.1)[0])
        loss.backward()
        results.append((loss, new.grad))
    close(results[0][0], results[1][0])
    close(results[0][1], results[1][1])


def test_cispo_keeps_the_gradient_where_the_clip_drops_it() -> None:
    new, old = torch.tensor([[1.0]], requires_grad=True), torch.zeros(1, 1)
    arguments = (new, old, torch.tensor([1.0]), torch.ones(1, 1))
    clipped, _ = clipped_surrogate(*arguments)
    (gradient,) = torch.autograd.grad(clipped.sum(), new)
    assert gradient == 0
    loss, metrics = cispo_surrogate(*arguments, ratio_floor=0.8, ratio_cap=1.2)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    close(gradient, [[-1.2]], 1e-6)
    assert [int(value) for value in metrics["clip_fraction"]] == [1, 1]


def test_nothing_but_log_prob_gets_a_gradient() -> None:
    new, old = log_probs()
    old, advantages = old.requires_grad_(), ADVANTAGES.clone().requires_grad_()
    for surrogate in SURROGATES.values():
        total(surrogate(new, old, advantages, MASK)[0]).backward()
    assert old.grad is None
    assert advantages.grad is None


# --- invariances -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_row_order_and_splits_do_not_matter(surrogate: str) -> None:
    function, totals = SURROGATES[surrogate], Totals.of_mask(MASK)
    for mode in (mode for mode in AGGREGATION_MODES if mode != "micro_batch_token_mean"):
        new, old = log_probs(spread=0.4)
        whole = total(function(new, old, ADVANTAGES, MASK)[0], mode=mode)
        whole.backward()
        for order, cut in itertools.product(([0, 1, 2, 3], [2, 0, 3, 1]), (1, 2, 3)):
            other, _ = log_probs(spread=0.4)
            loss = torch.zeros((), dtype=torch.float64)
            for part in (order[:cut], order[cut:]):
                unit_loss, _ = function(other[part], old[part], ADVANTAGES[part], MASK[part])
                share = aggregate(unit_loss, MASK[part], totals, mode=mode, max_length=4)
                share.backward()
                loss = loss + share.detach()
            close(loss, whole)
            close(other.grad, new.grad)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_advantages_may_be_given_per_unit_and_per_pixel(surrogate: str) -> None:
    new, old = log_probs((4, 4, 2, 3))
    by_row, _ = SURROGATES[surrogate](new, old, ADVANTAGES, MASK)
    by_unit, _ = SURROGATES[surrogate](new, old, ADVANTAGES[:, None].expand(4, 4), MASK)
    by_pixel, _ = SURROGATES[surrogate](new, old, ADVANTAGES[:, None, None, None].expand(4, 4, 2, 3), MASK)
    assert by_row.shape == new.shape
    close(by_unit, by_row)
    close(by_pixel, by_row)


def test_constant_map_equals_no_map() -> None:
    new, old = log_probs()
    expanded = new[:, :, None, None].expand(4, 4, 2, 2), old[:, :, None, None].expand(4, 4, 2, 2)
    for surrogate in SURROGATES.values():
        plain, metrics = surrogate(new, old, ADVANTAGES, MASK)
        mapped, map_metrics = surrogate(*expanded, ADVANTAGES, MASK)
        close(total(mapped), total(plain))
        for name, (value, count) in metrics.items():
            close(map_metrics[name][0] / map_metrics[name][1], value / count)


# --- values and metrics --------------------------------------------------------------------------------------------------


def test_clip_metrics() -> None:
    new = torch.tensor([[1.5, 0.5, 1.0, 9.0]], dtype=torch.float64).log()
    arguments = (new, torch.zeros_like(new), torch.tensor([1.0]), torch.tensor([[1, 1, 1, 0]]))
    _, metrics = clipped_surrogate(*arguments)
    assert [int(v) for v in metrics["clip_fraction_high"]] == [1, 3]
    assert [int(v) for v in metrics["clip_fraction_low"]] == [0, 3]
    close(metrics["ratio"][0], 3.0)
    close(metrics["approx_kl"][0], (0.5 - 0.5 - 0) - torch.tensor(0.75, dtype=torch.float64).log())
    _, metrics = clipped_surrogate(*arguments[:2], torch.tensor([-1.0]), arguments[3])
    assert [int(v) for v in metrics["clip_fraction_low"]] == [1, 3]


def test_clip_is_active() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.5, 1.5, 1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    assert clip_is_active(ratio, advantages, 0.2, 0.2).tolist() == [False, True, True, False, False]


def test_vespo_adds_the_sampler_ratio_to_the_sum() -> None:
    new, old = log_probs()
    moved = old.clone()
    moved[:, 0] -= 0.1
    sampler = torch.tensor([0.1, 0.1, 0.1, 0.0], dtype=torch.float64)
    close(
        vespo_surrogate(new, old, ADVANTAGES, MASK, sampler_log_ratio=sampler)[0],
        vespo_surrogate(new, moved, ADVANTAGES, MASK)[0],
    )
    with pytest.raises(ValueError, match="sampler_log_ratio must have shape"):
        vespo_surrogate(new, old, ADVANTAGES, MASK, sampler_log_ratio=sampler[:1])


def test_top_entropy_mask() -> None:
    entropy = torch.tensor([[5.0, 1.0, 2.0, 9.0], [3.0, 4.0, NAN, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    assert float(entropy_threshold(entropy, mask, 0.25)) == 4.0
    assert top_entropy_mask(entropy, mask, 0.25).int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert torch.equal(top_entropy_mask(entropy, mask, 1.0), mask != 0)
    given = top_entropy_mask(entropy, mask, 0.25, threshold=torch.tensor(2.0))
    assert given.int().tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]
    assert not bool(top_entropy_mask(entropy, torch.zeros_like(mask), 0.5).any())
    values = torch.rand(1, 37, generator=torch.Generator().manual_seed(0))
    expected = torch.quantile(values, 0.8)
    torch.testing.assert_close(entropy_threshold(values, torch.ones(1, 37), 0.2), expected)
    with pytest.raises(ValueError, match=r"in \(0, 1\], got 0"):
        entropy_threshold(entropy, mask, 0)


def test_off_policy_mask_drops_only_far_negative_rows() -> None:
    new, sampler = torch.zeros(3, 2), torch.tensor([[0.4, 0.0], [0.4, 0.0], [0.1, NAN]])
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    kept = off_policy_sequence_mask(new, sampler, advantages, torch.ones(3, 2), threshold=0.1)
    assert kept.int().tolist() == [[0, 0], [1, 1], [1, 1]]


def test_elbo_pair_loss_of_many_pairs_equals_pair_by_pair() -> None:
    generator = torch.Generator().manual_seed(0)
    prediction = torch.randn(3, 2, 4, 5, 5, generator=generator)
    x0 = torch.randn(3, 4, 5, 5, generator=generator)
    losses = elbo_pair_loss(prediction, x0)
    assert losses.shape == (3, 2)
    torch.testing.assert_close(losses[:, 1], elbo_pair_loss(prediction[:, 1], x0))
    assert elbo_pair_loss(prediction.to(torch.bfloat16), x0).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda n, o: clipped_surrogate(n, o[:2], ADVANTAGES, MASK), "must have log_prob's shape"),
        (lambda n, o: clipped_surrogate(n, o, ADVANTAGES, MASK[:, :2]), r"mask must be \[N, T\]"),
        (lambda n, o: clipped_surrogate(n, o, ADVANTAGES[:2], MASK), "advantages has shape"),
        (lambda n, o: clipped_surrogate(n, o, ADVANTAGES, MASK, level="row"), "ratio level must be"),
        (lambda n, o: clipped_surrogate(n, o, ADVANTAGES, MASK, clip_low=1.5), "clip_low must be in"),
        (lambda n, o: clipped_surrogate(n, o, ADVANTAGES, MASK, dual_clip=1.0), "dual_clip .* must be > 1"),
        (lambda n, o: clipped_surrogate(n, o, ADVANTAGES, MASK, delta=0.5), "delta .* must be > 1"),
        (lambda n, o: cispo_surrogate(n, o, ADVANTAGES, MASK, ratio_cap=0.5, ratio_floor=0.8), "ratio_floor <="),
        (lambda n, o: sapo_surrogate(n, o, ADVANTAGES, MASK, temperature_positive=0), "must be > 0"),
        (lambda n, o: elbo_pair_loss(n, o[:, :2]), r"x0 must be \[N, \*latent\]"),
        (lambda n, o: elbo_pair_loss(n, o, floor=0.0), "floor must be > 0"),
    ],
)
def test_bad_input_is_refused(call: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*log_probs())
