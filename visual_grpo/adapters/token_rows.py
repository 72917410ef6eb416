"""The rows of a log-prob pass: prompts and completions, and which tokens of them are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(kw_only=True)
class TokenRows:
    """`n` rows on one device."""

    prompt_ids: list[Tensor]
    """n tensors [L_i] int64, on the CPU."""
    completions: Tensor
    """[n, S] int64, padded on the right; without what stands after the last wanted token."""
    read: Tensor
    """[n] int64, tokens of each completion."""
    wanted: Tensor
    """[n, u] bool, True where the unit is a real token."""
    row: Tensor
    """[M] int64, the row of each wanted token, row by row."""
    unit: Tensor
    """[M] int64, its place in the completion."""
    pad_id: int

    @classmethod
    def of_units(
        cls, units: Tensor, *, prompt_ids: list[Tensor], completions: Tensor, lengths: Tensor, pad_id: int
    ) -> TokenRows:
        """Rows of which tokens `units` [u] are wanted; `completions` [n, T] have `lengths` [n] tokens."""
        # What stands after the last wanted token of the longest row changes nothing and is not computed.
        read = lengths.clamp(max=int(units.max()) + 1 if len(units) else 0)
        columns = torch.arange(int(read.max()), device=lengths.device)
        wanted = units < lengths[:, None]
        row, unit = wanted.nonzero(as_tuple=True)
        return cls(
            prompt_ids=prompt_ids,
            completions=torch.where(columns < read[:, None], completions[:, : len(columns)], pad_id),
            read=read,
            wanted=wanted,
            row=row,
            unit=units[unit],
            pad_id=pad_id,
        )

    @property
    def targets(self) -> Tensor:
        """[M] int64, the wanted tokens."""
        return self.completions[self.row, self.unit]

    @cached_property
    def starts(self) -> Tensor:
        """[n] int64, tokens of each prompt."""
        return self.lengths(self.prompt_ids)

    @cached_property
    def distinct_prompts(self) -> tuple[list[Tensor], Tensor]:
        """The different prompts, and [n] int64, which of them each row has."""
        first: dict[tuple[int, ...], int] = {}
        prompts: list[Tensor] = []
        owner = []
        for ids in self.prompt_ids:
            key = tuple(ids.tolist())
            if key not in first:
                first[key] = len(prompts)
                prompts.append(ids)
            owner.append(first[key])
        return prompts, torch.tensor(owner, device=self.read.device)

    @property
    def repeats_prompts(self) -> bool:
        """Whether a prompt has several rows."""
        return len(self.distinct_prompts[0]) < len(self.prompt_ids)

    def whole(self) -> tuple[Tensor, Tensor]:
        """Prompt and completion one after the other: ([n, S] int64, where each wanted token is predicted in [n * S])."""
        prompts = self.padded(self.prompt_ids)
        columns = torch.arange(self.completions.shape[1], device=prompts.device)
        room = prompts.new_full(self.completions.shape, self.pad_id)
        token_ids = torch.cat([prompts, room], dim=1).scatter(1, self.starts[:, None] + columns, self.completions)
        # The last token of a row predicts nothing that is asked for.
        token_ids = token_ids[:, : max(int((self.starts + self.read).max()) - 1, 1)]
        return token_ids, self.row * token_ids.shape[1] + self.starts[self.row] - 1 + self.unit

    def padded(self, ids: Sequence[Tensor]) -> Tensor:
        """[m, L] int64, padded on the right."""
        return nn.utils.rnn.pad_sequence(list(ids), batch_first=True, padding_value=self.pad_id).to(self.read.device)

    def lengths(self, ids: Sequence[Tensor]) -> Tensor:
        """[m] int64."""
        return torch.tensor([len(one) for one in ids], device=self.read.device)
