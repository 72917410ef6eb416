"""Samples of a model for an evaluation: pictures in GenEval's folder layout, or completions as JSON lines. Resumable.

Sample i of prompt p has its own noise, whatever the batch, the number of samples or the processes (`accelerate launch`): an
interrupted evaluation goes on where it stopped, and a folder begun with another model, seed or prompt file is refused.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from visual_grpo.config import DataConfig, ModelConfig, validate
from visual_grpo.data import PromptRow, load_prompts, prompt_batch
from visual_grpo.distributed import Ranks
from visual_grpo.errors import UserError
from visual_grpo.eval.images import write_samples
from visual_grpo.eval.protocol import check_settings, progress_bar
from visual_grpo.json_lines import read_jsonl
from visual_grpo.policy import apply_lora
from visual_grpo.registry import ADAPTERS
from visual_grpo.run_folder import write_atomic
from visual_grpo.types import PromptBatch

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
ENDS = 1 << 20


def guess_family(path: str) -> str:
    """The adapter of a model folder by its marker file: a diffusers pipeline's class, else a causal language model.

    Raises:
        UserError: no marker; say which family it is.
    """
    from visual_grpo.adapters.paths import resolve_model_path
    from visual_grpo.adapters.published import published

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
        if (name := _family_of(kind)) is not None:
            return name
        raise UserError(f"no adapter is known for the pipeline class {kind!r} of {path!r}; give family=NAME")
    known = published(path)
    if known is not None and (name := _family_of(known["class"])) is not None:
        return name
    if "stable-diffusion-3" in path:
        return "sd3"
    raise UserError(
        f"cannot tell the family of model {path!r}; check the path, or give family=NAME (visual-grpo list models)"
    )


def _family_of(pipeline_class: str | None) -> str | None:
    """The built-in adapter of a diffusers pipeline class."""
    from visual_grpo.adapters import TABLE

    found = (name for name in TABLE if getattr(ADAPTERS.get(name), "pipeline_class", "") == pipeline_class)
    return next(found, None)


def load_generator(
    path: str,
    lora: Path | None,
    family: str,
    sampling: Mapping[str, Any],
    dtype: str,
    device: torch.device | None = None,
) -> tuple[Any, Any]:
    """(adapter with its LoRA applied, sampling options)."""
    kind: Any = ADAPTERS.get(family)
    options = validate(kind.Sampling, dict(sampling), where="sampling")
    config = validate(ModelConfig, {"adapter": family, "path": path, "dtype": dtype})
    where = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adapter = kind.load(config, device=where, sampling=options)
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
        sampling: options of the family (steps, guidance, temperature, ...); the family's `eval_sampling` stands below them.
        dtype: of the weights.

    Returns:
        `out` for pictures, the file for completions.
    """
    rows = load_prompts(DataConfig(source=prompts, split="heldout" if prompts.startswith("testbed/") else "train"))
    if samples < 1 or batch < 1:
        raise UserError(f"samples and batch must be at least 1; they are {samples} and {batch}.")
    name = family or guess_family(model)
    chosen = {**getattr(ADAPTERS.get(name), "eval_sampling", {}), **(sampling or {})}
    with Ranks() as ranks:
        if ranks.main:
            settings: dict[str, Any] = {
                "model": model,
                "adapter": lora,
                "family": family,
                "samples": samples,
                "seed": seed,
            }
            settings |= {"sampling": chosen, "dtype": dtype, "prompts": _digest(rows)}
            settings["weights"] = weights_digest(Path(model), lora, leave=out)
            check_settings(out, settings, "samples")
        ranks.barrier()
        adapter, options = load_generator(model, lora, name, chosen, dtype, ranks.device)
        adapter.trainable_module.eval()
        if ranks.main:
            print(f"sampling {len(rows)} prompts x {samples} of {model}: {_shown(options)}", file=sys.stderr)
        everything = numbered(prompt_batch(rows, samples), seed, samples)
        if adapter.kind != "autoregressive":
            _images(adapter, rows, everything, options, out, samples, batch, seed, ranks)
        elif ranks.main:
            lines = "".join(json.dumps(row.metadata) + "\n" for row in rows)
            write_atomic(out / "prompts.jsonl", lines)
            _texts(adapter, everything, options, out, batch, seed)
        ranks.barrier()
    return out / "completions.jsonl" if adapter.kind == "autoregressive" else out


def _shown(options: Any) -> str:
    """The sampling options that a published figure depends on."""
    names = ("solver", "steps", "guidance", "height", "width", "temperature", "top_p", "top_k", "max_new_tokens")
    values = {name: getattr(options, name, None) for name in names}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def _digest(rows: list[PromptRow]) -> str:
    """What tells one prompt set from another, wherever its file lies."""
    text = json.dumps([row.metadata for row in rows], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def weights_digest(model: Path, lora: Path | None, *, leave: Path | None = None) -> str:
    """What tells the weights of a local model and LoRA from others under the same path: sizes, beginnings and ends of the files.

    Args:
        model: folder; anything else (a hub id) has none.
        lora: file or folder.
        leave: folder inside that is not looked at.
    """
    found = hashlib.sha256()
    for place in (model, lora):
        if place is None:
            continue
        files = (
            [place] if place.is_file() else sorted(f for f in place.rglob("*") if f.suffix in WEIGHTS and f.is_file())
        )
        for file in files:
            if leave is not None and file.resolve().is_relative_to(leave.resolve()):
                continue
            size = file.stat().st_size
            with file.open("rb") as stream:
                begin = stream.read(ENDS)
                stream.seek(max(size - ENDS, 0))
                found.update(f"{file.name} {size} ".encode() + begin + stream.read(ENDS))
    return found.hexdigest()[:16]


def sample_id(seed: int, prompt: int, sample: int) -> int:
    """63-bit id of image `sample` of prompt `prompt`: its noise depends on nothing else.

    >>> sample_id(42, 7, 0) == sample_id(42, 7, 0), sample_id(42, 7, 0) == sample_id(42, 0, 7)
    (True, False)
    """
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt}:{sample}".encode()).digest()[:8], "big") >> 1


def numbered(prompts: PromptBatch, seed: int, samples: int) -> PromptBatch:
    """The batch with `row_ids` by `sample_id`; row i is sample i % `samples` of prompt i // `samples`."""
    ids = [sample_id(seed, row // samples, row % samples) for row in range(len(prompts))]
    return replace(prompts, row_ids=torch.tensor(ids, dtype=torch.int64))


def _images(
    adapter: Any,
    rows: list[PromptRow],
    everything: PromptBatch,
    options: Any,
    out: Path,
    samples: int,
    batch: int,
    seed: int,
    ranks: Ranks,
) -> None:
    missing = [p for p in range(len(rows)) if not (out / f"{p:05d}" / "samples" / f"{samples - 1:04d}.png").is_file()]
    ranks.barrier()  # nobody writes before all have looked
    mine = missing[ranks.rank :: ranks.world]
    size = max(batch // samples, 1)
    with progress_bar(len(mine), "sampling") as advance:
        for start in range(0, len(mine), size):
            chosen = mine[start : start + size]
            index = torch.tensor([p * samples + i for p in chosen for i in range(samples)])
            done = adapter.decode(adapter.sample(everything.select(index), seed=seed, sampling=options))
            for number, p in enumerate(chosen):
                write_samples(out, p, rows[p].metadata, done.images[number * samples : (number + 1) * samples])
            advance(len(chosen))


def _texts(adapter: Any, everything: PromptBatch, options: Any, out: Path, batch: int, seed: int) -> None:
    path = out / "completions.jsonl"
    kept = read_jsonl(path, torn_end=True) if path.is_file() else []
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))  # without a line that was cut off
    with path.open("a", encoding="utf-8") as file, progress_bar(len(everything) - len(kept), "sampling") as advance:
        for start in range(len(kept), len(everything), batch):
            part = everything.select(torch.arange(start, min(start + batch, len(everything))))
            rows = adapter.decode(adapter.sample(part, seed=seed, sampling=options))
            for prompt, text, cut in zip(part.prompts, rows.texts, rows.truncated.tolist(), strict=True):
                file.write(json.dumps({"prompt": prompt, "completion": text, "truncated": cut}) + "\n")
            file.flush()
            advance(len(part))
