"""Another text reward of 0 or 1 whose verdicts are wrong with a known probability: to study training on noisy labels.

Source: the label noise of card s_grpo. Range 0 or 1. A verdict is flipped by a hash of seed, prompt and completion, so equal
answers to a prompt share one verdict, right or wrong, as with a verifier that errs on what it reads; any split of a batch and a
resumed run give the same values. Compare with the plain reward, `eval_only`.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardError, RewardOutput, RewardRequest, as_reward, register_reward, to_output
from visual_grpo.types import RewardStatus

__all__ = ["LabelNoise"]


@register_reward("label_noise")
class LabelNoise(Reward):
    """The verdict of `reward`, flipped with probability `flip`. Details: `flipped`, and those of the reward."""

    needs = frozenset({"texts"})

    def __init__(
        self, reward: str = "exact_match", *, params: dict[str, Any] | None = None, flip: float = 0.1, seed: int = 0
    ) -> None:
        """Choose whose verdicts are flipped.

        Args:
            reward: a text reward of 0 or 1.
            params: its own.
            flip: probability of a wrong verdict, in either direction.
            seed: of the flips.
        """
        if not 0 <= flip < 0.5:
            raise UserError(
                f"label_noise: flip must be at least 0 and below 0.5 (from there on labels say nothing), got {flip}"
            )
        self.flip, self.seed = flip, seed
        self._name, self._judge = reward, as_reward(reward, params=params)
        self.rows_per_call = self._judge.rows_per_call  # type: ignore[misc]
        if self._judge.needs - self.needs or self._judge.whole_groups:
            raise UserError(f"label_noise judges one text at a time, and reward {reward!r} reads more; use another")

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        found = to_output(self._judge(request), len(request), self._name)
        assert found.status is not None
        ok = found.status == RewardStatus.OK
        graded = ok & (found.values != 0) & (found.values != 1)
        if bool(graded.any()):
            raise RewardError(
                f"label_noise flips verdicts of 0 or 1, and reward {self._name!r} gave {float(found.values[graded][0]):g}; use "
                "one that says right or wrong"
            )
        flipped = self._flips(request.prompts, request.texts) & ok
        values = torch.where(flipped, 1 - found.values, found.values)
        return RewardOutput(
            values=values, status=found.status, details={**found.details, "flipped": flipped.to(torch.float32)}
        )

    def _flips(self, prompts: list[str], texts: list[str]) -> Tensor:
        """[N] bool."""

        def draw(prompt: str, text: str) -> float:
            key = f"{self.seed}\0{len(prompt)}\0{prompt}{text}".encode("utf-8", "surrogatepass")
            return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64

        return torch.tensor([draw(*pair) < self.flip for pair in zip(prompts, texts, strict=True)], dtype=torch.bool)

    def close(self) -> None:
        """Let the judge go."""
        self._judge.close()
