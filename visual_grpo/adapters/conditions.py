"""Encoded prompts: each distinct text once, kept in CPU memory, spread over the rows when the network is called."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ENCODE_BATCH = 64
"""Texts that go through the encoders at once."""


@dataclass(kw_only=True)
class Condition:
    """Encoded prompts of `N` rows."""

    tensors: dict[str, Tensor]
    """each [P, ...], one entry a distinct prompt."""
    index: Tensor
    """[N] int64, the row's prompt; with guidance [N + 1], the last being the negative prompt."""
    guided: bool = False
    """Whether `index` ends in the negative prompt."""

    def inputs(self, rows: Tensor, *, apart: bool = False) -> NetworkInputs:
        """What the network gets for rows [n]: with guidance a doubled batch, or two batches where `apart`."""
        bound = self.index[rows]
        if not self.guided:
            return NetworkInputs(tensors=self._take(bound))
        free = self.index[-1:].expand_as(bound)
        if apart:
            return NetworkInputs(tensors=self._take(bound), free=self._take(free))
        return NetworkInputs(tensors=self._take(torch.cat([free, bound])), doubled=True)

    def _take(self, index: Tensor) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self.tensors.items()}


@dataclass(kw_only=True)
class NetworkInputs:
    """Condition tensors of one network call, or of the two calls of guidance with one branch detached."""

    tensors: dict[str, Tensor]
    """[n, ...]; [2n, ...] with the unconditional half first where `doubled`."""
    free: dict[str, Tensor] | None = None
    """[n, ...] of the unconditional branch where it is called on its own."""
    doubled: bool = False


def padded_texts(rows: Sequence[Tensor], length: int) -> dict[str, Tensor]:
    """Texts of different lengths as condition tensors.

    Args:
        rows: [P], each [l, D] with l at most `length`.
        length: L, the same for every call, so that kept encodings stack.

    Returns:
        `tokens` [P, L, D], zero behind a text's end, and `mask` [P, L], 1 on its tokens.
    """
    tokens = torch.stack([torch.nn.functional.pad(row, (0, 0, 0, length - len(row))) for row in rows])
    lengths = torch.tensor([len(row) for row in rows], device=tokens.device)
    mask = torch.arange(length, device=tokens.device) < lengths[:, None]
    return {"tokens": tokens, "mask": mask.to(tokens.dtype)}


def trimmed_texts(condition: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Undo what `padded_texts` added beyond the longest text of a batch: tokens [n, l, D] and bool mask [n, l]."""
    mask = condition["mask"].bool()
    longest = int(mask.sum(dim=1).max())
    return condition["tokens"][:, :longest], mask[:, :longest]


class TextCache:
    """Encodings of texts, the least recently used thrown away first."""

    def __init__(self) -> None:
        """Start empty."""
        self._kept: OrderedDict[Hashable, dict[str, Tensor]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def encode(
        self,
        texts: Sequence[str],
        encoder: Callable[[list[str]], dict[str, Tensor]],
        *,
        key: Hashable,
        limit: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Condition:
        """Encode what is not kept yet.

        Args:
            texts: [N], in any order and repetition.
            encoder: distinct texts [P] -> tensors [P, ...].
            key: everything else that the encoding depends on.
            limit: entries kept afterwards.
            device: of the result.
            dtype: of the result.
        """
        distinct = list(dict.fromkeys(texts))
        known = {text: self._kept[key, text] for text in distinct if (key, text) in self._kept}
        missing = [text for text in distinct if text not in known]
        for start in range(0, len(missing), ENCODE_BATCH):
            chunk = missing[start : start + ENCODE_BATCH]
            encoded = {name: value.cpu() for name, value in encoder(chunk).items()}
            # Cloned: a view would keep the whole chunk alive after the other entries have gone.
            known |= {text: {name: value[i].clone() for name, value in encoded.items()} for i, text in enumerate(chunk)}
        for text in distinct:
            self._kept[key, text] = known[text]
            self._kept.move_to_end((key, text))
        while len(self._kept) > limit:
            self._kept.popitem(last=False)
        tensors = {
            name: torch.stack([known[text][name] for text in distinct]).to(device, dtype) for name in known[distinct[0]]
        }
        position = {text: i for i, text in enumerate(distinct)}
        return Condition(tensors=tensors, index=torch.tensor([position[text] for text in texts], device=device))
