"""Latents with a time axis through the denoising loop, transitions, noise pairs and ViPO's maps: a tiny Wan transformer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visual_grpo.adapters.diffusion import DiffusionAdapter, DiffusionSampling
from visual_grpo.pipelines.flow.vipo import Vipo, VipoConfig
from visual_grpo.types import RolloutBatch

SHAPE = (4, 3, 4, 6)
"""Channels, frames, height, width of the latents."""


class TinyVideo(DiffusionAdapter):
    """`WanTransformer3DModel` of random weights; a prompt is encoded as its letters, and latents are shown as they are."""

    lora_targets = ("to_q",)
    load = load_meta = plan_memory = save = None  # type: ignore[assignment]

    def __init__(self, **options: Any) -> None:
        from diffusers import WanTransformer3DModel

        super().__init__(DiffusionSampling(**options))
        torch.manual_seed(0)
        self.network = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
            text_dim=16, freq_dim=32, ffn_dim=32, num_layers=1, cross_attn_norm=True,
            qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
        ).eval()  # fmt: skip

    @property
    def trainable_module(self) -> nn.Module:
        return self.network

    def latent_shape(self, sampling: DiffusionSampling) -> tuple[int, ...]:
        return SHAPE

    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(latents, 1000 * sigma, condition["tokens"], return_dict=False)[0]

    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        letters = [[float(ord(c) % 7) for c in text.ljust(5)[:5]] for text in texts]
        return {"tokens": torch.tensor(letters)[..., None].expand(-1, -1, 16).sin()}

    def decode_latents(self, latents: Tensor) -> Tensor:
        return latents[:, :3].sigmoid()


def rollouts_of(contract: Any, adapter: TinyVideo) -> RolloutBatch:
    prompts = contract.prompts_of(["a cat", "a dog"])
    return adapter.decode(adapter.sample(prompts, seed=0, sampling=adapter.sampling))


@pytest.mark.parametrize("reduction", ["mean", "channel_mean"])
def test_transitions_of_clips(contract: Any, reduction: str) -> None:
    adapter = TinyVideo(steps=3, reduction=reduction)
    rows = rollouts_of(contract, adapter)
    assert rows.data["latents"].shape == (4, 2, *SHAPE)
    assert rows.old_log_prob is not None
    assert rows.old_log_prob.shape == (4, 2, *(() if reduction == "mean" else SHAPE[1:]))
    contract.check_ratio_is_one(adapter, rows, 1e-4)
    found = adapter.log_prob(rows, torch.arange(2)).value.sum()
    (slope,) = torch.autograd.grad(found, [adapter.network.patch_embedding.weight])
    assert float(slope.abs().max()) > 0


def test_noise_pairs_of_clips(contract: Any) -> None:
    adapter = TinyVideo(steps=3, solver="dpm")
    rows = rollouts_of(contract, adapter)
    pairs = {"pair_sigma": torch.tensor([[0.9, 0.4]]).expand(4, -1), "pair_noise": torch.ones(4, 2, *SHAPE)}
    rows.unit_kind, rows.data = "noise_pair", {"final": rows.data["final"], **pairs}
    found = adapter.log_prob(rows, torch.arange(2))
    assert found.value.shape == (4, 2)
    assert found.velocity is not None
    assert found.prediction is not None
    noised = 0.1 * rows.data["final"] + 0.9
    torch.testing.assert_close(found.prediction[:, 0], noised - 0.9 * found.velocity[:, 0], rtol=0, atol=1e-5)


def test_maps_of_clips_weigh_their_advantages(contract: Any) -> None:
    adapter = TinyVideo(steps=3, reduction="channel_mean")
    rows = rollouts_of(contract, adapter)
    assert rows.images is not None
    assert rows.images.shape == (4, 3, *SHAPE[1:])
    method, state = Vipo(VipoConfig(maps="colours", patch=1)), SimpleNamespace(policy=SimpleNamespace(adapter=adapter))
    rows = method.after_rollout(rows, state)  # type: ignore[arg-type]
    maps = rows.data["structure_map"]
    assert maps.shape == (4, *SHAPE[1:])
    dense = method.adjust_advantages(torch.tensor([1.0, -1.0, 0.5, 0.0]), None, rows, state)  # type: ignore[arg-type]
    assert dense.shape == (4, 1, *SHAPE[1:])
    torch.testing.assert_close(dense[1, 0], -maps[1])
