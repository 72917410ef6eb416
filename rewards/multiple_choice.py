"""Multiple choice: is the chosen option the right one?

Source: card rewards, section 8 (extract the letter or the <answer> body; lower case, no articles, no punctuation; 1 or 0). Range
0 or 1. Rows without a gold answer are not applicable; a completion that names no option scores 0.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.answers import extract_answer, gold_answer, normalise_answer

__all__ = ["MultipleChoice", "chosen_option", "gold_option"]

_ALONE = re.compile(r"\(?([A-Za-z])\)?[.):]?")
_LEADING = re.compile(r"\(?([A-Z])[.):]\s+\S")


def chosen_option(text: str, options: Sequence[str] = ()) -> str | None:
    r"""Return the letter of the option that a completion chooses, or None.

    The last <answer> or \boxed{} body counts, else the whole text. In it: a letter and nothing else, "B. red", the text of an
    option, else the last capital letter that stands alone.

    >>> chosen_option("<answer>(b)</answer>"), chosen_option("A red cat", ["blue", "red cat"]), chosen_option("none")
    ('B', 'B', None)
    """
    body = extract_answer(text, "answer_tag") or extract_answer(text, "boxed") or text.strip()
    found = _ALONE.fullmatch(body) or _LEADING.match(body)
    # Beyond the last option a single letter is no choice, but it may be an option's text.
    if found and string.ascii_uppercase.index(found.group(1).upper()) < (len(options) or 26):
        return found.group(1).upper()
    normal = normalise_answer(body)
    same = [i for i, option in enumerate(options[:26]) if normal and normalise_answer(option) == normal]
    if len(same) == 1:
        return string.ascii_uppercase[same[0]]
    return extract_answer(body, "letter")


def gold_option(gold: Any, options: Sequence[str] = ()) -> str | None:
    """The letter of a gold answer given as a letter, the text of an option or its 0-based index; None if it is no option.

    >>> gold_option("b"), gold_option("red", ["blue", "red"]), gold_option(0), gold_option("E", ["blue", "red"])
    ('B', 'B', 'A', None)
    """
    if isinstance(gold, int) and not isinstance(gold, bool):
        letter = string.ascii_uppercase[gold] if 0 <= gold < 26 else None
    else:
        letter = None if gold is None else chosen_option(str(gold), options)
    beyond = letter is not None and string.ascii_uppercase.index(letter) >= (len(options) or 26)
    return None if beyond else letter


@register_reward("multiple_choice")
class MultipleChoice(Reward):
    """1 if the chosen option is the gold one. Details: `answered`, 1 where an option was chosen."""

    needs = frozenset({"texts"})

    def __init__(self, *, gold_key: str | None = None, options_key: str = "choices") -> None:
        """Name the columns.

        Args:
            gold_key: metadata column of the gold answer: a letter, the text of an option, or its 0-based index (int);
                None: see `answers.GOLD_KEYS`.
            options_key: metadata column with the list of options in the order A, B, ...; without it only letters count.
        """
        self.gold_key, self.options_key = gold_key, options_key

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        values: list[float | None] = []
        answered = []
        for text, row in zip(request.texts, request.metadata, strict=True):
            options = self._options(row)
            gold = self._gold(row, options)
            chosen = chosen_option(text, options)
            if chosen is not None and options and string.ascii_uppercase.index(chosen) >= len(options):
                chosen = None
            answered.append(float(chosen is not None))
            values.append(None if gold is None else float(chosen == gold))
        return RewardOutput.from_list(values, {"answered": answered})

    def _options(self, row: Mapping[str, Any]) -> list[str]:
        given = row.get(self.options_key)
        return [str(option) for option in given] if isinstance(given, (list, tuple)) else []

    def _gold(self, row: Mapping[str, Any], options: Sequence[str]) -> str | None:
        return gold_option(gold_answer(row, self.gold_key), options)
