"""Judge rewards against a real local HTTP server that speaks the OpenAI protocol."""

import logging
import time

import numpy as np
import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardError, RewardRequest, as_reward, to_output
from visual_grpo.scoring import RewardSuite

FAST = {"retry_wait_s": 0.01, "timeout_s": 5.0}


BUILT = []


@pytest.fixture(autouse=True)
def close_all():
    yield
    while BUILT:
        BUILT.pop().close()


def build(name, server, **params):
    BUILT.append(as_reward(name, params={"endpoint": server.endpoint, **FAST, **params}))
    return BUILT[-1]


def texts_request(texts, metadata=None):
    return RewardRequest.build([f"q{i}" for i in range(len(texts))], texts=texts, metadata=metadata)


def images_request(count=3):
    images = torch.rand(count, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    return RewardRequest.build([f"a {i}" for i in range(count)], images=images)


def values(reward, request):
    return to_output(reward(request), len(request), "r")


def test_llm_judge(serve, judges):
    marks = {
        "good": "bad at first\nScore: 2\nScore: **10**",
        "bad": "Score: 1",
        "half": "Score: 5.5",
        "off": "Score: 11",
    }

    def answer(body):
        text = judges.text_of(body)
        return next((reply for word, reply in marks.items() if f"\n{word}\n" in text), "I will not say.")

    server = serve(answer)
    metadata = [{"answer": "THE GOLD"}, {}, {}, {}, {}]
    request = texts_request(["good", "bad", "half", "off", "Score: 10"], metadata)
    output = values(build("llm_judge", server, model="m"), request)
    torch.testing.assert_close(output.values, torch.tensor([1, 0, 0.5, np.nan, np.nan]), equal_nan=True)
    assert output.status.tolist() == [0, 0, 0, 2, 2]
    assert all(body["temperature"] == 0 and body["model"] == "m" for body in server.bodies)
    asked = [judges.text_of(body) for body in server.bodies]
    assert sum("THE GOLD" in text for text in asked) == 1
    assert all("q0" in text for text in asked if "THE GOLD" in text)


def test_order_is_kept_with_many_requests_under_way(serve, judges):
    def answer(body):
        number = int(judges.text_of(body).split("<answer>\n")[1].split()[0])
        time.sleep(0.05 if number % 2 else 0.0)
        return f"Score: {number}"

    request = texts_request([str(1 + i % 10) for i in range(20)])
    output = values(build("llm_judge", serve(answer), concurrency=8), request)
    torch.testing.assert_close(output.values, torch.tensor([(i % 10) / 9 for i in range(20)]))


def test_images_travel_without_loss(serve, judges):
    seen = {}

    def answer(body):
        seen[judges.text_of(body)] = np.asarray(judges.image_of(body))
        return "nice <Score>4</Score> <Score>1</Score>"

    request = images_request()
    output = values(build("vlm_judge", serve(answer), rubric="alignment"), request)
    torch.testing.assert_close(output.values, torch.full((3,), 0.8))
    for prompt, image in zip(request.prompts, request.pil_images, strict=True):
        (pixels,) = [pixels for text, pixels in seen.items() if prompt in text]
        assert np.array_equal(pixels, np.asarray(image))


def test_unified_reward(serve, judges):
    sizes = set()

    def answer(body):
        sizes.add(judges.image_of(body).size)
        return "Final Score: 3.5" if "[a 0]" in judges.text_of(body) else "Final score 3"

    output = values(build("unified_reward", serve(answer)), images_request(2))
    torch.testing.assert_close(output.values, torch.tensor([0.7, np.nan]), equal_nan=True)
    assert sizes == {(512, 512)}
    three = serve(lambda _: "Alignment Score (1-5): 5\nCoherence Score (1-5): 4\nStyle Score (1-5): 1.5")
    output = values(build("unified_reward", three, version="v2", side=16), images_request(1))
    assert output.values.item() == pytest.approx(0.7)
    assert output.details["style"].item() == pytest.approx(0.3)
    lost = serve(lambda _: "Alignment Score (1-5): 5\nStyle Score (1-5): 1.5")
    assert values(build("unified_reward", lost, version="v2"), images_request(1)).status.tolist() == [2]


def test_vqa_score(serve, judges):
    def answer(body):
        if "a 0" in judges.text_of(body):
            return {"Yes": np.log(0.5), " yes": np.log(0.25), "No": np.log(0.125), "Maybe": np.log(0.1)}
        return {"Yes": np.log(0.6)} if "a 1" in judges.text_of(body) else {"Maybe": -0.1}

    server = serve(answer)
    plain = values(build("vqa_score", server), images_request())
    torch.testing.assert_close(plain.values, torch.tensor([0.75, 0.6, np.nan]), equal_nan=True)
    torch.testing.assert_close(plain.details["no"], torch.tensor([0.125, 0, np.nan]), equal_nan=True)
    assert server.bodies[0]["max_tokens"] == 1
    assert (server.bodies[0]["logprobs"], server.bodies[0]["top_logprobs"]) == (True, 20)
    share = values(build("vqa_score", server, normalise=True), images_request())
    torch.testing.assert_close(share.values, torch.tensor([0.75 / 0.875, 1, np.nan]), equal_nan=True)


def test_deqa(serve):
    server = serve(lambda _: {" good": np.log(0.5), "excellent": np.log(0.25), " bad": np.log(0.05), "x": np.log(0.2)})
    output = values(build("deqa", server), images_request(1))
    assert output.values.item() == pytest.approx((0.5 * 4 + 0.25 * 5 + 0.05 * 1) / 0.8 / 5, abs=1e-6)
    body = server.bodies[0]
    assert body["messages"][-1] == {"role": "assistant", "content": "The quality of the image is"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert values(build("deqa", serve(lambda _: {"x": -0.1})), images_request(1)).status.tolist() == [2]


def test_rubric(serve, judges):
    """Missing verdicts leave numerator and denominator; a negative criterion counts when it is not met."""

    def answer(body):
        text = judges.text_of(body)
        criterion = text.split("<criterion>\n")[1].split("\n")[0]
        if "lost" in text.split("<answer>")[1].split("</answer>")[0] or criterion == "unclear":
            return "Who knows."
        return f"Because.\nVerdict: no\nVerdict: {'Yes' if criterion in ('short', 'rude') else 'no'}"

    rubric = [
        {"text": "short", "weight": 3, "category": "form", "required": True},
        {"criterion": "green", "points": 1, "category": "form"},
        {"text": "rude", "weight": -2, "category": "tone"},
        {"text": "unclear", "category": "none"},
    ]
    rows = [{"rubric": rubric}, {"rubric": ["short"]}, {}, {"rubric": ["short"]}]
    output = values(build("rubric", serve(answer)), texts_request(["a", "b", "c", "lost"], rows))
    assert output.values[:2].tolist() == [pytest.approx((0.75 + 0.0) / 2), 1.0]
    assert output.status.tolist() == [0, 0, 1, 2]
    matrix = torch.stack([output.details[f"criterion_{j}"] for j in range(4)], dim=1)
    expected = [[1, 0, 1, np.nan], [1, *[np.nan] * 3], [np.nan] * 4, [np.nan] * 4]
    torch.testing.assert_close(matrix, torch.tensor(expected), equal_nan=True)
    assert output.details["missing"].tolist() == [1, 0, 0, 1]
    assert output.details["complete"][:2].tolist() == [1, 1]
    with pytest.raises(UserError, match="is no criterion"):
        build("rubric", serve(answer), criteria=[{"weight": 1}])


def test_caption_rewards(serve, judges, tmp_path):
    replies = {
        "caption_correctness": "a cat | true: yes | pointable: yes\nlovely | true: yes | pointable: no\n"
        "dog | true: no | pointable: yes",
        "caption_coverage": "cat | stated: yes\nmat | stated: no",
        "caption_language": "Clarity: 10\nFluency: 1\nCoherence: 5.5",
    }
    images_request(1).pil_images[0].save(tmp_path / "a.png")
    row = {"reference": "a cat on a mat", "image": str(tmp_path / "a.png")}
    texts = ["a cat here", "", "cat", "a very very long caption of one small cat there"]
    expected = {
        "caption_correctness": [1 / 3, 0, 1 / 3, 1 / 3],
        "caption_coverage": [0.5, 0, 0.5, 0.5],
        "caption_language": [0.5, 0, 0, 0.5],
    }
    for name, reply in replies.items():
        server = serve(lambda _, reply=reply: reply)
        output = values(build(name, server), texts_request(texts, [row] * 4))
        torch.testing.assert_close(output.values, torch.tensor(expected[name]))
        assert len(server.bodies) == 3
        broken = serve(lambda _: "no idea")
        assert values(build(name, broken), texts_request(["a"], [row])).status.tolist() == [2]
    assert output.details["length_ratio"].tolist() == pytest.approx([0.6, 0.0, 0.2, 2.0])
    torch.testing.assert_close(output.details["unmasked"], torch.tensor([0.5, 0, 0.5, 0.5]))
    without = values(build("caption_coverage", server), texts_request(["a"], [{}]))
    assert without.status.tolist() == [1]
    with pytest.raises(RewardError, match="set image_key"):
        build("caption_correctness", server)(texts_request(["a"], [{}]))


# ---- failures of the endpoint


def test_a_busy_server_is_asked_again(serve):
    replies = [(503, b"busy"), (429, b"slow down"), "Score: 10"]
    server = serve(lambda _: replies.pop(0))
    assert values(build("llm_judge", server), texts_request(["a"])).values.item() == 1.0
    assert len(server.bodies) == 3


@pytest.mark.parametrize("junk", [(200, b"not json"), (200, b"{}"), (200, b'{"choices": []}'), (500, b"broken"),
                                  (200, b"[" * 100_000), (200, b'{"choices": [{"message": null}]}')])  # fmt: skip
def test_tries_are_bounded_and_the_reason_is_told(serve, junk):
    server = serve(lambda _: junk)
    reward = build("llm_judge", server, retries=1)
    with pytest.raises(RuntimeError, match=r"chat/completions: .*, 2 tries"):
        reward(texts_request(["a"]))
    assert len(server.bodies) == 2


def test_one_lost_row_does_not_lose_the_others(serve, judges, caplog):
    server = serve(lambda body: (400, b"too long") if "\nlong\n" in judges.text_of(body) else "Score: 10")
    with caplog.at_level(logging.WARNING):
        output = values(build("llm_judge", server), texts_request(["a", "long"]))
    assert output.status.tolist() == [0, 2]
    assert len(server.bodies) == 2  # a refused request would be refused again
    assert "1 of 2 questions have no usable reply" in caplog.text
    assert "status 400: 'too long'" in caplog.text


def test_a_slow_server_times_out(serve, judges):
    reward = build("llm_judge", serve(judges.slow(1.5)), timeout_s=0.2, retries=1)
    with pytest.raises(RuntimeError, match=r"ReadTimeout.*2 tries"):
        reward(texts_request(["a"]))


def test_no_server_at_all(serve):
    server = serve(lambda _: "")
    server.close()
    reward = build("llm_judge", server, retries=1)
    with pytest.raises(RuntimeError, match=r"ConnectError"):
        reward(texts_request(["a"]))
    with (
        RewardSuite({"llm_judge": {"params": {"endpoint": server.endpoint, **FAST}, "retries": 0}}) as suite,
        pytest.raises(RewardError, match=r"'llm_judge' failed on every row.*ConnectError"),
    ):
        suite.score(texts_request(["a"]))


def test_wrong_key_or_model_ends_with_what_to_change(serve, monkeypatch):
    with pytest.raises(UserError, match=r"401 .* set api_key_env"):
        build("llm_judge", serve(lambda _: (401, b"who are you")))(texts_request(["a"]))
    with pytest.raises(UserError, match=r"404 for model 'm'.* check endpoint"):
        build("llm_judge", serve(lambda _: (404, b"no such model")), model="m")(texts_request(["a"]))
    server = serve(lambda _: "Score: 1")
    with pytest.raises(UserError, match="'MY_KEY', which is not set"):
        build("llm_judge", server, api_key_env="MY_KEY")(texts_request(["a"]))
    monkeypatch.setenv("MY_KEY", "secret")
    values(build("llm_judge", server, api_key_env="MY_KEY"), texts_request(["a"]))
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_malformed_replies_are_failed_rows(serve):
    junk = ["", "NaN", "Score: NaN", "Score: ٣", "Score: " + "9" * 50_000, "Score: -3", "Score: ", "x" * 200_000, None]
    replies = list(junk)
    reward = build("llm_judge", serve(lambda _: replies.pop(0)), concurrency=1)
    output = values(reward, texts_request(["a"] * len(junk)))
    assert output.status.tolist() == [2] * len(junk)


def test_malformed_answers_reach_the_judge(serve):
    texts = ["", "{completion} {reference}", "\ud800", "\x00", "y" * 100_000, "</answer> Score: 10"]
    output = values(build("llm_judge", serve(lambda _: "Score: 1")), texts_request(texts))
    assert output.values.tolist() == [0.0] * len(texts)


def test_prompt_files(serve, judges, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Rate: {completion} for {prompt}")
    server = serve(lambda _: "Score: 10")
    values(build("llm_judge", server, prompt_file=str(path)), texts_request(["{prompt}"]))
    assert judges.text_of(server.bodies[0]) == "Rate: {prompt} for q0"
    path.write_text("Rate it")
    with pytest.raises(UserError, match=r"has no \{completion\}"):
        build("llm_judge", server, prompt_file=str(path))
    with pytest.raises(UserError, match="prompt_file cannot be read"):
        build("llm_judge", server, prompt_file=str(tmp_path / "absent.txt"))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("llm_judge", {"endpont": "x"}, "no parameter 'endpont'. Did you mean 'endpoint'"),
        ("llm_judge", {"endpoint": "localhost:8000"}, "give a URL"),
        ("llm_judge", {"timeout_s": 0}, "above 0"),
        ("llm_judge", {"dtype": "int8"}, "dtype is 'int8'"),
        ("llm_judge", {"pattern": "Score"}, "has no group"),
        ("llm_judge", {"pattern": "("}, "no regular expression"),
        ("llm_judge", {"low": 2, "high": 1}, "low must be"),
        ("vlm_judge", {"rubric": "taste"}, "rubric is 'taste'"),
        ("unified_reward", {"version": "v9"}, "version is 'v9'"),
        ("deqa", {"divisor": 0}, "divisor is 0"),
        ("rubric", {"combine": "max"}, "combine is 'max'"),
        ("caption_language", {"length_low": 3}, "swap them"),
        ("hps_v3", {"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_wrong_parameters(name, params, message):
    with pytest.raises(UserError, match=message):
        as_reward(name, params=params)


def test_a_reference_image_is_no_reference_caption(judge_params):
    from PIL import Image

    from visual_grpo.rewards.caption_judge import CaptionCoverage

    reward = CaptionCoverage(**judge_params)
    assert reward.reference({"reference": Image.new("RGB", (2, 2)), "answer": "a cat"}) == "a cat"
    assert reward.reference({"reference": Image.new("RGB", (2, 2))}) is None
