"""A flow model that fits on a page, and runs on it: milliseconds a step, no model library. Pictures are its latents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.adapters.diffusion import DiffusionAdapter
from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.protocol import MemoryPlan
from visual_grpo.api import plan
from visual_grpo.build import build_trainer
from visual_grpo.config import merge, to_yaml
from visual_grpo.distributed import Ranks
from visual_grpo.metrics import Stats
from visual_grpo.run_folder import RunFolder
from visual_grpo.trainer import Trainer

SHAPE = (3, 4, 4)
SCORES = torch.tensor([0.9, 0.2, 0.4, 0.1, 0.3, 0.8, 0.5, 0.55])


class Network(nn.Module):
    """Velocity of flattened latents, level and the prompt's code: one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(50, 16), nn.Linear(16, 48)
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight.copy_(0.2 * torch.randn(layer.weight.shape, generator=generator))
                layer.bias.zero_()

    def forward(self, latents: Tensor, sigma: Tensor, code: Tensor) -> Tensor:
        flat = torch.cat([latents.flatten(1), sigma[:, None], code[:, None]], dim=1)
        return self.second(torch.tanh(self.first(flat))).view_as(latents) + latents


class ToyFlow(DiffusionAdapter):
    """`model.adapter: toy_flow:ToyFlow`."""

    library = "torch"
    lora_targets = ("first",)

    def __init__(self, network: Network, sampling: Any) -> None:
        super().__init__(sampling)
        self.network = network

    @classmethod
    def load(cls, config: Any, *, device: torch.device, sampling: Any) -> ToyFlow:
        return cls(Network().to(device, getattr(torch, config.dtype)), sampling)

    @classmethod
    def load_meta(cls, config: Any) -> nn.Module:
        return Network().to("meta")

    @classmethod
    def plan_memory(cls, config: Any, module: nn.Module, *, sampling: Any, rows: int, units: int) -> MemoryPlan:
        return MemoryPlan(parts={})

    @property
    def trainable_module(self) -> nn.Module:
        return self.network

    def latent_shape(self, sampling: DiffusionSampling) -> tuple[int, ...]:
        return SHAPE

    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(latents, sigma.to(latents), condition["code"].to(latents))

    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        return {"code": torch.tensor([sum(text.encode()) % 10 / 10 for text in texts])}

    def decode_latents(self, latents: Tensor) -> Tensor:
        return torch.sigmoid(latents)

    def save(self, path: str) -> None:
        from safetensors.torch import save_model

        save_model(self.network, f"{path}/model.safetensors")


def flow_config(folder: Path, method: Any, **over: Any) -> dict[str, Any]:
    """Two prompts x 4 pictures of 6 steps in float64, with `over` merged in."""
    for split in ("train", "test"):
        lines = [f'{{"prompt": "{split} {word}", "tag": "t"}}\n' for word in ("a", "b", "c", "d")]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    config: dict[str, Any] = {
        "name": "flow",
        "model": {"adapter": "toy_flow:ToyFlow", "path": "toy", "dtype": "float64"},
        "method": method,
        "data": {"source": str(folder / "train.jsonl")},
        "eval": {"source": str(folder / "test.jsonl"), "every": 0, "samples": 4, "final_samples": 4, "grid": 0},
        "rewards": {"brightness": 1.0},
        "sampling": {"steps": 6},
        "train": {"prompts_per_step": 2, "group_size": 4, "micro_batch": 8, "updates_per_step": 1, "ema": None},
    }
    return merge(config, over)


def flow_trainer(folder: Path, method: Any, **over: Any) -> Trainer:
    """A trainer that has not started."""
    made = plan(flow_config(folder, method, **over))
    run = RunFolder.create(folder / "runs", "flow", config_yaml=to_yaml(made.config))
    return build_trainer(made, run, Ranks())


def rows_of(trainer: Trainer, scores: Tensor = SCORES) -> tuple[Any, Tensor]:
    """Rows to train and the advantages of all rows, for given rewards."""
    rollouts, rewards = trainer.collect(trainer._draw())
    rewards.values = scores[:, None]
    return trainer.prepare(rollouts, rewards, Stats())


def move(trainer: Trainer, size: float = 0.01) -> None:
    """Another policy than the one that sampled."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.policy.trainable.values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    trainer.state.on_policy = False


def gradient(trainer: Trainer, rows: Any) -> tuple[Tensor, float]:
    """Gradient and loss of `rows`, all in one optimizer step."""
    from visual_grpo.aggregation import Totals
    from visual_grpo.loss import passes

    total = 0.0
    for index in torch.arange(len(rows)).split(trainer.config.train.micro_batch):
        micro = rows.select(index)
        for loss, _ in passes(trainer.stack, micro, Totals.of_mask(rows.rollouts.unit_mask), trainer.state):
            loss.backward()
            total += float(loss.detach())
    parts = [p.grad.flatten() for p in trainer.policy.trainable.values() if p.grad is not None]
    trainer.optimizer.zero_grad()
    return torch.cat(parts), total
