"""Where MV-GRPO's further captions come from: rules of the drawn world, a language model, or a captioner that sees samples."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visual_grpo.errors import RunError, UserError
from visual_grpo.registry import load_object

if TYPE_CHECKING:
    from visual_grpo.rewards.judge import Failure, Question

logger = logging.getLogger(__name__)

View = tuple[str, dict[str, Any]]
"""A caption, and the metadata that rewards read with it."""
Enhancer = Callable[
    [Sequence[str], Sequence[dict[str, Any]], Sequence[Tensor], int, Sequence[torch.Generator]], list[list[View]]
]
"""(prompts [P], their metadata, their samples [G, 3, H, W], captions wanted, a generator each) -> views of each prompt."""

ATTRIBUTES = ("lighting", "style", "composition", "motion", "viewpoint", "colours", "setting", "mood")
REWRITE = (
    "Rewrite this description of a picture in one sentence of at most 40 words. Keep its subject and every object in it; "
    "vary the {attribute}. Reply with the sentence alone.\nDescription: {prompt}"
)
DESCRIBE = (
    "Describe this image in one sentence of at most 40 words, keeping the subject of: {prompt}\n"
    "Emphasise the {attribute}. Reply with the sentence alone."
)
_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


def build_enhancer(name: str, options: Mapping[str, Any]) -> Enhancer:
    """The enhancer `name`: scenes, scenes_seen, llm, vlm, or `package.module:function(prompt, images, count)`.

    Raises:
        UserError: unknown, or options that do not fit.
    """
    if name in ("llm", "vlm"):
        return _asked(name, options)
    if options:
        raise UserError(f"method.mv_grpo.options are those of the model of llm and vlm; enhancer {name!r} takes none")
    if name in ("scenes", "scenes_seen"):
        return _scenes(seen=name == "scenes_seen")
    if ":" not in name:
        raise UserError(
            f"method.mv_grpo.enhancer is {name!r}; known: llm, vlm, scenes, scenes_seen, or package.module:function"
        )
    return _own(load_object(name, "condition enhancer"), name)


def most_captions(name: str) -> int | None:
    """The most captions that `name` can give; None without a limit of its own."""
    return len(ATTRIBUTES) if name in ("llm", "vlm") else None


def _own(function: Any, name: str) -> Enhancer:
    """A user's function as an enhancer."""
    if not callable(function):
        raise UserError(f"method.mv_grpo.enhancer: {name!r} is {type(function).__name__}, which cannot be called")
    try:
        inspect.signature(function).bind("prompt", None, 1)
    except TypeError as error:
        raise UserError(
            f"method.mv_grpo.enhancer: {name!r} must take (prompt, images [G, 3, H, W], count) and return captions: {error}"
        ) from None

    def enhance(
        prompts: Sequence[str],
        metadata: Sequence[dict[str, Any]],
        images: Sequence[Tensor],
        count: int,
        generators: Sequence[torch.Generator],
    ) -> list[list[View]]:
        views = []
        for prompt, row, samples in zip(prompts, metadata, images, strict=True):
            captions = function(prompt, samples, count)
            if not isinstance(captions, list | tuple) or not all(isinstance(text, str) for text in captions):
                raise RunError(
                    f"enhancer {name!r} returned {captions!r} for {prompt!r}; it must return a list of texts"
                )
            views.append([(text, row) for text in captions])
        return views

    return enhance


def _scenes(*, seen: bool) -> Enhancer:
    from visual_grpo.testbed.detector import SceneDetector
    from visual_grpo.testbed.scene_views import described, neighbours, training_entries

    detector = SceneDetector()

    def enhance(
        prompts: Sequence[str],
        metadata: Sequence[dict[str, Any]],
        images: Sequence[Tensor],
        count: int,
        generators: Sequence[torch.Generator],
    ) -> list[list[View]]:
        views = []
        for prompt, row, samples, generator in zip(prompts, metadata, images, generators, strict=True):
            if "include" not in row:
                raise UserError(f"enhancer scenes knows the prompts of testbed/scenes only, not {prompt!r}")
            texts = _shuffled(neighbours(row), generator)
            if seen:
                drawn = [described(objects, prompt) for objects in detector.detect(samples)]
                firsts = [_shuffled(each, generator)[0] for each in drawn if each]
                texts = _shuffled(firsts, generator) + texts
            # A metadata row of its own: rewards judge the caption, not the prompt.
            known = training_entries()
            views.append([(text, dict(known[text])) for text in dict.fromkeys(texts)][:count])
        return views

    return enhance


def _shuffled(texts: Sequence[str], generator: torch.Generator) -> list[str]:
    return [texts[i] for i in torch.randperm(len(texts), generator=generator).tolist()]


def _asked(name: str, options: Mapping[str, Any]) -> Enhancer:
    """A model of transformers in this process, or behind an OpenAI-compatible endpoint (`options.endpoint`)."""
    from visual_grpo.reward import to_pil
    from visual_grpo.rewards.judge import JudgeSettings, LazyJudge, Question

    default = "Qwen/Qwen3-8B" if name == "llm" else "Qwen/Qwen3-VL-8B-Instruct"
    thinking = {"chat_template_kwargs": {"enable_thinking": False}} if name == "llm" else {}
    where = f"method.mv_grpo.options ({name})"
    settings = JudgeSettings.read(where, {"model": default, "max_new_tokens": 128, **thinking, **options})
    judge = LazyJudge(settings, f"mv_grpo's {name}")
    template = REWRITE if name == "llm" else DESCRIBE

    def questions(
        prompt: str, samples: Tensor, attributes: Sequence[str], generator: torch.Generator
    ) -> list[Question]:
        pictures: list[tuple[Any, ...]] = [()] * len(attributes)
        if name == "vlm":
            order = torch.randperm(len(samples), generator=generator)
            chosen = order[torch.arange(len(attributes)) % len(samples)]
            pictures = [(picture,) for picture in to_pil(samples[chosen])]
        return [
            Question(text=template.replace("{attribute}", word).replace("{prompt}", prompt), images=seen)
            for word, seen in zip(attributes, pictures, strict=True)
        ]

    def enhance(
        prompts: Sequence[str],
        metadata: Sequence[dict[str, Any]],
        images: Sequence[Tensor],
        count: int,
        generators: Sequence[torch.Generator],
    ) -> list[list[View]]:
        orders = [_shuffled(ATTRIBUTES, generator) for generator in generators]
        kept: list[list[str]] = [[] for _ in prompts]
        for attempt in (slice(0, count), slice(count, None)):  # once more, for what was empty or came twice
            asked = [
                questions(prompt, samples, order[attempt][: count - len(kept[i])], generator)
                for i, (prompt, samples, order, generator) in enumerate(
                    zip(prompts, images, orders, generators, strict=True)
                )
            ]
            replies = iter(judge.generate([question for each in asked for question in each]))
            for i, each in enumerate(asked):
                kept[i] = distinct([*kept[i], *(_caption(next(replies)) for _ in each)], prompts[i])
        if settings.endpoint is not None:
            judge.close()  # connections are cheap, a model in this process stays
        return [[(text, dict(row)) for text in texts] for texts, row in zip(kept, metadata, strict=True)]

    return enhance


def distinct(captions: Sequence[str], prompt: str) -> list[str]:
    """Captions that are neither empty nor the prompt, each once; case, white space and a final full stop make no difference.

    >>> distinct(["A dog.", "a  dog", "", "a cat"], "A cat")
    ['A dog.']
    """
    seen = {_plain(prompt), ""}
    out = []
    for caption in captions:
        if _plain(caption) not in seen:
            seen.add(_plain(caption))
            out.append(caption)
    return out


def _plain(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()


def _caption(reply: str | Failure) -> str:
    """The first line of a reply, without thoughts and quotation marks; empty where there is none."""
    if not isinstance(reply, str):
        logger.warning("mv_grpo: a caption is missing: %s", reply.reason)
        return ""
    lines = _THOUGHT.sub("", reply).strip().splitlines()
    return lines[0].strip().strip("\"'“”").strip() if lines else ""
