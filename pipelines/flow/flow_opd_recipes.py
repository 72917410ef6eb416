"""Recipes of Flow-OPD: pipelines of teachers, a cold start and the student; and GRPO on the mixed reward to compare with."""

from __future__ import annotations

from typing import Any

from visual_grpo.config import (
    AdvantageConfig,
    DataConfig,
    EmaConfig,
    EvalConfig,
    KlConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RatioConfig,
    RewardConfig,
    RunConfig,
    TaskSource,
    TrainConfig,
)
from visual_grpo.config_stages import PipelineConfig
from visual_grpo.pipelines.flow.flow_grpo import scenes, sd35_medium

# -- the testbed: scenes (GenEval) and words (OCR) ------------------------------------------------------------------------------

TASKS = {"scenes": "testbed/scenes", "words": "testbed/words"}
BASE = "testbed/sd3_tiny"


def _rewards(*tasks: str) -> dict[str, RewardConfig]:
    """Each task's own reward, half of it partial credit; several tasks weigh alike."""
    scene = RewardConfig(params={"mode": "mixed", "detector": "testbed"}, applies={"task": "scenes"})
    read = RewardConfig(weight=0.5, params={"engine": "testbed"}, applies={"task": "words"})
    like = RewardConfig(weight=0.5, applies={"task": "words"})
    found = {"geneval": scene, "ocr": read, "word_likeness": like}
    if len(tasks) > 1:
        return found
    names = {"scenes": ("geneval",), "words": ("ocr", "word_likeness")}[tasks[0]]
    return {name: found[name].model_copy(update={"applies": None}) for name in names}


def _expert(task: str) -> RunConfig:
    """V-GRPO on one task, as `quickstart` in half of the steps."""
    return _v_grpo(
        f"{task}_expert",
        f"V-GRPO on the testbed's {task} alone",
        method=[{"v_grpo": {"pairs": 3}}],
        data=DataConfig(source=TASKS[task], balance="tag"),
        rewards=_rewards(task),
        train=_v_grpo_training(30, lr=5e-4),
        eval=EvalConfig(every=0, samples=240, final_samples=240, batch=60),
    )


def _v_grpo(name: str, summary: str, **sections: Any) -> RunConfig:
    method = sections.pop("method")
    return scenes(
        name,
        method,
        summary,
        sampling={"steps": 6, "guidance": 1.0},
        advantage=AdvantageConfig(soft_clip=5.0),
        kl=KlConfig(beta=0.3, estimator="prediction"),
        **sections,
    )


def _v_grpo_training(steps: int, *, lr: float) -> TrainConfig:
    return TrainConfig(
        steps=steps,
        prompts_per_step=8,
        group_size=12,
        micro_batch=96,
        optimizer=OptimizerConfig(lr=lr, betas=(0.9, 0.99), warmup_steps=5, schedule="linear"),
        ema=EmaConfig(decay=0.9, every=1),
    )


def _both_tasks() -> dict[str, Any]:
    """Prompts, rewards and evaluation of what knows both tasks."""
    return {
        "data": DataConfig(sources={task: TaskSource(source=path) for task, path in TASKS.items()}, balance="tag"),
        "rewards": _rewards(*TASKS),
        "eval": EvalConfig(every=0, samples=240, final_samples=480, batch=60),
    }


def _student(path: str, *, anchor_beta: float = 0.04) -> RunConfig:
    """Distillation of both experts: 8 prompts x 2 a step, many small steps, as every state of a row is a target."""
    teachers = {task: f"stage://{task}" for task in TASKS}
    return scenes(
        "student",
        [
            "flow_grpo",
            {"flow_opd": {"teachers": teachers, "anchor": BASE, "anchor_beta": anchor_beta}},
            "task_cycle",
        ],
        "Flow-OPD on the testbed's scenes and words",
        model=ModelConfig(adapter="sd3", path=path),
        sampling={"steps": 6, "guidance": 1.0, "noise_scale": 0.7},
        train=TrainConfig(
            steps=80,
            prompts_per_step=8,
            group_size=2,
            micro_batch=16,
            updates_per_step=1,
            optimizer=OptimizerConfig(lr=4e-4, betas=(0.9, 0.99), warmup_steps=5, schedule="linear"),
            ema=EmaConfig(decay=0.9, every=1),
        ),
        **_both_tasks(),
    )


def _tiny(name: str, summary: str, *, cold_start: bool = True, anchor_beta: float = 0.04) -> PipelineConfig:
    stages: dict[str, Any] = {task: _expert(task) for task in TASKS}
    if cold_start:
        stages["mean"] = {"merge": list(TASKS)}
    stages["student"] = _student("stage://mean" if cold_start else BASE, anchor_beta=anchor_beta)
    return PipelineConfig(name=name, summary=summary, stages=stages)


def flow_opd_tiny() -> PipelineConfig:
    """Two experts of V-GRPO, the mean of their weights, and a student distilled from both on its own trajectories."""
    return _tiny("flow_opd_tiny", "Flow-OPD unites an expert of scenes and one of words in one tiny SD3")


def flow_opd_no_cold_start_tiny() -> PipelineConfig:
    """`flow_opd_tiny` with a student that starts from the base model."""
    return _tiny("flow_opd_no_cold_start_tiny", "flow_opd_tiny without its cold start", cold_start=False)


def flow_opd_no_mar_tiny() -> PipelineConfig:
    """`flow_opd_tiny` without the pull to the anchor."""
    return _tiny("flow_opd_no_mar_tiny", "flow_opd_tiny without its anchor", anchor_beta=0.0)


def flow_opd_sft_tiny() -> PipelineConfig:
    """`flow_opd_tiny` whose cold start is supervised: the base model is fitted to samples of both experts."""
    stages: dict[str, Any] = {task: _expert(task) for task in TASKS}
    teachers = {task: f"stage://{task}" for task in TASKS}
    stages["sft"] = scenes(
        "sft",
        [{"flow_sft": {"teachers": teachers}}, "task_cycle"],
        "Supervised cold start on samples of both experts",
        sampling={"steps": 6, "guidance": 1.0},
        train=TrainConfig(
            steps=40,
            prompts_per_step=32,
            group_size=1,
            micro_batch=32,
            optimizer=OptimizerConfig(lr=3e-4, betas=(0.9, 0.99), warmup_steps=5, schedule="linear"),
            ema=EmaConfig(decay=0.9, every=1),
        ),
        **_both_tasks(),
    )
    stages["student"] = _student("stage://sft")
    return PipelineConfig(name="flow_opd_sft_tiny", summary="flow_opd_tiny with a supervised cold start", stages=stages)


def grpo_mix_tiny() -> RunConfig:
    """V-GRPO on the rewards of both tasks, with as many network calls as both experts and the student of `flow_opd_tiny`."""
    return _v_grpo(
        "grpo_mix_tiny",
        "V-GRPO on the testbed's scenes and words at once, what Flow-OPD is compared with",
        method=[{"v_grpo": {"pairs": 3}}, "task_cycle"],
        train=_v_grpo_training(83, lr=4e-4),
        **_both_tasks(),
    )


# -- SD3.5-medium ---------------------------------------------------------------------------------------------------------------

LORA = LoraConfig(rank=32, alpha=64)
ROOT = "stabilityai/stable-diffusion-3.5-medium"
EXPERTS = {
    "geneval": {"params": {"mode": "partial", "detector": "mask2former"}},
    "ocr": {},
}


def _sd35_student(init: str) -> RunConfig:
    """The paper's student: 16 prompts x 16, cycle OCR 1 and GenEval 3, MAR 0.04.

    The authors' run on OCR alone has learning rate 3e-4 and micro-batches of 8. What they compare with, GRPO on the mixed reward,
    is 48 x 24 with 0.8 of each task's own reward and 0.2 DeQA, cycle GenEval 3, OCR 1, PickScore 1.
    """
    rewards = {name: RewardConfig(**settings, applies={"task": name}) for name, settings in EXPERTS.items()}
    tasks = {name: TaskSource(source=f"data/{name}/train.jsonl", heldout=f"data/{name}/test.jsonl") for name in EXPERTS}
    teachers = {name: f"stage://{name}" for name in EXPERTS}
    return sd35_medium(
        "student",
        [
            "flow_grpo",
            {"flow_opd": {"teachers": teachers, "anchor": "stage://deqa", "anchor_beta": 0.04}},
            {"task_cycle": {"steps": {"ocr": 1, "geneval": 3}}},
        ],
        "Flow-OPD on SD3.5-medium, GenEval and OCR",
        "geneval",
        model=ModelConfig(adapter="sd3", path=ROOT, dtype="bfloat16", lora=LORA, init=init),
        data=DataConfig(sources=tasks),
        rewards=rewards,
        ratio=RatioConfig(clip_low=1e-4, clip_high=1e-4),
        train=TrainConfig(
            steps=1000,
            prompts_per_step=16,
            group_size=16,
            updates_per_step=2,
            micro_batch=4,
            units_per_pass=1,
            rollout_batch=16,
            optimizer=OptimizerConfig(lr=1e-4, weight_decay=1e-4),
            ema=EmaConfig(decay=0.9, every=8),
        ),
        eval=EvalConfig(every=30, samples=480, final_samples=2048, batch=16, sampling={"steps": 40}),
    )


def _sd35_experts() -> dict[str, Any]:
    """Flow-GRPO on one reward each, and the anchor: 0.4 DeQA + 0.6 PickScore."""
    deqa = {
        "recipe": "flow_grpo_sd35_medium_pickscore",
        "rewards": {"deqa": {"weight": 0.4}, "pickscore": {"weight": 0.6}},
    }
    experts: dict[str, Any] = {name: {"recipe": f"flow_grpo_sd35_medium_{name}"} for name in EXPERTS}
    return {**experts, "deqa": deqa}


def flow_opd_sd35_medium() -> PipelineConfig:
    """The paper's pipeline on SD3.5-medium: experts by Flow-GRPO, the mean of their LoRAs, the student with the DeQA anchor.

    In place of the first three stages the public LoRAs of Flow-GRPO may be named in `teachers`. The length of the student's
    stage was not found; bfloat16 as in `flow_grpo_sd35_medium_geneval`.
    """
    return PipelineConfig(
        name="flow_opd_sd35_medium",
        summary="Flow-OPD on SD3.5-medium: experts of GenEval and OCR, their mean, and the student",
        stages={**_sd35_experts(), "mean": {"merge": list(EXPERTS)}, "student": _sd35_student("stage://mean")},
    )


def flow_opd_sft_sd35_medium() -> PipelineConfig:
    """`flow_opd_sd35_medium` with the supervised cold start; its length and batch are our choice."""
    student = _sd35_student("stage://sft")
    sft = {
        **student.explicit(),
        "name": "sft",
        "summary": "Supervised cold start on samples of the experts",
        "method": [
            {"flow_sft": {"teachers": {name: f"stage://{name}" for name in EXPERTS}, "pairs": 1}},
            {"task_cycle": {"steps": {"ocr": 1, "geneval": 3}}},
        ],
        "model": {**student.model.model_dump(), "init": None},
        "sampling": {**student.sampling, "steps": 40},
    }
    sft["train"] = {**sft["train"], "steps": 200, "group_size": 1, "prompts_per_step": 256, "updates_per_step": 1}
    return PipelineConfig(
        name="flow_opd_sft_sd35_medium",
        summary="Flow-OPD on SD3.5-medium with a supervised cold start",
        stages={**_sd35_experts(), "sft": sft, "student": student},
    )
