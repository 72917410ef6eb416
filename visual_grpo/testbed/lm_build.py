"""Builds `lm_tiny`: a small Qwen3 language model that does arithmetic well enough to be worth aligning.

The model is pretrained from scratch on worked solutions of `arithmetic`, right ones first, then ones with label noise on
purpose: with probability `WRONG` a step or the answer is off, with probability `MALFORMED` the answer is missing or
ambiguous. So the base holds the right mode and many wrong ones, its sampled pass@1 is 0.4 to 0.6 and its pass@8 is
high: reinforcement learning has something to select from. Held-out prompts (`arithmetic.is_heldout`) are never trained on.

Beside plain questions it sees shares of two further contexts, with the same noise: a hint in the prompt
(`What is 27+45? Hint: 27+40=67`) and a second turn (`Check.`) that asks for a fresh solution.

The chat template is `<|bos|><|user|>question<|end|><|assistant|>completion<|end|>`; `<|end|>` is the end of sequence.
`system` and `tool` are legal roles too, and `<think>`, `</think>`, `<short>` are reserved tokens that pre-training never shows.
"""

import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from visual_grpo.testbed.arithmetic import (
    KINDS,
    STYLES,
    Problem,
    is_correct,
    is_heldout,
    sample_problem,
    solve,
    split_prompts,
)
from visual_grpo.testbed.build_folder import build_folder
from visual_grpo.testbed.muon import Muon

WEIGHTS_DIR = Path(__file__).parent / "weights" / "lm_tiny"
"""Where the shipped weights lie: pass it to `from_pretrained`."""

MAX_NEW_TOKENS = 32
"""Enough for the longest working of the default kinds with its end token."""

WRONG = 0.32
MALFORMED = 0.06
CLEAN_SHARE = 0.75
"""Share of the training time before label noise starts."""
HINT_SHARE = 0.12
CHECK_SHARE = 0.06

CONTROL_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
RESERVED_TOKENS = ("<think>", "</think>", "<short>")
_WORDS = (" #### ", "#### ", "What is ", " Hint: ", "Check.", "The answer is ", "wrong", "right", " and ", " or ")
_STYLE_WEIGHTS = (0.15, 0.3, 0.55)
_OFFSETS = (-10, -2, -1, 1, 2, 10)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant', 'system', 'tool'] %}"
    "{{ raise_exception('unknown role ' ~ message['role']) }}{% endif %}"
    "<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Makes the tokenizer: printable ASCII characters, a few merged words, control tokens.

    Digits are never merged, so a number is spelled digit by digit, and every printable ASCII text (with newlines)
    decodes to itself.

    Returns:
        A tokenizer that pads on the left, with a chat template.
    """
    special = ["<|pad|>", "<|bos|>", "<|end|>", "<|unk|>", *CONTROL_TOKENS]
    vocabulary = {token: i for i, token in enumerate(special)}
    for character in ["\n", *map(chr, range(32, 127))]:
        vocabulary[character] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        for end in range(2, len(word) + 1):
            left, right = word[: end - 1], word[end - 1]
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<|unk|>", fuse_unk=False))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        additional_special_tokens=list(CONTROL_TOKENS),
        padding_side="left",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(list(RESERVED_TOKENS))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, out_dir: Path) -> None:
    """Saves the tokenizer under the class name and the key that transformers 4 and 5 both read."""
    tokenizer.save_pretrained(out_dir)
    path = out_dir / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for key in ("backend", "extra_special_tokens"):
        config.pop(key, None)
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": list(CONTROL_TOKENS)}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def build_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """Makes the untrained model: four Qwen3 layers of width 128, tied embeddings, about one million parameters."""
    config = Qwen3Config(
        vocab_size=8 * math.ceil(len(tokenizer) / 8),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def noisy_solution(problem: Problem, rng: random.Random, *, wrong: float = WRONG, malformed: float = MALFORMED) -> str:
    """Draws a solution in a random style that is right with probability `1 - wrong - malformed`."""
    style = rng.choices(STYLES, _STYLE_WEIGHTS)[0]
    draw = rng.random()
    if draw < wrong:
        steps = solve(problem).count("=")
        return solve(problem, style, wrong_step=rng.randint(0, steps), offset=rng.choice(_OFFSETS))
    text = solve(problem, style)
    if draw >= wrong + malformed:
        return text
    head, _, answer = text.rpartition("#### ")
    other = int(answer) + rng.choice((1, 2, 10))
    return head + rng.choice(("#### ?", f"#### {answer} or {other}", "####"))


def training_turns(rng: random.Random, noise: float) -> list[dict[str, str]]:
    """Draws one conversation of the pre-training set.

    Args:
        rng: source of randomness.
        noise: factor on the error probabilities, 0 (all right) to 1.

    Returns:
        Chat messages; questions are never held-out ones.
    """
    problem = sample_problem(rng.choice(KINDS), rng)
    while is_heldout(problem.prompt):
        problem = sample_problem(rng.choice(KINDS), rng)
    question, kind = problem.prompt, rng.random()
    if kind < HINT_SHARE:
        question = f"{question} Hint: {solve(problem).split(' ')[0]}"
    rates = {"wrong": noise * WRONG, "malformed": noise * MALFORMED}
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": noisy_solution(problem, rng, **rates)},
    ]
    if HINT_SHARE <= kind < HINT_SHARE + CHECK_SHARE:
        turns.append({"role": "user", "content": "Check."})
        turns.append({"role": "assistant", "content": noisy_solution(problem, rng, **rates)})
    return turns


def training_batches(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random, size: int, noise: float, count: int = 8
) -> list[dict[str, torch.Tensor]]:
    """Draws `count` batches of conversations of like length, in random order.

    Returns:
        Per batch `input_ids`, `attention_mask` and `labels` (-100 outside the assistant's words), int64 [size, L].
    """
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(count * size):
        encoded = tokenizer.apply_chat_template(
            training_turns(rng, noise), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        rows.append((encoded["input_ids"], encoded["assistant_masks"]))
    rows.sort(key=lambda row: len(row[0]))
    batches = [_collate(rows[i : i + size], tokenizer.pad_token_id) for i in range(0, len(rows), size)]
    rng.shuffle(batches)
    return batches


def _collate(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Pads `(ids, assistant mask)` pairs on the right to one batch."""
    length = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), length), pad)
    labels = torch.full((len(rows), length), -100)
    attention_mask = torch.zeros((len(rows), length), dtype=torch.int64)
    for i, (ids, mask) in enumerate(rows):
        tokens = torch.tensor(ids)
        input_ids[i, : len(ids)] = tokens
        labels[i, : len(ids)] = torch.where(torch.tensor(mask) == 1, tokens, -100)
        attention_mask[i, : len(ids)] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


@torch.no_grad()
def sample_completions(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    samples: int = 1,
    *,
    seed: int = 0,
    temperature: float = 1.0,
) -> list[list[str]]:
    """Samples completions from the model's full distribution (no top-k, no top-p).

    Args:
        model: the policy; left in the mode it was in.
        tokenizer: its tokenizer.
        prompts: [B] questions, each sent as one user message.
        samples: completions of each prompt.
        seed: seed of the draw; the global random state is restored afterwards.
        temperature: 0 decodes greedily.

    Returns:
        [B][samples] texts without special tokens.
    """
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts for _ in range(samples)]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    training = model.training
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAX_NEW_TOKENS,
            **choice,
        )
    model.train(training)
    decoded = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [decoded[i : i + samples] for i in range(0, len(decoded), samples)]


def measure(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, str]],
    samples: int = 8,
    *,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Scores sampled completions by kind.

    Args:
        model: the policy.
        tokenizer: its tokenizer.
        rows: prompt rows of `arithmetic.split_prompts`.
        samples: completions of each prompt, the k of `pass_any`.
        seed: seed of the sampling.

    Returns:
        For each tag and `all`: `pass_1` (mean over samples), `pass_any` (some sample is right) and `prompts` (count).
    """
    texts = sample_completions(model, tokenizer, [row["prompt"] for row in rows], samples, seed=seed)
    right = [[is_correct(text, row["answer"]) for text in group] for row, group in zip(rows, texts, strict=True)]
    table: dict[str, dict[str, float]] = {}
    for tag in ["all", *dict.fromkeys(row["tag"] for row in rows)]:
        groups = [flags for row, flags in zip(rows, right, strict=True) if tag in ("all", row["tag"])]
        table[tag] = {
            "pass_1": round(sum(map(sum, groups)) / (len(groups) * samples), 4),
            "pass_any": round(sum(map(any, groups)) / len(groups), 4),
            "prompts": len(groups),
        }
    return table


def _optimizers(model: Qwen3ForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the layers, AdamW on embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    adamw = torch.optim.AdamW(rest, lr=0.2 * learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, lr=learning_rate, adjust_lr_fn="original"), adamw]
    for group in (g for o in optimizers for g in o.param_groups):
        group["peak"] = group["lr"]
    return optimizers


def _cpu_seconds(threads: int) -> float:
    """CPU time of this process so far, per thread."""
    return time.process_time() / threads


def _schedule(progress: float, step: int) -> float:
    """Factor on the learning rates: warm-up over 50 steps, flat, linear decay over the last 40 % of the time."""
    return min(1.0, (step + 1) / 50) * min(1.0, (1.0 - progress) / 0.4 + 0.01)


def build(
    out_dir: str | Path = WEIGHTS_DIR,
    seed: int = 0,
    minutes: float = 6.5,
    threads: int = 1,
    *,
    batch: int = 32,
    learning_rate: float = 0.02,
    max_steps: int | None = None,
) -> Path:
    """Pretrains `lm_tiny` and writes model, tokenizer and `build_log.jsonl`.

    Args:
        out_dir: folder to write, created if missing; readable by `from_pretrained`.
        seed: seed of the weights and of the data.
        minutes: CPU time per thread, evaluation excluded; the schedule is stretched over it. CPU time and not wall
            time, so that a busy machine gives the same model, later.
        threads: CPU threads.
        batch: conversations a step.
        learning_rate: peak rate of Muon on the matrices; AdamW runs the rest at a fifth of it.
        max_steps: when set, the schedule counts steps instead of minutes, and a rerun gives the same weights.

    Returns:
        `out_dir`.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    out_dir = build_folder(out_dir)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer).train()
    optimizers = _optimizers(model, learning_rate)
    heldout = split_prompts(100)[1]
    log: list[dict[str, object]] = []
    losses: list[float] = []
    batches: list[dict[str, torch.Tensor]] = []
    spent, step = 0.0, 0
    while (progress := step / max_steps if max_steps else spent / (60 * minutes)) < 1.0:
        start = _cpu_seconds(threads)
        batches = batches or training_batches(tokenizer, rng, batch, float(progress >= CLEAN_SHARE))
        loss = model(**batches.pop()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * _schedule(progress, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        step += 1
        spent += _cpu_seconds(threads) - start
        if step % 250 == 0:
            log.append(_log_line(step, spent, losses[-100:], measure(model, tokenizer, heldout, 1)))
            (out_dir / "build_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    model.eval().save_pretrained(out_dir)
    save_tokenizer(tokenizer, out_dir)
    final = measure(model, tokenizer, split_prompts()[1], 8)
    log.append({**_log_line(step, spent, losses[-100:], final), "seed": seed, "batch": batch, "threads": threads})
    (out_dir / "build_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return out_dir


def _log_line(step: int, seconds: float, losses: list[float], table: dict[str, dict[str, float]]) -> dict[str, object]:
    """One line of the build log."""
    mean = sum(losses) / len(losses)
    return {"step": step, "seconds": round(seconds, 1), "loss": round(mean, 4), "heldout": table}
