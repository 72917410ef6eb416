"""Tests of the shipped small language model and of the code that builds it."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from visual_grpo.testbed import lm_build
from visual_grpo.testbed.arithmetic import STYLES, all_prompts, is_heldout, sample_problem, solve, split_prompts
from visual_grpo.testbed.muon import Muon

PASS_1_RANGE = (0.4, 0.6)
"""Documented in `lm_build`: sampled pass@1 of the base on held-out prompts."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(lm_build.WEIGHTS_DIR, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(lm_build.WEIGHTS_DIR, local_files_only=True)


def test_shipped_tokenizer_is_the_built_one(tokenizer: PreTrainedTokenizerBase) -> None:
    built = lm_build.build_tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.chat_template == built.chat_template
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        assert getattr(tokenizer, name) == getattr(built, name) is not None
    assert tokenizer.padding_side == "left"


def test_every_prompt_and_solution_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(0)
    texts = [row["prompt"] for row in all_prompts(100)]
    for kind in lm_build.KINDS:
        texts += [solve(sample_problem(kind, rng), style) for style in STYLES for _ in range(30)]
        texts += [lm_build.noisy_solution(sample_problem(kind, rng), rng) for _ in range(30)]
    for text in [*texts, "Hint: use tens.\n<think>a  b</think> ~{}", "".join(map(chr, range(32, 127)))]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids


def test_completions_fit_the_token_budget(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(1)
    for kind in lm_build.KINDS:
        for _ in range(300):
            ids = tokenizer(solve(sample_problem(kind, rng)) + tokenizer.eos_token)["input_ids"]
            assert len(ids) <= lm_build.MAX_NEW_TOKENS


def test_chat_template_renders_and_masks_the_assistant(tokenizer: PreTrainedTokenizerBase) -> None:
    user = {"role": "user", "content": "What is 1+2?"}
    prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|bos|><|user|>What is 1+2?<|end|><|assistant|>"
    turns = [user, {"role": "assistant", "content": "#### 3"}]
    whole = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    assert tokenizer.decode(whole["input_ids"]) == prompt + "#### 3<|end|>"
    trained = [i for i, on in zip(whole["input_ids"], whole["assistant_masks"], strict=True) if on]
    assert tokenizer.decode(trained) == "#### 3<|end|>"
    with pytest.raises(Exception, match="unknown role judge"):
        tokenizer.apply_chat_template([{"role": "judge", "content": ""}], tokenize=False)


def test_loads_offline_in_a_fresh_process() -> None:
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1]); m = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "print(type(m).__name__, t.eos_token, m.generation_config.eos_token_id == t.eos_token_id)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(lm_build.WEIGHTS_DIR)],
        env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["Qwen3ForCausalLM", "<|end|>", "True"]


def test_size_on_disk_and_log() -> None:
    files = list(Path(lm_build.WEIGHTS_DIR).iterdir())
    assert sum(file.stat().st_size for file in files) < 12e6
    lines = [json.loads(line) for line in (lm_build.WEIGHTS_DIR / "build_log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] >= lines[0]["step"]
    assert "seed" in lines[-1]


def test_base_is_half_right_and_holds_the_right_mode(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase
) -> None:
    by_tag: dict[str, list[dict[str, str]]] = {}
    for row in split_prompts()[1]:
        by_tag.setdefault(row["tag"], []).append(row)
    rows = [row for group in by_tag.values() for row in group[:26]]
    table = lm_build.measure(model, tokenizer, rows, 8, seed=0)
    assert table["all"]["prompts"] == 104
    assert PASS_1_RANGE[0] <= table["all"]["pass_1"] <= PASS_1_RANGE[1]
    assert table["all"]["pass_any"] >= 0.85
    again = lm_build.measure(model, tokenizer, rows, 8, seed=0)
    assert again == table


def test_sampling_leaves_the_global_random_state_alone(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase
) -> None:
    before = torch.get_rng_state()
    texts = lm_build.sample_completions(model, tokenizer, ["What is 1+2?", "What is 10+20?"], 3, seed=5)
    assert [len(group) for group in texts] == [3, 3]
    assert torch.equal(before, torch.get_rng_state())


def test_training_data_never_shows_a_heldout_prompt() -> None:
    rng = random.Random(0)
    for _ in range(500):
        question = lm_build.training_turns(rng, 1.0)[0]["content"]
        assert not is_heldout(question.partition(" Hint:")[0])


def test_muon_moves_a_matrix_by_an_orthogonal_step() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(8, 16))
    weight.grad = torch.randn(8, 16, generator=generator)
    Muon([weight], lr=0.5, adjust_lr_fn="original").step()
    singular = torch.linalg.svdvals(weight.detach() / 0.5)
    assert singular.min() > 0.5
    assert singular.max() < 1.5
    assert (weight * weight.grad).sum() < 0


def test_build_with_a_step_count_is_reproducible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = split_prompts(3)
    monkeypatch.setattr(lm_build, "split_prompts", lambda *_: few)
    threads = torch.get_num_threads()
    for name in ("a", "b"):
        lm_build.build(tmp_path / name, seed=3, threads=1, batch=4, max_steps=2)
    torch.set_num_threads(threads)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert first == second
