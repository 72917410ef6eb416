"""Builds `two_tower`: contrastive training on drawn scenes with partly wrong captions, on a CPU in minutes.

The data have the flaw of data from the web, on purpose: faint pictures often have the caption of something else, bold ones do
not. A model that learns this trusts a bold picture more, whatever it shows, as preference models do that love saturated pictures.

The log ends with what the model is worth: how often it finds the right caption of scenes whose captions it never saw, and how
well it agrees with the exact detector on pictures of the base generator, where it was never trained.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visual_grpo.testbed.build_folder import build_folder
from visual_grpo.testbed.noisy_captions import corrupt_caption
from visual_grpo.testbed.scenes import BACKGROUND, KINDS, Metadata, all_prompts, draw_prompt, split_prompts
from visual_grpo.testbed.two_tower import TwoTower, contrastive_loss, save_two_tower

SCENES = 8_000
BATCH = 128
STEPS = 400
BOLDNESS = (0.8, 2.0)
"""Range of the contrast to the background; scenes are drawn at 1."""
MISMATCH = (0.95, 0.0)
"""Chance that the caption is that of another picture, for the faintest and the boldest pictures; linear between."""
CAPTION_NOISE = 0.1
"""Chance that a content word is replaced."""
LEARNING_RATE = 2e-3
WARMUP = 30

Log = Callable[[dict[str, object]], None]


def build(out_dir: Path | str, seed: int = 0, *, steps: int = STEPS, scenes: int = SCENES, proxy: bool = True) -> None:
    """Train the model and write it, with `build_log.jsonl`, to a folder.

    Args:
        out_dir: folder of the weights.
        seed: of data, weights and order.
        steps: optimizer steps.
        scenes: pictures drawn.
        proxy: measure the agreement with the detector on pictures of the shipped `sd3_tiny` (half a minute).
    """
    torch.manual_seed(seed)
    out = build_folder(out_dir)
    start = time.process_time()
    with (out / "build_log.jsonl").open("w", encoding="utf-8") as file:

        def log(record: dict[str, object]) -> None:
            line = json.dumps({**record, "cpu_s": round(time.process_time() - start)})
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()

        model = TwoTower(vocabulary())
        count = sum(p.numel() for p in model.parameters())
        log({"stage": "setup", "seed": seed, "torch": torch.__version__, "parameters": count, "scenes": scenes})
        train(model, seed=seed, steps=steps, scenes=scenes, log=log)
        save_two_tower(model, out)
        log({"stage": "retrieval", **retrieval(model)})
        if proxy:
            log({"stage": "proxy", **agreement(model)})


def vocabulary() -> list[str]:
    """The distinct words of all captions of the drawn world, sorted."""
    return sorted({word for entry in all_prompts() for word in str(entry["prompt"]).split()})


def draw(entries: Sequence[Metadata], count: int, rng: np.random.Generator) -> tuple[Tensor, list[Metadata]]:
    """Draw scenes of random prompts, all kinds equally often: images [count, 3, H, W] uint8 and the prompts."""
    by_kind = [[entry for entry in entries if entry["tag"] == kind] for kind in KINDS]
    chosen = [members[rng.integers(len(members))] for members in (by_kind[i % len(KINDS)] for i in range(count))]
    images = np.stack([draw_prompt(entry, rng) for entry in chosen])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), chosen


def embolden(images: Tensor, factor: Tensor | float) -> Tensor:
    """Images [N, 3, H, W] in [0, 1] with their contrast to the drawn background multiplied by `factor` ([N] or one)."""
    ground = BACKGROUND / 255
    scale = factor.view(-1, 1, 1, 1) if isinstance(factor, Tensor) else factor
    return (ground + (images - ground) * scale).clamp(0, 1)


def train(model: TwoTower, *, seed: int, steps: int, scenes: int, log: Log) -> None:
    """Train in place on the training split; captions are made wrong anew each time they are seen."""
    rng = np.random.default_rng(seed)
    images, entries = draw(split_prompts()[0], scenes, rng)
    log({"stage": "drawn"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(steps):
        rate = min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        index = rng.choice(scenes, size=min(BATCH, scenes), replace=False)
        bold = rng.uniform(*BOLDNESS, size=len(index))
        strays = rng.random(len(index)) < np.interp(bold, BOLDNESS, MISMATCH)
        told = np.where(strays, rng.integers(scenes, size=len(index)), index)
        captions = [corrupt_caption(str(entries[i]["prompt"]), rng, probability=CAPTION_NOISE) for i in told]
        seen = embolden(images[torch.from_numpy(index)].float() / 255, torch.from_numpy(bold).float())
        pictures = model.image_features(seen)
        loss = contrastive_loss(pictures, model.text_features(captions), model.scale())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            log(
                {"stage": "train", "step": step, "loss": round(loss.item(), 4), "scale": round(model.scale().item(), 2)}
            )
    model.eval()


@torch.no_grad()
def retrieval(model: TwoTower, count: int = 600, seed: int = 1) -> dict[str, object]:
    """How often the true caption of a drawn held-out scene has the largest cosine.

    Returns:
        `of_all`: among all 592 held-out captions; `of_two`: against the same caption with wrong words; and `of_two` by kind.
    """
    rng = np.random.default_rng(seed)
    held = split_prompts()[1]
    images, entries = draw(held, count, rng)
    pictures = model.image_features(images.float() / 255)
    captions = [str(entry["prompt"]) for entry in held]
    best = (pictures @ model.text_features(captions).T).argmax(1).tolist()
    true = [str(entry["prompt"]) for entry in entries]
    wrong = [_wrong(text, rng) for text in true]
    right_wins = (
        (pictures * model.text_features(true)).sum(1) > (pictures * model.text_features(wrong)).sum(1)
    ).tolist()
    by_kind = {
        kind: _mean([win for win, entry in zip(right_wins, entries, strict=True) if entry["tag"] == kind])
        for kind in KINDS
    }
    of_all = _mean([captions[i] == text for i, text in zip(best, true, strict=True)])
    return {"of_all": of_all, "of_two": _mean(right_wins), **by_kind}


def _wrong(caption: str, rng: np.random.Generator) -> str:
    """The caption with at least one wrong content word."""
    while True:
        changed = corrupt_caption(caption, rng, probability=0.4)
        if changed != caption:
            return changed


def _mean(values: Sequence[bool]) -> float:
    return round(sum(values) / len(values), 4)


@torch.no_grad()
def agreement(
    model: TwoTower, *, prompts: int = 60, samples: int = 8, steps: int = 6, seed: int = 7
) -> dict[str, object]:
    """Compare the cosine with GenEval's rule and the exact detector on pictures of the base `sd3_tiny`.

    Returns:
        `correlation` over all pictures (Pearson, of the cosine with right = 1 and wrong = 0), `within_prompts` after the mean
        of each prompt is taken off, which is what a group-relative method sees, `right_above_wrong`: how often a right picture
        has the larger cosine than a wrong one of the same prompt; `correct`: share of right pictures; mean cosine of both; and
        the mean cosine and the share of right pictures of `bold`, the same pictures with 1.5 times the contrast.
    """
    from visual_grpo.adapters.sd3 import SD3Adapter
    from visual_grpo.config import ModelConfig
    from visual_grpo.testbed.detector import SceneDetector
    from visual_grpo.testbed.scene_scores import is_correct, sample_images, score_prompts

    entries = [entry for entry in score_prompts(prompts) for _ in range(samples)]
    captions = [str(entry["prompt"]) for entry in entries]
    source = ModelConfig(adapter="sd3", path="testbed/sd3_tiny")
    generator = SD3Adapter.load(source, device=torch.device("cpu"), sampling=SD3Adapter.Sampling())
    images = sample_images(generator, captions, seed=seed, steps=steps)
    texts, detector = model.text_features(captions), SceneDetector()

    def judged(pictures: Tensor) -> tuple[Tensor, Tensor]:
        verdicts = [is_correct(e, f) for e, f in zip(entries, detector.detect(pictures), strict=True)]
        return torch.tensor(verdicts).double(), (model.image_features(pictures) * texts).sum(1).double()

    right, cosine = judged(images)
    bold_right, bold_cosine = judged(embolden(images, 1.5))
    groups_right, groups_cosine = right.view(prompts, samples), cosine.view(prompts, samples)
    inside = [values - values.mean(1, keepdim=True) for values in (groups_right, groups_cosine)]
    pairs = [
        (good[:, None] > bad[None, :]).double()
        for hits, values in zip(groups_right.bool(), groups_cosine, strict=True)
        if len(good := values[hits]) and len(bad := values[~hits])
    ]
    return {
        "pictures": len(entries),
        "correct": round(right.mean().item(), 4),
        "cosine": round(cosine.mean().item(), 4),
        "bold": {"correct": round(bold_right.mean().item(), 4), "cosine": round(bold_cosine.mean().item(), 4)},
        "correlation": _correlation(right, cosine),
        "within_prompts": _correlation(inside[0].flatten(), inside[1].flatten()),
        "right_above_wrong": round(float(sum(p.sum() for p in pairs) / sum(p.numel() for p in pairs)), 4),
        "cosine_right": round(cosine[right == 1].mean().item(), 4),
        "cosine_wrong": round(cosine[right == 0].mean().item(), 4),
    }


def _correlation(a: Tensor, b: Tensor) -> float:
    return round(float(torch.corrcoef(torch.stack([a, b]))[0, 1]), 4)
