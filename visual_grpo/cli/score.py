"""`visual-grpo score`: rewards over images or texts that exist already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from visual_grpo.cli.samples import Sample
    from visual_grpo.reward import RewardRequest
    from visual_grpo.types import RewardBatch


def command(
    reward: Annotated[
        list[str],
        typer.Option("--reward", metavar="NAME[,NAME...]", help="Names, or package.module:Name; may be repeated."),
    ],
    prompts: Annotated[
        Path, typer.Option("--prompts", metavar="FILE", exists=True, dir_okay=False, help="Prompts: .txt or .jsonl.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME.key=value ...",
            help="As under `rewards:`, e.g. vqa_score.timeout_s=1800 clip_score.params.variant=paper.",
        ),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option("--images", metavar="DIR", exists=True, file_okay=False, help="Images, in prompt order."),
    ] = None,
    texts: Annotated[
        Path | None, typer.Option("--texts", metavar="FILE", exists=True, dir_okay=False, help="Texts: .txt or .jsonl.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples scored at once (whole prompts).")] = 64,
    device: Annotated[str, typer.Option("--device", help="For rewards that are models.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every row.")] = False,
) -> None:
    """Score images (--images) or texts (--texts) against their prompts."""
    from visual_grpo.cli.output import print_json, print_table
    from visual_grpo.cli.reward_settings import reward_settings
    from visual_grpo.cli.samples import image_samples, text_samples
    from visual_grpo.registry import REWARDS

    names = [name.strip() for part in reward for name in part.split(",") if name.strip()]
    if not names:
        raise UserError("--reward needs at least one name; `visual-grpo list rewards` prints them.")
    for name in names:
        REWARDS.target(name)  # an unknown name is refused before anything is read
    rewards = reward_settings(names, settings or [])
    if images is not None and texts is None:
        samples = image_samples(images, prompts)
    elif texts is not None and images is None:
        samples = text_samples(texts, prompts)
    else:
        given = "both were" if images is not None else "neither was"
        raise UserError(f"visual-grpo score needs either --images DIR or --texts FILE; {given} given.")

    columns, rows = score(rewards, samples, batch=batch, device=device)
    summary = [_summary(column, rows) for column in columns]
    if as_json:
        print_json({"rewards": summary, "rows": rows})
    else:
        print_table("", [*summary[0]], [[*line.values()] for line in summary])


def score(
    rewards: Mapping[str, Any], samples: Sequence[Sample], *, batch: int, device: str
) -> tuple[list[str], list[dict[str, Any]]]:
    """Score `samples` with `rewards`: names with their settings, as in a run's config.

    Returns:
        The names of the columns, and one row a sample: prompt, image or text, each reward's value (None unless ok) and
        its state under "status".
    """
    from visual_grpo.scoring import RewardSuite
    from visual_grpo.types import RewardStatus

    rows: list[dict[str, Any]] = []
    columns: list[str] = []
    with RewardSuite(rewards, device=device) as suite:
        for part in batches(samples, batch):
            scored: RewardBatch = suite.score(_request(part), evaluation=True)
            columns = [*scored.names]
            for sample, values, states in zip(part, scored.values.tolist(), scored.status.tolist(), strict=True):
                status = [RewardStatus(state) for state in states]
                rows.append(
                    {
                        "prompt": sample.prompt,
                        **({"image": str(sample.image)} if sample.image else {"text": sample.text}),
                        **{
                            n: v if s == RewardStatus.OK else None
                            for n, v, s in zip(columns, values, status, strict=True)
                        },
                        "status": {n: s.name.lower() for n, s in zip(columns, status, strict=True)},
                    }
                )
    return columns, rows


def batches(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """Cut `samples` into parts of about `size`, never within a prompt's samples (rewards may compare them)."""
    part: list[Sample] = []
    for sample in samples:
        if len(part) >= size and sample.prompt_index != part[-1].prompt_index:
            yield part
            part = []
        part.append(sample)
    if part:
        yield part


def _request(part: Sequence[Sample]) -> RewardRequest:
    import torch

    from visual_grpo.reward import RewardRequest

    files = [sample.image for sample in part if sample.image is not None]
    return RewardRequest.build(
        [sample.prompt for sample in part],
        images=load_images(files) if files else None,
        texts=None if files else [sample.text or "" for sample in part],
        metadata=[sample.metadata for sample in part],
        group_ids=torch.tensor([sample.prompt_index for sample in part]),
    )


def load_images(files: Sequence[Path]) -> Tensor:
    """Read RGB images of one size as [N, 3, H, W] in [0, 1]."""
    import numpy as np
    import torch
    from PIL import Image

    from visual_grpo.pictures import to_rgb

    arrays = []
    for file in files:
        try:
            with Image.open(file) as opened:
                arrays.append(np.array(to_rgb(opened)))
        except Exception as error:  # Pillow's formats raise SyntaxError, ValueError, struct.error and more
            raise UserError(f"cannot read the image {str(file)!r}: {error}.") from error
        if arrays[-1].shape != arrays[0].shape:
            sizes = [f"{a.shape[1]}x{a.shape[0]}" for a in (arrays[0], arrays[-1])]
            raise UserError(
                f"{files[0]} is {sizes[0]} and {file} is {sizes[1]}: images that are scored at once must have one size. "
                f"Resize them, or score them one prompt at a time with --batch 1."
            )
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255


def _summary(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    values = [row[name] for row in rows if row[name] is not None]
    states = [row["status"][name] for row in rows]
    return {
        "reward": name,
        "mean": sum(values) / len(values) if values else None,
        "min": min(values, default=None),
        "max": max(values, default=None),
        "ok": len(values),
        "not_applicable": states.count("not_applicable"),
        "failed": states.count("failed"),
    }
