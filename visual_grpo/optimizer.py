"""AdamW with its learning-rate schedule, and its state as named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visual_grpo.config import OptimizerConfig
from visual_grpo.schedules import lr_multiplier


class Optimizer:
    """One AdamW over the trained parameters."""

    def __init__(self, parameters: dict[str, nn.Parameter], config: OptimizerConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self.parameters = parameters
        self.steps_done = 0
        self.adamw = torch.optim.AdamW(
            list(parameters.values()),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        factor = lr_multiplier(
            self.config.schedule, self.steps_done, total_steps=self.total_steps, warmup_steps=self.config.warmup_steps
        )
        return self.config.lr * factor

    def gradient_norm(self) -> Tensor:
        """Global L2 norm of the gradients."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        return nn.utils.get_total_norm(grads) if grads else torch.tensor(0.0)

    def step(self, norm: Tensor) -> None:
        """Clip to `grad_norm`, update, forget the gradients."""
        if self.config.grad_norm is not None:
            nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self.config.grad_norm, norm)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        self.steps_done += 1
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The state of every parameter as `name|field` tensors."""
        out: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for key, value in self.adamw.state.get(parameter, {}).items():
                out[f"{name}|{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return out

    def load_tensors(self, tensors: dict[str, Tensor], steps_done: int) -> None:
        """Take back what `tensors` gave."""
        for full, value in tensors.items():
            name, _, key = full.rpartition("|")
            parameter = self.parameters[name]
            place = value if key == "step" else value.to(parameter.device)
            self.adamw.state[parameter][key] = place.clone()
        self.steps_done = steps_done
