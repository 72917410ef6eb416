"""One GRPO step of `text_lm` against TRL's `GRPOTrainer`: time by phase, memory, and the loss on the same rollouts.

    visual-grpo benchmark text_step_vs_trl --seeds 3            # 3 rounds of all sides
    python -m visual_grpo.eval.benchmarks.text_step_vs_trl

Both train the same random Qwen3 of 3.2 M parameters on the same prompts, one optimizer step a rollout batch, float32, no vLLM, in
three shapes (`--shape` for one): 64 rows (8 prompts x 8) of 108 prompt and 64 new tokens; 2 x 16 rows of 256 + 256; 2 x 16 of
1,024 + 128. `long_135m` and `vlm_135m` (1 x 16 rows, one step; half an hour) run when named. A third side makes only the plain
model calls of such a step, every row with its own prompt. Each side runs in a process of its own, one after the other, so that
neither time nor memory is shared. Ends with TRL's losses and gradients on our rollouts (`text_loss_parity`). Needs
`pip install "trl==1.16.*"`; run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from visual_grpo.eval.benchmarks.text_step_sides import (
    SHAPES,
    TINY,
    make_inputs,
    side_bare,
    side_ours,
    side_trl,
)

PHASES = ("generate", "forward+backward", "rest", "step")
SIDES = ("ours", "trl", "bare")


def run(
    *, seeds: int = 3, out: Path | str | None = None, shapes: Sequence[str] = TINY, losses: bool = True
) -> dict[str, Any]:
    """Measure `seeds` rounds of all sides for each of `shapes`, then (`losses`) the losses.

    Returns:
        By shape: per side the medians over rounds and steps ("seconds", "cpu_seconds", "memory_mib"), "ratios" and "cpu_ratios"
        between the sides, and "loss" with both sides' values.
    """
    found: dict[str, Any] = {"rounds": seeds}
    for shape in shapes:
        with tempfile.TemporaryDirectory() as scratch:
            work = Path(out) / shape if out is not None else Path(scratch)
            work.mkdir(parents=True, exist_ok=True)
            make_inputs(work, SHAPES[shape])
            rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
            for seed in range(seeds):
                for side in SIDES:
                    rounds[side].append(_in_own_process(side, work, shape, seed))
            compared = {"loss": _in_own_process("losses", work, shape, 0)} if losses else {}
        result: dict[str, Any] = {side: _median(done) for side, done in rounds.items()}
        for kind, name in (("seconds", "ratios"), ("cpu_seconds", "cpu_ratios")):
            result[name] = _ratios(*(result[side][kind] for side in SIDES))
        found[shape] = result | compared
    return found


def _ratios(ours: dict[str, float], trl: dict[str, float], bare: dict[str, float]) -> dict[str, float]:
    """Above 1, TRL is slower than we are, and we are slower than the bare calls."""
    passes = "forward+backward"
    unavoidable = bare["generate"] + bare[passes]
    return {
        **{f"trl / ours, {phase}": trl[phase] / ours[phase] for phase in ("step", "generate", passes)},
        "ours / bare calls": (ours["generate"] + ours[passes]) / unavoidable,
        "trl / bare calls": (trl["generate"] + trl[passes]) / unavoidable,
    }


def _in_own_process(side: str, work: Path, shape: str, seed: int) -> dict[str, Any]:
    """Run one side in a fresh interpreter; its last line of output is the result."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    options = {"--side": side, "--work": str(work), "--shape": shape, "--seed": str(seed)}
    command = [sys.executable, "-m", __spec__.name, *(text for pair in options.items() for text in pair)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        from visual_grpo.errors import RunError

        raise RunError(f"side {side!r} of the benchmark failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _median(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the steps of all rounds, and of the rounds' memory."""
    steps = [step for one in rounds for step in one["steps"]]
    memory = rounds[0]["memory_mib"]
    return {
        **{
            kind: {phase: statistics.median(step[kind][phase] for step in steps) for phase in PHASES}
            for kind in ("seconds", "cpu_seconds")
        },
        "memory_mib": {key: statistics.median(one["memory_mib"][key] for one in rounds) for key in memory},
    }


def main() -> None:
    """Run the benchmark, or (for the benchmark itself) one side of it."""
    from visual_grpo.eval.benchmarks.text_loss_parity import side_losses

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2, help="rounds of all sides")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--shape", choices=SHAPES, help="one shape; without it those of the small model")
    parser.add_argument("--no-losses", action="store_true", help="times and memory only")
    parser.add_argument("--side", choices=[*SIDES, "losses"], help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sides = {"ours": side_ours, "trl": side_trl, "bare": side_bare, "losses": side_losses}
    if given.side is not None:
        print(json.dumps(sides[given.side](given.work, SHAPES[given.shape], given.seed)))
        return
    result = run(seeds=given.seeds, shapes=[given.shape] if given.shape else TINY, losses=not given.no_losses)
    print(json.dumps(result, indent=1))
    if not given.json:
        print_result(result)


def print_result(result: dict[str, Any]) -> None:
    """The result as tables."""
    for name, shape in SHAPES.items():
        if name in result:
            what = f"{shape.rows} rows ({shape.prompts} x {shape.group}), {shape.prompt_tokens} + {shape.new_tokens} tokens"
            _print_shape(f"{name}: {what}", result[name])


def _print_shape(title: str, result: dict[str, Any]) -> None:
    from visual_grpo.cli.output import print_table

    header = ["side", *PHASES, "peak MiB", "above the model"]
    for kind in ("seconds", "cpu_seconds"):
        rows = []
        for side in SIDES:
            times = [f"{result[side][kind][phase]:.3f}" for phase in PHASES]
            rows.append([side, *times, *(f"{value:.0f}" for value in result[side]["memory_mib"].values())])
        print_table(f"{title}: one training step, {kind}", header, rows)
    ratios = [[name, f"{value:.3f}", f"{result['cpu_ratios'][name]:.3f}"] for name, value in result["ratios"].items()]
    print_table("ratios", ["", "seconds", "cpu_seconds"], ratios)
    if "loss" not in result:
        return
    losses = [[name, *(f"{value:.8f}" for value in found.values())] for name, found in result["loss"].items()]
    print_table("loss on the same rollouts", ["loss", *next(iter(result["loss"].values()))], losses)


if __name__ == "__main__":
    main()
