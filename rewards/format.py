r"""Does a completion keep to a required form? Range 0 or 1, style "tag_count" [0, 1].

Source: TRL's think format (one <think> block at the start) and DeepSeek-R1's think + answer form; card rewards, section 7. The
other families are ours: one \boxed{}, JSON, a grounding box, tags of your own, and a count of tags for a policy that gets none
of the strict ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.answers import extract_answer
from visual_grpo.rewards.iou import parse_boxes

__all__ = ["STYLES", "Format", "Style", "tag_count", "tags_in_order"]

Style = Literal["think", "think_answer", "answer", "boxed", "json", "box", "tag_count"]

STYLES: dict[str, re.Pattern[str]] = {
    "think": re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE),
    # Atomic: without it a completion that repeats "</think><answer>" takes the square of its length, the lock held.
    "think_answer": re.compile(r"^<think>(?>.*?</think>\s*<answer>).*?</answer>$", re.DOTALL),
}
"""The published forms, as regular expressions."""


def tags_in_order(text: str, tags: Sequence[str]) -> bool:
    """Say whether `text` is <a>...</a> <b>...</b> for `tags` a, b: each once, in order, only white space around them.

    >>> tags_in_order("<plan>x</plan> <code>y</code>", ["plan", "code"]), tags_in_order("<plan>x", ["plan"])
    (True, False)
    """
    rest = text.strip()
    for tag in tags:
        start, end = f"<{tag}>", f"</{tag}>"
        if text.count(start) != 1 or text.count(end) != 1 or not rest.startswith(start) or end not in rest:
            return False
        rest = rest.split(end, 1)[1].lstrip()
    return not rest


def tag_count(text: str, tags: Sequence[str]) -> float:
    """Share of the opening and closing tags that occur exactly once, [0, 1].

    >>> tag_count("<think>a</think> 4", ["think", "answer"])
    0.5
    """
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    return sum(text.count(mark) == 1 for mark in marks) / len(marks)


def _is_json(text: str) -> bool:
    """A JSON object or array, bare or as the only fenced block; after a </think>, what follows it."""
    body = text.rsplit("</think>", 1)[-1].strip()
    first, _, rest = body.partition("\n")
    inside, mark, last = rest.rpartition("\n")
    if first.rstrip() in ("```", "```json") and mark and last.strip() == "```":
        body = inside
    try:
        return isinstance(json.loads(body), (dict, list))
    except (ValueError, RecursionError):
        return False


def _is_boxed(text: str) -> bool:
    return text.count("\\boxed{") == 1 and bool(extract_answer(text, "boxed"))


_CHECKS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "think": lambda text, _: STYLES["think"].match(text) is not None,
    "think_answer": lambda text, _: STYLES["think_answer"].match(text) is not None,
    "answer": lambda text, _: text.count("<answer>") == 1 and bool(extract_answer(text, "answer_tag")),
    "boxed": lambda text, _: _is_boxed(text),
    "json": lambda text, _: _is_json(text),
    "box": lambda text, _: bool(parse_boxes(text)),
    "tag_count": tag_count,
}


@register_reward("format")
class Format(Reward):
    """1 if the completion has the form."""

    needs = frozenset({"texts"})

    def __init__(
        self, style: Style = "think", *, tags: Sequence[str] | None = None, pattern: str | None = None
    ) -> None:
        """Choose the form.

        Args:
            style: "think" and "think_answer" match from the first character on; "answer": one <answer> that is not empty;
                "boxed": one \\boxed{} that is not empty; "json": an object or array and nothing else (after any </think>);
                "box": at least one grounding box (see `iou.parse_boxes`), in the <answer> if there is one; "tag_count":
                the share of opening and closing tags that occur exactly once.
            tags: names of tags of your own, each once and in this order, instead of a style; with "tag_count" the tags that
                are counted (think and answer by default).
            pattern: regular expression in place of a style; the dot matches line ends, end it with $ to match everything.
        """
        if tags is not None and (isinstance(tags, str) or not tags or not all(isinstance(tag, str) for tag in tags)):
            raise UserError(f"format: tags is {tags!r}; give a list of one or more names, such as [plan, answer].")
        names = list(tags or ("think", "answer"))
        if pattern is not None:
            try:
                compiled = re.compile(pattern, re.DOTALL)
            except re.error as error:
                raise UserError(f"format: pattern {pattern!r} is no regular expression: {error}.") from error
            self.check: Callable[[str], float] = lambda text: compiled.match(text) is not None
        elif style not in get_args(Style):
            raise UserError(f"format: style is {style!r}; give one of {', '.join(get_args(Style))}, or a pattern.")
        elif tags is not None and style != "tag_count":
            self.check = lambda text: tags_in_order(text, names)
        else:
            self.check = lambda text: _CHECKS[style](text, names)

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        return RewardOutput.from_list([float(self.check(text)) for text in request.texts])
