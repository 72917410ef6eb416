"""Malformed configs and inputs through the command line: status 2, one message that names the key or file, no folder left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from toy_run import toy_config

from visual_grpo.cli import main
from visual_grpo.method import Method, MethodConfig

HERE = "test_bad_input"


class First(Method[MethodConfig]):
    """Fills an exclusive hook."""

    def surrogate(self, micro: Any, state: Any) -> Any:
        """Never called."""
        raise NotImplementedError


class Second(First):
    """Fills the same."""


class Picky:
    """A reward whose constructor refuses a value."""

    def __init__(self, size: int = 1) -> None:
        if size < 1:
            raise ValueError("size must be positive")


class Lost:
    """A reward whose constructor misses a file."""

    def __init__(self) -> None:
        raise FileNotFoundError("weights.bin is not there")


OVERRIDES: list[tuple[str, str | list[str], list[str]]] = [
    # the form of overrides
    ("no equals sign", "train.steps", ["override 'train.steps'", "section.key=value"]),
    ("empty key", "=3", ["override '=3'", "section.key=value"]),
    ("double dot", "train..steps=1", ["override 'train..steps=1'"]),
    ("broken yaml value", "train.steps=[1", ["override 'train.steps=[1'", "not valid YAML"]),
    ("key below a number", "train.steps.x=1", ["train.steps:", "valid integer"]),
    # keys
    ("unknown section", "trian.steps=1", ["unknown key 'trian'", "Did you mean 'train'?"]),
    ("unknown key", "train.stpes=1", ["unknown key 'train.stpes'", "Did you mean 'steps'?"]),
    ("unknown deep key", "train.optimizer.lrr=1", ["'train.optimizer.lrr'", "Did you mean 'lr'?"]),
    ("unknown key of an optional section", "model.lora.rnak=4", ["'model.lora.rnak'", "Did you mean 'rank'?"]),
    ("unknown sampling key", "sampling.temprature=1", ["'sampling.temprature'", "Did you mean 'temperature'?"]),
    ("unknown evaluation sampling key", "eval.sampling.lenght=1", ["'eval.sampling.lenght'"]),
    ("unknown method option", "method=[{dapo: {max_tris: 2}}]", ["'method.dapo.max_tris'", "Did you mean 'max_tries'?"]),
    ("unknown key of a reward", "rewards={exact_match: {wieght: 1}}", ["rewards.exact_match.wieght", "Did you mean 'weight'?"]),
    ("unknown parameter of a reward", "rewards={length: {params: {targt: 3}}}", ["'length'", "'targt'"]),
    # values
    ("section as number", "train=5", ["train:", "5"]),
    ("list for a section", "train=[1, 2]", ["train:"]),
    ("text for a number", "train.steps=many", ["train.steps:", "many"]),
    ("fraction for a count", "train.steps=1.5", ["train.steps:"]),
    ("truth for a number", "train.steps=yes", ["train.steps:", "truth value"]),
    ("zero steps", "train.steps=0", ["train.steps:", "greater than 0"]),
    ("negative learning rate", "train.optimizer.lr=-1e-4", ["train.optimizer.lr:", "greater than 0"]),
    ("nan learning rate", "train.optimizer.lr=.nan", ["train.optimizer.lr:", "finite"]),
    ("infinite learning rate", "train.optimizer.lr=.inf", ["train.optimizer.lr:", "finite"]),
    ("momentum of 2", "train.optimizer.betas=[2, 0.9]", ["train.optimizer.betas.0:", "less than 1"]),
    ("one momentum", "train.optimizer.betas=[0.9]", ["train.optimizer.betas.1"]),
    ("infinite weight", "rewards.exact_match=.inf", ["rewards.exact_match.weight:", "finite"]),
    ("nan limit of an alarm", "alarms.kl_max=.nan", ["alarms.kl_max:", "finite"]),
    ("alarm action", "alarms.kl=shout", ["alarms.kl:", "'off', 'warn' or 'stop'"]),
    ("dropout of 1", "model.lora.dropout=1", ["model.lora.dropout:", "less than 1"]),
    ("lora rank 0", "model.lora.rank=0", ["model.lora.rank:", "greater than 0"]),
    ("lora without modules", "model.lora.targets=[to_q]", ["model.lora.targets ['to_q']", "head"]),
    ("no layer to train", "model.train_layers=[attn]", ["model.train_layers ['attn']"]),
    ("dtype typo", "model.dtype=bflaot16", ["model.dtype:", "'bfloat16'"]),
    ("seed below 0", "train.seed=-1", ["train.seed:"]),
    ("seed too large", "train.seed=99999999999999999999999", ["train.seed:"]),
    ("clip above 1", "ratio.clip_low=1.5", ["ratio.clip_low:", "less than or equal to 1"]),
    ("divergence of transitions on tokens", "kl={beta: 0.1, estimator: gaussian}", ["kl.estimator=gaussian", "k3"]),
    ("divergence of predictions on tokens", "kl={beta: 0.1, estimator: prediction}", ["kl.estimator=prediction", "k3"]),
    ("ratio on a divergence", "kl={estimator: gaussian, importance: true}", ["kl.importance", "k1, k2, k3", "leave it out"]),
    ("share of all tokens", "loss.top_entropy=1", ["loss.top_entropy:", "less than 1"]),
    ("limit without old log-probs", "loss.off_policy_max=0.1", ["loss.off_policy_max compares", "train.epochs_per_step"]),
    ("limit of 0", "loss.off_policy_max=0", ["loss.off_policy_max:", "greater than 0"]),
    ("clip below 0", "ratio.clip_low=-0.1", ["ratio.clip_low:"]),
    ("ema decay 1", "train.ema.decay=1", ["train.ema.decay:"]),
    ("timeout 0", "rewards={exact_match: {timeout_s: 0}}", ["rewards.exact_match.timeout_s:"]),
    ("negative retries", "rewards={exact_match: {retries: -1}}", ["rewards.exact_match.retries:"]),
    ("unknown aggregation", "loss.aggregation=mean", ["loss.aggregation:", "token_mean"]),
    ("temperature 0 in training", "sampling.temperature=0", ["sampling.temperature:", "greater than 0"]),
    ("no evaluation samples", "eval.samples=0", ["eval.samples:", "greater than 0"]),
    ("no checkpoint", "checkpoint.keep=0", ["checkpoint.keep:"]),
    # geometry
    ("group of one", "train.group_size=1", ["train.group_size is 1", "at least 2"]),
    ("updates that do not divide", "train.updates_per_step=3", ["train.updates_per_step (3)", "train.group_size=6 or 9"]),
    ("more prompts than there are", "train.prompts_per_step=17", ["train.prompts_per_step (17)", "16 prompts", "use 16"]),
    # names
    ("unknown method", "method=gropo", ["no method named 'gropo'", "Did you mean 'grpo'?"]),
    ("method twice", "method=[grpo, grpo]", ["'grpo' stands twice"]),
    ("method as number", "method=5", ["method:", "got 5"]),
    ("not a method", "method=pathlib:Path", ["'pathlib:Path'", "no subclass"]),
    ("module that is not there", "method=no_such:Thing", ["no module 'no_such'"]),
    ("two of one hook", f"method=[{HERE}:First, {HERE}:Second]", ["First", "Second", "exclusive hook 'surrogate'"]),
    ("methods of other units", "method=[flow_grpo, v_grpo]", ["flow_grpo, v_grpo cannot be stacked", "noise_pair"]),
    ("flow method on text", "method=flow_grpo", ["flow_grpo", "'toy'", "autoregressive"]),
    ("unknown adapter", "model.adapter=toyy", ["no model named 'toyy'", "Did you mean 'toy'?"]),
    ("unknown reward", "rewards=exact_mach", ["no reward named 'exact_mach'", "Did you mean 'exact_match'?"]),
    ("no reward", "rewards={}", ["rewards:", "none to train on"]),
    ("only evaluation rewards", "rewards={exact_match: {eval_only: true}}", ["rewards:", "eval_only"]),
    ("refused reward parameter", "rewards={'test_bad_input:Picky': {params: {size: 0}}}", ["Picky", "size must be positive"]),
    ("image reward on text", "rewards=brightness", ["'brightness' reads images", "texts"]),
    ("options that are no mapping", "method=[{dapo: 3}]", ["options of method 'dapo' are 3"]),
    ("options of a method that is not there", ["method=[grpo]", "method.dapo.max_tries=2"], ["no 'dapo' in the stack (grpo)"]),
    ("a list that holds itself", "sampling={x: &a [*a]}", ["sampling={x", "recursive"]),
    ("a date that is none", "name=2020-13-45", ["override 'name=2020-13-45'", "not valid YAML"]),
    ("truth for a number of a method", "method=[{dapo: {max_tries: yes}}]", ["method.dapo.max_tries:", "truth value"]),
    ("truth for a number of the sampler", "sampling.max_new_tokens=yes", ["sampling.max_new_tokens:", "truth value"]),
    ("reward that is no name", "rewards=[[exact_match]]", ["rewards:", "is no name"]),
    ("reward twice", "rewards=[exact_match, exact_match]", ["rewards:", "'exact_match' stands twice"]),
    ("reward under the name of the sum", "rewards={total: {reward: exact_match}}", ["rewards:", "'total'"]),
    ("reward that Python knows nothing of", "rewards={'builtins:dict': 1}", ["'builtins:dict'", "no reward class or function"]),
    ("reward without its file", f"rewards={{'{HERE}:Lost': 1}}", ["Lost", "weights.bin is not there"]),
    ("module that ends Python", "method=exits:Thing", ["'exits:Thing'", "SystemExit"]),
    ("adapter that is none", "model.adapter=pathlib:Path", ["'pathlib:Path'", "no subclass of PolicyAdapter"]),
    ("lora on no name", "model.lora.targets=['']", ["model.lora.targets", "head"]),
    ("name that is too long", f"name={'n' * 300}", ["cannot name a folder"]),
    ("name of two lines", 'name="a\\nb"', ["cannot name a folder"]),
    ("unknown tracker", "track.trackers=[tensorbord]", ["track.trackers.0:"]),
    ("name with a slash", "name=a/b", ["name 'a/b'"]),
    # prompts
    ("no such file", "data.source=nothing.jsonl", ["nothing.jsonl", "data.source"]),
    ("no such world", "data.source=testbed/scnes", ["'scnes'", "Did you mean 'scenes'?"]),
    ("no such split", ["data.source=testbed/arithmetic", "data.split=dev"], ["splits train and heldout"]),
    ("empty file", "data.source=empty.txt", ["empty.txt", "holds no prompt"]),
    ("broken line", "data.source=broken.jsonl", ["broken.jsonl, line 2", "not valid JSON"]),
    ("a list in a line", "data.source=lists.jsonl", ["lists.jsonl, line 1", "JSON object"]),
    ("no such column", "data.prompt_column=caption", ["'caption'", "data.prompt_column"]),
    ("number as prompt", "data.source=numbers.jsonl", ["numbers.jsonl, record 1", "non-empty text, or a conversation", "got 5"]),
    ("no such answer column", "data.answer_column=gold", ["'gold'", "data.answer_column"]),
    ("binary prompts", "data.source=binary.txt", ["binary.txt"]),
    ("not a parquet file", "data.source=fake.parquet", ["fake.parquet", "parquet"]),
    ("a folder as prompts", "data.source=.", ["'.' is no file", "data.source"]),
    ("no name as prompts", "data.source=''", ["is no file", "data.source"]),
    ("a file of another kind", "data.source=toy.yaml", ["toy.yaml", "no known kind", ".jsonl"]),
    ("a number of 5000 digits", "data.source=huge.jsonl", ["huge.jsonl, line 1", "not valid JSON"]),
    ("too deep", "data.source=deep.jsonl", ["deep.jsonl, line 1", "not valid JSON"]),
    ("half a surrogate pair", "data.source=half.jsonl", ["half.jsonl, record 1", "'prompt'", "surrogate"]),
    ("the home folder of nobody", "data.source=~nobody-here/a.jsonl", ["no prompt file"]),
    ("held-out prompts in training", "eval.source=train.jsonl", ["16 held-out prompts are also training prompts", "eval.source"]),
]  # fmt: skip

FILES: list[tuple[str, bytes, list[str]]] = [
    ("empty", b"", ["bad.yaml", "must hold sections"]),
    ("a list", b"- a\n- b\n", ["bad.yaml", "must hold sections", "list"]),
    ("broken yaml", b"model: {adapter: toy\ntrain: [", ["bad.yaml", "not valid YAML"]),
    ("not text", bytes(range(128, 256)), ["bad.yaml", "not UTF-8"]),
    (
        "a section twice",
        b"train: {steps: 1}\nmodel: {adapter: toy}\ntrain: {steps: 2}\n",
        ["bad.yaml", "'train' stands twice", "line 1"],
    ),
    ("a key twice", b"train:\n  steps: 1\n  seed: 2\n  steps: 3\n", ["bad.yaml", "'steps' stands twice", "line 2"]),
    ("a mapping that holds itself", b"a: &a {b: *a}\n", ["bad.yaml"]),
    ("a list that holds itself", b"a: &a [*a]\n", ["bad.yaml", "recursive"]),
    ("sections missing", b"name: x\n", ["model is missing", "data is missing", "rewards is missing"]),
    ("keys that are numbers", b"1: 2\nmodel: {adapter: toy, path: t}\ndata: {source: x}\nrewards: length\n", ["1"]),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a config that would run and some files that would not."""
    config = toy_config(tmp_path)
    config["data"]["source"], config["eval"]["source"] = "train.jsonl", "test.jsonl"
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (tmp_path / "huge.jsonl").write_text('{"prompt": "a", "answer": ' + "9" * 5000 + "}\n")
    (tmp_path / "deep.jsonl").write_text('{"prompt": ' + "[" * 100_000 + "\n")
    (tmp_path / "half.jsonl").write_text('{"prompt": "\\ud800"}\n')
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lists.jsonl").write_text("[1]\n")
    (tmp_path / "numbers.jsonl").write_text('{"prompt": 5}\n')
    (tmp_path / "binary.txt").write_bytes(bytes(range(128, 256)))
    (tmp_path / "fake.parquet").write_bytes(b"PAR0 nothing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("VISUAL_GRPO_DEBUG", "0")
    return tmp_path


def refused(args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, one message with all `words`, no traceback, no run."""
    runs = sorted(Path("runs").rglob("*"))
    status = main(["train", *args])
    printed = capsys.readouterr()
    assert status == 2, printed.err
    assert printed.err.count("Error: ") == 1
    assert "Traceback" not in printed.err
    missing = [word for word in words if word not in printed.err]
    assert not missing, f"{missing} not in {printed.err}"
    assert len(printed.err) < 1500
    assert sorted(Path("runs").rglob("*")) == runs


@pytest.mark.parametrize(("overrides", "words"), [c[1:] for c in OVERRIDES], ids=[c[0] for c in OVERRIDES])
def test_overrides(overrides: str | list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused(["toy.yaml", *([overrides] if isinstance(overrides, str) else overrides)], words, capsys)


@pytest.mark.parametrize(("content", "words"), [c[1:] for c in FILES], ids=[c[0] for c in FILES])
def test_config_files(content: bytes, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.yaml").write_bytes(content)
    refused(["bad.yaml"], words, capsys)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["no.yaml"], ["no.yaml", "No such file"]),
        (["./"], ["'.'", "Is a directory"]),
        (["quickstrat"], ["no recipe named 'quickstrat'", "Did you mean 'quickstart'?"]),
        (["a\0.yaml"], ["a\\x00.yaml", "null byte"]),
        (["empty.txt"], ["no recipe named 'empty.txt'", "write ./empty.txt"]),
        (["os:getcwd"], ["recipe 'os:getcwd' makes str, not a RunConfig"]),
        (["visual_grpo.config:RunConfig"], ["RunConfig' could not be made", "Field required"]),
        (["toy.yaml", "--resume"], ["nothing to resume"]),
        (["toy.yaml", "--resume", "--out", "away"], ["nothing to resume", "away"]),
        (["toy.yaml", "--out", "toy.yaml/x"], ["toy.yaml/x", "use another --out"]),
        (["toy.yaml", "model.adapter=text_lm", "model.path=/no/such_model"], ["/no/such_model"]),
        (["toy.yaml", "track.trackers=[aim]"], ["track.trackers: aim is not installed", "pip install"]),
    ],
)
def test_arguments(args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused(args, words, capsys)


def test_a_folder_that_holds_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["toy.yaml", "train.steps=1", "eval.final_samples=2", "eval.every=0", "--out", "runs/mine"]
    assert main(["train", *small]) == 0
    capsys.readouterr()
    refused(small, ["'runs/mine' already holds a run", "--resume"], capsys)
    refused([*small, "--resume", "train.seed=7"], ["cannot resume", "train.seed: 0 in the run, 7 now"], capsys)


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("rewards=exact_mach", "Did you mean 'exact_match'?"),
        ("rewards={length: {params: {targt: 3}}}", "'targt'"),
        ("data.source=broken.jsonl", "broken.jsonl, line 2"),
        ("train.prompts_per_step=17", "16 prompts"),
        ("eval.source=train.jsonl", "16 held-out prompts"),
    ],
)
def test_a_dry_run_finds_wrong_rewards_and_prompts(
    override: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["toy.yaml", "--dry-run", override], [word], capsys)


def test_a_dry_run_needs_no_prompts_but_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "toy.yaml", "--dry-run", "data.source=nothing.jsonl", "eval.source=owner/name"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "there is no file 'nothing.jsonl' here; the run will need it" in printed
    assert "'owner/name' is a data set of the hub" in printed


def test_every_fault_of_a_config_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    refused(
        ["toy.yaml", "train.steps=0", "eval.samples=0", "oops=1"], ["train.steps:", "eval.samples:", "'oops'"], capsys
    )


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["toy.yaml", "train.stpes=1"], "Did you mean 'steps'?"),
        (["toy.yaml", "data.source=nothing.jsonl"], "nothing.jsonl"),
        (["toy.yaml", "--resume"], "nothing to resume"),
        (["toy.yaml", "rewards=exact_mach", "--dry-run"], "Did you mean 'exact_match'?"),
        (["toy.yaml", "train.group_size=1"], "at least 2 samples"),
    ],
)
def test_in_a_process_of_its_own(args: list[str], word: str, folder: Path) -> None:
    command = [sys.executable, "-m", "visual_grpo", "train", *args]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_there_are_enough_cases() -> None:
    assert len(OVERRIDES) + len(FILES) >= 60


def test_a_dry_run_names_prompts_that_are_not_there_yet(capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe can be looked at before its data is there; the run itself is refused."""
    assert main(["train", "toy.yaml", "--dry-run", "data.source=nothing.jsonl"]) == 0
    assert "there is no file 'nothing.jsonl' here" in " ".join(capsys.readouterr().out.split())
    refused(["toy.yaml", "data.source=nothing.jsonl"], ["nothing.jsonl"], capsys)
