"""Text problems with several samples each: pass@k, avg@k, maj@k, with an interval over problems.

Source: card evaluation, section 8; pass@k is the unbiased estimator of arXiv 2107.03374. Truncated answers count as wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.eval.images import read_lines
from visual_grpo.eval.intervals import bootstrap_interval
from visual_grpo.reward import RewardRequest
from visual_grpo.rewards.answers import extract_answer, normalise_answer, same_answer
from visual_grpo.scoring import RewardSuite
from visual_grpo.types import RewardStatus

__all__ = ["avg_at_k", "evaluate", "maj_at_k", "mean_pass_at_k", "pass_at_k", "summarise"]


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
    right = 0
    for row, verdicts in zip(answers, correct, strict=True):
        firsts: list[int] = []
        votes: list[int] = []
        for position, answer in enumerate(row):
            if answer is None:
                continue
            known = next((i for i, first in enumerate(firsts) if _same(answer, row[first])), None)
            if known is None:
                firsts.append(position)
                votes.append(1)
            else:
                votes[known] += 1
        if votes:
            right += bool(verdicts[firsts[votes.index(max(votes))]])
    return right / len(answers)


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
    """Put all figures of a set of problems together; `interval` is the 95 % bootstrap over problems of avg@k."""
    if not correct or any(len(row) == 0 for row in correct):
        raise ValueError("a summary needs at least one problem, and a sample of each")
    sizes = sorted({len(row) for row in correct})
    interval = bootstrap_interval([sum(map(bool, row)) / len(row) for row in correct])
    count = sizes[0] if len(sizes) == 1 else "n"
    summary: dict[str, Any] = {
        "problems": len(correct),
        "samples": sum(map(len, correct)),
        f"avg@{count}": avg_at_k(correct),
        "interval": [interval.low, interval.high],
    }
    summary |= {f"pass@{k}": mean_pass_at_k(correct, k) for k in ks}
    if answers is not None:
        summary[f"maj@{count}"] = maj_at_k(answers, correct)
    return summary


def evaluate(
    *,
    texts: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    reward: str = "math_verify",
    threshold: float = 1.0,
    ks: int | Sequence[int] = (1,),
    model: str | None = None,
    adapter: str | Path | None = None,
    images: str | Path | None = None,
) -> dict[str, Any]:
    """Score a file of completions.

    Args:
        texts: JSON lines with `completion` (or `text`), perhaps `truncated`; the same number of lines for each problem, in the
            order of the prompt file.
        prompts: JSON lines with the problems and their gold answers.
        out: folder for results.jsonl and summary.json.
        reward: reward that judges an answer.
        threshold: least value that counts as correct.
        ks: of pass@k.
    """
    if texts is None or prompts is None:
        raise UserError("text needs a file of completions (texts=FILE.jsonl) and the problems (--prompts FILE.jsonl).")
    problems, rows = read_lines(prompts), read_lines(texts)
    if len(rows) % len(problems):
        raise UserError(f"{len(rows)} completions for {len(problems)} problems: each needs the same number, in order.")
    share = len(rows) // len(problems)
    wanted = [ks] if isinstance(ks, int) else list(ks)
    if any(not 1 <= k <= share for k in wanted):
        raise UserError(f"ks is {ks}; there are {share} samples of each problem, so every k must lie in 1..{share}.")
    completions = [_completion(row, number, texts) for number, row in enumerate(rows, start=1)]
    metadata = [problems[i // share] for i in range(len(rows))]
    with RewardSuite({reward: {"timeout_s": None, "retries": 0, "on_failed": "stop"}}) as suite:
        scored = suite.score(
            RewardRequest.build([str(row.get("prompt", "")) for row in metadata], texts=completions, metadata=metadata),
            evaluation=True,
        )
    truncated = [bool(row.get("truncated", False)) for row in rows]
    applies = (scored.status[:, 0] == RewardStatus.OK).tolist()
    if not any(applies):
        raise UserError(f"reward {reward!r} applies to no problem of {str(prompts)!r}: no gold answer could be read.")
    values = scored.values[:, 0].tolist()
    kept = [p for p in range(len(problems)) if all(applies[p * share : (p + 1) * share])]

    def by_problem(column: Sequence[Any]) -> list[list[Any]]:
        return [list(column[p * share : (p + 1) * share]) for p in kept]

    correct = [a and v >= threshold and not t for a, v, t in zip(applies, values, truncated, strict=True)]
    answers = [extract_answer(text) for text in completions]
    summary = summarise(by_problem(correct), by_problem(answers), ks=wanted)
    summary |= {"without_gold": len(problems) - len(kept), "truncation_rate": sum(truncated) / len(truncated)}
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        lines = [
            {"problem": i // share, "answer": answer, "correct": right, "truncated": cut}
            for i, (answer, right, cut) in enumerate(zip(answers, correct, truncated, strict=True))
        ]
        (Path(out) / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        (Path(out) / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def _completion(row: dict[str, Any], number: int, path: str | Path) -> str:
    plain = Path(path).suffix != ".jsonl"  # `read_lines` puts the lines of such a file under "prompt"
    text = row.get("completion", row.get("text", row.get("prompt") if plain else None))
    if not isinstance(text, str):
        raise UserError(f"{path}, line {number}: no text under 'completion' or 'text'.")
    return text
