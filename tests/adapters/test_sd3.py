"""The SD3 adapter on a random StableDiffusion3Pipeline, against diffusers' own sampling, and on the published sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from visual_grpo.adapters import memory
from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.noise import row_noise
from visual_grpo.adapters.paths import packaged_folder, resolve_model_path
from visual_grpo.adapters.published import published
from visual_grpo.adapters.sd3 import SD3Adapter
from visual_grpo.config import LoraConfig, ModelConfig
from visual_grpo.errors import UserError
from visual_grpo.types import RolloutBatch

SOLVERS = ["flow_sde", "dance_sde", "cps"]
MEDIUM_35 = "stabilityai/stable-diffusion-3.5-medium"


def adapter_of(pipeline: Any, dtype: torch.dtype = torch.float32, **options: Any) -> SD3Adapter:
    return SD3Adapter(pipeline.to(dtype), DiffusionSampling(**options))


@pytest.fixture(scope="module")
def adapter(tiny_sd3: Any, tmp_path_factory: pytest.TempPathFactory) -> SD3Adapter:
    return adapter_of(tiny_sd3.build(tmp_path_factory.mktemp("tokenizers")))


@pytest.fixture(scope="module")
def saved(adapter: SD3Adapter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    adapter.save(str(folder))
    return folder


@pytest.fixture
def prompts(contract: Any) -> Any:
    return contract.prompts_of(["a cat", "two dogs"])


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("solver", SOLVERS)
def test_contract(contract: Any, adapter: SD3Adapter, prompts: Any, solver: str, guidance: float) -> None:
    options = DiffusionSampling(steps=4, solver=solver, guidance=guidance)
    contract.check_adapter(adapter, prompts, options, trained="attn.to_q")


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("t5", [True, False])
def test_ode_sample_is_that_of_diffusers(
    tiny_sd3: Any, prompts: Any, tmp_path: Path, t5: bool, guidance: float
) -> None:
    own = adapter_of(tiny_sd3.build(tmp_path, t5=t5, dual=t5))
    options = DiffusionSampling(
        steps=6, solver="ode", guidance=guidance, negative_prompt="blur", max_sequence_length=10
    )
    rows = own.decode(own.sample(prompts, seed=2, sampling=options))
    call = {
        "prompt": prompts.prompts,
        "negative_prompt": ["blur"] * len(prompts),
        "latents": row_noise(2, prompts.row_ids, (4, 8, 8), "initial"),
        "num_inference_steps": 6,
        "guidance_scale": guidance,
        "max_sequence_length": 10,
    }
    latents = own.pipeline(**call, output_type="latent").images
    assert torch.allclose(rows.data["final"], latents, atol=1e-5)
    images = own.pipeline(**call, output_type="pt").images
    assert rows.images is not None
    assert torch.allclose(rows.images, images, atol=1e-5)
    assert images.std() > 0.01


def test_schedules_are_those_of_diffusers(tiny_sd3: Any, tmp_path: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    own = adapter_of(tiny_sd3.build(tmp_path))
    for changes in ({"shift": 1.0}, {"shift": 3.0}, {"use_dynamic_shifting": True}, {"use_karras_sigmas": True}):
        own.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(**changes)
        call = {"prompt": ["a"], "num_inference_steps": 7, "output_type": "latent", "guidance_scale": 1.0}
        own.pipeline(**call)
        expected = own.pipeline.scheduler.sigmas
        assert torch.allclose(own.noise_levels(DiffusionSampling(steps=7)), expected, atol=1e-6), changes
    assert not torch.allclose(own.noise_levels(DiffusionSampling(steps=7, shift=5.0)), expected)


@pytest.mark.parametrize("solver", SOLVERS)
def test_float64_replay_is_exact(contract: Any, tiny_sd3: Any, prompts: Any, tmp_path: Path, solver: str) -> None:
    own = adapter_of(tiny_sd3.build(tmp_path), torch.float64)
    rows = own.sample(prompts, seed=0, sampling=DiffusionSampling(steps=4, solver=solver, guidance=2.0))
    assert rows.data["final"].dtype == torch.float64
    contract.check_ratio_is_one(own, rows, 1e-10)
    half = own.sample(
        prompts, seed=0, sampling=DiffusionSampling(steps=4, solver=solver, guidance=2.0, forward_batch=2)
    )
    assert torch.allclose(rows.data["final"], half.data["final"], atol=1e-12)


def test_half_precision_network_keeps_float32_steps(tiny_sd3: Any, prompts: Any, tmp_path: Path) -> None:
    own = adapter_of(tiny_sd3.build(tmp_path), torch.bfloat16)
    rows = own.sample(prompts, seed=0, sampling=DiffusionSampling(steps=4))
    assert rows.data["latents"].dtype == torch.float32
    replay = own.log_prob(rows, torch.arange(3))
    assert replay.value.dtype == torch.float32
    assert torch.allclose(replay.value, rows.old_log_prob, atol=2e-2)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_windows_replay(contract: Any, adapter: SD3Adapter, prompts: Any, guidance: float) -> None:
    options = DiffusionSampling(steps=5, guidance=guidance)
    rows = adapter.sample(prompts, seed=0, sampling=options, units=torch.tensor([1, 2]))
    contract.check_rollout(rows, prompts)
    contract.check_ratio_is_one(adapter, rows)
    contract.check_subsets(adapter, rows)


def test_noise_pairs_of_a_rollout(contract: Any, adapter: SD3Adapter, prompts: Any) -> None:
    from visual_grpo.objectives import elbo_pair_loss

    final = adapter.sample(prompts, seed=0, sampling=DiffusionSampling(steps=4, solver="ode")).data["final"]
    noise, sigma = torch.randn(4, 3, *final.shape[1:]), torch.tensor([[0.9, 0.5, 0.2]] * 4)
    rows = RolloutBatch(
        prompts=prompts,
        unit_kind="noise_pair",
        unit_mask=torch.ones(4, 3, dtype=torch.bool),
        data={"final": final, "pair_sigma": sigma, "pair_noise": noise},
    )
    replay = adapter.log_prob(rows, torch.arange(3))
    condition = adapter.encode(prompts.prompts, DiffusionSampling()).inputs(torch.arange(4)).tensors
    for pair in range(3):
        s = sigma[:, pair].view(-1, 1, 1, 1)
        z = (1 - s) * final + s * noise[:, pair]
        prediction = z - s * adapter.predict_velocity(z, sigma[:, pair], condition)
        assert torch.allclose(replay.value[:, pair], -elbo_pair_loss(prediction, final), atol=1e-5)
    contract.check_subsets(adapter, rows)
    contract.check_gradients(adapter, rows, "attn.to_q")


def test_everything_else_is_frozen_and_the_prompt_matters(adapter: SD3Adapter, prompts: Any) -> None:
    pipeline = adapter.pipeline
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3", "vae", "transformer"):
        module = getattr(pipeline, name)
        assert not module.training
        assert not any(p.requires_grad for p in module.parameters())
    other = prompts.select(torch.arange(4))
    other.prompts = ["red"] * 4
    options = DiffusionSampling(steps=4, solver="ode")
    first, second = (adapter.sample(p, seed=0, sampling=options).data["final"] for p in (prompts, other))
    assert not torch.allclose(first, second, atol=1e-4)


def test_sizes(adapter: SD3Adapter, prompts: Any) -> None:
    rows = adapter.decode(adapter.sample(prompts, seed=0, sampling=DiffusionSampling(steps=2, height=32, width=16)))
    assert rows.data["final"].shape == (4, 4, 16, 8)
    assert rows.images is not None
    assert rows.images.shape == (4, 3, 32, 16)
    with pytest.raises(UserError, match=r"sampling.height \(18\) must be a multiple of 4 and at most 32.*use 16"):
        adapter.sample(prompts, seed=0, sampling=DiffusionSampling(height=18))
    with pytest.raises(UserError, match=r"sampling.width \(64\).*use 32"):
        adapter.sample(prompts, seed=0, sampling=DiffusionSampling(width=64))


def test_a_saved_pipeline_loads_here_and_in_diffusers(saved: Path, adapter: SD3Adapter, prompts: Any) -> None:
    config = ModelConfig(adapter="sd3", path=str(saved), gradient_checkpointing=True)
    options = DiffusionSampling(steps=4)
    loaded = SD3Adapter.load(config, device=torch.device("cpu"), sampling=options)
    first, second = (a.sample(prompts, seed=0, sampling=options) for a in (adapter, loaded))
    assert torch.allclose(first.data["final"], second.data["final"], atol=1e-6)
    assert loaded.trainable_module.gradient_checkpointing
    assert list(saved.rglob("*.safetensors"))
    assert not list(saved.rglob("*.bin"))


def test_checkpointing_changes_no_gradient(contract: Any, saved: Path, prompts: Any) -> None:
    gradients = []
    for checkpointing in (False, True):
        config = ModelConfig(adapter="sd3", path=str(saved), dtype="float64", gradient_checkpointing=checkpointing)
        own = SD3Adapter.load(config, device=torch.device("cpu"), sampling=DiffusionSampling())
        own.trainable_module.requires_grad_(True).train()
        rows = own.sample(prompts, seed=0, sampling=DiffusionSampling(steps=3))
        assert own.pipeline.vae.dtype == torch.float64
        own.log_prob(rows, torch.arange(2)).value.sum().backward()
        gradients.append([p.grad for p in own.trainable_module.parameters() if p.grad is not None])
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("call", ["load", "load_meta"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no-such-folder", "no folder .*no-such-folder.* and it is no hub id"),
        ("/no/such/folder", "no folder '/no/such/folder'"),
        ("testbed/nothing", "Packaged models: .*visual-grpo testbed build NAME"),
        ("nobody/nothing-of-this-name", "nobody/nothing-of-this-name.*(cache|Published values)"),
    ],
)
def test_paths_that_are_not_there(monkeypatch: pytest.MonkeyPatch, call: str, path: str, message: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = ModelConfig(adapter="sd3", path=path)
    given = {"device": torch.device("cpu"), "sampling": DiffusionSampling()} if call == "load" else {}
    with pytest.raises(UserError, match=message):
        getattr(SD3Adapter, call)(config, **given)


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    config = ModelConfig(adapter="sd3", path=str(tmp_path))
    with pytest.raises(UserError, match=r"without model_index.json.*holds: nothing"):
        SD3Adapter.load_meta(config)
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(UserError, match="is a FluxPipeline, but adapter 'sd3' needs a StableDiffusion3Pipeline"):
        SD3Adapter.load(config, device=torch.device("cpu"), sampling=DiffusionSampling())
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(UserError, match="cannot read"):
        SD3Adapter.load_meta(config)
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    with pytest.raises(UserError, match=r"cannot load model\.path"):
        SD3Adapter.load(config, device=torch.device("cpu"), sampling=DiffusionSampling())
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"")
    with pytest.raises(UserError, match="is a file; give the folder"):
        resolve_model_path(str(file), marker="model_index.json")


@pytest.mark.parametrize(
    ("path", "low", "high"),
    [
        ("stabilityai/stable-diffusion-3-medium-diffusers", 2.0e9, 2.1e9),
        (MEDIUM_35, 2.2e9, 2.3e9),
        ("stabilityai/stable-diffusion-3.5-large", 8.0e9, 8.2e9),
    ],
)
def test_published_sizes(contract: Any, path: str, low: float, high: float) -> None:
    config = ModelConfig(adapter="sd3", path=path, dtype="bfloat16", lora=LoraConfig(rank=32))
    module = SD3Adapter.load_meta(config)
    count = sum(p.numel() for p in module.parameters())
    known = published(path)
    assert known is not None
    assert low < count < high
    assert count == known["parameters"]["transformer"]
    assert all(p.device.type == "meta" and p.dtype == torch.bfloat16 for p in module.parameters())
    plan = SD3Adapter.plan_memory(config, module, sampling=DiffusionSampling(guidance=4.5), rows=2, units=3)
    contract.check_plan(plan)
    assert plan.parts["frozen weights"] == 2 * count
    assert plan.parts["text encoders"] == 2 * (123_650_304 + 694_659_840 + 4_762_310_656)


def test_lora_targets_are_modules_of_the_real_network() -> None:
    from visual_grpo.policy import inject_lora

    config = ModelConfig(adapter="sd3", path=MEDIUM_35, lora=LoraConfig(rank=32))
    module = SD3Adapter.load_meta(config)
    blocks = [name for name, _ in module.named_modules() if name.startswith("transformer_blocks.0.")]
    for target in SD3Adapter.lora_targets:
        assert f"transformer_blocks.0.{target}" in blocks, target
    inject_lora(module, LoraConfig(rank=32), SD3Adapter.lora_targets)
    lora = sum(p.numel() for name, p in module.named_parameters() if "lora_" in name)
    # 24 blocks of 8 layers of width 1536, the last without text output: 191 layers of 2 * 32 * 1536 values.
    assert lora == 191 * 2 * 32 * 1536
    plan = SD3Adapter.plan_memory(config, module, sampling=DiffusionSampling(), rows=1, units=1)
    assert plan.parts["LoRA weights"] == 4 * lora
    assert plan.parts["optimizer states"] == 8 * lora


def test_memory_plan_of_a_folder(contract: Any, saved: Path, adapter: SD3Adapter) -> None:
    config = ModelConfig(adapter="sd3", path=str(saved))
    module = SD3Adapter.load_meta(config)
    options = DiffusionSampling(guidance=2.0)
    plan = SD3Adapter.plan_memory(config, module, sampling=options, rows=4, units=3)
    contract.check_plan(plan)
    encoders = [adapter.pipeline.text_encoder, adapter.pipeline.text_encoder_2, adapter.pipeline.text_encoder_3]
    assert plan.parts["text encoders"] == 4 * sum(p.numel() for encoder in encoders for p in encoder.parameters())
    assert plan.parts["VAE"] == 4 * sum(p.numel() for p in adapter.pipeline.vae.parameters())
    rows = adapter.sample(contract.prompts_of(["a", "b"]), seed=0, sampling=DiffusionSampling(steps=4))
    stored = sum(value.numel() * value.element_size() for value in rows.data.values())
    assert plan.parts["rollout storage"] == stored
    less = SD3Adapter.plan_memory(
        config.model_copy(update={"gradient_checkpointing": True}), module, sampling=options, rows=4, units=3
    )
    assert less.parts["activations"] < plan.parts["activations"]
    assert "16 x 34 tokens" not in plan.notes[0]
    assert "24 sequences x 34 tokens" in plan.notes[0]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dual", [0, 2])
def test_activation_estimate_against_saved_tensors(lora: bool, dual: int) -> None:
    """The constants of `memory` against what autograd keeps, on blocks of width 128 with 264 tokens."""
    from diffusers import SD3Transformer2DModel

    from visual_grpo.policy import inject_lora

    def kept(layers: int) -> int:
        network = SD3Transformer2DModel(
            sample_size=32,
            in_channels=4,
            out_channels=4,
            num_layers=layers,
            attention_head_dim=64,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=128,
            pooled_projection_dim=32,
            pos_embed_max_size=16,
            dual_attention_layers=tuple(range(1, 1 + dual)) if layers > 2 else (),
            qk_norm="rms_norm",
        )
        if lora:
            inject_lora(network, LoraConfig(rank=4), SD3Adapter.lora_targets)
        weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
        saved: dict[int, tuple[int, Any]] = {}

        def pack(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            network(
                hidden_states=torch.randn(1, 4, 32, 32),
                timestep=torch.tensor([500.0]),
                encoder_hidden_states=torch.randn(1, 8, 32),
                pooled_projections=torch.randn(1, 32),
            )
        return sum(size for size, _ in saved.values())

    measured = kept(4) - kept(2)
    shape = memory.BlockShape(layers=2, width=128, image_tokens=256, text_tokens=8, extra_attention=dual)
    estimate, _ = memory.transformer_activation_bytes(
        shape, sequences=1, element_size=4, checkpointing=False, lora=lora
    )
    assert abs(estimate / measured - 1) < 0.1


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_the_packaged_model(contract: Any, guidance: float) -> None:
    config = ModelConfig(adapter="sd3", path="testbed/sd3_tiny")
    options = DiffusionSampling(steps=4, guidance=guidance)
    own = SD3Adapter.load(config, device=torch.device("cpu"), sampling=options)
    rows = contract.prompts_of(["a photo of a red circle", "a photo of two blue squares"])
    contract.check_adapter(own, rows, options, trained="attn.to_q")
    exact = SD3Adapter.load(
        config.model_copy(update={"dtype": "float64"}), device=torch.device("cpu"), sampling=options
    )
    contract.check_rows_stand_alone(exact, rows, options, 1e-12)
    assert resolve_model_path("testbed/sd3_tiny", marker="model_index.json") == str(packaged_folder("sd3_tiny"))
    assert sum(p.numel() for p in own.trainable_module.parameters()) == sum(
        p.numel() for p in SD3Adapter.load_meta(config).parameters()
    )
