"""`visual-grpo testbed`: pretrain a small model of the testbed again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TABLE: dict[str, tuple[str, str]] = {
    "sd3_tiny": (
        "visual_grpo.testbed.denoiser_build:build_sd3_tiny",
        "StableDiffusion3Pipeline with a 2 to 3 M parameter transformer.",
    ),
    "lm_tiny": ("visual_grpo.testbed.lm_build:build", "Small Qwen3 language model that does arithmetic."),
    "flux_tiny": (
        "visual_grpo.testbed.denoiser_build:build_flux_tiny",
        "FluxPipeline with a 2 to 3 M parameter transformer.",
    ),
    "sd15_tiny": (
        "visual_grpo.testbed.denoiser_build:build_sd15_tiny",
        "StableDiffusionPipeline with a 2 to 3 M parameter UNet.",
    ),
    "sdxl_tiny": (
        "visual_grpo.testbed.denoiser_build:build_sdxl_tiny",
        "StableDiffusionXLPipeline with a 2 to 3 M parameter UNet.",
    ),
    "two_tower": (
        "visual_grpo.testbed.two_tower_build:build",
        "Small CLIP-like model of the scenes: a learned reward that can be exploited.",
    ),
}

app = typer.Typer(help="Build the small models of the testbed.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Build the small models of the testbed."""


@app.command("build")
def build(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {', '.join(sorted(TABLE))}.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", file_okay=False, help="Folder for the weights and log (default: build/NAME)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of data, weights and order.")] = 0,
) -> None:
    """Pretrain a small model again, seeded; takes minutes on a CPU."""
    from visual_grpo.registry import Registry

    builders = Registry[object]("testbed model", builtin_module="visual_grpo.cli.testbed:TABLE")
    builder = builders.get(name)
    assert callable(builder)
    folder = Path("build") / name if out is None else out
    builder(folder, seed=seed)
    use = f"rewards.two_tower.params.path={folder}" if name == "two_tower" else f"model.path={folder}"
    print(f"{name} written to {folder}; use it with {use}")
