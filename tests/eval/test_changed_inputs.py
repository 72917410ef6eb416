"""Evaluations that are started again, or compared, after something under them has changed; files that do not fit together."""

import json
import logging

import pytest
import torch

from visual_grpo.cli import main
from visual_grpo.errors import RunError, UserError
from visual_grpo.eval import (
    caption,
    compare,
    compbench,
    diversity,
    dpg,
    fid,
    generate,
    geneval,
    geneval2,
    images,
    preference,
    text,
    vqa,
)
from visual_grpo.eval.judging import Question, ask
from visual_grpo.eval.protocol import score_samples


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path):
    for index in range(3):
        images.write_samples(tmp_path / "pictures", index, {"prompt": f"p{index}"}, torch.full((1, 3, 8, 8), index / 4))
    return tmp_path / "pictures"


def length(images, prompts):
    return [float(len(p)) for p in prompts]


class TestImages:
    def test_a_changed_prompt_is_scored_again(self, folder, tmp_path):
        run = {"images": folder, "out": tmp_path / "out", "rewards": {"length": {"reward": length}}, "scale": "reward"}
        assert preference.evaluate(**run)["means"] == {"length": 2.0}
        (folder / "00001" / "metadata.jsonl").write_text('{"prompt": "p1 and more"}\n')
        assert preference.evaluate(**run)["means"] == {"length": 5.0}
        flat = write(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "cccc"}])
        assert preference.evaluate(**run, prompts=flat)["means"] == {"length": 2.0}

    def test_changed_questions_are_asked_again(self, folder, tmp_path):
        head = "item_id,text,proposition_id,dependency,tuple,question_natural_language\n"
        csv = tmp_path / "q.csv"

        class Judge:
            def probability(self, pictures, questions, forms):
                raise AssertionError

            def answer(self, pictures, questions):
                return ["yes" if "good" in question else "no" for question in questions]

        for question, score in (("good?", 100.0), ("bad?", 0.0)):
            csv.write_text(head + "".join(f"i{i},p{i},1,0,entity,{question}\n" for i in range(3)))
            assert dpg.evaluate(images=folder, out=tmp_path / "d", questions=csv, judge=Judge())["score"] == score
        with pytest.raises(UserError, match="resolution is 0"):
            dpg.evaluate(images=folder, questions=csv, judge=Judge(), resolution=0)

    def test_failed_images_are_tried_again(self, folder, tmp_path):
        broken = True

        def moody(images, prompts):
            return [float("nan") if broken and p == "p1" else 1.0 for p in prompts]

        run = {"images": folder, "out": tmp_path / "out", "rewards": {"moody": {"reward": moody, "retries": 0}}}
        assert preference.evaluate(**run)["failed"] == {"moody": 1}
        broken = False
        assert preference.evaluate(**run)["failed"] == {"moody": 0}

    def test_the_last_image_alone_in_its_batch_may_fail(self, folder):
        def last(images, prompts):
            return [float("nan") if p == "p2" else 1.0 for p in prompts]

        def never(images, prompts):
            return [float("nan")] * len(prompts)

        def run(reward):
            return preference.evaluate(images=folder, rewards={"r": {"reward": reward, "retries": 0}}, batch_size=1)

        assert run(last)["failed"] == {"r": 1}
        with pytest.raises(RunError, match="failed on every row"):
            run(never)

    def test_prompts_that_are_none(self, folder, tmp_path):
        for row in ({"caption": "a cat"}, {"prompt": 3}, {"prompt": " "}):
            with pytest.raises(UserError, match="'prompt' must be a text"):
                images.find_samples(folder, write(tmp_path / "p.jsonl", [row] * 3))

    def test_prompts_and_images_that_are_left_out_are_told(self, folder, tmp_path, caplog):
        prompts = write(tmp_path / "p.jsonl", [{"prompt": "x"}] * 5)
        with caplog.at_level(logging.WARNING):
            images.find_samples(folder, prompts)
        assert "2 prompts have no image (the first: number 3" in caplog.text
        caplog.clear()
        flat = tmp_path / "flat"
        flat.mkdir()
        for name in ("00000.png", "image_1.png", "successes.png"):
            (flat / name).write_bytes((folder / "00000" / "samples" / "0000.png").read_bytes())
        images.find_samples(flat, write(tmp_path / "one.jsonl", [{"prompt": "x"}]))
        assert "1 images are left out, such as image_1.png" in caplog.text

    @pytest.mark.parametrize(
        "include",
        [
            [{"count": 1}],
            [{"class": "ring"}],
            [{"class": "ring", "count": 0}],
            "ring",
            [{"class": "ring", "count": 1, "position": ["left of", 0]}],
        ],
    )  # fmt: skip
    def test_clauses_that_say_nothing(self, folder, tmp_path, include):
        prompts = write(tmp_path / "p.jsonl", [{"prompt": "x", "tag": "counting", "include": include}] * 3)
        with pytest.raises(UserError, match="mend its line of the prompt file"):
            geneval.evaluate(images=folder, prompts=prompts)
        with pytest.raises(UserError, match="mend its line of the prompt file"):
            compbench.evaluate(images=folder, prompts=prompts, category="numeracy")

    @pytest.mark.parametrize("questions", [3, "ab", [3], ["ab"], [["a"]]])
    def test_questions_of_geneval2_that_are_none(self, folder, tmp_path, questions):
        prompts = write(tmp_path / "p.jsonl", [{"prompt": "x", "vqa_list": questions}] * 3)
        with pytest.raises(UserError, match="no vqa_list"):
            geneval2.evaluate(images=folder, prompts=prompts)

    def test_features_of_another_shape_or_not_finite(self, folder, tmp_path):
        pair = {"images": folder, "prompts": write(tmp_path / "p.jsonl", [{"prompt": "x"}] * 3)}
        for wrong in (lambda x: x.mean((1, 2, 3)), lambda x: x[:0].flatten(1), lambda x: [1.0]):
            with pytest.raises(UserError, match="image features must be a tensor"):
                diversity.evaluate(**pair, features=wrong)
        with pytest.raises(UserError, match=r"fid: the features .* not finite"):
            fid.evaluate(images=folder, reference=folder, features=lambda x: x.flatten(1) / 0 - x.flatten(1) / 0)

    def test_no_batch_size(self, folder):
        with pytest.raises(UserError, match="batch_size is 0"):
            score_samples(images.find_samples(folder), lambda *_: [], name="mine", out=None, settings={}, batch_size=0)


def test_samples_of_other_weights_are_not_gone_on_with(tmp_path):
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "w.safetensors"
    file.write_bytes(b"a" * 100)
    first = generate.weights_digest(tmp_path / "model", None)
    (tmp_path / "model" / "log.jsonl").write_text("more\n")
    assert generate.weights_digest(tmp_path / "model", None) == first
    assert generate.weights_digest(tmp_path / "model", file) != first
    file.write_bytes(b"a" * 99 + b"b")
    assert generate.weights_digest(tmp_path / "model", None) != first
    assert generate.weights_digest(tmp_path / "model", None, leave=tmp_path / "model") != first


class TestTexts:
    def run(self, tmp_path, name, problems, completions, **options):
        prompts = write(tmp_path / f"p-{name}.jsonl", problems)
        texts = write(tmp_path / f"t-{name}.jsonl", completions)
        return text.evaluate(prompts=prompts, texts=texts, out=tmp_path / name, **{"reward": "exact_match", **options})

    def test_only_results_of_the_same_problems_scored_alike_are_compared(self, tmp_path, capsys):
        ones = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(3)]
        others = [{"prompt": f"{i} + 2?", "answer": str(i + 2)} for i in range(3)]
        said = [{"completion": str(i + 1)} for i in range(3)]
        self.run(tmp_path, "a", ones, said)
        self.run(tmp_path, "b", others, said)
        self.run(tmp_path, "c", ones, said, reward="anls")
        self.run(tmp_path, "d", ones[:2], said[:2])
        with pytest.raises(UserError, match="no sample of the same prompt in common"):
            compare.compare(tmp_path / "a", tmp_path / "b")
        for other in (tmp_path / "c", tmp_path / "c" / "items.jsonl"):
            with pytest.raises(UserError, match="scored differently"):
                compare.compare(tmp_path / "a", other)
        assert main(["eval", "vqa", "--compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 2
        assert "holds results of 'text', not of 'vqa'" in capsys.readouterr().err
        assert main(["eval", "text", "--compare", str(tmp_path / "a"), str(tmp_path / "d")]) == 0
        assert "Left out: 1 samples that only a has and 0 that only b has." in capsys.readouterr().err
        with pytest.raises(UserError, match="made with other settings"):
            self.run(tmp_path, "a", ones, said, reward="anls")
        (tmp_path / "a" / "settings.json").write_text("{")
        with pytest.raises(UserError, match="is not a JSON object"):
            compare.compare(tmp_path / "a", tmp_path / "d")

    def test_completions_of_other_prompts_are_refused(self, tmp_path):
        problems = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "2 + 2?", "answer": "4"}]
        turned = [{"prompt": "2 + 2?", "completion": "4"}, {"prompt": "1 + 1?", "completion": "2"}]
        with pytest.raises(UserError, match=r"line 1 answers the prompt '2 \+ 2\?'"):
            self.run(tmp_path, "a", problems, turned)
        templated = [{"prompt": f"<user>{row['prompt']}</user>", "completion": row["answer"]} for row in problems]
        assert self.run(tmp_path, "b", problems, templated)["avg@1"] == 1.0
        with pytest.raises(UserError, match="line 1 answers the prompt"):
            vqa.evaluate(prompts=tmp_path / "p-a.jsonl", texts=tmp_path / "t-a.jsonl", metric="exact_match")

    def test_a_reward_that_fails_on_a_sample_leaves_its_problem_out(self, tmp_path, monkeypatch):
        from visual_grpo.rewards.exact_match import ExactMatch

        plain, broken = ExactMatch.__call__, True

        def moody(self, request):
            values = plain(self, request).values.clone()
            return [
                float("nan") if broken and t == "?" else v for t, v in zip(request.texts, values.tolist(), strict=True)
            ]

        monkeypatch.setattr(ExactMatch, "__call__", moody)
        run = (
            "a",
            [{"prompt": "1?", "answer": "1"}, {"prompt": "2?", "answer": "2"}],
            [{"completion": "1"}, {"completion": "?"}],
        )
        found = self.run(tmp_path, *run)
        assert (found["problems"], found["failed"], found["without_gold"], found["avg@1"]) == (1, 1, 0, 1.0)
        broken = False
        assert self.run(tmp_path, *run)["avg@1"] == 0.5

    def test_a_store_with_a_broken_line_is_told(self, tmp_path):
        run = ("a", [{"prompt": "1?", "answer": "1"}], [{"completion": "1"}])
        self.run(tmp_path, *run)
        store = tmp_path / "a" / "verdicts.jsonl"
        store.write_text("{broken}\n" + store.read_text())
        with pytest.raises(UserError, match=r"line 1 of .*verdicts\.jsonl"):
            self.run(tmp_path, *run)


class TestQuestions:
    @pytest.mark.parametrize(
        ("metric", "row", "answer"),
        [
            ("exact_match", {"answers": [{"answer": "cat"}] * 4}, "cat"),
            ("vqa_accuracy", {"answers": [{"answer": "cat"}] * 10}, "cat"),
            ("multiple_choice", {"answer": "b", "choices": ["x", "y"]}, "B"),
            ("multiple_choice", {"answer": "(B)", "choices": ["x", "y"]}, "y"),
            ("multiple_choice", {"answer": "y", "choices": ["x", "y"]}, "B"),
            ("multiple_choice", {"answer": 1, "choices": ["x", "y"]}, "B"),
            ("multiple_choice", {"answer": 1, "choices": ["1", "2"]}, "A"),
        ],
    )
    def test_forms_of_gold_answers(self, metric, row, answer, tmp_path):
        files = {
            "prompts": write(tmp_path / "q.jsonl", [row]),
            "texts": write(tmp_path / "a.jsonl", [{"completion": answer}]),
        }
        assert vqa.evaluate(**files, metric=metric)[metric] == 1.0

    @pytest.mark.parametrize(
        ("metric", "row", "message"),
        [
            ("exact_match", {"answers": []}, "no 'answers'"),
            ("anls", {"answer": " "}, "no 'answers'"),
            ("multiple_choice", {"answer": "E", "choices": ["x", "y"]}, "none of the choices"),
            ("iou", {"box": [10, 10, 5, 5]}, "x1 < x2"),
            ("iou", {"box": [None, 0, 5, 5]}, "not of numbers"),
        ],
    )
    def test_gold_answers_that_nothing_can_equal_are_refused(self, metric, row, message, tmp_path):
        files = {
            "prompts": write(tmp_path / "q.jsonl", [row]),
            "texts": write(tmp_path / "a.jsonl", [{"completion": "B"}]),
        }
        with pytest.raises(UserError, match=message):
            vqa.evaluate(**files, metric=metric)


class TestCaptions:
    def test_another_picture_of_the_same_name_is_another_question(self, tmp_path):
        (tmp_path / "a.png").write_bytes(b"1")
        question = Question(prompt="p", read=str, image=tmp_path / "a.png")
        first = question.key("judge")
        assert question.key("judge") == first
        (tmp_path / "a.png").write_bytes(b"2")
        assert question.key("judge") != first

    def test_numbers_out_of_range(self):
        for options in ({"workers": 0}, {"retries": -1}):
            with pytest.raises(UserError, match="workers of 1 or more"):
                ask(lambda prompt, image=None: "x", [Question(prompt="p", read=str)], **options)

    def test_orders_do_not_depend_on_the_captions_that_are_there(self, tmp_path):
        rows = [
            {"image": f"{i}", "question": "Which colour?", "choices": ["red", "blue", "green"], "answer": "red"}
            for i in range(6)
        ]
        prompts = write(tmp_path / "q.jsonl", rows)
        shown = {}
        for name, some in (("all", range(6)), ("some", range(3, 6))):
            texts = write(tmp_path / f"{name}.jsonl", [{"image": f"{i}", "caption": "c"} for i in some])
            run = {"texts": texts, "prompts": prompts, "out": tmp_path / name, "judge": lambda prompt, image=None: "A"}
            assert caption.evaluate(**run)["without_caption"] == 6 - len(some)
            lines = (tmp_path / name / "results.jsonl").read_text().splitlines()
            shown[name] = {line["item"]: line["shown"] for line in map(json.loads, lines)}
        assert shown["some"] == {key: shown["all"][key] for key in ("3", "4", "5")}

    def test_more_choices_than_letters(self, tmp_path):
        row = {"image": "a", "question": "Which?", "choices": [str(i) for i in range(30)], "answer": "3"}
        files = {
            "prompts": write(tmp_path / "q.jsonl", [row]),
            "texts": write(tmp_path / "a.jsonl", [{"image": "a", "caption": "c"}]),
        }
        with pytest.raises(UserError, match="30 choices are more than there are letters"):
            caption.evaluate(**files, judge=lambda prompt, image=None: "A")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mix", "position=nan"], "weights from 0"),
        (["--mix", "position=inf"], "weights from 0"),
        (["--exclude", "captions.jsonl"], "'prompt' must be a text"),
        (["--classes", "latin.txt"], "cannot read class names"),
    ],
)
def test_prompt_rules_with_bad_files_and_weights(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "captions.jsonl", [{"caption": "a photo of a cat"}])
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    assert main(["prompts", "geneval", "--out", "x.jsonl", *options]) == 2
    assert message in capsys.readouterr().err


def test_texts_of_other_prompts_are_not_scored(tmp_path, capsys):
    prompts = write(tmp_path / "p.jsonl", [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "2 + 2?", "answer": "4"}])
    texts = write(tmp_path / "t.jsonl", [{"prompt": "2 + 2?", "text": "4"}, {"prompt": "1 + 1?", "text": "2"}])
    assert main(["score", "--reward", "exact_match", "--texts", str(texts), "--prompts", str(prompts)]) == 2
    assert "line 1 answers the prompt '2 + 2?'" in capsys.readouterr().err
