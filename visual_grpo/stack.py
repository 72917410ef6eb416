"""Several methods as one: who fills an exclusive hook, and the order of the chained ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from visual_grpo.advantages import soft_clip
from visual_grpo.config import RunConfig, validate
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig, Needs
from visual_grpo.types import MicroBatch, RewardBatch, RolloutBatch

EXCLUSIVE = ("rollout", "score", "advantages", "surrogate", "aggregate")
CHAINED = (
    "select_prompts",
    "before_rollout",
    "after_rollout",
    "shape_rewards",
    "after_score",
    "filter_groups",
    "adjust_advantages",
    "filter_rows",
    "unit_weights",
    "kl_scale",
    "before_updates",
    "live_weights",
    "regulariser_coefficients",
    "regularise",
    "after_step",
)


class MethodStack:
    """Several methods as one. An empty stack is vanilla GRPO."""

    def __init__(self, methods: Mapping[str, Method[Any]]) -> None:
        """Check that no exclusive hook has two providers.

        Raises:
            UserError: two methods fill the same exclusive hook; names both and the hook.
        """
        self.methods = dict(methods)
        self._core: Method[Any] = Method(MethodConfig())
        self._providers: dict[str, Method[Any]] = {}
        for hook in EXCLUSIVE:
            names = [name for name, method in self.methods.items() if fills(method, hook)]
            if len(names) > 1:
                raise UserError(
                    f"methods {names[0]!r} and {names[1]!r} cannot be stacked: both fill the exclusive hook {hook!r}; remove one"
                )
            self._providers[hook] = self.methods[names[0]] if names else self._core

    @classmethod
    def build(cls, config: RunConfig) -> MethodStack:
        """Instantiate the stack of a resolved config."""
        methods: dict[str, Method[Any]] = {}
        for name, params in named_methods(config.method):
            kind = method_class(name)
            if name in methods:
                raise UserError(f"method {name!r} stands twice in the stack; remove one")
            methods[name] = kind(validate(kind.Config, params, where=f"method.{name}"))
        return cls(methods)

    def __getattr__(self, hook: str) -> Any:
        """The provider of an exclusive hook."""
        if hook in EXCLUSIVE:
            return getattr(self._providers[hook], hook)
        raise AttributeError(hook)

    def provider(self, hook: str) -> str | None:
        """The method that fills an exclusive hook; None where the core does."""
        return next((name for name, method in self.methods.items() if fills(method, hook)), None)

    def provides(self, hook: str) -> bool:
        """True where a method of the stack fills `hook`."""
        return any(fills(method, hook) for method in self.methods.values())

    def chain(self, hook: str, value: Any, *args: Any) -> Any:
        """Run a chained hook in stack order: `value = method.hook(value, *args)`."""
        for method in self.methods.values():
            if fills(method, hook):
                value = getattr(method, hook)(value, *args)
        return value

    def after_score(
        self, rollouts: RolloutBatch, rewards: RewardBatch, state: LoopState
    ) -> tuple[RolloutBatch, RewardBatch]:
        """The chained hook that carries two values."""
        for method in self.methods.values():
            rollouts, rewards = method.after_score(rollouts, rewards, state)
        return rollouts, rewards

    def regularise(
        self, micro: MicroBatch, coefficients: Tensor, weights: Tensor, state: LoopState
    ) -> dict[str, Tensor]:
        """All methods' terms by name."""
        terms: dict[str, Tensor] = {}
        for name, method in self.methods.items():
            for key, value in method.regularise(micro, coefficients, weights, state).items():
                terms[f"{name}/{key}"] = value
        return terms

    def shaped(self, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> RewardBatch:
        """`shape_rewards` of the whole stack, with the clean scores kept."""
        start = replace(rewards, clean=rewards) if rewards.clean is None else rewards
        out: RewardBatch = self.chain("shape_rewards", start, rollouts, state)
        return rewards if out is start else replace(out, clean=start.clean)

    def adjusted(self, advantages: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """The core's clamps, then `adjust_advantages` of the stack."""
        options = state.config.advantage
        if options.soft_clip is not None:
            advantages = soft_clip(advantages, options.soft_clip)
        if options.clip is not None:
            advantages = advantages.clamp(-options.clip, options.clip)
        out: Tensor = self.chain("adjust_advantages", advantages, rewards, rollouts, state)
        return out

    def passes_matter(self, config: RunConfig) -> bool:
        """True where the loss depends on which rows share a forward pass."""
        averaged_by_pass = config.loss.aggregation == "micro_batch_token_mean"
        return averaged_by_pass or any(method.passes_matter() for method in self.methods.values())

    @property
    def needs(self) -> Needs:
        """Everything the stack asks for."""
        all_needs = [m.needs for m in self.methods.values()]
        return Needs(
            unit_kinds=frozenset.intersection(Needs().unit_kinds, *(n.unit_kinds for n in all_needs)),
            kinds=frozenset.intersection(Needs().kinds, *(n.kinds for n in all_needs)),
            weight_sets=frozenset().union(*(n.weight_sets for n in all_needs)),
            reference=any(n.reference for n in all_needs),
            whole_groups=any(n.whole_groups for n in all_needs),
            couples_units=any(n.couples_units for n in all_needs),
            input_gradients=any(n.input_gradients for n in all_needs),
            single_samples=any(n.single_samples for n in all_needs),
            given_rows=any(n.given_rows for n in all_needs),
            compares_rewards=all(n.compares_rewards for n in all_needs),
            idle_steps=any(n.idle_steps for n in all_needs),
        )

    def state_dict(self) -> dict[str, Any]:
        """State of every method, by name."""
        return {name: method.state_dict() for name, method in self.methods.items()}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        for name, method in self.methods.items():
            method.load_state_dict(values.get(name, {}))


def fills(method: Method[Any] | type[Method[Any]], hook: str) -> bool:
    """True where the method's class has its own version of `hook`."""
    kind = method if isinstance(method, type) else type(method)
    return getattr(kind, hook) is not getattr(Method, hook)


def named_methods(items: list[dict[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """The stack as (name, options) pairs in order."""
    return [(name, params) for item in items for name, params in item.items()]


def method_class(name: str) -> type[Method[Any]]:
    """Look a method up by name or `package.module:Class`.

    Raises:
        UserError: unknown, or the object is no `Method` class.
    """
    from visual_grpo.registry import METHODS

    found = METHODS.get(name)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"method {name!r} leads to {found!r}, which is no subclass of visual_grpo.method.Method")
    return found
