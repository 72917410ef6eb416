"""Muon for CPU pre-training of the small language model."""

import torch


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix of each update (Newton-Schulz), in fp32 and batched by shape.

    torch.optim.Muon computes in bfloat16, which a CPU without bfloat16 units runs many times slower.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Updates every matrix [out, in] that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            nesterov: dict[torch.Size, list[torch.Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1.0 - group["momentum"])
                by_shape.setdefault(weight.shape, []).append(weight)
                nesterov.setdefault(weight.shape, []).append(weight.grad.lerp(average, group["momentum"]))
            for shape, weights in by_shape.items():
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for weight, update in zip(weights, _orthogonalize(torch.stack(nesterov[shape])), strict=True):
                    weight.add_(update, alpha=-scale)


def _orthogonalize(matrices: torch.Tensor, iterations: int = 4) -> torch.Tensor:
    """Pushes the singular values of each matrix of [B, out, in] towards 1 (quintic Newton-Schulz of the Muon paper)."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
