"""Prompts of the package reasoning-gym: puzzles made from a seed, as many as are asked for.

Source: Stojanovski et al., arXiv 2505.24760. The reward `reasoning_gym` scores the answers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from visual_grpo.errors import UserError, did_you_mean

SEEDS = {"heldout": 1, "train": 0}
SIZE = {"heldout": 500, "train": 5000}


def puzzles(name: str, split: str, size: int | None, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """At most `size` different puzzles of a data set: its entries, with the question as `prompt` and the data set as `tag`.

    Training puzzles hold none of the first 500 held-out ones, whatever their number.

    Args:
        name: of the data set ("chain_sum").
        split: train or heldout.
        size: puzzles to make, of which repeated ones are dropped; None: 5,000 for training and 500 held out.
        options: of the data set (`max_terms: 3`).

    Raises:
        UserError: an unknown data set, split or option, or the package is not installed.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(f"reasoning_gym/{name} needs the package reasoning-gym: pip install 'visual-grpo[reasoning]'")
    if split not in SEEDS:
        raise UserError(f"reasoning_gym/{name} has the splits train and heldout, not {split!r}")
    own = _made(name, size or SIZE[split], SEEDS[split], options)
    held_out = own if split == "heldout" else _made(name, SIZE["heldout"], SEEDS["heldout"], options)
    if split == "train":
        own = {question: entry for question, entry in own.items() if question not in held_out}
        if not own:
            raise UserError(f"data.options {dict(options)} make so few puzzles that all are held out; widen them")
    return [{**entry, "prompt": question, "tag": name} for question, entry in own.items()]


def _made(name: str, size: int, seed: int, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise UserError(
            f"reasoning-gym has no data set {name!r}.{did_you_mean(name, list(DATASETS))} Known: {', '.join(sorted(DATASETS))}."
        )
    try:
        return {entry["question"]: entry for entry in create_dataset(name, **{"size": size, "seed": seed, **options})}
    except Exception as error:  # each data set checks its options in its own way, by assertions for the most part
        raise UserError(f"data.options {dict(options)} do not fit reasoning_gym/{name}: {error}") from None
