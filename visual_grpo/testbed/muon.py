"""Muon for the matrices of a small transformer, in float32 and batched over matrices of one shape.

`torch.optim.Muon` orthogonalises one matrix at a time in bfloat16, which is slow on a CPU without bfloat16 units.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, *, steps: int = 4) -> Tensor:
    """Push the singular values of matrices towards 1 by a quintic Newton-Schulz iteration.

    Args:
        matrices: [K, rows, columns].
        steps: iterations; four bring most singular values into about 0.5 to 1.3.

    Returns:
        Same shape.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised.

    Args:
        params: 2-D parameters [out, in] only.
        lr: learning rate.
        momentum: Nesterov momentum.
        adjust_lr_fn: `torch.optim.Muon`'s names: "match_rms_adamw" (an update has the root mean square that AdamW's would
            have) or "original" (an update's spectral norm is about `lr * sqrt(max(1, out / in))`).
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._matches_adamw = adjust_lr_fn == "match_rms_adamw"
        flat = [p.ndim for group in self.param_groups for p in group["params"] if p.ndim != 2]
        if flat:
            raise ValueError(f"Muon takes matrices only, got {len(flat)} parameters of other dimensions")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, members in by_shape.items():
                self._step_shape(shape, members, group["lr"], group["momentum"])

    def _step_shape(self, shape: torch.Size, members: list[torch.nn.Parameter], lr: float, momentum: float) -> None:
        gradients = torch.stack([member.grad for member in members if member.grad is not None])
        state = self.state[members[0]]
        if "buffer" not in state:
            state["buffer"] = torch.zeros_like(gradients)
        state["buffer"].lerp_(gradients, 1 - momentum)
        update = orthogonalize(gradients.lerp(state["buffer"], momentum))
        scale = 0.2 * max(shape) ** 0.5 if self._matches_adamw else max(1.0, shape[0] / shape[1]) ** 0.5
        for member, direction in zip(members, update, strict=True):
            member.add_(direction, alpha=-lr * scale)
