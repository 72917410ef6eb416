"""Text problems with several samples each: pass@k, avg@k, maj@k, with intervals over problems.

Source: card evaluation, section 8; pass@k is the unbiased estimator of arXiv 2107.03374. Truncated answers count as wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from visual_grpo.data import check_pairing
from visual_grpo.errors import RunError, UserError
from visual_grpo.eval.images import read_lines
from visual_grpo.eval.judging import Answers, track
from visual_grpo.eval.protocol import check_settings
from visual_grpo.eval.results import means, task_text, write_all
from visual_grpo.reward import RewardRequest
from visual_grpo.rewards.answers import extract_answer, normalise_answer, same_answer
from visual_grpo.scoring import RewardSuite
from visual_grpo.types import RewardStatus

__all__ = ["avg_at_k", "by_problem", "evaluate", "maj_at_k", "mean_pass_at_k", "pass_at_k", "summarise"]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of `k` samples, drawn without replacement from `samples` with `correct` right ones, is right.

    >>> pass_at_k(10, 3, 1), round(pass_at_k(10, 3, 5), 6), pass_at_k(4, 0, 4)
    (0.3, 0.916667, 0.0)
    """
    if not 0 <= correct <= samples:
        raise ValueError(f"pass@k needs 0 <= correct <= samples; got {correct} of {samples}")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples a problem and k >= 1; there are {samples}")
    if samples - correct < k:
        return 1.0
    # C(n-c, k) / C(n, k) is symmetric in c and k, so the shorter product does; exact integers up to the one division.
    fewer, more = sorted((correct, k))
    none_right = every = 1
    for i in range(fewer):
        none_right *= samples - more - i
        every *= samples - i
    return (every - none_right) / every


def mean_pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> float:
    """Mean of pass@k over problems, each with its own number of samples."""
    return sum(pass_at_k(len(row), sum(map(bool, row)), k) for row in correct) / len(correct)


def avg_at_k(correct: Sequence[Sequence[bool]]) -> float:
    """Mean correctness over samples, then over problems: the estimate of pass@1."""
    return mean_pass_at_k(correct, 1)


def maj_at_k(answers: Sequence[Sequence[str | None]], correct: Sequence[Sequence[bool]]) -> float:
    """Share of problems whose most frequent answer is right; ties go to the answer seen first.

    Args:
        answers: extracted answers by problem; None where none was found, which is never the majority.
        correct: verdict on each; the one on the first sample with the majority answer counts.
    """
    return sum(majority_is_right(*row) for row in zip(answers, correct, strict=True)) / len(answers)


def majority_is_right(answers: Sequence[str | None], correct: Sequence[bool]) -> bool:
    """Whether the most frequent answer to one problem is right; see `maj_at_k`."""
    firsts: list[int] = []
    votes: list[int] = []
    for position, answer in enumerate(answers):
        if answer is None:
            continue
        known = next((i for i, first in enumerate(firsts) if _same(answer, answers[first])), None)
        if known is None:
            firsts.append(position)
            votes.append(1)
        else:
            votes[known] += 1
    return bool(votes) and bool(correct[firsts[votes.index(max(votes))]])


def _same(answer: str, other: str | None) -> bool:
    """Whether two answers are one vote; what normalises to nothing ("?!") is compared as it stands."""
    assert other is not None
    if not normalise_answer(answer) or not normalise_answer(other):
        return answer.strip() == other.strip()
    return same_answer(answer, other)


def summarise(
    correct: Sequence[Sequence[bool]],
    answers: Sequence[Sequence[str | None]] | None = None,
    *,
    ks: Sequence[int] = (1,),
) -> dict[str, Any]:
    """Put all figures of a set of problems together.

    Returns:
        problems, samples, avg@n, pass@k of every k, maj@n and maj@k (of the first k samples); `intervals`: their 95 % bootstrap
        over problems, the independent items, and `interval`, that of avg@n.
    """
    if not correct or any(len(row) == 0 for row in correct):
        raise ValueError("a summary needs at least one problem, and a sample of each")
    items = by_problem(correct, answers, ks=ks)
    figures = means(items, [name for name in items[0] if name != "item"])
    average = next(name for name in items[0] if name.startswith("avg@"))
    return {
        "problems": len(correct),
        "samples": sum(map(len, correct)),
        **figures,
        "interval": figures["intervals"][average],
    }


def by_problem(
    correct: Sequence[Sequence[bool]],
    answers: Sequence[Sequence[str | None]] | None = None,
    *,
    ks: Sequence[int] = (1,),
    names: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """The figures of each problem by itself; their means over problems are those of the set."""
    sizes = sorted({len(row) for row in correct})
    count = sizes[0] if len(sizes) == 1 else "n"
    items: list[dict[str, Any]] = []
    for number, row in enumerate(correct):
        right = sum(map(bool, row))
        item: dict[str, Any] = {
            "item": str(number) if names is None else names[number],
            f"avg@{count}": right / len(row),
        }
        item |= {f"pass@{k}": pass_at_k(len(row), right, k) for k in ks}
        if answers is not None:
            some = {f"maj@{k}": majority_is_right(answers[number][:k], row[:k]) for k in ks if 1 < k < len(row)}
            item |= {name: float(value) for name, value in some.items()}
            item[f"maj@{count}"] = float(majority_is_right(answers[number], row))
        items.append(item)
    return items


def evaluate(
    *,
    texts: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    reward: str = "math_verify",
    threshold: float = 1.0,
    ks: int | Sequence[int] = (1,),
    score_batch: int = 64,
    model: str | None = None,
    adapter: str | Path | None = None,
    images: str | Path | None = None,
) -> dict[str, Any]:
    """Score a file of completions; a problem with a sample on which the reward failed is left out and counted (`failed`).

    Args:
        texts: JSON lines with `completion` (or `text`), perhaps `truncated`; the same number of lines for each problem, in the
            order of the prompt file.
        prompts: JSON lines with the problems and their gold answers.
        out: folder for results.jsonl, items.jsonl, summary.json, and the verdicts that an interrupted run takes up again.
        reward: reward that judges an answer.
        threshold: least value that counts as correct.
        ks: of pass@k and maj@k.
        score_batch: completions scored at a time.
    """
    if texts is None or prompts is None:
        raise UserError("text needs a file of completions (texts=FILE.jsonl) and the problems (--prompts FILE.jsonl).")
    problems, rows = read_lines(prompts), read_lines(texts)
    if len(rows) % len(problems):
        raise UserError(f"{len(rows)} completions for {len(problems)} problems: each needs the same number, in order.")
    check_pairing(texts, rows, problems)
    share = len(rows) // len(problems)
    wanted = [ks] if isinstance(ks, int) else list(ks)
    if any(not 1 <= k <= share for k in wanted):
        raise UserError(f"ks is {ks}; there are {share} samples of each problem, so every k must lie in 1..{share}.")
    if score_batch < 1:
        raise UserError(f"score_batch is {score_batch}; give 1 or more.")
    if out is not None:
        check_settings(Path(out), {"evaluation": "text", "reward": reward, "threshold": threshold})
    completions = [_completion(row, number, texts) for number, row in enumerate(rows, start=1)]
    metadata = [problems[i // share] for i in range(len(rows))]
    values, failed = _score(
        reward, completions, metadata, None if out is None else Path(out) / "verdicts.jsonl", score_batch
    )
    truncated = [bool(row.get("truncated", False)) for row in rows]
    if all(value is None for value in values) and not failed:
        raise UserError(f"reward {reward!r} applies to no problem of {str(prompts)!r}: no gold answer could be read.")
    broken = {i // share for i in failed}
    kept = [p for p in range(len(problems)) if None not in values[p * share : (p + 1) * share]]
    if not kept:
        raise RunError(
            f"reward {reward!r} scored all samples of no problem: {len(broken)} have a sample on which it failed."
        )
    correct = [v is not None and v >= threshold and not t for v, t in zip(values, truncated, strict=True)]
    answers = [extract_answer(text) for text in completions]
    right = [correct[p * share : (p + 1) * share] for p in kept]
    given = [answers[p * share : (p + 1) * share] for p in kept]
    summary = summarise(right, given, ks=wanted)
    summary |= {"without_gold": len(problems) - len(kept) - len(broken), "failed": len(broken)}
    summary |= {"truncation_rate": sum(truncated) / len(truncated)}
    lines = [
        {"problem": i // share, "answer": answer, "correct": verdict, "truncated": cut}
        for i, (answer, verdict, cut) in enumerate(zip(answers, correct, truncated, strict=True))
    ]
    items = by_problem(right, given, ks=wanted, names=[str(p) for p in kept])
    for item, p in zip(items, kept, strict=True):
        item["prompt"] = task_text(problems[p])
    write_all(out, summary=summary, results=lines, items=items)
    return summary


def _score(
    reward: str, completions: Sequence[str], metadata: Sequence[dict[str, Any]], path: Path | None, batch: int
) -> tuple[list[float | None], list[int]]:
    """Value of each completion, None where there is none, and which have failed; kept in `path`, so an interrupted run goes on.

    Failures are not kept: the next run tries them again.
    """
    verdicts = Answers(path)
    keys = [
        hashlib.sha256(json.dumps([reward, text, row], sort_keys=True, default=str).encode()).hexdigest()[:32]
        for text, row in zip(completions, metadata, strict=True)
    ]
    missing = [i for i in {key: i for i, key in enumerate(keys)}.values() if verdicts.get(keys[i]) is None]
    parts = [missing[start : start + batch] for start in range(0, len(missing), batch)]
    with RewardSuite({reward: {"timeout_s": None, "retries": 0, "on_failed": "drop"}}) as suite:
        for part in track(parts, "scoring", len(parts)):
            rows = [metadata[i] for i in part]
            request = RewardRequest.build(
                [task_text(row, "") for row in rows], texts=[completions[i] for i in part], metadata=rows
            )
            scored = suite.score(request, evaluation=True)
            for i, state, value in zip(part, scored.status[:, 0].tolist(), scored.values[:, 0].tolist(), strict=True):
                if state != RewardStatus.FAILED:
                    verdicts.put(keys[i], value=value if state == RewardStatus.OK else None)
    found = [verdicts.get(key) for key in keys]
    failed = [i for i, record in enumerate(found) if record is None]
    return [None if record is None else record["value"] for record in found], failed


def _completion(row: dict[str, Any], number: int, path: str | Path) -> str:
    plain = Path(path).suffix != ".jsonl"  # `read_lines` puts the lines of such a file under "prompt"
    text = row.get("completion", row.get("text", row.get("prompt") if plain else None))
    if not isinstance(text, str):
        raise UserError(f"{path}, line {number}: no text under 'completion' or 'text'.")
    return text
