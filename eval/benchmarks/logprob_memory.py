"""Memory of the log-prob pass of a text model against the length of the answer, for a real vocabulary.

    visual-grpo benchmark logprob_memory

One row is replayed and differentiated, once with the logits of `chunk` tokens at a time (`sampling.logits_chunk`) and, up to
`full_up_to` tokens, with all of them. The model has one thin layer, so that logits are what memory is for. Counted are the bytes
that autograd holds from the forward to the backward pass, and how far the process grew over what it had before (Linux only): that
includes what is made again for the gradient, and the gradient of the embedding, which does not depend on the length.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from visual_grpo.errors import UserError
from visual_grpo.eval.benchmarks.step_memory import SavedBytes

if TYPE_CHECKING:
    from visual_grpo.adapters.text_lm import TextLMAdapter

__all__ = ["run", "table"]

MIB = 2**20
LENGTHS = (256, 512, 1024, 2048, 4096)


def run(
    *,
    seeds: int = 1,
    out: Path | None = None,
    vocabulary: int = 151_936,
    lengths: tuple[int, ...] = LENGTHS,
    chunk: int = 64,
    full_up_to: int = 2048,
    width: int = 32,
) -> dict[str, Any]:
    """Measure.

    Args:
        seeds: unused; memory does not depend on the seed.
        out: folder for logprob_memory.json and logprob_memory.md.
        vocabulary: rows of the output embedding; the default is Qwen2.5's and Qwen3's.
        lengths: tokens of the answer.
        chunk: tokens whose logits exist at once.
        full_up_to: longest answer for which all logits are made too (about 12 bytes a logit).
        width: of the model.

    Returns:
        A row a length: chunked and full (None beyond `full_up_to`), each with held_mib (what autograd held between the passes),
        and process_mib (growth of the process; None where the system does not tell), and value_gap, the largest difference of a
        log-prob between the two.

    Raises:
        UserError: a length or chunk below 1.
    """
    if min(*lengths, chunk, vocabulary) < 1:
        raise UserError(f"lengths, chunk and vocabulary must be positive, got {lengths}, {chunk} and {vocabulary}")
    rows: dict[str, Any] = {}
    for length in lengths:
        chunked, values = _pass(_adapter(vocabulary, width, max(lengths), chunk), length)
        full, gap = None, None
        if length <= full_up_to:
            full, all_values = _pass(_adapter(vocabulary, width, max(lengths), None), length)
            gap = float((values - all_values).abs().max())
        rows[str(length)] = {"chunked": chunked, "full": full, "value_gap": gap}
    result = {"vocabulary": vocabulary, "chunk": chunk, "lengths": rows}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "logprob_memory.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        (out / "logprob_memory.md").write_text(table(result), encoding="utf-8")
    return result


def _adapter(vocabulary: int, width: int, length: int, chunk: int | None) -> TextLMAdapter:
    """One layer with random weights, the same for the same sizes; all weights are trained."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from visual_grpo.adapters.text_lm import TextLMAdapter, TextSampling
    from visual_grpo.testbed.lm_build import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.model_max_length = length + 64
    config = Qwen3Config(
        vocab_size=max(vocabulary, len(tokenizer)),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=width // 2,
        max_position_embeddings=length + 64,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).train()
    return TextLMAdapter(model, tokenizer, sampling=TextSampling(logits_chunk=chunk))


def _pass(adapter: TextLMAdapter, length: int) -> tuple[dict[str, float | None], torch.Tensor]:
    """Forward and backward pass over one row of `length` tokens: (figures, log-probs [length])."""
    from visual_grpo.types import PromptBatch

    index = torch.zeros(1, dtype=torch.int64)
    prompts = PromptBatch(prompts=["1+1"], metadata=[{}], group_ids=index, row_ids=index)
    rows = adapter.rows_from_texts(
        prompts, ["1" * (length - 1)], adapter.sampling
    )  # a digit is a token, and so is the end
    before = _restart_peak()
    with SavedBytes() as saved:
        value = adapter.log_prob(rows, torch.arange(length)).value
        value.sum().backward()
    peak = _process_bytes("VmHWM")
    grown = None if before is None or peak is None else (peak - before) / MIB
    return {"held_mib": saved.peak / MIB, "process_mib": grown}, value.detach()[0]


def _restart_peak() -> int | None:
    """Present bytes of the process, from which its peak is counted anew; None where the system cannot."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _process_bytes("VmRSS")
    return None


def _process_bytes(key: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return 1024 * int(line.split()[1])
    return None


def table(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    lines = [
        f"Vocabulary {result['vocabulary']:,}, MiB.",
        "",
        f"| tokens | held, {result['chunk']} tokens at a time | process | held, all logits | process | largest difference |",
        f"|{'---|' * 6}",
    ]
    for length, row in result["lengths"].items():
        sides = [(side or {}).get(key) for side in (row["chunked"], row["full"]) for key in ("held_mib", "process_mib")]
        cells = ["-" if value is None else f"{value:.0f}" for value in sides]
        gap = "-" if row["value_gap"] is None else f"{row['value_gap']:.1e}"
        lines.append(f"| {length} | {' | '.join(cells)} | {gap} |")
    return "\n".join(lines) + "\n"
