"""Diversity of the samples of a prompt: mean pairwise 1 - cosine of their features, within each prompt's group.

Source: card evaluation, section 2 (our definition; no single reference). A policy that exploits its reward lowers it: the samples
of a prompt grow alike. Figures of different features cannot be compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["group_diversity", "mean_pairwise_distance"]


def mean_pairwise_distance(features: Tensor) -> float:
    """Mean of 1 - cosine over all pairs of different rows of [n, D], n > 1; a row of zeros has cosine 0 with all others.

    >>> round(mean_pairwise_distance(torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 0.0]])), 6)
    0.666667
    """
    unit = torch.nn.functional.normalize(features.double(), dim=-1)
    cosine = unit @ unit.T
    count = len(unit)
    return float(1 - (cosine.sum() - cosine.diagonal().sum()) / (count * (count - 1)))


def group_diversity(features: Tensor, groups: Tensor) -> dict[int, float]:
    """`mean_pairwise_distance` of each group of at least two rows.

    Args:
        features: [N, D].
        groups: [N] int64, equal for the samples of one prompt.

    Returns:
        First row of the group -> its figure, in the order of the rows.

    >>> group_diversity(torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([7, 7, 3, 3, 5]))
    {0: 0.0, 2: 1.0}
    """
    found = {}
    for group in dict.fromkeys(groups.tolist()):
        rows = torch.nonzero(groups == group).flatten()
        if len(rows) > 1:
            found[int(rows[0])] = mean_pairwise_distance(features[rows])
    return found
