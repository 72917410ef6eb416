"""Judges of evaluations: one naming of the options, for an endpoint and for a model in this process."""

from __future__ import annotations

import json
import math

import pytest
import torch
from PIL import Image

from visual_grpo.cli import main
from visual_grpo.errors import RunError, UserError
from visual_grpo.eval import caption, compbench, dpg, geneval2
from visual_grpo.eval.images import write_samples
from visual_grpo.eval.judging import Question, ask, load_judge
from visual_grpo.rewards.vqa_models import BlipJudge, opened_judge
from visual_grpo.rewards.vqa_models import load_judge as image_judge

FAST = {"retry_wait_s": 0.01, "timeout_s": 5.0}
RED = torch.tensor([0.9, 0.1, 0.1])[:, None, None].expand(3, 40, 64)


@pytest.fixture
def images(tmp_path):
    pairs = [["How many rings are there?", "2"], ["Is the ring red?", "Yes"]]
    row = {"prompt": "a red ring", "vqa_list": pairs, "skills": ["count", "attribute"], "atom_count": 3}
    write_samples(tmp_path / "images", 0, row, torch.stack([RED, 1 - RED]))
    return tmp_path / "images"


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "dpg.csv"
    path.write_text(
        "item_id,text,proposition_id,dependency,tuple,question_natural_language\n"
        "one,a red ring,1,0,entity - whole (ring),Is there a ring?\n"
        "one,a red ring,2,1,attribute - color (ring red),Is there a red ring?\n"
    )
    return path


@pytest.fixture
def captions(tmp_path):
    texts, prompts = tmp_path / "c.jsonl", tmp_path / "q.jsonl"
    texts.write_text('{"image": "a.png", "caption": "a red ring"}\n{"image": "b.png", "caption": "a blue one"}\n')
    qa = {"question": "Which colour?", "choices": ["red", "blue"], "answer": "red"}
    prompts.write_text("".join(json.dumps({"image": name, **qa}) + "\n" for name in ("a.png", "b.png")))
    return {"texts": texts, "prompts": prompts}


def test_geneval2_with_an_endpoint(serve, judges, images, tmp_path):
    """Sums over the accepted spellings; the picture and the question arrive."""

    def answer(body):
        red = judges.image_of(body).convert("RGB").getpixel((0, 0))[0] > 128
        if judges.text_of(body) == "How many rings are there? Answer in one word.":
            return {"two": math.log(0.5), "2": math.log(0.25), "three": math.log(0.1)}
        assert judges.text_of(body) == "Is the ring red? Answer in one word."
        return {"Yes": math.log(0.6 if red else 0.1), " yes": math.log(0.2), "No": math.log(0.01)}

    server = serve(answer)
    given = {"images": images, "judge": server.endpoint, "judge_model": "served", "judge_options": FAST}
    found = geneval2.evaluate(**given, out=tmp_path / "out")
    assert found["am"] == pytest.approx(100 * ((0.75 + 0.8) / 2 + (0.75 + 0.3) / 2) / 2, abs=1e-4)
    assert found["skills"] == {"count": pytest.approx(75, abs=1e-4), "attribute": pytest.approx(55, abs=1e-4)}
    assert found["judge"] == "endpoint:served"
    assert len(server.bodies) == 4
    assert server.bodies[0]["model"] == "served"
    assert geneval2.evaluate(**given, out=tmp_path / "out") == found  # nothing is asked again
    assert len(server.bodies) == 4
    with pytest.raises(UserError, match="made with other settings"):
        geneval2.evaluate(**{**given, "judge_model": "other"}, out=tmp_path / "out")


def test_dpg_with_an_endpoint(serve, judges, images, questions):
    def answer(body):
        return "Yes." if "a ring" in judges.text_of(body) else " no\n"

    options = [f"judge={serve(answer).endpoint}", "judge_model=served", "judge_options={timeout_s: 5, concurrency: 2}"]
    command = ["eval", "dpg", "--images", str(images), f"questions={questions}", *options, "grid=0"]
    assert main([*command, "--out", str(images.parent / "out")]) == 0
    assert json.loads((images.parent / "out" / "summary.json").read_text())["score"] == 50.0


def test_an_image_evaluation_never_scores_a_judge_that_is_away(serve, images, questions, tmp_path):
    away = serve(lambda body: (503, b"busy"))
    given = {"judge": away.endpoint, "judge_model": "m", "judge_options": {**FAST, "retries": 1}}
    with pytest.raises(RunError, match=r"endpoint:m: .*503.*goes on there"):
        dpg.evaluate(images=images, questions=questions, out=tmp_path / "out", **given)
    assert not (tmp_path / "out" / "results.jsonl").exists()
    with pytest.raises(RunError, match="status 400"):
        compbench.evaluate(
            images=images, judge=serve(lambda body: (400, b"no images")).endpoint, judge_model="m", judge_options=FAST
        )


def test_captions_with_an_endpoint(serve, judges, captions, tmp_path):
    """The first reply makes no sense and is asked for again; what was said is kept."""
    seen: list[str] = []

    def answer(body):
        seen.append(judges.text_of(body))
        if len(seen) == 1:
            return "I will not say."
        shown = next(line for line in seen[-1].splitlines() if line.endswith(". red"))
        return shown[0]

    server = serve(answer)
    given = {**captions, "judge_model": "served", "out": tmp_path / "out", "workers": 1, "judge_options": FAST}
    found = caption.evaluate(judge=server.endpoint, **given)
    assert (found["accuracy"], found["judge"], found["judge_failed"]) == (1.0, "endpoint:served", 0)
    assert len(seen) == 3
    assert server.bodies[0]["max_tokens"] == 2048
    moved = serve(answer)  # the address is not part of what was asked
    assert caption.evaluate(judge=moved.endpoint, **given) == found
    assert len(seen) == 3
    away = {**given, "judge": serve(lambda body: (500, b"")).endpoint, "out": tmp_path / "other"}
    away["judge_options"] = {**FAST, "retries": 0}
    with pytest.raises(RunError, match=r"status 500.*goes on there"):
        caption.evaluate(**away)


def test_a_model_in_this_process(tiny_vlm, images, tmp_path):
    """The same model for images and for texts, alone or in batches."""
    options = {"judge_model": str(tiny_vlm), "judge_options": {"device": "cpu", "max_new_tokens": 4}}
    found = geneval2.evaluate(images=images, judge="vlm", **options)
    assert 0 < found["am"] < 100
    assert found["judge"] == f'vlm:{tiny_vlm} {{"max_new_tokens": 4}}'
    picture = tmp_path / "p.png"
    Image.new("RGB", (40, 64), "red").save(picture)
    asked = [Question(prompt=text, read=str, image=picture) for text in ("Is it?", "What colour is it?", "x")]
    alone = ask(load_judge("vlm", **options), asked)
    options["judge_options"] = {**options["judge_options"], "batch_size": 2}
    batched = load_judge("vlm", **options)
    assert ask(batched, asked) == alone
    assert batched("Is it?", Image.open(picture)) == alone[0]
    assert len(set(alone)) > 1


def test_options_that_make_no_judge():
    url = "http://localhost:1/v1"
    for given, message in (
        ({"given": url}, "needs judge_model=NAME"),
        ({"given": url, "judge_model": "m", "judge_options": {"timeout": 3}}, r"Did you mean 'timeout_s'\?"),
        ({"given": url, "judge_model": "m", "judge_options": {"timeout_s": "long"}}, "must be numbers above 0"),
        ({"given": url, "judge_model": "m", "judge_options": {"endpoint": url}}, "takes no 'endpoint'"),
        ({"given": "vlm", "judge_options": 3}, "give a mapping"),
        ({"given": "testbed", "judge_model": "m"}, "SceneJudge cannot be built"),
        ({"given": "builtins:repr", "judge_model": "m"}, "not for 'builtins:repr'"),
    ):
        for load in (load_judge, image_judge):
            with pytest.raises(UserError, match=message):
                load(**given)
    with pytest.raises(UserError, match="cannot be called with a prompt and an image"):
        load_judge("blip")
    with opened_judge("blip", "some/blip", {"batch_size": 2, "device": "cpu"}) as (name, judge):
        assert isinstance(judge, BlipJudge)
        assert (judge.model, judge.batch_size) == ("some/blip", 2)
        assert name == 'blip {"batch_size": 2, "device": "cpu", "model": "some/blip"}'


def test_blip(tmp_path):
    """A random BLIP: the probability of a first token under the softmax of the decoder's first step."""
    from transformers import BertTokenizer, BlipConfig, BlipForQuestionAnswering, BlipImageProcessor, BlipProcessor

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "yes", "no", "red", "?"]
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": 3, "sep_token_id": 3}
    text = {**sizes, **special, "vocab_size": len(words), "encoder_hidden_size": 16, "max_position_embeddings": 24}
    torch.manual_seed(0)
    config = BlipConfig(text_config=text, vision_config={**sizes, "image_size": 16, "patch_size": 8})
    model = BlipForQuestionAnswering(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    size = {"height": 16, "width": 16}
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    BlipProcessor(BlipImageProcessor(size=size), tokenizer).save_pretrained(tmp_path)
    judge = image_judge("blip", str(tmp_path), {"device": "cpu", "batch_size": 2})
    pictures = [Image.new("RGB", (20, 20), color) for color in ("red", "blue", "green")]
    asked = ["red?", "red ? red ?", "no?"]
    yes = judge.probability(pictures, asked, [("Yes", "yes", " yes")] * 3)
    either = judge.probability(pictures, asked, [("Yes", "no")] * 3)
    everything = judge.probability(pictures, asked, [tuple(words)] * 3)
    assert yes.shape == (3,)
    assert ((yes > 0) & (yes < either) & (either < 1)).all()
    torch.testing.assert_close(everything, torch.ones(3))
    assert len(judge.answer(pictures, asked)) == 3
