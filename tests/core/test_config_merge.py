"""Dotted overrides change one entry, whole ones replace; what a layer of a config does to the one below."""

from __future__ import annotations

import pytest

from visual_grpo.api import nested_overrides
from visual_grpo.config import RunConfig, merge, validate
from visual_grpo.config_text import dump_yaml, parse_overrides, parse_yaml
from visual_grpo.errors import UserError

BASE = {
    "model": {"adapter": "toy", "path": "toy"},
    "data": {"source": "x.txt"},
    "method": ["flow_grpo", {"dapo": {"max_tries": 3, "shaped": True}}],
    "rewards": {"geneval": {"weight": 1.0, "params": {"a": 1, "b": 2}}, "pickscore": 0.5},
}


def rewards(*items: str) -> dict[str, tuple[float, dict[str, int]]]:
    config = validate(RunConfig, merge(BASE, parse_overrides(items)))
    return {name: (reward.weight, reward.params) for name, reward in config.rewards.items()}


def test_a_dotted_reward_leaves_the_others() -> None:
    geneval = (1.0, {"a": 1, "b": 2})
    assert rewards("rewards.pickscore=0.2") == {"geneval": geneval, "pickscore": (0.2, {})}
    assert rewards("rewards.ocr=2") == {"geneval": geneval, "pickscore": (0.5, {}), "ocr": (2.0, {})}
    assert rewards("rewards.geneval=3")["geneval"] == (3.0, {"a": 1, "b": 2})
    assert rewards("rewards.geneval.params.a=7")["geneval"] == (1.0, {"a": 7, "b": 2})
    assert rewards("rewards.geneval.params={a: 7}")["geneval"] == (1.0, {"a": 7})


def test_a_whole_value_replaces() -> None:
    assert rewards("rewards=ocr") == {"ocr": (1.0, {})}
    assert rewards("rewards={ocr: 2}") == {"ocr": (2.0, {})}


def test_a_whole_mapping_of_names_replaces_and_a_dotted_one_adds() -> None:
    """Before, `mean.merge={words: 1}` left the other stage in the mean, and `applies={tag: b}` asked for both."""
    base = {
        "rewards": {"ocr": {"applies": {"task": "words"}}},
        "combine": {"gate": {"a": 1.0}},
        "method": [{"flow_opd": {"teachers": {"x": "1", "y": "2"}}}, {"task_cycle": {"steps": {"x": 1, "y": 3}}}],
        "merge": {"x": 1.0, "y": 1.0},
        "train": {"steps": 5},
    }
    whole = merge(
        base,
        parse_overrides(
            [
                "rewards.ocr.applies={tag: b}",
                "combine.gate={b: 2}",
                "method.flow_opd.teachers={x: 3}",
                "method.task_cycle.steps={y: 1}",
                "merge={y: 3}",
            ]
        ),
    )
    assert whole["rewards"]["ocr"]["applies"] == {"tag": "b"}
    assert whole["combine"]["gate"] == {"b": 2}
    assert whole["method"] == [{"flow_opd": {"teachers": {"x": 3}}}, {"task_cycle": {"steps": {"y": 1}}}]
    assert whole["merge"] == {"y": 3}
    dotted = merge(base, parse_overrides(["method.flow_opd.teachers.x=3", "merge.y=3", "train.steps=7"]))
    assert dotted["method"][0] == {"flow_opd": {"teachers": {"x": 3, "y": "2"}}}
    assert dotted["merge"] == {"x": 1.0, "y": 3}
    assert dotted["train"] == {"steps": 7}


def test_overrides_add_up() -> None:
    assert set(rewards("rewards.ocr=1", "rewards.length=2")) == {"geneval", "pickscore", "ocr", "length"}
    assert rewards("rewards=ocr", "rewards.length=2") == {"ocr": (1.0, {}), "length": (2.0, {})}
    assert rewards("rewards.ocr=1", "rewards={length: 2}") == {"length": (2.0, {})}


def test_the_name_of_a_plug_in_has_dots_of_its_own() -> None:
    assert rewards("rewards.my.module:Reward.weight=2")["my.module:Reward"] == (2.0, {})


def test_python_overrides_are_read_alike() -> None:
    assert nested_overrides({"rewards.ocr": 1, "train.steps": 2}) == nested_overrides(
        ["rewards.ocr=1", "train.steps=2"]
    )
    assert nested_overrides("train.steps=2") == {"train": {"steps": 2}}


def test_options_of_one_method_of_a_stack() -> None:
    merged = merge(BASE, parse_overrides(["method.dapo.max_tries=5"]))
    assert merged["method"] == [{"flow_grpo": {}}, {"dapo": {"max_tries": 5, "shaped": True}}]
    assert BASE["method"][1] == {"dapo": {"max_tries": 3, "shaped": True}}
    with pytest.raises(UserError, match=r"no 'gspo' in the stack \(flow_grpo, dapo\)"):
        merge(BASE, parse_overrides(["method.gspo.x=5"]))


def test_quoted_values_stay_text() -> None:
    assert parse_yaml(dump_yaml({"a": "12e45", "b": 1e-5, "c": "yes"}), "x") == {"a": "12e45", "b": 1e-5, "c": "yes"}
    assert parse_overrides(["a='1e5'", "b=1e5", "c=[1e5]", 'd="5"']) == {"a": "1e5", "b": 1e5, "c": [1e5], "d": "5"}
