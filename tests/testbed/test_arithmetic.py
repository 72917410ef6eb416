"""Tests of the arithmetic world: right answers, stable split, readable completions."""

import random
import subprocess
import sys

import pytest

from visual_grpo.testbed import arithmetic
from visual_grpo.testbed.arithmetic import (
    KINDS,
    STYLES,
    Kind,
    Problem,
    all_prompts,
    extract_answer,
    is_correct,
    is_heldout,
    sample_problem,
    solve,
    split_prompts,
)

BIG = Kind(name="big", operators="+-", operands=4, digits=3, other_digits=3)


def test_answers_equal_pythons_own_evaluation() -> None:
    for row in all_prompts(200):
        expression = row["prompt"].removeprefix("What is ").removesuffix("?")
        assert set(expression) <= set("0123456789+-*")
        assert row["answer"] == str(eval(expression))


def test_rows_hold_exactly_prompt_answer_and_tag() -> None:
    rows = all_prompts(20)
    assert {frozenset(row) for row in rows} == {frozenset({"prompt", "answer", "tag"})}
    assert {row["tag"] for row in rows} == {kind.name for kind in KINDS}
    assert len({row["prompt"] for row in rows}) == len(rows) == 20 * len(KINDS)


def test_split_is_disjoint_and_covers_everything() -> None:
    train, heldout = split_prompts(300)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    assert len(train) + len(heldout) == len(all_prompts(300))
    assert 0.15 < len(heldout) / (len(train) + len(heldout)) < 0.25
    assert {row["tag"] for row in heldout} == {kind.name for kind in KINDS}


def test_membership_does_not_depend_on_how_many_prompts_are_drawn() -> None:
    small = {row["prompt"] for row in split_prompts(50)[1]}
    assert small <= {row["prompt"] for row in split_prompts(300)[1]}


def test_split_is_the_same_in_another_process_with_another_hash_seed() -> None:
    code = (
        "from visual_grpo.testbed.arithmetic import split_prompts; print([r['prompt'] for r in split_prompts(30)[1]])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{[row['prompt'] for row in split_prompts(30)[1]]}\n"}


def test_known_prompts_keep_their_side() -> None:
    assert is_heldout("What is 27+45?") is True
    assert is_heldout("What is 11+11?") is False
    assert is_heldout("What is 12+34-5?") is False


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", [*KINDS, BIG], ids=lambda kind: kind.name)
def test_solutions_are_right_and_every_equation_holds(kind: Kind, style: str) -> None:
    rng = random.Random(0)
    for _ in range(100):
        problem = sample_problem(kind, rng)
        text = solve(problem, style)
        assert is_correct(text, str(problem.answer))
        for equation in text.partition(arithmetic.MARKER)[0].split():
            left, _, right = equation.partition("=")
            assert eval(left) == int(right) >= 0


def test_a_wrong_step_spoils_the_answer_and_later_steps_build_on_it() -> None:
    problem = Problem(kind="add", operands=(27, 45), operators=("+",))
    assert solve(problem) == "27+40=67 67+5=72 #### 72"
    assert solve(problem, "short") == "27+40=67 #### 72"
    assert solve(problem, "direct") == "#### 72"
    assert solve(problem, wrong_step=0, offset=10) == "27+40=77 77+5=82 #### 82"
    assert solve(problem, wrong_step=2, offset=-1) == "27+40=67 67+5=72 #### 71"
    assert solve(problem, "direct", wrong_step=0, offset=10) == "#### 82"


def test_results_stay_non_negative() -> None:
    problem = Problem(kind="sub", operands=(20, 20), operators=("-",))
    assert solve(problem, "direct", wrong_step=5, offset=-2) == "#### 2"


def test_product_is_solved_by_places() -> None:
    problem = Problem(kind="mul", operands=(27, 4), operators=("*",))
    assert solve(problem) == "20*4=80 7*4=28 80+28=108 #### 108"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1+1=2 #### 2", "2"),
        ("#### 1 or 2", "2"),
        ("1+1=2 #### ?", None),
        ("1+1=2 ####", None),
        ("1+1=2", "2"),
        ("#### 1 #### -3", "-3"),
        ("#### 1,234", "1234"),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_wrong_input_is_refused_with_the_value() -> None:
    problem = Problem(kind="add", operands=(1, 2), operators=("+",))
    with pytest.raises(ValueError, match="'long'"):
        solve(problem, "long")
    with pytest.raises(ValueError, match="'/'"):
        _ = Problem(kind="x", operands=(4, 2), operators=("/",)).answer
    with pytest.raises(ValueError, match="cannot be mixed"):
        sample_problem(Kind(name="x", operators="+*"), random.Random(0))
