"""GenEval of a whole folder: 553 prompts x 4 images with the testbed's detector, from files to summary; images a second.

visual-grpo benchmark geneval_folder
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visual_grpo.eval.geneval import evaluate
from visual_grpo.eval.images import write_samples
from visual_grpo.testbed.scenes import all_prompts, draw_prompt

__all__ = ["run"]


def run(*, seeds: int = 1, out: Path | None = None, prompts: int = 553, samples: int = 4) -> dict[str, Any]:
    """Draw correct scenes, write them in GenEval's layout, and time their evaluation.

    Args:
        seeds: folders.
        out: folder for geneval_folder.json.
        prompts, samples: size of a folder.

    Returns:
        images, seconds and cpu_seconds of an evaluation (means over folders), overall (1 for a detector without fault).
    """
    walls, cpus, scores = [], [], []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        every = all_prompts()
        chosen = [every[i] for i in rng.permutation(len(every))[:prompts]]
        with tempfile.TemporaryDirectory() as folder:
            for index, row in enumerate(chosen):
                drawn = np.stack([draw_prompt(row, rng) for _ in range(samples)])
                write_samples(folder, index, row, torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 255)
            wall, cpu = time.perf_counter(), time.process_time()
            found = evaluate(images=folder, out=Path(folder) / "results")
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
            scores.append(found["overall"])
    result = {
        "images": prompts * samples,
        "seconds": float(np.mean(walls)),
        "cpu_seconds": float(np.mean(cpus)),
        "overall": float(np.mean(scores)),
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "geneval_folder.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result
