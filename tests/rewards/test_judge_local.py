"""Judges in this process: random Qwen2.5-VL, Qwen2-VL (HPSv3) and Qwen3 of the true classes."""

import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, as_reward
from visual_grpo.rewards.judge import JudgeSettings, Question
from visual_grpo.rewards.judge_local import LocalJudge, word_ids

PROMPTS = ["a cat", "two red dogs and a much longer prompt", "x"]


@pytest.fixture(scope="module")
def tiny_lm(judges, tmp_path_factory):
    return judges.tiny_lm(tmp_path_factory.mktemp("lm"))


@pytest.fixture
def images():
    return RewardRequest.build(PROMPTS, images=torch.rand(3, 3, 40, 64, generator=torch.Generator().manual_seed(1)))


def local(folder, **settings):
    return LocalJudge(JudgeSettings(model=str(folder), device="cpu", **settings), "test")


def test_first_words_are_the_softmax_of_the_models_own_logits(tiny_vlm, images):
    """Against a forward pass of one row by the plain library."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    image = images.pil_images[0]
    chat = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Is it?"}]}]
    processor = AutoProcessor.from_pretrained(tiny_vlm)
    model = AutoModelForImageTextToText.from_pretrained(tiny_vlm).eval()
    inputs = processor.apply_chat_template(
        chat, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        expected = model(**inputs).logits[0, -1].double().softmax(-1)
    ids = {word: processor.tokenizer(word)["input_ids"][0] for word in ("Yes", " Yes", "No")}
    words = (("Yes", " Yes", "Yes"), ("No",))  # a spelling given twice counts once
    judge = local(tiny_vlm)
    (found,) = judge.first_words([Question(text="Is it?", images=(image,))], words)
    sums = [expected[ids["Yes"]] + expected[ids[" Yes"]], expected[ids["No"]]]
    torch.testing.assert_close(torch.tensor(found).exp(), torch.stack(sums).float(), rtol=1e-4, atol=1e-7)


def test_generation_is_greedy_and_does_not_depend_on_the_batch(tiny_lm):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    model = AutoModelForCausalLM.from_pretrained(tiny_lm).eval()
    questions = [Question(text=text) for text in PROMPTS]
    batched = local(tiny_lm, max_new_tokens=6, batch_size=3).generate(questions)
    for question, reply in zip(questions, batched, strict=True):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question.text}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        for _ in range(6):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
            if ids[0, -1] == tokenizer.eos_token_id:
                break
        start = len(tokenizer(text)["input_ids"])
        assert reply == tokenizer.decode(ids[0, start:], skip_special_tokens=True)


@pytest.mark.parametrize("name", ["vqa_score", "deqa"])
def test_probability_rewards(name, tiny_vlm, images):
    whole = as_reward(name, params={"model": str(tiny_vlm), "device": "cpu"})(images).values
    assert torch.isfinite(whole).all()
    assert whole.std() > 1e-6
    alone = as_reward(name, params={"model": str(tiny_vlm), "device": "cpu", "batch_size": 1})(images).values
    torch.testing.assert_close(alone, whole, rtol=1e-4, atol=1e-6)


def test_marks_and_their_failures(tiny_vlm, tiny_lm, images):
    """Random weights say nothing of sense: the row has failed. A pattern that accepts anything shows that replies are read."""
    params = {"model": str(tiny_vlm), "device": "cpu", "max_new_tokens": 4}
    for name in ("vlm_judge", "unified_reward"):
        extra = {"side": 28} if name == "unified_reward" else {}
        assert as_reward(name, params={**params, **extra})(images).status.tolist() == [2, 2, 2]
    texts = RewardRequest.build(PROMPTS, texts=["a", "", "c"])
    judge = as_reward("llm_judge", params={"model": str(tiny_lm), "device": "cpu", "max_new_tokens": 4})
    assert judge(texts).status.tolist() == [2, 2, 2]
    judge.close()
    assert judge(texts).status.tolist() == [2, 2, 2]


def test_hps_v3_formula(hps_v3_params, images):
    """Against the plain library: the hidden state at the token, through the head of the file."""
    from pathlib import Path

    from safetensors.torch import load_file
    from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

    from visual_grpo.rewards.hps_v3 import FILE, TOKEN

    weights = load_file(Path(hps_v3_params["model"]) / FILE)
    processor = AutoProcessor.from_pretrained(hps_v3_params["base"], min_pixels=56 * 56, max_pixels=56 * 56)
    model = Qwen2VLForConditionalGeneration.from_pretrained(hps_v3_params["base"]).eval()
    model.resize_token_embeddings(len(processor.tokenizer) + 1, mean_resizing=False)
    model.get_input_embeddings().weight.data.copy_(weights["model.embed_tokens.weight"])
    processor.tokenizer.add_special_tokens({"additional_special_tokens": [TOKEN]})
    reward = as_reward("hps_v3", params=hps_v3_params)
    output = reward(images)
    larger = as_reward("hps_v3", params={**hps_v3_params, "pixels": 112 * 112})(images.take([0]))
    assert abs(larger.values.item() - output.values[0].item()) > 1e-6
    for row, prompt in enumerate(PROMPTS):
        text = reward.template.replace("{prompt}", prompt)
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
        inputs = processor(
            text=[processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)],
            images=[images.pil_images[row]],
            return_tensors="pt",
        )
        with torch.no_grad():
            hidden = model.model(**inputs).last_hidden_state[0]
        (at,) = (inputs["input_ids"][0] == len(processor.tokenizer) - 1).nonzero()
        x = hidden[at]
        for layer in ("0", "3", "5"):
            x = x.relu() if layer != "0" else x
            x = x @ weights[f"rm_head.{layer}.weight"].T + weights[f"rm_head.{layer}.bias"]
        torch.testing.assert_close(output.values[row : row + 1], x[:, 0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(output.details["sigma"][row : row + 1], x[:, 1], rtol=1e-4, atol=1e-5)


def test_what_cannot_serve_is_refused(tiny_lm, tmp_path, hps_v3_params, images):
    with pytest.raises(UserError, match="test's config could not be loaded"):
        local(tmp_path / "absent")
    with pytest.raises(UserError, match="reads no images"):
        as_reward("vqa_score", params={"model": str(tiny_lm), "device": "cpu"})(images)
    with pytest.raises(UserError, match="hps_v3's weights could not be loaded"):
        as_reward("hps_v3", params={**hps_v3_params, "model": str(tmp_path)})(images)
    (tmp_path / "prompt.txt").write_text("{prompt}")
    with pytest.raises(UserError, match=r"must hold \{prompt\} and <\|Reward\|>"):
        as_reward("hps_v3", params={"prompt_file": str(tmp_path / "prompt.txt")})
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    with pytest.raises(UserError, match="begins 'xa' as it begins another answer word"):
        word_ids(tokenizer, [["xa"], ["xb"]], "test")
