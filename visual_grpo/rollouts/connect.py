"""Find the engine that a run asks for and give it its first weights."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.config import RatioConfig, RunConfig
from visual_grpo.errors import UserError
from visual_grpo.rollouts.settings import VllmConfig

if TYPE_CHECKING:
    from visual_grpo.policy import Policy
    from visual_grpo.rollouts.engine import RolloutEngine

LEAST_TEMPERATURE = 0.01
"""vLLM's own bound (`_MAX_TEMP` in its sampling_params.py)."""


def check_engine(config: RunConfig, sampling: Any, eval_sampling: Any, processes: int) -> None:
    """Refuse settings of an engine that cannot work, before anything is loaded.

    Raises:
        UserError: naming the key and what to change.
    """
    if not (sampling.uses_engine or eval_sampling.uses_engine):
        if "vllm" in config.sampling:
            raise UserError(
                "sampling.vllm is set, but the model itself samples: set sampling.engine=vllm, or leave it out"
            )
        for key in ("correction", "correction_max", "correction_min"):
            if getattr(config.ratio, key) != RatioConfig.model_fields[key].default:
                raise UserError(
                    f"ratio.{key} weighs the samples of an engine, and the model itself samples: leave it out"
                )
        return
    if not sampling.uses_engine:
        raise UserError(
            "eval.sampling.engine=vllm needs sampling.engine=vllm: the engine is tested on training samples"
        )
    if eval_sampling.uses_engine and eval_sampling.vllm != sampling.vllm:
        raise UserError("eval.sampling.vllm differs from sampling.vllm: a run has one engine; set sampling.vllm alone")
    for key, used in (("sampling", sampling), ("eval.sampling", eval_sampling)):
        if used.uses_engine and 0 < used.temperature < LEAST_TEMPERATURE:
            raise UserError(
                f"{key}.temperature is {used.temperature:g}, and vLLM takes {LEAST_TEMPERATURE:g} in place of all below: use 0 "
                f"(greedy) or at least {LEAST_TEMPERATURE:g}"
            )
    if config.model.dtype == "float64":
        raise UserError("sampling.engine=vllm has no float64; set model.dtype to float32, bfloat16 or float16")
    if processes > 1:
        raise UserError(
            f"sampling.engine=vllm trains in one process in this version, the launcher started {processes}: start without it, "
            "or set sampling.engine=model"
        )
    correction = config.ratio.correction
    if config.loss.surrogate == "vespo" and correction.startswith("sequence"):
        raise UserError(
            f"loss.surrogate=vespo makes a product over the row itself, so ratio.correction={correction} would cut it twice; set "
            "ratio.correction=token_truncate"
        )


def connect(config: RunConfig, sampling: Any, run_folder: Path) -> RolloutEngine | None:
    """The engine, with the weights that it was started with; None where the model itself samples.

    Raises:
        UserError: it is not there, or serves no model.
    """
    if not sampling.uses_engine:
        return None
    settings: VllmConfig = sampling.vllm
    folder = run_folder / "sync"
    if settings.folder is not None:  # of others too, and emptied in the end: a name that is ours alone
        own = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:12]
        folder = Path(os.path.expanduser(settings.folder)) / f"visual-grpo-sync-{own}"
    if settings.mode == "server":
        from visual_grpo.rollouts.vllm_server import VllmServer

        return VllmServer(settings, folder=folder)
    from visual_grpo.rollouts.vllm_colocated import ColocatedVllm

    return ColocatedVllm(settings, config.model, folder=folder)


def start(engine: RolloutEngine, policy: Policy, sampling: Any) -> None:
    """Check that the engine serves the policy's model, and send its weights.

    Raises:
        UserError: it serves another model, or does not take the weights.
    """
    adapter: Any = policy.adapter
    engine.check(adapter, sampling)
    adapter.engine = engine
    engine.follow(policy)
