"""Build the parts of a run from its plan, train, export, and write the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from visual_grpo.api import Plan
from visual_grpo.checkpoint import export_model
from visual_grpo.combination import row_combination
from visual_grpo.config import DataConfig, to_yaml
from visual_grpo.data import PromptRow, load_prompts
from visual_grpo.distributed import Ranks
from visual_grpo.errors import UserError, did_you_mean
from visual_grpo.exports import load_into
from visual_grpo.held_out import weights_to_export
from visual_grpo.out_of_memory import memory_errors
from visual_grpo.policy import Policy
from visual_grpo.resumption import MAY_CHANGE
from visual_grpo.reward_runner import RewardSpec
from visual_grpo.rollouts.connect import connect, start
from visual_grpo.run_folder import RunFolder
from visual_grpo.scoring import RewardSuite
from visual_grpo.selection import BEST
from visual_grpo.trainer import Result, Trainer
from visual_grpo.writer import RunWriter


def build_trainer(plan: Plan, folder: RunFolder, ranks: Ranks) -> Trainer:
    """Load prompts, rewards and the model, cheapest first, so that a mistake shows before weights are read.

    Raises:
        UserError: a prompt set, reward, model path or geometry that is wrong.
    """
    config = plan.config
    train_prompts, eval_prompts = read_prompts(plan)
    suite = build_suite(plan, ranks.device)
    check_applies(suite.specs, train_prompts, eval_prompts)
    torch.manual_seed(config.train.seed)
    adapter = plan.adapter_class.load(config.model, device=ranks.device, sampling=plan.sampling)
    policy = Policy(adapter, config.model, seed=config.train.seed)
    if config.model.init is not None:
        load_into(policy, config.model.init, "model.init")
    for rows, sampling in ((train_prompts, plan.sampling), (eval_prompts, plan.eval_sampling)):
        adapter.check_prompts([row.prompt for row in rows], [row.metadata for row in rows], sampling)
    engine = connect(config, plan.sampling, folder.path)
    writer = RunWriter(folder, config, main=ranks.main, unit="tokens" if plan.media == "texts" else "images")
    try:
        if engine is not None:
            start(engine, policy, plan.sampling)
        return Trainer(
            config,
            policy=policy,
            stack=plan.stack,
            suite=suite,
            train_prompts=train_prompts,
            eval_prompts=eval_prompts,
            sampling=plan.sampling,
            eval_sampling=plan.eval_sampling,
            ranks=ranks,
            writer=writer,
        )
    except BaseException:
        writer.close()
        if engine is not None:
            engine.close()
        raise


def read_prompts(plan: Plan) -> tuple[list[PromptRow], list[PromptRow]]:
    """Training and held-out prompts.

    Raises:
        UserError: a set that cannot be read, is too small for a step, or shares prompts with the other.
    """
    config = plan.config
    train_prompts = load_prompts(config.data)
    eval_prompts = load_prompts(eval_data(plan))
    if len(train_prompts) < config.train.prompts_per_step:
        raise UserError(
            f"train.prompts_per_step ({config.train.prompts_per_step}) is more than the {len(train_prompts)} prompts of "
            f"{', '.join(repr(part.source) for _, part in config.data.sets())}; use {len(train_prompts)} or fewer"
        )
    for method in plan.stack.methods.values():
        method.check_prompts(train_prompts)
    check_balance(train_prompts, config.data)
    check_disjoint(train_prompts, eval_prompts, config)
    return train_prompts, eval_prompts


def check_applies(
    specs: Sequence[RewardSpec], train_prompts: Sequence[PromptRow], eval_prompts: Sequence[PromptRow]
) -> None:
    """Refuse a reward whose `applies` fits no prompt: it would score nothing.

    Raises:
        UserError: naming the reward, and the key where no prompt has it.
    """
    for spec in specs:
        rows = eval_prompts if spec.eval_only else train_prompts
        if not isinstance(spec.applies, Mapping) or any(spec.matches(row.metadata) for row in rows):
            continue
        known = list(dict.fromkeys(key for row in rows for key in row.metadata))
        absent = [key for key in spec.applies if key not in known]
        why = (
            f"no prompt has the column {absent[0]!r}.{did_you_mean(absent[0], known)}" if absent else "no value is so."
        )
        raise UserError(
            f"rewards.{spec.name}.applies {dict(spec.applies)} fits none of the {len(rows)} prompts: {why} Columns: "
            f"{', '.join(known)}"
        )


def check_balance(rows: Sequence[PromptRow], data: DataConfig) -> None:
    """Refuse a key of `data.balance` that no prompt has: nothing would be balanced.

    Raises:
        UserError: with the nearest key.
    """
    known = list(dict.fromkeys(key for row in rows for key in row.metadata))
    if data.balance is not None and data.balance not in known:
        raise UserError(
            f"data.balance is {data.balance!r}, but no prompt has such a column.{did_you_mean(data.balance, known)} Columns: "
            f"{', '.join(known)}. Name one of them, or set data.balance=null"
        )


def build_suite(plan: Plan, device: torch.device) -> RewardSuite:
    """The rewards, without their engines.

    Raises:
        UserError: a parameter that is wrong, or a reward that reads what the model does not make.
    """
    combine = plan.config.combine
    suite = RewardSuite(
        plan.config.rewards, device=device, gate=combine.gate, closed=combine.closed, combine=row_combination(combine)
    )
    suite.check_media([plan.media], model=f"adapter {plan.config.model.adapter!r}")
    return suite


def eval_data(plan: Plan) -> DataConfig:
    """Where held-out prompts come from: `eval.source`, or the held-out split of `data.source`; of tasks the same, each.

    Raises:
        UserError: `eval.source` with several tasks, which have their held-out prompts each.
    """
    data, evaluation = plan.config.data, plan.config.eval
    changed: dict[str, Any] = {"split": evaluation.split, "limit": None}
    if not data.sources:
        return DataConfig(**{**data.model_dump(), **changed, "source": evaluation.source or data.source})
    if evaluation.source is not None:
        raise UserError(
            f"eval.source is {evaluation.source!r}, but data.sources has several tasks: set data.sources.TASK.heldout"
        )
    tasks = {
        name: {**part.model_dump(), **changed, "source": part.heldout or part.source}
        for name, part in data.sources.items()
    }
    return DataConfig(**{**data.model_dump(), "sources": tasks})


def check_disjoint(train_prompts: Any, eval_prompts: Any, config: Any) -> None:
    """Refuse held-out prompts that are also trained on.

    Raises:
        UserError: naming one shared prompt.
    """
    shared = {r.prompt for r in train_prompts} & {r.prompt for r in eval_prompts}
    if shared:
        now = f"eval.source (now {config.eval.source or config.data.source!r}, split {config.eval.split!r})"
        where = "data.sources.TASK.heldout" if config.data.sources else now
        raise UserError(
            f"{len(shared)} held-out prompts are also training prompts, for example {min(shared)!r}: a held-out score would "
            f"mean nothing. Set {where} to prompts that the training prompts do not hold"
        )


def run_plan(
    plan: Plan,
    *,
    resume: bool,
    out: str | Path | None,
    root: str | Path,
    ranks: Ranks | None = None,
    moved: Sequence[str] = (),
) -> Result:
    """Train to the end, export the model into `model/` of the run folder and write the report.

    Args:
        plan: checked.
        resume: go on with the run in the folder.
        out: exactly this folder, in place of one in `root` by the run's name.
        root: the folder of all runs.
        ranks: the process group of a pipeline, whose stages share it; it is left open.
        moved: keys of paths into the pipeline's folder, which may lie elsewhere when the run goes on.
    """
    with nullcontext(ranks) if ranks is not None else Ranks() as ranks:
        made = None
        if ranks.main:
            fixed = {"train.micro_batch"} if plan.stack.passes_matter(plan.config) else set()
            made = RunFolder.create(
                root,
                plan.config.name,
                config_yaml=to_yaml(plan.config),
                resume=resume,
                out=out,
                may_change=[*(key for key in MAY_CHANGE if key not in fixed), *moved],
            )
        path = ranks.broadcast(str(made.path) if made is not None else None)
        folder = made or RunFolder(path, resumed=resume)
        try:
            return _train(plan, folder, ranks, resume=resume)
        except UserError:
            if ranks.main:
                folder.discard()
            raise
        finally:
            folder.close()


def _train(plan: Plan, folder: RunFolder, ranks: Ranks, *, resume: bool) -> Result:
    with memory_errors():
        trainer = build_trainer(plan, folder, ranks)
        return _run(trainer, folder, resume=resume)


def _run(trainer: Trainer, folder: RunFolder, *, resume: bool) -> Result:
    try:
        if resume:
            trainer.resume()
        result = trainer.run()
        if trainer.ranks.main:
            export(trainer)
        trainer.writer.finish(result)
        return replace(result, folder=str(folder.path))
    except KeyboardInterrupt:
        trainer.writer.message(
            f"interrupted after step {trainer.step}; the checkpoint of step {trainer.progress.saved} is kept: go on with --resume"
            if trainer.progress.saved
            else f"interrupted after step {trainer.step}, before the first checkpoint: --resume begins again"
        )
        raise
    finally:
        trainer.suite.close()
        trainer.writer.close()
        if trainer.policy.adapter.engine is not None:
            trainer.policy.adapter.engine.close()


def export(trainer: Trainer) -> None:
    """The trained model in the plain library's format: `model/` as last evaluated, `best/` if the best weights are others."""
    policy, folder = trainer.policy, trainer.writer.folder.path
    chosen = weights_to_export(policy, trainer.config)
    targets = {"model": chosen}
    if BEST in policy.sets and chosen != BEST:
        targets["best"] = BEST
    for name, weights in targets.items():
        with nullcontext() if weights is None else policy.weights(weights):
            export_model(policy, folder / name)
