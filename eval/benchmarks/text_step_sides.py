"""The sides of the benchmark text_step_vs_trl: the toolkit's trainer, TRL's trainer, and the bare model calls of a step."""

from __future__ import annotations

import inspect
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LLM = {
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen3",
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        **LLM,
    },
    "smollm2_135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        **LLM,
    },
}
"""Configs of the models, whose weights are random: 3.2 M parameters, and the 135 M of SmolLM2-135M's architecture."""


@dataclass(frozen=True)
class Shape:
    """What one step works on, with which of `MODELS`, and how many steps are timed after how many others."""

    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    model: str = "tiny"
    warm_up: int = 1
    steps: int = 4
    our_rows: int | None = None
    """Completions that our side trains at once; None: all."""
    rival_rows: int | None = None
    """The same of TRL and the bare calls."""

    @property
    def rows(self) -> int:
        """Completions a step."""
        return self.prompts * self.group


SHAPES = {
    "short": Shape(prompts=8, group=8, prompt_tokens=108, new_tokens=64),
    "long": Shape(prompts=2, group=16, prompt_tokens=256, new_tokens=256),
    "vlm": Shape(prompts=2, group=16, prompt_tokens=1024, new_tokens=128),
    "long_135m": Shape(1, 16, 256, 256, model="smollm2_135m", warm_up=0, steps=1, our_rows=8, rival_rows=4),
    "vlm_135m": Shape(1, 16, 1024, 128, model="smollm2_135m", warm_up=0, steps=1, rival_rows=4),
}
"""Arithmetic, reasoning, and a picture's tokens before a short answer; the last two also on the larger model, where whole rows of
1,024 + 128 tokens, 16 at once, would want some 30 GB for activations (an estimate): rows at once are chosen for like memory."""
TINY = tuple(name for name, shape in SHAPES.items() if shape.model == "tiny")
LR = 1e-5
CLOCKS: dict[str, Callable[[], float]] = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}


def distinct_words(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Reward of both sides, in TRL's signature: the number of different words of a completion."""
    return [float(len(set(text.split()))) for text in completions]


def make_inputs(work: Path, shape: Shape) -> None:
    """Write the random model with a word-level tokenizer, and two prompt files, where they are not yet."""
    model = work / "model"
    if (model / "config.json").is_file():
        return
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    settings = MODELS[shape.model]
    count = settings["vocab_size"] - 3
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(count))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **special).save_pretrained(model)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).save_pretrained(model)
    generator = torch.Generator().manual_seed(0)
    for name, lines_wanted in (("train", 200), ("heldout", 8)):
        drawn = torch.randint(count, (lines_wanted, shape.prompt_tokens), generator=generator)
        lines = [" ".join(f"w{i}" for i in row) for row in drawn.tolist()]
        (work / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_config(work: Path, shape: Shape, seed: int) -> dict[str, Any]:
    """Our side's run, as a config file would state it."""
    return {
        "name": "text_step",
        "model": {"adapter": "text_lm", "path": str(work / "model")},
        "data": {"source": str(work / "train.txt")},
        "rewards": {f"{__spec__.name}:distinct_words": 1.0},
        "sampling": {"max_new_tokens": shape.new_tokens, "stop_on_eos": False},
        "loss": {"aggregation": "token_mean"},
        "train": {
            "steps": shape.warm_up + shape.steps,
            "prompts_per_step": shape.prompts,
            "group_size": shape.group,
            "micro_batch": shape.our_rows or shape.rows,
            "seed": seed,
            "optimizer": {"lr": LR, "schedule": "linear"},
        },
        "eval": {"source": str(work / "heldout.txt"), "every": 0},
        "self_test": {"enabled": False},
    }


class Clock:
    """Wall and CPU seconds by phase, step by step; CPU seconds (one thread) hardly feel other load on the machine."""

    def __init__(self) -> None:
        self._spent: dict[str, dict[str, float]] = {}
        self.steps: list[dict[str, dict[str, float]]] = []
        self.restart()

    def restart(self) -> None:
        """Begin a step now."""
        self._spent = {kind: defaultdict(float) for kind in CLOCKS}
        self._started = {kind: now() for kind, now in CLOCKS.items()}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's time to `name`."""
        started = {kind: now() for kind, now in CLOCKS.items()}
        try:
            yield
        finally:
            for kind, now in CLOCKS.items():
                self._spent[kind][name] += now() - started[kind]

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Add the time of every call of `owner.name` to `phase`."""
        called: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            with self.phase(phase):
                return called(*args, **options)

        setattr(owner, name, timed)

    def close_step(self) -> None:
        """End a step: `generate`, and `train` without what ran inside it under `other`, are its phases."""
        found = {}
        for kind, now in CLOCKS.items():
            spent, step = self._spent[kind], now() - self._started[kind]
            passes = spent["train"] - spent["other"]
            rest = step - spent["generate"] - passes
            found[kind] = {"generate": spent["generate"], "forward+backward": passes, "rest": rest, "step": step}
        self.steps.append(found)
        self.restart()


def _peak_mib() -> float:
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def _report(clock: Clock, loaded: float, shape: Shape) -> dict[str, Any]:
    """Result of a timed side; `loaded` is the peak before the first step."""
    peak = _peak_mib()
    return {
        "steps": clock.steps[shape.warm_up :],
        "memory_mib": {"peak": peak, "peak above the loaded model": peak - loaded},
    }


@contextmanager
def our_trainer(work: Path, shape: Shape, seed: int) -> Iterator[Any]:
    """The toolkit's own trainer before its first step."""
    from visual_grpo.api import plan
    from visual_grpo.build import build_trainer
    from visual_grpo.config import to_yaml
    from visual_grpo.distributed import Ranks
    from visual_grpo.run_folder import RunFolder

    made = plan(run_config(work, shape, seed))
    folder = RunFolder.create(work / "runs", made.config.name, config_yaml=to_yaml(made.config))
    with Ranks() as ranks:
        trainer = build_trainer(made, folder, ranks)
        yield trainer
        trainer.suite.close()
        trainer.writer.close()
    folder.close()


def side_ours(work: Path, shape: Shape, seed: int) -> dict[str, Any]:
    """Iterations of the toolkit's own trainer."""
    clock = Clock()
    with our_trainer(work, shape, seed) as trainer:
        loaded = _peak_mib()
        clock.watch(trainer.policy, "sample", "generate")
        clock.watch(trainer, "optimizer_step", "train")
        for name in ("gradient_norm", "step"):
            clock.watch(trainer.optimizer, name, "other")
        clock.restart()
        for _ in range(shape.warm_up + shape.steps):
            trainer.iteration()
            clock.close_step()
    return _report(clock, loaded, shape)


def trl_trainer(work: Path, shape: Shape, seed: int, **options: Any) -> Any:
    """TRL's trainer with the same settings; gradient checkpointing (its default) is off, as on our side."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(work / "trl"),
        per_device_train_batch_size=shape.rival_rows or shape.rows,
        gradient_accumulation_steps=shape.rows // (shape.rival_rows or shape.rows),
        num_generations=shape.group,
        max_completion_length=shape.new_tokens,
        generation_kwargs={"min_new_tokens": shape.new_tokens},
        max_steps=shape.warm_up + shape.steps,
        learning_rate=LR,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        seed=seed,
        **options,
    )
    prompts = (work / "train.txt").read_text(encoding="utf-8").splitlines()
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32),
        reward_funcs=distinct_words,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(work / "model"),
    )


def side_trl(work: Path, shape: Shape, seed: int) -> dict[str, Any]:
    """Training steps of TRL."""
    from transformers import TrainerCallback

    trainer, clock = trl_trainer(work, shape, seed), Clock()
    loaded = _peak_mib()
    clock.watch(trainer, "_generate", "generate")
    clock.watch(trainer, "_prepare_inputs", "other")
    clock.watch(trainer, "training_step", "train")

    class StepClock(TrainerCallback):  # type: ignore[misc]
        """From the end of a step to the end of the next."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.close_step()

    trainer.add_callback(StepClock())
    trainer.train()
    return _report(clock, loaded, shape)


def side_bare(work: Path, shape: Shape, seed: int) -> dict[str, Any]:
    """The plain model calls of a step and nothing else: prefill, the tokens of all rows, one pass over whole rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    torch.manual_seed(seed)
    size = MODELS[shape.model]["vocab_size"]
    prompts = torch.randint(3, size, (shape.prompts, shape.prompt_tokens))
    answers = torch.randint(3, size, (shape.rows, shape.new_tokens))
    rows = torch.cat([prompts.repeat_interleave(shape.group, 0), answers], 1)
    clock, loaded = Clock(), _peak_mib()
    clock.restart()
    for _ in range(shape.warm_up + shape.steps):
        with clock.phase("generate"):
            _bare_generate(model, prompts, shape)
        with clock.phase("train"):
            for part in rows.split(shape.rival_rows or shape.rows):
                logits = model(input_ids=part[:, :-1], use_cache=False, logits_to_keep=shape.new_tokens).logits
                logits.log_softmax(-1).gather(2, part[:, -shape.new_tokens :, None]).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.close_step()
    return _report(clock, loaded, shape)


@torch.no_grad()
def _bare_generate(model: Any, prompts: Tensor, shape: Shape) -> None:
    """Greedy tokens through the model's own cache."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    output = model.eval()(input_ids=prompts, use_cache=True, logits_to_keep=1)
    cache = getattr(output, name)
    cache.batch_repeat_interleave(shape.group)
    token = output.logits[:, -1].argmax(-1).repeat_interleave(shape.group)
    for _ in range(shape.new_tokens - 1):
        token = (
            model(input_ids=token[:, None], use_cache=True, logits_to_keep=1, **{name: cache}).logits[:, -1].argmax(-1)
        )
    model.train()
