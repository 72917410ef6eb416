"""Exports: the plain library loads them in a fresh process and gives the same sample."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))
import tiny_sd3

from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.noise import row_noise
from visual_grpo.adapters.sd3 import SD3Adapter
from visual_grpo.checkpoint import export_model
from visual_grpo.config import LoraConfig, ModelConfig
from visual_grpo.data import PromptRow, prompt_batch
from visual_grpo.errors import UserError
from visual_grpo.policy import Policy, apply_lora

DIFFUSERS = """
import sys, torch
from diffusers import StableDiffusion3Pipeline
base, model, latents, out, lora = sys.argv[1:]
pipe = StableDiffusion3Pipeline.from_pretrained(base if lora == "lora" else model)
if lora == "lora":
    pipe.load_lora_weights(model)
pipe.set_progress_bar_config(disable=True)
x = torch.load(latents)
image = pipe("abc", latents=x, num_inference_steps=3, guidance_scale=1.0, max_sequence_length=10, output_type="pt").images
torch.save(image, out)
"""


def diffusion_policy(folder: Path, lora: LoraConfig | None) -> tuple[Policy, Any, Path]:
    base = folder / "base"
    tiny_sd3.build(folder / "parts").save_pretrained(base)
    config = ModelConfig(adapter="sd3", path=str(base), lora=lora)
    sampling = DiffusionSampling(steps=3, solver="ode", max_sequence_length=10)
    policy = Policy(SD3Adapter.load(config, device=torch.device("cpu"), sampling=sampling), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # as if trained: a fresh LoRA is the identity
        for parameter in policy.trainable.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy, sampling, base


def check_in_diffusers(folder: Path, lora: LoraConfig | None) -> None:
    policy, sampling, base = diffusion_policy(folder, lora)
    model = export_model(policy, folder / "model")
    rows = policy.sample(prompt_batch([PromptRow(prompt="abc", metadata={})], 1), seed=1, sampling=sampling)
    torch.save(row_noise(1, torch.tensor([0]), rows.data["final"].shape[1:], "initial"), folder / "latents.pt")
    kind = "full" if lora is None else "lora"
    command = [
        sys.executable,
        "-c",
        DIFFUSERS,
        str(base),
        str(model),
        str(folder / "latents.pt"),
        str(folder / "image.pt"),
        kind,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert rows.images is not None
    torch.testing.assert_close(torch.load(folder / "image.pt"), rows.images, atol=1e-5, rtol=0)
    assert not list(model.rglob("*.bin"))
    assert list(model.rglob("*.safetensors"))


def test_lora_loads_in_diffusers(tmp_path: Path) -> None:
    """`load_lora_weights` on the base pipeline gives our sample (1e-5), alpha other than rank included."""
    check_in_diffusers(tmp_path, LoraConfig(rank=4, alpha=12))


def test_full_weights_load_in_diffusers(tmp_path: Path) -> None:
    """`from_pretrained` gives our sample (1e-5)."""
    check_in_diffusers(tmp_path, None)


PEFT = """
import sys, torch
from transformers import AutoModelForCausalLM
base, model, out, kind = sys.argv[1:]
if kind == "lora":
    from peft import PeftModel
    net = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), model)
else:
    net = AutoModelForCausalLM.from_pretrained(model)
ids = torch.arange(3, 11)[None]
torch.save(net.eval()(ids).logits.detach(), out)
"""


def check_in_transformers(folder: Path, lora: LoraConfig | None) -> None:
    from tiny_text import make_model, make_tokenizer

    from visual_grpo.adapters.text_lm import TextLMAdapter, TextSampling

    base = folder / "base"
    make_model().save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    config = ModelConfig(adapter="text_lm", path=str(base), lora=lora)
    policy = Policy(
        TextLMAdapter.load(config, device=torch.device("cpu"), sampling=TextSampling(max_new_tokens=4)), config
    )
    with torch.no_grad():
        for number, parameter in enumerate(policy.trainable.values()):
            parameter.add_(0.02 * torch.arange(parameter.numel()).view_as(parameter).float().add(number).sin())
    model = export_model(policy, folder / "model")
    kind = "full" if lora is None else "lora"
    command = [sys.executable, "-c", PEFT, str(base), str(model), str(folder / "logits.pt"), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with torch.no_grad():
        ours = policy.module.eval()(torch.arange(3, 11)[None]).logits  # type: ignore[operator]
    torch.testing.assert_close(torch.load(folder / "logits.pt"), ours, atol=1e-5, rtol=0)


def test_lora_loads_in_peft(tmp_path: Path) -> None:
    """`PeftModel.from_pretrained` gives our logits (1e-5)."""
    check_in_transformers(tmp_path, LoraConfig(rank=2, alpha=6, init="default"))


def test_full_weights_load_in_transformers(tmp_path: Path) -> None:
    """`AutoModelForCausalLM.from_pretrained` gives our logits (1e-5)."""
    check_in_transformers(tmp_path, None)


def renamed(model: Path, file: str, old: str, new: str) -> None:
    """A LoRA for a network whose layers have other names."""
    weights = load_file(model / file)
    save_file({name.replace(old, new): value for name, value in weights.items()}, model / file)


def test_a_lora_of_another_network_is_refused_by_diffusers(tmp_path: Path) -> None:
    """Both libraries only warn, and the base model would be evaluated under the LoRA's name."""
    lora = LoraConfig(rank=2)
    policy, sampling, base = diffusion_policy(tmp_path, lora)
    model = export_model(policy, tmp_path / "model")
    config = ModelConfig(adapter="sd3", path=str(base))
    fresh = [SD3Adapter.load(config, device=torch.device("cpu"), sampling=sampling) for _ in range(2)]
    apply_lora(fresh[0], model)
    renamed(model, "pytorch_lora_weights.safetensors", "transformer.", "unet.")
    with pytest.raises(UserError, match="cannot put the LoRA"):
        apply_lora(fresh[1], model)


def test_a_lora_of_another_network_is_refused_by_peft(tmp_path: Path) -> None:
    from tiny_text import make_adapter

    config = ModelConfig(adapter="text_lm", path="x", lora=LoraConfig(rank=2))
    model = export_model(Policy(make_adapter(), config), tmp_path / "model")
    apply_lora(make_adapter(), model)
    renamed(model, "adapter_model.safetensors", "layers.1", "layers.7")
    with pytest.raises(UserError, match=r"cannot put the LoRA .*missing adapter keys"):
        apply_lora(make_adapter(), model)
