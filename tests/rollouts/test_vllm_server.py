"""Training through a server that speaks vLLM's routes (`stand_in`): a whole run, what a server may get wrong, and a resumption.

No vLLM runs here; docs/rollouts.md says what was tried with it.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from stand_in import Faults, StandIn, serving

from visual_grpo.adapters.paths import packaged_folder
from visual_grpo.adapters.text_lm import TextLMAdapter, TextSampling
from visual_grpo.api import plan
from visual_grpo.build import build_trainer
from visual_grpo.config import LoraConfig, ModelConfig, to_yaml
from visual_grpo.distributed import Ranks
from visual_grpo.errors import RunError, UserError
from visual_grpo.importance import SAMPLER_LOG_PROB
from visual_grpo.loss import LossInputs, passes, settle_old, step_totals
from visual_grpo.policy import Policy
from visual_grpo.rollouts import vllm_server
from visual_grpo.rollouts.agreement import TOLERANCE, measure
from visual_grpo.rollouts.connect import start
from visual_grpo.rollouts.settings import VllmConfig
from visual_grpo.rollouts.vllm_server import VllmServer
from visual_grpo.run_folder import RunFolder
from visual_grpo.selftest import SelfTestError
from visual_grpo.trainer import Trainer
from visual_grpo.types import PromptBatch

LM_TINY = str(packaged_folder("lm_tiny"))
LORA = {"rank": 8, "alpha": 16, "init": "default"}


def digits(completions: list[str]) -> list[float]:
    """Unequal within most groups, whatever the model says."""
    return [float(sum(place * ord(letter) for place, letter in enumerate(text, 1)) % 7) for text in completions]


def settings(url: str, **over: Any) -> dict[str, Any]:
    return {
        "model": {"adapter": "text_lm", "path": "testbed/lm_tiny"},
        "data": {"source": "testbed/arithmetic"},
        "rewards": {f"{__name__}:digits": 1.0},
        "sampling": {"max_new_tokens": 5, "temperature": 1.5, "engine": "vllm", "vllm": {"url": url}},
        "train": {"steps": 2, "prompts_per_step": 1, "group_size": 4, "micro_batch": 4, "optimizer": {"lr": 1e-3}},
        "eval": {"every": 0, "samples": 2, "final_samples": 2, "batch": 2},
        "checkpoint": {"every": 10},
        **over,
    }


def trainer(folder: Path, url: str, *, resume: bool = False, **over: Any) -> Trainer:
    made = plan(settings(url, **over))
    run = RunFolder.create(folder, "run", config_yaml=to_yaml(made.config), resume=resume, out=folder / "run")
    try:
        return build_trainer(made, run, Ranks())
    except BaseException:
        run.discard()
        run.close()
        raise


def train(folder: Path, url: str, *, resume: bool = False, **over: Any) -> int:
    """Steps done by a run, without its report."""
    made = trainer(folder, url, resume=resume, **over)
    try:
        if resume:
            made.resume()
        return made.run().step
    finally:
        made.suite.close()
        made.writer.close()
        made.policy.adapter.engine.close()
        made.writer.folder.discard()
        made.writer.folder.close()


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full weights"])
def test_a_run_through_a_server(tmp_path, lora):
    server = StandIn(LM_TINY)
    model = settings("")["model"] | {"lora": lora}
    with serving(server) as url:
        assert train(tmp_path, url, model=model) == 2
    checks = {c["name"]: c for c in json.loads((tmp_path / "run" / "self_test.json").read_text())}
    for name in ("rollout engine and model agree", "rollout engine follows the weights"):
        assert checks[name]["status"] == "ok"
    told = RunFolder(tmp_path / "run").log.read_text()
    assert "self-test after the first step\n  ok   rollout engine and model agree" in told
    for metrics in steps(tmp_path):
        assert metrics["grad_norm"] > 0
        assert metrics["sampler/log_prob_difference"] < 1e-5
        assert metrics["sampler/log_prob_difference_max"] < 1e-4
        assert metrics["sampler/correction"] == pytest.approx(1.0, abs=1e-3)
        assert metrics["sampler/truncated"] == 0.0
    weights = load_file(tmp_path / "run" / "checkpoints" / "step-000002" / "weights.safetensors")
    assert all(bool(torch.isfinite(t).all()) for t in weights.values())
    # At the start, moved by the self-test, put back or trained: each set of weights was sent once, before it was sampled from.
    routes = [route for route, _ in server.requests]
    sent = "/v1/load_lora_adapter" if lora else "/collective_rpc"
    assert routes.count(sent) == 4
    assert routes.index(sent) < routes.index("/v1/completions")
    assert routes.count("/reset_prefix_cache") == (0 if lora else 4)
    assert server.loras == {}
    assert not (tmp_path / "run" / "sync").exists()


def test_a_server_that_keeps_its_old_weights_is_found(tmp_path):
    told = r"rollout engine follows the weights: .* samples with old weights, whatever it is sent"
    with serving(StandIn(LM_TINY, faults=Faults(stale=True))) as url, pytest.raises(SelfTestError, match=told):
        train(tmp_path, url, model=settings("")["model"] | {"lora": LORA})


def test_log_probs_of_another_temperature_are_found(tmp_path):
    told = r"rollout engine and model agree: .*--logprobs-mode processed_logprobs"
    with serving(StandIn(LM_TINY, faults=Faults(raw_log_probs=True))) as url, pytest.raises(SelfTestError, match=told):
        train(tmp_path, url)


@pytest.fixture(scope="module")
def policy() -> Policy:
    config = ModelConfig(adapter="text_lm", path="testbed/lm_tiny", lora=LoraConfig(**LORA))
    return Policy(TextLMAdapter.load(config, device=torch.device("cpu"), sampling=TextSampling()), config)


def sampled(policy: Policy, url: str, folder: Path, **over: Any) -> Any:
    """Two rows of a new engine, which is given the weights first."""
    options = TextSampling(max_new_tokens=5, temperature=0.8, engine="vllm", vllm={"url": url, **over})
    rows = torch.arange(2)
    prompts = PromptBatch(prompts=["1+1=", "12-5="], metadata=[{}, {}], group_ids=rows, row_ids=rows)
    with closing(VllmServer(options.vllm, folder=folder / "sync")) as engine:
        start(engine, policy, options)
        return policy.sample(prompts, seed=3, sampling=options), measure(policy, prompts, options)


def test_other_weights_than_those_of_the_model_are_measured(tmp_path, policy):
    server = StandIn(LM_TINY)
    with serving(server) as url:
        rows, found = sampled(policy, url, tmp_path)
        again, _ = sampled(policy, url, tmp_path)
        for value in server.plain.values():
            value.mul_(1.02)
        server._active = None
        _, other = sampled(policy, url, tmp_path)
    assert torch.equal(rows.data["completion_ids"], again.data["completion_ids"])
    assert found.mean < 1e-5
    assert other.mean > TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (Faults(change={"logprobs": None}), "a reply has no log-probs"),
        (Faults(change={"logprobs": lambda v: {"token_logprobs": v["token_logprobs"][1:]}}), r"\d tokens came back with \d log"),
        (Faults(change={"logprobs": lambda v: {"token_logprobs": [None] * len(v["token_logprobs"])}}), "without a log-prob"),
        (Faults(change={"token_ids": None}), "no token_ids; it needs vLLM 0.11"),
        (Faults(change={"token_ids": lambda v: [900] * len(v)}), "token 900 came back, but model.path has 168 tokens"),
        (Faults(change={"token_ids": lambda v: v + v * 9}), "new tokens came back, asked for 1 to 5"),
        (Faults(change={"prompt_token_ids": lambda v: [1, *v]}), "prompt tokens that are not the"),
        (Faults(change={"finish_reason": "abort"}), "it ended with 'abort'"),
        (Faults(end_ids=tuple(range(168))), "run the engine with --generation-config vllm"),
        (Faults(lora=False), "answers 404 .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        (Faults(dies=(1, 0)), "EngineCore is dead"),
    ],
)  # fmt: skip
def test_what_a_server_gets_wrong_is_told_at_once(tmp_path, policy, faults, message):
    with serving(StandIn(LM_TINY, faults=faults)) as url, pytest.raises(UserError, match=message) as caught:
        sampled(policy, url, tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "sync").exists()


def test_full_weights_need_the_development_routes(tmp_path):
    told = r"/collective_rpc answers 404 .*VLLM_SERVER_DEV_MODE=1"
    with serving(StandIn(LM_TINY, faults=Faults(dev_mode=False))) as url, pytest.raises(UserError, match=told):
        train(tmp_path, url)
    assert not (tmp_path / "run").exists()


def test_a_server_that_is_not_there_or_does_not_answer(tmp_path, policy):
    with serving(StandIn(LM_TINY)) as url:
        pass
    with pytest.raises(UserError, match=r"no answer to /v1/models .*`vllm serve`"):
        sampled(policy, url, tmp_path)
    told = r"gave no answer within 3 s.*sampling.vllm.timeout_s"
    with serving(StandIn(LM_TINY, faults=Faults(hangs=True))) as url, pytest.raises(UserError, match=told):
        sampled(policy, url, tmp_path, timeout_s=3.0)


def test_a_server_of_another_model(tmp_path, policy):
    server = StandIn(LM_TINY)
    told = r"it serves no model 'qwen'; set sampling.vllm.model to one of: base"
    with serving(server) as url, pytest.raises(UserError, match=told):
        sampled(policy, url, tmp_path, model="qwen")
    server = StandIn(LM_TINY)
    server.tokenizer = lambda text, **_: {"input_ids": [1] * len(text)}
    with serving(server) as url, pytest.raises(UserError, match=r"another tokenizer"):
        sampled(policy, url, tmp_path)
    with serving(StandIn(LM_TINY, max_model_len=5)) as url, pytest.raises(UserError, match=r"its --max-model-len is 5"):
        sampled(policy, url, tmp_path)


def test_what_a_request_says():
    server = StandIn(LM_TINY)
    made = plan(settings("http://unused"))
    with serving(server) as url, closing(VllmServer(VllmConfig(url=url + "/v1/"), folder=Path("unused"))) as engine:
        engine.complete([[5, 6], [7]], [11, 12], made.sampling, [2])
    bodies = sorted((body for route, body in server.requests if route == "/v1/completions"), key=lambda b: b["seed"])
    assert [(b["prompt"], b["seed"]) for b in bodies] == [([5, 6], 11), ([7], 12)]
    assert {k: v for k, v in bodies[0].items() if k not in ("prompt", "seed")} == {
        "model": "base", "max_tokens": 5, "temperature": 1.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [2],
        "ignore_eos": False, "logprobs": 0, "return_token_ids": True, "add_special_tokens": False,
        "skip_special_tokens": False,
    }  # fmt: skip


def test_nothing_is_lost_when_the_server_dies_and_a_resumed_run_sends_the_weights_first(tmp_path):
    longer = settings("")["train"] | {"steps": 3}
    # Sent: the first weights, those that the self-test moved, those of step 1, and those of step 2: it dies in the third rollout.
    told = r"EngineCore is dead.*then go on with --resume"
    with serving(StandIn(LM_TINY, faults=Faults(dies=(4, 2)))) as url, pytest.raises(RunError, match=told):
        train(tmp_path, url, train=longer)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    again = StandIn(LM_TINY)
    with serving(again) as url:  # at another address
        assert train(tmp_path, url, resume=True, train=longer) == 3
    routes = [route for route, _ in again.requests]
    before = routes[: routes.index("/v1/completions")]
    assert before.count("/collective_rpc") == 2  # the weights of model.path, then those of the checkpoint


def loss_and_gradient(run: Trainer, rows: LossInputs) -> tuple[float, torch.Tensor]:
    for parameter in run.policy.trainable.values():
        parameter.grad = None
    total = 0.0
    for loss, _ in passes(run.stack, rows, step_totals(rows, 1), run.state):
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in run.policy.trainable.values()])


def test_the_correction_weighs_each_row_whatever_the_split(tmp_path):
    """Differences are made: rows 0.. get a summed log-ratio of known size, so the weights are known."""
    with serving(StandIn(LM_TINY)) as url:
        run = trainer(tmp_path, url, model=settings("")["model"] | {"lora": LORA | {"init": "gaussian"}})
        rollouts = run.policy.sample(run._draw(), seed=3, sampling=run.state.sampling)
        run.policy.adapter.engine.close()
        run.writer.close()
    sampler = rollouts.data[SAMPLER_LOG_PROB]
    assert torch.equal(sampler, rollouts.old_log_prob)
    sums = torch.tensor([0.4, -0.6, 2.0, 0.0])  # e^2 is above 3: that row is left out
    first = torch.zeros_like(sampler)
    first[:, 0] = sums
    rollouts.data[SAMPLER_LOG_PROB] = sampler - first
    expected = torch.where(sums.exp() > 3, 0.0, sums.exp())
    advantages = torch.tensor([1.0, -0.5, 0.7, 0.3])
    weights = torch.ones(rollouts.unit_mask.shape)

    def gradient(rows: LossInputs, correction: str, chunk: int | None = None) -> tuple[float, torch.Tensor]:
        config = run.config.model_copy(
            update={
                "ratio": run.config.ratio.model_copy(update={"correction": correction}),
                "train": run.config.train.model_copy(update={"units_per_pass": chunk}),
            }
        )
        run.state.config = config
        return loss_and_gradient(run, rows)

    rows = LossInputs(rollouts=rollouts, advantages=advantages, weights=weights)
    corrected = gradient(rows, "sequence_mask")
    by_hand = gradient(LossInputs(rollouts=rollouts, advantages=advantages * expected, weights=weights), "none")
    assert corrected[0] == pytest.approx(by_hand[0], abs=1e-5)
    torch.testing.assert_close(corrected[1], by_hand[1], rtol=1e-4, atol=1e-7)
    chunked = gradient(rows, "sequence_mask", 3)
    assert chunked[0] == pytest.approx(corrected[0], abs=1e-5)
    torch.testing.assert_close(chunked[1], corrected[1], rtol=1e-4, atol=1e-7)
    # Row 1 is pushed down, and the engine gave it 0.6 nats more than the model: that is what loss.off_policy_max looks at.
    run.config = run.config.model_copy(update={"loss": run.config.loss.model_copy(update={"off_policy_max": 0.05})})
    left = gradient(rows, "none")
    run.config = run.config.model_copy(update={"loss": run.config.loss.model_copy(update={"off_policy_max": None})})
    without = torch.where(torch.arange(4) == 1, 0.0, advantages)
    torch.testing.assert_close(left[1], gradient(replace(rows, advantages=without), "none")[1], rtol=1e-4, atol=1e-7)
    # Several updates: the old log-probs are those of the model, replayed, and no longer those of the engine.
    several = run.config.model_copy(update={"train": run.config.train.model_copy(update={"updates_per_step": 2})})
    run.state.config = several
    engine = LossInputs(rollouts=rollouts, advantages=advantages, weights=weights)
    engine.rollouts.old_log_prob = rollouts.data[SAMPLER_LOG_PROB]
    settled = settle_old(engine, [torch.arange(4)], run.state, lambda: None)
    torch.testing.assert_close(settled.rollouts.old_log_prob, sampler, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"sampling": {"vllm": {"url": "http://x"}}}, "set sampling.engine=vllm"),
        ({"sampling": {}, "ratio": {"correction": "none"}}, "ratio.correction weighs the samples of an engine"),
        ({"sampling": {"engine": "vllm", "vllm": {"ulr": "x"}}}, "Did you mean 'url'"),
        (
            {"sampling": {}, "eval": {"sampling": {"engine": "vllm"}}},
            "eval.sampling.engine=vllm needs sampling.engine=vllm",
        ),
        ({"eval": {"sampling": {"vllm": {"url": "http://other"}}}}, "a run has one engine"),
        ({"model": {"adapter": "text_lm", "path": "testbed/lm_tiny", "dtype": "float64"}}, "has no float64"),
        ({"loss": {"surrogate": "vespo"}}, "set ratio.correction=token_truncate"),
        (
            {"sampling": {"max_new_tokens": 8, "engine": "vllm", "vllm": {"url": "localhost:8000"}}},
            "is no address; give http://HOST:PORT",
        ),
    ],
)
def test_settings_that_cannot_work(tmp_path, over, message):
    with pytest.raises(UserError, match=message):
        train(tmp_path, "http://127.0.0.1:9", **over)


def test_a_folder_of_the_users_is_shared_under_a_name_of_the_run(tmp_path):
    (tmp_path / "shared" / "run").mkdir(parents=True)
    with serving(StandIn(LM_TINY)) as url:
        made = settings(url)["sampling"] | {"vllm": {"url": url, "folder": str(tmp_path / "shared")}}
        run = trainer(tmp_path, url, sampling=made)
        engine = run.policy.adapter.engine
        assert [p.parent.parent for p in engine.folder.glob("*/*.safetensors")] == [engine.folder]
        assert engine.folder.parent == tmp_path / "shared"
        run.writer.close()
        engine.close()
    assert [p.name for p in (tmp_path / "shared").iterdir()] == ["run"]


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"trains in one process in this version, the launcher started 2"):
        plan(settings("http://127.0.0.1:9", train={"prompts_per_step": 2}))


def test_an_evaluation_outside_a_run_has_no_engine(policy):
    rows = torch.zeros(1, dtype=torch.int64)
    prompts = PromptBatch(prompts=["1+1="], metadata=[{}], group_ids=rows, row_ids=rows)
    policy.adapter.engine = None
    with pytest.raises(UserError, match=r"set sampling.engine=model here"):
        policy.sample(prompts, seed=0, sampling=TextSampling(max_new_tokens=4, engine="vllm"))


def test_the_key_of_a_server_is_sent(tmp_path, monkeypatch):
    seen = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(401, json={"error": "Unauthorized"})

    monkeypatch.setattr(vllm_server, "_client", lambda _: httpx.Client(transport=httpx.MockTransport(handle)))
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(UserError, match=r"put its API key into VLLM_API_KEY"):
        vllm_server.VllmServer(VllmConfig(), folder=tmp_path)
    assert seen == ["Bearer secret"]
