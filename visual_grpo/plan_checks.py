"""What a resolved config must not ask for: settings that do not fit one another, and settings that nothing would read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from visual_grpo.adapters.protocol import PolicyAdapter, SamplingConfig
from visual_grpo.combination import check_combination
from visual_grpo.config import RunConfig, merge
from visual_grpo.errors import UserError, did_you_mean
from visual_grpo.stack import MethodStack

__all__ = [
    "check_adapter",
    "check_loss",
    "check_rewards",
    "check_sampling",
    "check_surrogate",
    "check_temperature",
    "check_unread",
]

CLIPS: dict[str, tuple[str, ...]] = {
    "cispo": ("ratio.clip_low",),
    "sapo": ("ratio.clip_low", "ratio.clip_high"),
    "vespo": ("ratio.clip_low", "ratio.clip_high"),
}
"""Bounds that a surrogate of the core does not read."""


def check_adapter(name: str, adapter: type[PolicyAdapter], stack: MethodStack) -> None:
    """Refuse a model that does not have what the methods train.

    Args:
        name: of the adapter.
        adapter: its class.
        stack: the methods.

    Raises:
        UserError: naming the methods and what they need.
    """
    needs = stack.needs
    names = ", ".join(stack.methods) or "grpo"
    if not (needs.kinds and needs.unit_kinds):
        wanted = "; ".join(
            f"{each}: {' or '.join(sorted(method.needs.unit_kinds))} of {' or '.join(sorted(method.needs.kinds))}"
            for each, method in stack.methods.items()
        )
        raise UserError(f"methods {names} cannot be stacked: no model has the units that all of them need ({wanted})")
    if adapter.kind not in needs.kinds or not (adapter.unit_kinds & needs.unit_kinds):
        raise UserError(
            f"method {names} cannot train adapter {name!r}: it needs a model of kind "
            f"{' or '.join(sorted(needs.kinds))} "
            f"that replays {' or '.join(sorted(needs.unit_kinds))} units, but this one is {adapter.kind} and replays "
            f"{' and '.join(sorted(adapter.unit_kinds))}"
        )
    if needs.input_gradients and not adapter.input_gradients:
        raise UserError(
            f"method {names} cannot train adapter {name!r}: it needs gradients to the model's inputs, which this "
            "adapter does not give; use text_lm"
        )
    if needs.given_rows and not adapter.given_rows:
        raise UserError(
            f"method {names} cannot train adapter {name!r}: it trains on texts that are given, which this "
            "adapter does not read; use text_lm"
        )


def check_loss(config: RunConfig, stack: MethodStack, unit_kinds: Collection[str], sampling: Any) -> None:
    """Refuse settings of the loss that do not fit what is replayed: `unit_kinds` that the adapter and the methods share.

    Raises:
        UserError: naming the key and what fits.
    """
    kl, loss = config.kl, config.loss
    if kl.beta > 0 and kl.estimator == "gaussian" and "transition" not in unit_kinds:
        raise UserError(
            "kl.estimator=gaussian needs denoising transitions; use k3 for tokens, prediction for noise pairs"
        )
    denoises = bool({"transition", "noise_pair"} & set(unit_kinds))
    if kl.beta > 0 and kl.estimator in ("prediction", "velocity") and not denoises:
        raise UserError(f"kl.estimator={kl.estimator} needs a denoising model; use kl.estimator=k3 for tokens")
    if kl.importance and kl.estimator in ("gaussian", "prediction", "velocity"):
        raise UserError(
            f"kl.importance corrects estimates from log-probs (k1, k2, k3), and kl.estimator={kl.estimator} is none: leave it out"
        )
    if loss.mask_truncated and denoises:
        raise UserError("loss.mask_truncated masks texts that hit a length limit; pictures have none: leave it out")
    if loss.mask_truncated and not getattr(sampling, "stop_on_eos", True):
        raise UserError(
            "loss.mask_truncated masks texts that hit the length limit, and with sampling.stop_on_eos=false all of them do: "
            "nothing would be trained. Set one of the two back"
        )
    for name in ("top_entropy", "off_policy_max"):
        if getattr(loss, name) is not None and denoises:
            raise UserError(f"loss.{name} is for tokens, and this model has none: leave it out")
    updates = config.train.updates_per_step * config.train.epochs_per_step
    same = updates == 1 and config.ratio.old == "auto" and not sampling.uses_engine
    if loss.off_policy_max is not None and same:
        raise UserError(
            "loss.off_policy_max compares with the old log-probs, from which the only update on a rollout does not differ: leave "
            "it out, or set train.updates_per_step or train.epochs_per_step above 1, or ratio.old=sampler"
        )
    lengths = loss.aggregation in ("fixed_length", "token_sum_over_length")
    if lengths and loss.max_length is None and getattr(sampling, "max_new_tokens", None) is None:
        raise UserError(
            f"loss.aggregation={loss.aggregation} divides by a length, and this model's sampler has no limit: set "
            "loss.max_length"
        )
    if loss.max_length is not None and not lengths and stack.provider("aggregate") is None:
        raise UserError(
            f"loss.max_length is the divisor of fixed_length and token_sum_over_length; loss.aggregation={loss.aggregation} does "
            "not read it: leave it out"
        )


def check_surrogate(config: RunConfig, surrogate_by: str | None) -> None:
    """Refuse options of the surrogate that the one in use does not read.

    Args:
        config: of the run.
        surrogate_by: the method of the stack that has a surrogate of its own, if one does.

    Raises:
        UserError: naming the keys.
    """
    ratio, loss = config.ratio, config.loss
    bounds = [f"ratio.{key}" for key in ("dual_clip", "delta") if getattr(ratio, key) is not None]
    level = ["ratio.level"] if ratio.level != "token" else []
    if surrogate_by is not None:
        unread = [*bounds, *level, *(["loss.surrogate"] if loss.surrogate != "clipped" else [])]
        if unread:
            raise UserError(
                f"method {surrogate_by!r} has a loss of its own, which does not read {' and '.join(unread)}: leave it out "
                "(a method before it in the stack may have set it)"
            )
    elif bounds and loss.surrogate != "clipped":
        raise UserError(
            f"{' and '.join(bounds)} bounds the ratio of loss.surrogate=clipped; {loss.surrogate} does not read it: leave it out"
        )
    elif level and loss.surrogate == "vespo":
        raise UserError(
            f"loss.surrogate=vespo weighs whole sequences and reads no ratio.level ({ratio.level}): use token"
        )
    elif loss.surrogate == "cispo" and ratio.clip_high < 1:
        raise UserError(
            f"loss.surrogate=cispo reads ratio.clip_high ({ratio.clip_high:g}) as the cap of the ratio itself; below 1 it "
            "cuts every ratio, also that of an unchanged policy. Set ratio.clip_high=5 (its usual value)"
        )


def check_unread(config: RunConfig, stack: MethodStack, defaults: Sequence[Mapping[str, Any]]) -> None:
    """Refuse core options that the user has set and that nothing in this stack reads.

    Args:
        config: of the run.
        stack: its methods.
        defaults: of the methods, in stack order: what one of them sets is no wish of the user's.

    Raises:
        UserError: naming the method, or the surrogate of the core, and the keys.
    """
    usual: dict[str, Any] = {}
    for layer in defaults:
        usual = merge(usual, layer)

    def chosen(key: str) -> bool:
        section, _, name = key.partition(".")
        values = getattr(config, section)
        usually = usual.get(section, {}).get(name, type(values).model_fields[name].default)
        return bool(getattr(values, name) != usually)

    own = CLIPS.get(config.loss.surrogate, ()) if stack.provider("surrogate") is None else ()
    readers: dict[str, Sequence[str]] = {f"loss.surrogate={config.loss.surrogate}": own}
    readers |= {f"method {name!r}": method.unread(config) for name, method in stack.methods.items()}
    for reader, keys in readers.items():
        given = [key for key in keys if chosen(key)]
        if given:
            raise UserError(f"{reader} does not read {' and '.join(given)}: leave it out")


def check_temperature(stack: MethodStack, sampling: SamplingConfig) -> None:
    """Refuse greedy samples in training: those of a prompt would all be the same.

    Raises:
        UserError: naming the key.
    """
    if getattr(sampling, "temperature", 1.0) == 0 and stack.provider("rollout") is None:
        raise UserError(
            "sampling.temperature is 0, so all answers to a prompt would be the same and nothing could be learned: use 1 or so, "
            "and eval.sampling.temperature=0 for greedy evaluations"
        )


def check_sampling(
    config: RunConfig,
    adapter: type[PolicyAdapter],
    unit_kinds: Collection[str],
    sampling: SamplingConfig,
    eval_sampling: SamplingConfig,
) -> None:
    """Refuse options of sampler and prompts that the model does not have, or that would do nothing.

    Raises:
        UserError: naming the key.
    """
    if adapter.kind == "diffusion" and any(part.system_prompt is not None for _, part in config.data.sets()):
        raise UserError("data.system_prompt is of chat templates, and this model takes plain prompts: leave it out")
    adapter.check_sampling(sampling, "sampling")
    adapter.check_sampling(eval_sampling, "eval.sampling")
    sampling.check_use(unit_kinds)
    eval_sampling.check_evaluation(config.eval.sampling)


def check_rewards(config: RunConfig, stack: MethodStack) -> None:
    """Refuse a run without a reward to train on, or with a combination that cannot work.

    The names are looked up when the suite is built, before the model.

    Args:
        config: of the run.
        stack: its methods.

    Raises:
        UserError: naming the key.
    """
    if all(reward.eval_only for reward in config.rewards.values()):
        raise UserError(
            "rewards: there is none to train on; name at least one that is not eval_only, such as rewards: {geneval: 1.0}"
        )
    weights = [reward.weight for reward in config.rewards.values() if not reward.eval_only]
    if stack.needs.compares_rewards and ":" not in config.combine.how and not any(weights):
        raise UserError(
            "rewards: every weight is 0, so all answers count alike and nothing could be learned; give one a weight, and make "
            "those that are only watched eval_only"
        )
    for name, reward in config.rewards.items() if config.data.sources else ():
        wanted = (reward.applies or {}).get("task", [])
        for task in wanted if isinstance(wanted, list) else [wanted]:
            if task not in config.data.sources:
                raise UserError(
                    f"rewards.{name}.applies names task {task!r}, but data.sources has "
                    f"{', '.join(config.data.sources)}.{did_you_mean(str(task), config.data.sources)}"
                )
    check_combination(config, stack.provider("advantages"))
