"""Samples of a model for an evaluation: pictures in GenEval's folder layout, or completions as JSON lines. Resumable.

Sample i of prompt p has its own noise, whatever the batch: an interrupted evaluation goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from visual_grpo.config import DataConfig, ModelConfig, validate
from visual_grpo.data import PromptRow, load_prompts, prompt_batch
from visual_grpo.errors import UserError
from visual_grpo.eval.images import write_samples
from visual_grpo.policy import apply_lora
from visual_grpo.registry import ADAPTERS
from visual_grpo.types import PromptBatch


def guess_family(path: str) -> str:
    """The adapter of a model folder by its marker file: a diffusers pipeline's class, else a causal language model.

    Raises:
        UserError: no marker; say which family it is.
    """
    from visual_grpo.adapters.paths import resolve_model_path

    for marker in ("model_index.json", "config.json"):
        try:
            folder = Path(resolve_model_path(path, marker=marker))
        except UserError:
            continue
        if not (folder / marker).is_file():  # a hub id
            break
        if marker == "config.json":
            return "text_lm"
        kind = json.loads((folder / marker).read_text(encoding="utf-8")).get("_class_name")
        if kind == "StableDiffusion3Pipeline":
            return "sd3"
        raise UserError(f"no adapter is known for the pipeline class {kind!r} of {path!r}; give family=NAME")
    if "stable-diffusion-3" in path:
        return "sd3"
    raise UserError(
        f"cannot tell the family of model {path!r}; check the path, or give family=NAME (visual-grpo list models)"
    )


def load_generator(
    path: str, lora: Path | None, family: str | None, sampling: Mapping[str, Any], dtype: str
) -> tuple[Any, Any]:
    """(adapter with its LoRA applied, sampling options)."""
    name = family or guess_family(path)
    kind: Any = ADAPTERS.get(name)
    options = validate(kind.Sampling, dict(sampling), where="sampling")
    config = validate(ModelConfig, {"adapter": name, "path": path, "dtype": dtype})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adapter = kind.load(config, device=device, sampling=options)
    if lora is not None:
        apply_lora(adapter, lora)
    return adapter, options


def generate(
    model: str,
    *,
    out: Path,
    prompts: str,
    lora: Path | None = None,
    family: str | None = None,
    samples: int = 4,
    batch: int = 32,
    seed: int = 42,
    sampling: Mapping[str, Any] | None = None,
    dtype: str = "float32",
) -> Path:
    """Sample `samples` times from every prompt into `out`; what is there already is kept.

    Args:
        model: folder, hub id or testbed/NAME.
        out: a folder for `00000/samples/0000.png`, or completions.jsonl.
        prompts: a prompt file, or testbed/NAME (its held-out prompts).
        lora: to put on the model.
        family: adapter name; found from the folder where possible.
        samples: of each prompt.
        batch: rows at a time.
        seed: of the noises.
        sampling: options of the family (steps, guidance, temperature, ...).
        dtype: of the weights.

    Returns:
        `out` for pictures, the file for completions.
    """
    rows = load_prompts(DataConfig(source=prompts, split="heldout" if prompts.startswith("testbed/") else "train"))
    adapter, options = load_generator(model, lora, family, sampling or {}, dtype)
    adapter.trainable_module.eval()
    everything = prompt_batch(rows, samples)
    if adapter.kind == "autoregressive":
        out.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row.metadata) + "\n" for row in rows)
        (out / "prompts.jsonl").write_text(lines, encoding="utf-8")
        return _texts(adapter, everything, options, out, batch, seed)
    _images(adapter, rows, everything, options, out, samples, batch, seed)
    return out


def _images(
    adapter: Any,
    rows: list[PromptRow],
    everything: PromptBatch,
    options: Any,
    out: Path,
    samples: int,
    batch: int,
    seed: int,
) -> None:
    from rich.progress import track

    out.mkdir(parents=True, exist_ok=True)
    missing = [p for p in range(len(rows)) if not (out / f"{p:05d}" / "samples" / f"{samples - 1:04d}.png").is_file()]
    size = max(batch // samples, 1)
    for start in track(range(0, len(missing), size), description="sampling", disable=not missing):
        chosen = missing[start : start + size]
        index = torch.tensor([p * samples + i for p in chosen for i in range(samples)])
        done = adapter.decode(adapter.sample(everything.select(index), seed=seed, sampling=options))
        for number, p in enumerate(chosen):
            write_samples(out, p, rows[p].metadata, done.images[number * samples : (number + 1) * samples])


def _texts(adapter: Any, everything: PromptBatch, options: Any, out: Path, batch: int, seed: int) -> Path:
    from rich.progress import track

    path = out / "completions.jsonl"
    done = len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else 0
    with path.open("a", encoding="utf-8") as file:
        for start in track(range(done, len(everything), batch), description="sampling"):
            part = everything.select(torch.arange(start, min(start + batch, len(everything))))
            rows = adapter.decode(adapter.sample(part, seed=seed, sampling=options))
            for prompt, text, cut in zip(part.prompts, rows.texts, rows.truncated.tolist(), strict=True):
                file.write(json.dumps({"prompt": prompt, "completion": text, "truncated": cut}) + "\n")
            file.flush()
    return path
