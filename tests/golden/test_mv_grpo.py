"""Worked example of MV-GRPO: advantages of each view, the objective, and the ratio under one caption (float64)."""

import pytest
import torch
from torch import Tensor

from visual_grpo.advantages import group_advantages
from visual_grpo.aggregation import Totals, aggregate
from visual_grpo.objectives import clipped_surrogate
from visual_grpo.transitions import Transition, flow_sde_step, transition_log_prob

REWARDS = torch.tensor([[0.9, 0.5, 0.4, 0.6], [0.2, 0.8, 0.5, 0.5], [0.3] * 4], dtype=torch.float64)
LOG_RATIO = torch.tensor([[5e-5, -2e-4, 1e-4, 0], [3e-4, 2e-4, -1e-4, -5e-5], [1e-4] * 4], dtype=torch.float64)
VIEWS = torch.arange(3).repeat_interleave(4)


def close(actual: Tensor, expected: object, tolerance: float = 1e-6) -> None:
    wanted = torch.as_tensor(expected, dtype=torch.float64).reshape(actual.shape)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("std", "eps", "first", "second"),
    [
        ("population", 1e-4, (1.602711, -0.534237, -1.068474, 0), (-1.413547, 1.413547, 0, 0)),
        ("bessel", 1e-8, (1.388730, -0.462910, -0.925820, 0), (-1.224745, 1.224745, 0, 0)),
    ],
)
def test_advantages_inside_each_view(std: str, eps: float, first: tuple, second: tuple) -> None:
    found = group_advantages(REWARDS.flatten(), VIEWS, std=std, eps=eps)
    close(found, [*first, *second, 0, 0, 0, 0])
    assert found[8:].tolist() == [0, 0, 0, 0]


def test_averaging_over_captions_first_is_something_else() -> None:
    pooled = group_advantages(REWARDS.mean(0), torch.zeros(4, dtype=torch.int64), std="population", eps=1e-4)
    close(pooled, [0, 1.411220, -1.411220, 0])


def test_objective() -> None:
    """The mean over all twelve pairs: the flat view counts."""
    weights = group_advantages(REWARDS.flatten(), VIEWS, std="population", eps=1e-4)
    log_prob, mask = LOG_RATIO.reshape(12, 1), torch.ones(12, 1)
    loss, _ = clipped_surrogate(log_prob, torch.zeros_like(log_prob), weights, mask, clip_low=1e-4, clip_high=1e-4)
    close(-loss.view(3, 4).mean(1), [6.6771e-6, -7.0693e-5, 0], 1e-9)
    close(-aggregate(loss, mask, Totals.of_mask(mask), mode="sequence_mean_token_mean"), -2.1339e-5, 1e-9)


def grid(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(1, 1, 2, 2)


def step(velocity: Tensor) -> Transition:
    x = grid(0.5, -0.2, 0.1, 0.8)
    return flow_sde_step(x, velocity, 0.8576923, 0.6021505, noise_scale=0.7, sigma_max=0.8576923)


def test_ratio_under_one_caption() -> None:
    """A transition sampled under the prompt, scored under another caption by the old and the new weights."""
    prompt = grid(0.3, -0.6, 0.2, -0.1)
    caption = prompt + grid(0.1, 0.05, -0.1, 0)
    sampled = step(prompt).sample(grid(1, -0.5, 0.25, -1.5))
    own, old, new = (
        transition_log_prob(step(velocity), sampled)
        for velocity in (prompt, caption, caption + grid(0.02, -0.01, 0, 0.03))
    )
    close(own, -1.223518)
    close(old, -1.228473)
    close(new, -1.226716)
    close((new - old).exp(), 1.001759)
    close((old - own).exp(), 0.995057)
    close((new - own).exp(), 0.996807)
