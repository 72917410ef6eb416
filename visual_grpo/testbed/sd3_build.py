"""Builds `sd3_tiny`: pretrains a small `StableDiffusion3Pipeline` on the drawn world, from nothing, on a CPU.

Two stages: the autoencoder (minutes), then flow matching in its latent space on deliberately noisy captions (about an
hour on one thread). The result draws crisp objects and follows its prompt in a third of the cases, so there is something
to align.

The schedule is in steps, so a seed gives the same model on the same machine; `minutes` ends the training earlier.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from torch import Tensor

from visual_grpo.testbed.detector import Detection, SceneDetector
from visual_grpo.testbed.flow_pretraining import FlowSettings, sample_latents, train_flow
from visual_grpo.testbed.scenes import KINDS, Metadata, relations, split_prompts
from visual_grpo.testbed.sd3_models import LATENT_CHANNELS, LATENT_SIZE, build_pipeline, build_vae
from visual_grpo.testbed.vae_pretraining import decode_latents, train_vae

WEIGHTS_DIR = Path(__file__).parent / "weights" / "sd3_tiny"
"""Where the shipped pipeline lies: pass it to `StableDiffusion3Pipeline.from_pretrained`."""

VAE_STEPS = 1000
FLOW_STEPS = 3600
SAMPLING_SHIFT = 3.0
SCORE_STEPS = 6


def build(
    out_dir: Path | str,
    seed: int = 0,
    *,
    minutes: float | None = None,
    threads: int = 1,
    vae_dir: Path | str | None = None,
    settings: FlowSettings | None = None,
) -> None:
    """Pretrain the pipeline and write it, with `build_log.jsonl`, to a folder.

    Args:
        out_dir: folder of the finished pipeline; snapshots of the average weights appear there every few minutes.
        seed: seed of data, weights and order.
        minutes: limit of the flow-matching stage; None runs all `FLOW_STEPS` steps.
        threads: threads of torch; one is best on a busy machine.
        vae_dir: folder of an autoencoder trained by this function before; None trains it.
        settings: data and optimization of the flow-matching stage.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    out = Path(out_dir)
    records: list[dict[str, object]] = []
    start = time.monotonic()

    def log(record: dict[str, object]) -> None:
        records.append(record)
        print(json.dumps(record), flush=True)

    if vae_dir is None:
        vae = build_vae()
        train_vae(vae, seed=seed, steps=VAE_STEPS, log=log)
    else:
        vae = AutoencoderKL.from_pretrained(vae_dir)
        log_file = Path(vae_dir) / "build_log.jsonl"
        records += [json.loads(line) for line in log_file.read_text().splitlines()] if log_file.exists() else []
    vae.requires_grad_(False).eval()
    pipeline = build_pipeline(vae, shift=SAMPLING_SHIFT)
    log(
        {
            "stage": "setup",
            "seed": seed,
            "threads": threads,
            "torch": torch.__version__,
            "settings": str(settings or FlowSettings()),
        }
    )

    def snapshot(step: int) -> None:
        for guidance in (1.0, 2.5):
            score = score_pipeline(pipeline, images=120, guidance=guidance, steps=SCORE_STEPS)
            log(
                {"stage": "score", "step": step, "wall": round(time.monotonic() - start), "guidance": guidance, **score}
            )
        save(pipeline, out, records)

    train_flow(
        pipeline, settings or FlowSettings(), seed=seed, steps=FLOW_STEPS, minutes=minutes, log=log, snapshot=snapshot
    )
    snapshot(-1)


def save(pipeline: StableDiffusion3Pipeline, out: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Write a pipeline so that a reader of `out` never sees half of it; transformer and autoencoder in float16.

    `from_pretrained` gives float32 modules back.
    """
    fresh = out.with_name(out.name + ".new")
    old = out.with_name(out.name + ".old")
    for folder in (fresh, old):
        shutil.rmtree(folder, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    modules = (pipeline.transformer, pipeline.vae)
    kept = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
    for module in modules:
        module.half()
    pipeline.save_pretrained(fresh, safe_serialization=True)
    for module, state in zip(modules, kept, strict=True):
        module.float().load_state_dict(state)
    (fresh / "build_log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if out.exists():
        out.rename(old)
    fresh.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def score_prompts(count: int) -> list[Metadata]:
    """Return `count` held-out prompts, the kinds in equal shares, repeating where a kind has few."""
    heldout = split_prompts()[1]
    by_kind = [[entry for entry in heldout if entry["tag"] == kind] for kind in KINDS]
    chosen = []
    for index in range(count):
        members = by_kind[index % len(KINDS)]
        place = index // len(KINDS)
        chosen.append(members[place * max(len(members) * len(KINDS) // count, 1) % len(members)])
    return chosen


def sample_images(
    pipeline: StableDiffusion3Pipeline, captions: Sequence[str], *, seed: int, steps: int, guidance: float = 1.0
) -> Tensor:
    """Sample one image a caption with noise of a fixed seed, [N, 3, H, W] in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((len(captions), LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE), generator=generator)
    images = []
    for start in range(0, len(captions), 60):
        part = slice(start, start + 60)
        latents = sample_latents(pipeline, captions[part], noise[part], steps=steps, guidance=guidance)
        images.append(decode_latents(pipeline.vae, latents))
    return torch.cat(images)


def score_pipeline(
    pipeline: StableDiffusion3Pipeline, *, images: int, guidance: float, steps: int, seed: int = 1234
) -> dict[str, object]:
    """Score samples of held-out prompts by GenEval's rules with the exact detector.

    Returns:
        `score` (mean of the six kinds), `strict` (correct and no further object) and the score of each kind.
    """
    prompts = score_prompts(images)
    found = SceneDetector().detect(
        sample_images(pipeline, [str(entry["prompt"]) for entry in prompts], seed=seed, steps=steps, guidance=guidance)
    )
    loose: dict[str, list[float]] = {kind: [] for kind in KINDS}
    strict: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for entry, detections in zip(prompts, found, strict=True):
        correct = is_correct(entry, detections)
        wanted = sum(clause["count"] for clause in entry["include"])  # type: ignore[attr-defined]
        loose[str(entry["tag"])].append(correct)
        strict[str(entry["tag"])].append(correct and sum(map(len, detections.values())) == wanted)
    means = {kind: sum(values) / len(values) for kind, values in loose.items()}
    strict_mean = sum(sum(values) / len(values) for values in strict.values()) / len(KINDS)
    rounded = {kind: round(value, 3) for kind, value in means.items()}
    return {"score": round(sum(means.values()) / len(KINDS), 4), "strict": round(strict_mean, 4), **rounded}


def is_correct(metadata: Metadata, detections: Mapping[str, Sequence[Detection]]) -> bool:
    """Apply GenEval's official rule to the detections of one image.

    Args:
        metadata: GenEval metadata of the prompt.
        detections: class name -> detections, best first.
    """
    threshold = 0.9 if metadata["tag"] == "counting" else 0.3
    matched: list[list[Detection]] = []
    for clause in metadata["include"]:  # type: ignore[attr-defined]
        boxes = [item for item in detections.get(clause["class"], ()) if item.score > threshold][:16]
        kept = boxes[: clause["count"]]
        if len(kept) < clause["count"]:
            return False
        if "color" in clause and sum(item.color == clause["color"] for item in kept) < clause["count"]:
            return False
        if "position" in clause:
            relation, target = clause["position"]
            if any(relation not in relations(item.box, other.box) for item in kept for other in matched[target]):
                return False
        matched.append(kept)
    for clause in metadata.get("exclude", ()):  # type: ignore[attr-defined]
        if sum(item.score > threshold for item in detections.get(clause["class"], ())) >= clause["count"]:
            return False
    return True
