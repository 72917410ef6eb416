"""Prompt files as other systems write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from visual_grpo.config import DataConfig
from visual_grpo.data import is_local, load_prompts
from visual_grpo.errors import UserError
from visual_grpo.eval.images import read_lines

ROWS = [{"prompt": "a \u2028 line \x85 separator", "answer": "1"}, {"prompt": "Ü 漢字", "answer": "2"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def read(path: Path) -> list[str]:
    return [row.prompt for row in load_prompts(DataConfig(source=str(path)))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("marked.jsonl", b"\xef\xbb\xbf" + LINES.encode()),
        ("windows.jsonl", LINES.replace("\n", "\r\n").encode()),
        ("UPPER.JSONL", LINES.encode()),
        ("list.json", json.dumps(ROWS, indent=1).encode()),
        ("lines.json", LINES.encode()),
        ("with spaces/ü 漢.jsonl", LINES.encode()),
    ],
)
def test_every_way_to_write_the_same_rows(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert read(path) == [row["prompt"] for row in ROWS]
    if path.suffix == ".jsonl":
        assert read_lines(path) == ROWS


def test_conversations_of_trl(tmp_path: Path) -> None:
    """One user message, with or without a system message; a setting of the run wins; longer ones are refused."""
    user, system = {"role": "user", "content": "2 + 2?"}, {"role": "system", "content": "Be brief."}
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"prompt": chat, "answer": "4"}) + "\n" for chat in ([user], [system, user])))
    rows = load_prompts(DataConfig(source=str(path)))
    assert [row.prompt for row in rows] == ["2 + 2?", "2 + 2?"]
    assert [row.metadata.get("system") for row in rows] == [None, "Be brief."]
    assert rows[1].metadata["prompt"] == [system, user]
    asked = load_prompts(DataConfig(source=str(path), system_prompt="Think."))
    assert [row.metadata["system"] for row in asked] == ["Think.", "Think."]
    for chat in ([user, {"role": "assistant", "content": "4"}, user], [system], [], [{"role": "user"}]):
        path.write_text(json.dumps({"prompt": chat}))
        with pytest.raises(UserError, match="a conversation of one"):
            load_prompts(DataConfig(source=str(path)))


def test_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\x0bstill two\r\n")
    assert read(tmp_path / "a.txt") == ["one", "two\x0bstill two"]


def test_parquet_leaves_nothing_in_the_home_folder(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["a", "b"]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["c", "d"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["c", "d"]


@pytest.mark.parametrize(
    ("source", "local"), [("owner/name", False), ("gsm8k", False), ("/abs/file", True), ("a b", True)]
)
def test_only_what_can_be_a_hub_id_is_looked_for_there(source: str, local: bool) -> None:
    assert is_local(source) is local


def test_a_dot_leads_into_a_record(tmp_path: Path) -> None:
    """DAPO-Math-17k keeps its prompt as a conversation and the answer in a record; a column of that very name comes first."""
    path = tmp_path / "dapo.jsonl"
    said = [{"role": "user", "content": "2 + 3?"}]
    rows = [
        {"prompt": said, "reward_model": {"ground_truth": "5", "style": "rule"}},
        {"prompt": said, "reward_model.ground_truth": "6", "reward_model": {"ground_truth": "5"}},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(source=str(path), answer_column="reward_model.ground_truth")
    assert [row.metadata["answer"] for row in load_prompts(config)] == ["5", "6"]
    wrong = "record 1 has no column 'reward_model.truth'.* it has the columns prompt, reward_model"
    with pytest.raises(UserError, match=wrong):
        load_prompts(config.model_copy(update={"answer_column": "reward_model.truth"}))
