"""CIDEr-D: how well a caption agrees with the reference captions of its image, rare n-grams counting more.

Source: Vedantam et al. (arXiv 1411.5726) and the COCO caption evaluation; card rewards, section 8: n = 1..4, tf-idf with
document frequencies over the reference corpus (one document an image), idf = log N - log max(1, df), similarity sum min(h,
r) r / (|h| |r|) times exp(-(len h - len r)^2 / (2 sigma^2)), mean over n and over references, x 10. Range [0, 10]. Rows
without references are not applicable; an empty caption scores 0. Words are split by a rule of ours (lower case, no
punctuation) and not by the Penn Treebank tokenizer of the Java tool: figures differ a little from published ones where
captions have unusual punctuation.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.json_lines import read_jsonl
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward

__all__ = ["Cider", "Corpus", "cider_d", "reference_texts"]

logger = logging.getLogger(__name__)

ORDERS = 4
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")

Ngram = tuple[str, ...]


def _ngrams(text: str) -> list[Counter[Ngram]]:
    """Counts of the n-grams of a caption, one counter for each of n = 1..4."""
    words = _WORD.findall(text.lower())
    return [
        Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))  #
        for n in range(1, ORDERS + 1)
    ]


@dataclass(frozen=True)
class Corpus:
    """Document frequencies of n-grams; a document is the set of references of one image."""

    documents: int
    frequency: Counter[Ngram]

    @classmethod
    def of(cls, images: Iterable[Sequence[str]]) -> Corpus:
        """Count over `images`, the references of each."""
        frequency: Counter[Ngram] = Counter()
        documents = 0
        for references in images:
            documents += 1
            frequency.update({gram for text in references for counts in _ngrams(text) for gram in counts})
        return cls(documents, frequency)

    @classmethod
    def read(cls, path: Path) -> Corpus:
        """Read .jsonl, an object {"references": [...]} an image; or .txt, a caption and image a line."""
        if not path.is_file():
            raise UserError(
                f"cider: corpus {str(path)!r} is no file; give a .jsonl or .txt file of reference captions."
            )
        if path.suffix == ".jsonl":
            images = [reference_texts(line) for line in read_jsonl(path)]
        else:
            images = [[line] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not all(images) or len(images) < 2:
            raise UserError(
                f"cider: corpus {str(path)!r} holds {len(images)} images, {sum(not i for i in images)} of them without "
                f'captions; it needs two or more, each {{"references": ["...", ...]}}.'
            )
        return cls.of(images)

    def weigh(self, counts: Sequence[Counter[Ngram]]) -> list[dict[Ngram, float]]:
        """Tf-idf vectors, one for each n."""
        total = math.log(self.documents)
        return [
            {gram: tf * (total - math.log(max(1, self.frequency[gram]))) for gram, tf in level.items()}
            for level in counts
        ]


def cider_d(caption: str, references: Sequence[str], corpus: Corpus, *, sigma: float = 6.0) -> float:
    """CIDEr-D of one caption.

    >>> corpus = Corpus.of([["a red cat sits here"], ["two dogs run far away"]])
    >>> round(cider_d("a red cat sits here", ["a red cat sits here"], corpus), 6)
    10.0
    """
    hypothesis = _ngrams(caption)
    vector, length = corpus.weigh(hypothesis), hypothesis[0].total()
    norms = [_norm(level) for level in vector]
    sums = [0.0] * ORDERS
    for text in references:
        reference = _ngrams(text)
        others = corpus.weigh(reference)
        penalty = math.exp(-((length - reference[0].total()) ** 2) / (2 * sigma**2))
        for n, (level, other) in enumerate(zip(vector, others, strict=True)):
            norm = norms[n] * _norm(other)
            if norm > 0:
                dot = sum(min(weight, other[gram]) * other[gram] for gram, weight in level.items() if gram in other)
                sums[n] += dot / norm * penalty
    return 10 * sum(sums) / ORDERS / len(references)


def _norm(vector: Mapping[Ngram, float]) -> float:
    return math.sqrt(sum(weight * weight for weight in vector.values()))


@register_reward("cider")
class Cider(Reward):
    """CIDEr-D of the completion, divided by `divisor`."""

    needs = frozenset({"texts"})

    def __init__(
        self, corpus: str, *, references_key: str = "references", sigma: float = 6.0, divisor: float = 1.0
    ) -> None:
        """Choose the corpus.

        Args:
            corpus: file of reference captions, see `Corpus.read`: the training or validation references of the data set. Or
                "batch": the references of the distinct images among the rows that are scored together (never further rows, so a
                value then depends on the batch, and with one image idf and score are 0).
            references_key: metadata column with the reference captions (a list, or one text).
            sigma: width of the length penalty, in words.
            divisor: scores are divided by this; 10 gives [0, 1].
        """
        if sigma <= 0 or divisor <= 0:
            raise UserError(f"cider: sigma and divisor must be above 0; they are {sigma} and {divisor}.")
        self.corpus = None if corpus == "batch" else Corpus.read(Path(corpus))
        self.references_key, self.sigma, self.divisor = references_key, sigma, divisor

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        references = [reference_texts(row.get(self.references_key)) for row in request.metadata]
        corpus = self.corpus
        if corpus is None:
            corpus = Corpus.of(dict.fromkeys(tuple(texts) for texts in references if texts))
            if corpus.documents < 2:
                logger.warning(
                    "cider: the batch holds one image's references, so every score is 0; give a corpus file."
                )
        return RewardOutput.from_list(
            [
                cider_d(text, found, corpus, sigma=self.sigma) / self.divisor if found else None
                for text, found in zip(request.texts, references, strict=True)
            ]
        )


def reference_texts(given: Any) -> list[str]:
    """Reference captions of a metadata column: a list, one text, or an object that holds them; blank ones are left out."""
    if isinstance(given, Mapping):
        given = next((given[key] for key in ("references", "captions", "caption") if given.get(key)), None)
    items = given if isinstance(given, (list, tuple)) else [given]
    return [str(item) for item in items if item is not None and str(item).strip()]
