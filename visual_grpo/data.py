"""Prompts: where they come from, and the order in which a run takes them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visual_grpo.config import DataConfig, PromptSet
from visual_grpo.distributed import Ranks
from visual_grpo.errors import UserError, did_you_mean
from visual_grpo.puzzles import puzzles
from visual_grpo.registry import load_object
from visual_grpo.seeding import seeded_generator
from visual_grpo.types import PromptBatch

TESTBED = {
    "scenes": "visual_grpo.testbed.scenes:split_prompts",
    "words": "visual_grpo.testbed.words:split_prompts",
    "arithmetic": "visual_grpo.testbed.arithmetic:split_prompts",
    "arithmetic_modes": "visual_grpo.testbed.arithmetic_modes:split_prompts",
}
"""Worlds that need no file: functions that give (train, held-out) lists of metadata with a `prompt`."""
MADE = ("testbed/", "reasoning_gym/")
"""Sources that are made here and not read."""
ABSENT = object()
"""Of a column that a record lacks."""


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One line of a prompt set."""

    prompt: str
    metadata: dict[str, Any]
    task: int | None = None
    """place of its set in `data.sources`; None where there is one set."""


def load_prompts(config: DataConfig) -> list[PromptRow]:
    """Read a prompt set: `testbed/NAME`, `reasoning_gym/NAME`, a .txt (a prompt a line), .jsonl or .parquet file, or a hub id.

    Of `sources` all sets one after the other; their rows carry the task.

    Raises:
        UserError: missing, empty or malformed, with the line and what to change.
    """
    rows: list[PromptRow] = []
    for number, (task, part) in enumerate(config.sets()):
        found = _load_set(part)
        if task is not None:
            found = [replace(row, task=number, metadata={**row.metadata, "task": task}) for row in found]
        rows += found
    return rows


def _load_set(config: PromptSet) -> list[PromptRow]:
    source = config.source
    assert source is not None
    if source.startswith("testbed/"):
        records = _testbed(source.removeprefix("testbed/"), config.split)
    elif source.startswith("reasoning_gym/"):
        records = puzzles(source.removeprefix("reasoning_gym/"), config.split, config.limit, config.options)
    elif is_local(source):
        records = _read_file(Path(os.path.expanduser(source)))
    else:
        records = _hub(source, config.split)
    if config.options and not source.startswith("reasoning_gym/"):
        raise UserError(f"data.options belong to a reasoning_gym/NAME source, not to {source!r}; remove them")
    rows = [_row(record, number, config) for number, record in enumerate(records, 1)]
    if not rows:
        raise UserError(f"prompt set {source!r} (split {config.split!r}) holds no prompt")
    return rows[: config.limit]


SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_local(source: str) -> bool:
    """Whether `source` names a file here, and not a data set of the hub (which may have to be fetched)."""
    return source.lower().endswith(SUFFIXES) or not _HUB_ID.fullmatch(source) or os.path.exists(source)


def _testbed(name: str, split: str) -> list[dict[str, Any]]:
    if name not in TESTBED:
        raise UserError(
            f"no testbed world {name!r}.{did_you_mean(name, list(TESTBED))} Known: {', '.join(sorted(TESTBED))}."
        )
    train, heldout = load_object(TESTBED[name])()
    splits = {"train": train, "heldout": heldout}
    if split not in splits:
        raise UserError(f"testbed/{name} has the splits train and heldout, not {split!r}")
    return list(splits[split])


def _read_file(path: Path) -> list[dict[str, Any]]:
    if not os.path.isfile(path):  # unlike Path.is_file, False also below a folder that may not be looked into
        what = f"{str(path)!r} is no file" if os.path.exists(path) else f"no prompt file at {str(path)!r}"
        raise UserError(f"{what}; set data.source (or eval.source) to a .txt, .jsonl or .parquet file")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"prompt file {str(path)!r} is of no known kind; give a .txt, .jsonl or .parquet file")
    if suffix == ".parquet":
        return _parquet(path)
    text = read_text(path, "prompt file")
    # Not splitlines: U+2028 and its like may stand within a line.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if suffix == ".txt":
        return [{"prompt": line.strip()} for _, line in lines]
    if suffix == ".json" and text.lstrip().startswith("["):
        found = [(f"record {number}", record) for number, record in enumerate(_json(text, str(path)), 1)]
    else:
        found = [(f"line {number}", _json(line, f"{path}, line {number}")) for number, line in lines]
    for where, record in found:
        if not isinstance(record, dict):
            raise UserError(f"{path}, {where}: expected a JSON object, got {type(record).__name__}")
    return [record for _, record in found]


def _parquet(path: Path) -> list[dict[str, Any]]:
    from datasets import load_dataset

    try:
        # A cache of its own: the home folder may be read-only or full, and the file may have changed since the last run.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            return list(load_dataset("parquet", data_files=str(path), split="train", cache_dir=cache))
    except Exception as error:  # each reader has errors of its own
        raise UserError(f"cannot read prompt file {str(path)!r} as parquet: {type(error).__name__}") from None


def read_text(path: Path, what: str) -> str:
    """The text of a file; a byte-order mark at its start is no part of it, and every line ends in `\\n`.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {what} {str(path)!r}: {error}") from None


def check_pairing(texts: str | Path, rows: Sequence[Mapping[str, Any]], tasks: Sequence[Mapping[str, Any]]) -> None:
    """Refuse completions that say themselves that they answer another prompt than the one in their place.

    Args:
        texts: their file, in the message.
        rows: the same number for each task, in order.
        tasks: problems or questions.

    Raises:
        UserError: naming the first such line.
    """
    share = len(rows) // len(tasks)
    for number, row in enumerate(rows):
        # A chat template may stand around the prompt; a line of a plain file is nothing but its text.
        given, asked = row.get("prompt"), tasks[number // share].get("prompt")
        answers = any(key in row for key in ("completion", "text", "answer"))
        if answers and isinstance(given, str) and isinstance(asked, str) and asked.strip() not in given:
            raise UserError(
                f"{texts}, line {number + 1} answers the prompt {given[:80]!r}, but prompt {number // share + 1} of the prompt "
                f"file is {asked[:80]!r}: the two files belong together line by line, {share} completions a prompt."
            )


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is no JSONDecodeError
        reason = getattr(error, "msg", None) or error
        raise UserError(f"{where}: not valid JSON ({reason}); a .jsonl file has one object a line") from None


def _hub(source: str, split: str) -> list[dict[str, Any]]:
    from datasets import load_dataset

    try:
        return list(load_dataset(source, split=split))
    except Exception as error:
        raise UserError(
            f"{source!r} is no testbed world, no .txt/.jsonl/.parquet file, and could not be loaded as a hub data set "
            f"(split {split!r}): {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}"
        ) from None


def _column(record: Mapping[str, Any], name: str) -> Any:
    """The value of a column; a dot leads into a record within one (`reward_model.ground_truth`). `ABSENT`: there is none."""
    if name in record:
        return record[name]
    first, _, rest = name.partition(".")
    inner = record.get(first)
    return _column(inner, rest) if rest and isinstance(inner, Mapping) else ABSENT


def _said(prompt: Any) -> tuple[Any, Any]:
    """(user's text, system's text or None) of a conversation `[{role, content}, ...]`, as TRL's data sets have; else as it is."""
    messages = prompt if isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt) else []
    if [m.get("role") for m in messages] not in (["user"], ["system", "user"]):
        return prompt, None
    return messages[-1].get("content"), messages[0].get("content") if len(messages) == 2 else None


def _row(record: dict[str, Any], number: int, config: PromptSet) -> PromptRow:
    prompt, system = _said(_column(record, config.prompt_column))
    if not isinstance(prompt, str) or not prompt.strip():
        given = None if prompt is ABSENT else prompt
        raise UserError(
            f"{config.source}, record {number}: column {config.prompt_column!r} must be a non-empty text, or a conversation of "
            f"one user message with at most a system message before it, got {given!r}; the record has the columns "
            f"{', '.join(map(str, record))}. Set data.prompt_column."
        )
    for column, value in record.items():
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise UserError(
                f"{config.source}, record {number}: column {column!r} holds half of a surrogate pair, which is no text; "
                f"write the whole character: {value[:80]!a}"
            )
    metadata = dict(record)
    if config.answer_column is not None:
        answer = _column(record, config.answer_column)
        if answer is ABSENT:
            raise UserError(
                f"{config.source}, record {number} has no column {config.answer_column!r} (data.answer_column); it has the "
                f"columns {', '.join(map(str, record))}"
            )
        metadata["answer"] = answer
    system = system if config.system_prompt is None else config.system_prompt
    if system is not None:
        metadata["system"] = system
    return PromptRow(prompt=prompt, metadata=metadata)


def in_turns(rows: Sequence[PromptRow], key: str | None) -> list[list[int]]:
    """Row indices by the value of metadata `key` (sorted by value); one list of all rows when `key` is None."""
    if key is None:
        return [list(range(len(rows)))]
    values = [str(row.metadata.get(key)) for row in rows]
    return [[i for i, v in enumerate(values) if v == value] for value in sorted(set(values))]


class PromptSource:
    """The order of a run's prompts: seeded shuffled epochs, kinds in turn, or draws by the stack's weights.

    The state is one number, so a resumed run goes on where it stopped.
    """

    def __init__(self, rows: Sequence[PromptRow], config: DataConfig, seed: int) -> None:
        self.rows = list(rows)
        self.config = config
        self.seed = seed
        self.cursor = 0
        self._turns = in_turns(self.rows, config.balance)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that differ where a prompt differs: the cursor, and what methods keep by prompt, belong to these."""
        found = hashlib.sha256()
        for row in self.rows:
            found.update(row.prompt.encode() + b"\0")
        return found.hexdigest()[:16]

    def draw(self, count: int, weights: Tensor | None = None) -> list[int]:
        """Indices of the next `count` prompts.

        `weights` [P] of unequal values draw without replacement, 0 = never. Where all that are not 0 are equal, the epochs and
        turns go on over these prompts.

        Raises:
            UserError: fewer than `count` prompts have a weight above 0.
        """
        if weights is not None and not bool((weights == weights[0]).all()):
            allowed = weights > 0
            possible = int(allowed.sum())
            if possible < count:
                raise UserError(
                    f"only {possible} prompts are left by select_prompts, but train.prompts_per_step needs {count}"
                )
            if bool((weights[allowed] == weights[allowed][0]).all()):
                return self._filtered(count, allowed)
            generator = seeded_generator(self.seed, 17, self.cursor)
            chosen = torch.multinomial(weights.double(), count, generator=generator).tolist()
        else:
            chosen = [self._at(self.cursor + i) for i in range(count)]
        self.cursor += count
        return chosen

    def _filtered(self, count: int, allowed: Tensor) -> list[int]:
        """The next `count` distinct prompts that are allowed; those passed over have had their turn."""
        chosen: list[int] = []
        while len(chosen) < count:
            found = self._at(self.cursor)
            self.cursor += 1
            if bool(allowed[found]) and found not in chosen:
                chosen.append(found)
        return chosen

    def _at(self, position: int) -> int:
        turn = self._turns[position % len(self._turns)]
        epoch, place = divmod(position // len(self._turns), len(turn))
        if not self.config.shuffle:
            return turn[place]
        order = torch.randperm(len(turn), generator=seeded_generator(self.seed, 5, position % len(self._turns), epoch))
        return turn[int(order[place])]


def prompt_batch(
    rows: Sequence[PromptRow], group_size: int, *, first_group: int = 0, index: Sequence[int] | None = None
) -> PromptBatch:
    """`group_size` rows of every prompt, side by side; groups are numbered from `first_group`.

    `index`, the prompts' places in their set, becomes the row tag `index`; tasks become the row tag `task`.
    """
    count = len(rows)
    tags = {} if index is None else {"index": torch.tensor(index, dtype=torch.int64).repeat_interleave(group_size)}
    groups = torch.arange(first_group, first_group + count).repeat_interleave(group_size)
    return PromptBatch(
        prompts=[r.prompt for r in rows for _ in range(group_size)],
        metadata=[r.metadata for r in rows for _ in range(group_size)],
        group_ids=groups,
        row_ids=torch.arange(first_group * group_size, (first_group + count) * group_size),
        tags=tags | {k: v.repeat_interleave(group_size) for k, v in task_tag(rows).items()},
    )


def task_tag(rows: Sequence[PromptRow]) -> dict[str, Tensor]:
    """`task` [len(rows)] int64, where the rows have tasks."""
    tasks = [row.task for row in rows if row.task is not None]
    return {"task": torch.tensor(tasks, dtype=torch.int64)} if tasks else {}


def evaluation_batch(rows: Sequence[PromptRow], samples: int, group_size: int = 1) -> PromptBatch:
    """`samples` rows over the prompts: tasks in turn, in each the kinds (`tag`) in turn.

    The first rows are the same whatever `samples` is. Row i has `row_ids[i] == i`, so its noise is fixed; `tags["sample"]` counts
    repeats of a prompt, of which `group_size` stand side by side.
    """
    tasks: dict[int | None, list[int]] = {}
    for i, row in enumerate(rows):
        tasks.setdefault(row.task, []).append(i)
    turns = [_kinds(rows, members) for members in tasks.values()]
    chosen, repeats = [], []
    for i in range(samples):
        group, sibling = divmod(i, group_size)
        kinds = turns[group % len(turns)]
        place, number = divmod(group // len(turns), len(kinds))
        repeat, place = divmod(place, len(kinds[number]))
        chosen.append(kinds[number][place])
        repeats.append(repeat * group_size + sibling)
    picked = [rows[i] for i in chosen]
    return PromptBatch(
        prompts=[row.prompt for row in picked],
        metadata=[row.metadata for row in picked],
        group_ids=torch.arange(samples),
        row_ids=torch.arange(samples),
        tags={
            "sample": torch.tensor(repeats, dtype=torch.int64),
            "index": torch.tensor(chosen, dtype=torch.int64),
            **task_tag(picked),
        },
    )


def _kinds(rows: Sequence[PromptRow], members: list[int]) -> list[list[int]]:
    """Row indices of one task by their `tag`, each kind in a seeded order."""
    has_tags = all("tag" in rows[i].metadata for i in members)
    turns = in_turns([rows[i] for i in members], "tag" if has_tags else None)
    orders = [torch.randperm(len(t), generator=seeded_generator(99, k)).tolist() for k, t in enumerate(turns)]
    return [[members[turn[i]] for i in order] for turn, order in zip(turns, orders, strict=True)]


def share_of(ranks: Ranks, batch: PromptBatch) -> PromptBatch:
    """This process's rows of a batch that all processes made alike; sizes may differ by one row."""
    bounds = [len(batch) * r // ranks.world for r in range(ranks.world + 1)]
    return batch.select(torch.arange(bounds[ranks.rank], bounds[ranks.rank + 1]))
