"""Pipelines: stages in order, references between them, overrides, resumption, merges."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from killed_run import KILLED, assert_same_run, exported, finish, output, records
from toy_run import toy_config

import visual_grpo as vg
from visual_grpo.api import any_plan, recipe_yaml
from visual_grpo.cli import main
from visual_grpo.config import RunConfig, to_yaml
from visual_grpo.config_stages import PipelineConfig, references, replaced
from visual_grpo.config_text import key_parts
from visual_grpo.errors import RunError, UserError
from visual_grpo.exports import merge_exports
from visual_grpo.registry import RECIPES
from visual_grpo.stages import PipelinePlan, plan_pipeline

LORA = {"rank": 2, "alpha": 4, "targets": ["head"]}


def toy(folder: Path, **over: Any) -> dict[str, Any]:
    """A run of two steps."""
    config = toy_config(folder, train={"steps": 2}, eval={"samples": 8, "final_samples": 8}, **over)
    return {key: value for key, value in config.items() if key != "name"}


def pipeline(folder: Path, **model: Any) -> dict[str, Any]:
    """Two experts, their mean, and a student that starts from it."""
    whole = "lora" not in model
    start = {"path": "stage://both"} if whole else {"init": "stage://both"}
    return {
        "name": "pipe",
        "stages": {
            "first": toy(folder, model=model),
            "second": toy(folder, model=model) | {"name": "other", "rewards": {"length": {"params": {"target": 1}}}},
            "both": {"merge": ["first", "second"]},
            "student": toy(folder, model={**model, **start}),
        },
    }


def over(config: dict[str, Any], stage: str, **values: Any) -> dict[str, Any]:
    """`config` with values of one stage replaced."""
    return config | {"stages": config["stages"] | {stage: config["stages"][stage] | values}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Config and folder of an uninterrupted pipeline."""
    folder = tmp_path_factory.mktemp("pipeline")
    config = pipeline(folder)
    config["stages"]["second"]["rewards"] = {"killed_run:digits": 1.0}
    assert finish(config, folder / "pipe") == 0, output(folder / "pipe")
    return config, folder / "pipe"


# -- running ------------------------------------------------------------------------------------------------------------------


def test_each_stage_starts_from_what_it_refers_to(reference: Any) -> None:
    _, folder = reference
    first, second, both = (exported(folder / name) for name in ("first", "second", "both"))
    for name, value in both.items():
        assert torch.equal(value, (0.5 * first[name].double() + 0.5 * second[name].double()).float())
    assert any(not torch.equal(first[name], second[name]) for name in first)
    stored = yaml.safe_load((folder / "student/config.yaml").read_text())
    assert stored["model"]["path"] == str((folder / "both/model").resolve())
    # What the student drew first are the merged weights' samples, not those of a fresh model.
    start = (folder / "student/eval/step-000000.jsonl").read_text()
    assert start != (folder / "first/eval/step-000000.jsonl").read_text()
    for name in ("first", "second", "student"):
        assert (folder / name / "report.html").is_file()
    assert (folder / "config.yaml").is_file()


def test_the_summary_has_a_record_for_each_stage(reference: Any) -> None:
    _, folder = reference
    summary = json.loads((folder / "summary.json").read_text())
    assert [(r["stage"], r["does"], r.get("steps")) for r in summary] == [
        ("first", "grpo", 2),
        ("second", "grpo", 2),
        ("both", "merge of first, second", None),
        ("student", "grpo", 2),
    ]
    last = [json.loads(line) for line in (folder / "student/metrics.jsonl").read_text().splitlines()][-1]
    assert summary[-1]["after"]["exact_match"] == last["metrics"]["exact_match/by_tag"]
    assert summary[-1]["model"] == "student/model"


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("second/checkpoints/step-000002", 1),  # within a stage
        ("second/result.json", 1),  # after a stage, before it counts as finished
        ("both/model", 1),  # within a merge
        ("summary.json", 4),  # between the stages
    ],
)
def test_a_killed_pipeline_ends_as_the_uninterrupted_one(
    reference: Any, tmp_path: Path, where: str, number: int
) -> None:
    config, whole = reference
    run = tmp_path / "pipe"
    assert finish(config, run, kill_in=str(run / where), kill_at=number) == KILLED
    assert finish(config, run) == 0, output(run)
    for name in ("first", "second"):
        assert_same_run(run / name, whole / name)
    assert records(run / "student") == records(whole / "student")
    mine, theirs = exported(run / "student"), exported(whole / "student")
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert not list(run.rglob("*.tmp"))


def test_finished_stages_are_left_alone_and_their_results_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"name": "pipe", "stages": {"first": toy(tmp_path), "both": {"merge": ["first"]}}}
    broken = over(config, "first", rewards={"test_stages:missing": 1.0})
    with pytest.raises(UserError, match="stage 'first': "):
        vg.train(broken, out=tmp_path / "pipe")
    assert not (tmp_path / "pipe/first").exists()  # refused before anything ran
    first = vg.train(config, out=tmp_path / "pipe")
    written = (tmp_path / "pipe/first/metrics.jsonl").stat().st_mtime_ns
    again = vg.train(config, out=tmp_path / "pipe", resume=True)
    assert (tmp_path / "pipe/first/metrics.jsonl").stat().st_mtime_ns == written
    assert again.summary == first.summary
    assert again.stages["both"] is None
    assert again.stages["first"].after.metrics == first.stages["first"].after.metrics
    assert again.stages["first"].before.metrics == first.stages["first"].before.metrics
    with pytest.raises(UserError, match="already holds a run"):
        vg.train(config, out=tmp_path / "pipe")
    with pytest.raises(UserError, match=r"stages\.first\.train\.steps: 2 in the run, 3 now"):
        vg.train(config, out=tmp_path / "pipe", resume=True, overrides={"first.train.steps": 3})
    with pytest.raises(UserError, match="it holds a pipeline"):
        vg.train(toy_config(tmp_path), out=tmp_path / "pipe", resume=True)


def failing(prompts: list[str], completions: list[str]) -> list[float]:
    """A reward that is broken."""
    raise RuntimeError("no scores today")


def test_a_stage_that_fails_leaves_the_earlier_ones_and_may_be_changed_where_it_has_not_begun(tmp_path: Path) -> None:
    config = {"name": "pipe", "stages": {"one": toy(tmp_path), "two": toy(tmp_path), "three": toy(tmp_path)}}
    bad = over(config, "two", rewards={"test_stages:failing": {"retries": 0}})
    with pytest.raises(
        RunError, match=r"stage 2 of 3, two(.|\n)*no scores today(.|\n)*earlier stages \(one\) are kept"
    ):
        vg.train(bad, out=tmp_path / "pipe")
    assert (tmp_path / "pipe/one/model").is_dir()
    with pytest.raises(UserError, match=r"stages\.two\.rewards"):  # it has begun
        vg.train(config, out=tmp_path / "pipe", resume=True)
    for path in ("metrics.jsonl", "config.yaml"):
        (tmp_path / "pipe/two" / path).unlink(missing_ok=True)
    longer = over(config, "three", train={**config["stages"]["three"]["train"], "steps": 3})
    done = vg.train(longer, out=tmp_path / "pipe", resume=True)
    assert [record.get("steps") for record in done.summary] == [2, 2, 3]


@pytest.mark.parametrize(
    ("gone", "damaged", "message"),
    [
        (["student", "both", "first/model"], None, r"merge\.first refers to what stage 'first' exported, .* is gone"),
        (["student", "both", "first/model", "second/model"], None, "stage 3 of 4.*merge.first refers to"),
        (["student", "both/model"], None, "stage 4 of 4.*model.path refers to what stage 'both' exported"),
        (["student", "both"], "second/model/model.safetensors", "second/model/model.safetensors' cannot be read"),
        (["student", "both", "first/model/model.safetensors"], None, "cannot merge 'first': there are no weights in"),
        (["first"], None, "stage 'both' is finished, but 'first', which it was made from, is not"),
        (["student"], "first/result.json", "first/result.json' is damaged"),
    ],
)
def test_what_was_deleted_or_damaged_between_two_starts_is_told(
    reference: Any, tmp_path: Path, gone: list[str], damaged: str | None, message: str
) -> None:
    config, whole = reference
    run = tmp_path / "a copy"
    shutil.copytree(whole, run)
    for name in gone:
        (shutil.rmtree if (run / name).is_dir() else Path.unlink)(run / name)
    if damaged is not None:
        (run / damaged).write_bytes((run / damaged).read_bytes()[:40])
    with pytest.raises(UserError, match=message):
        vg.train(config, out=run, resume=True)


def test_a_merge_writes_over_nothing_of_the_user(tmp_path: Path) -> None:
    mine = tmp_path / "pipe/both/model"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is there already, and stage 'both' would write over it"):
        vg.train(pipeline(tmp_path), out=tmp_path / "pipe")
    assert [path.name for path in (tmp_path / "pipe").rglob("*.*")] == ["thesis.txt"]


def test_a_pipeline_goes_on_where_its_folder_was_moved_to(reference: Any, tmp_path: Path) -> None:
    """A stage that has begun holds the paths of the old place."""
    config, whole = reference
    shutil.copytree(whole, tmp_path / "moved")
    (tmp_path / "moved/student/result.json").unlink()
    done = vg.train(config, out=tmp_path / "moved", resume=True)
    assert done.summary == json.loads((whole / "summary.json").read_text())
    stored = yaml.safe_load((tmp_path / "moved/student/config.yaml").read_text())
    assert stored["model"]["path"] == str((tmp_path / "moved/both/model").resolve())


def test_a_lora_goes_on_from_an_earlier_one_and_its_reference_is_that_start(tmp_path: Path) -> None:
    config = pipeline(tmp_path, lora=LORA)
    config["stages"]["student"] |= {"kl": {"beta": 0.1}, "rewards": {"killed_run:digits": 1.0}}
    del config["stages"]["second"]
    config["stages"]["both"] = {"merge": ["first"]}
    config["stages"]["first"]["rewards"] = {"killed_run:digits": 1.0}
    vg.train(config, out=tmp_path / "pipe")
    both = exported(tmp_path / "pipe/both")
    (checkpoint,) = (tmp_path / "pipe/student/checkpoints").glob("step-*")
    kept = load_file(checkpoint / "set-reference.safetensors")
    assert both
    for name, value in both.items():
        inside = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(kept[inside], value)
    trained = exported(tmp_path / "pipe/student")
    assert any(not torch.equal(trained[name], both[name]) for name in both)


# -- what is refused before anything runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "values", "message"),
    [
        ("student", {"model": {"adapter": "toy", "path": "stage://boht"}}, "no such stage. Did you mean 'both'"),
        ("student", {"model": {"adapter": "toy", "path": "stages://both"}}, "A reference is stage://NAME"),
        (
            "first",
            {"model": {"adapter": "toy", "path": "stage://student"}},
            "stage 'first': model.path refers to stage",
        ),
        ("student", {"model": {"adapter": "toy", "path": "stage://student"}}, "refers to this stage itself"),
        ("both", {"merge": ["first", "secnd"]}, "no such stage. Did you mean 'second'"),
        ("both", {"merge": ["first", "student"]}, "comes later; move it before 'both'"),
        ("both", {"merge": []}, "at least 1"),
        ("both", {"merge": ["first", "first"]}, "stands twice"),
        ("both", {"merge": {"first": 0}}, "greater than 0"),
        ("both", {"merge": ["first"], "train": {}}, "stage 'both': unknown key 'train'"),
        ("student", {"trian": {}}, "stage 'student': unknown key 'trian'. Did you mean 'train'"),
        ("student", {"recipe": "quikstart"}, "stage 'student': no recipe named 'quikstart'"),
        ("student", {"model": {"adapter": "sd3", "path": "stage://both"}, "sampling": {}}, "a model of 'toy'"),
        (
            "student",
            {"model": {"adapter": "toy", "path": "toy", "lora": LORA, "init": "stage://both"}},
            "exports a whole model of 'toy'",
        ),
        ("second", {"model": {"adapter": "toy", "path": "toy", "lora": LORA}}, "cannot be merged"),
        ("student", {"data": {"source": "missing.jsonl"}}, "no prompt file"),
    ],
)
def test_bad_pipelines(tmp_path: Path, stage: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        vg.train(over(pipeline(tmp_path), stage, **values), out=tmp_path / "pipe")
    assert not (tmp_path / "pipe").exists()


def test_a_lora_is_no_model_path(tmp_path: Path) -> None:
    config = pipeline(tmp_path, lora=LORA)
    config["stages"]["student"]["model"] = {"adapter": "toy", "path": "stage://both", "lora": LORA}
    with pytest.raises(UserError, match=r"set model\.path=toy and model\.init=stage://both"):
        plan_pipeline(config)
    with pytest.raises(UserError, match="init 'x' is the start of a LoRA, but lora is null"):
        vg.train(toy_config(tmp_path, model={"init": "x"}), out=tmp_path / "run")
    config["stages"]["student"]["model"] = {"adapter": "toy", "path": "toy", "init": "stage://both"}
    config["stages"]["student"]["model"]["lora"] = LORA | {"rank": 3}
    with pytest.raises(UserError, match="which does not fit this stage's a LoRA of rank 3"):
        plan_pipeline(config)


@pytest.mark.parametrize("name", ["all", "stages", "a.b", "1a", ""])
def test_names_of_stages(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="a stage cannot be called"):
        plan_pipeline({"stages": {name: toy(tmp_path)}})
    with pytest.raises(UserError, match="stages"):
        plan_pipeline({"stages": {}})


def test_exports_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for name, keys in (("a", "xy"), ("b", "xz")):
        (tmp_path / name).mkdir()
        save_file({key: torch.ones(2) for key in keys}, tmp_path / name / "model.safetensors")
    folders = {name: tmp_path / name for name in "ab"}
    with pytest.raises(UserError, match="cannot merge 'a' and 'b': 2 tensors are in one of them only \\('y', 'z'\\)"):
        merge_exports({"a": 1, "b": 1}, tmp_path / "out", folders)
    save_file({"x": torch.ones(3), "y": torch.ones(2)}, tmp_path / "b/model.safetensors")
    with pytest.raises(UserError, match=r"tensors 'x' of shapes \[2\] and \[3\]"):
        merge_exports({"a": 1, "b": 1}, tmp_path / "out", folders)
    assert not (tmp_path / "out").exists()


def test_the_merge_of_one_export_is_that_export_and_weights_are_normalised(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for name in "ab":
        (tmp_path / name).mkdir()
        values = {"w": torch.randn(5), "steps": torch.tensor([3]), "half": torch.randn(4).bfloat16()}
        save_file(values, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    folders = {name: tmp_path / name for name in "ab"}
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    one = load_file(merge_exports({"a": 0.3}, tmp_path / "one", folders) / "model.safetensors")
    assert all(torch.equal(one[key], a[key]) for key in a)
    two = load_file(merge_exports({"a": 1.0, "b": 3.0}, tmp_path / "two", folders) / "model.safetensors")
    assert torch.equal(two["w"], (0.25 * a["w"].double() + 0.75 * b["w"].double()).float())
    assert torch.equal(two["steps"], a["steps"])
    assert two["half"].dtype == torch.bfloat16


# -- forms, overrides, commands -----------------------------------------------------------------------------------------------


def test_a_reference_in_capitals_is_no_hub_id(tmp_path: Path) -> None:
    config = pipeline(tmp_path)
    config["stages"]["student"]["model"]["path"] = "Stage://both"
    with pytest.raises(UserError, match=r"refers to 'Stage://both', but there is no such stage"):
        plan_pipeline(config)


def test_references_are_found_in_any_value_and_replaced() -> None:
    value = {"model": {"path": "stage://a"}, "method": [{"m": {"teachers": {"x": "stage://b", "y": "else"}}}]}
    assert list(references(value)) == [("model.path", "a"), ("method.0.m.teachers.x", "b")]
    assert replaced(value, {"a": "/a"}) == {
        "model": {"path": "/a"},
        "method": [{"m": {"teachers": {"x": "stage://b", "y": "else"}}}],
    }


def test_forms_of_a_stage_and_overrides(tmp_path: Path) -> None:
    config = PipelineConfig(
        stages={
            "quick": "quickstart",
            "run": RunConfig(**toy_config(tmp_path)),
            "on_top": {"recipe": "quickstart", "train": {"steps": 3}, "model": {"path": "stage://quick"}},
            "mean": {"merge": ["quick", "on_top"]},
        }
    )
    over = {"all.train.seed": 7, "quick.train.seed": 8, "mean.merge.quick": 2, "quick.rewards.ocr.weight": 0.5}
    made = plan_pipeline(config, over)
    runs = {stage.name: stage.plan.config for stage in made.stages if stage.plan is not None}
    assert {name: run.train.seed for name, run in runs.items()} == {"quick": 8, "run": 7, "on_top": 7}
    assert runs["on_top"].train.steps == 3
    assert runs["on_top"].train.prompts_per_step == runs["quick"].train.prompts_per_step == 8
    assert {name: run.name for name, run in runs.items()} == {"quick": "quick", "run": "toy", "on_top": "on_top"}
    assert set(runs["quick"].rewards) == {"geneval", "ocr"}
    assert made.stages[-1].merge == {"quick": 2.0, "on_top": 1.0}
    assert [stage.export.base for stage in made.stages] == ["testbed/sd3_tiny", "toy", *["testbed/sd3_tiny"] * 2]
    assert key_parts("run.rewards.my.module:Reward.weight") == ["run", "rewards", "my.module:Reward", "weight"]
    for wrong, message in [
        ({"quik.train.seed": 1}, "names no stage of this pipeline. Did you mean 'quick'"),
        ({"train.seed": 1}, "every training stage all.key=value"),
        ({"quick": 1}, "replaces a whole stage"),
        ({"run.recipe": 3}, "stage 'run': recipe: 3 is no name"),
    ]:
        with pytest.raises(UserError, match=message.replace(".", r"\.")):
            plan_pipeline(config, wrong)


def make_recipe() -> PipelineConfig:
    """Two stages."""
    stages: dict[str, Any] = {"quick": "quickstart"}
    stages["more"] = {"recipe": "quickstart", "model": {"path": "stage://quick"}}
    return PipelineConfig(name="test_stages_recipe", summary="Two of them.", stages=stages)


def test_a_recipe_may_be_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "test_stages_recipe" not in RECIPES:
        RECIPES.register("test_stages_recipe", summary="Two of them.")(make_recipe)
    shown = recipe_yaml("test_stages_recipe")
    (tmp_path / "pipe.yaml").write_text(shown)
    read, made = any_plan(tmp_path / "pipe.yaml"), any_plan("test_stages_recipe")
    assert isinstance(read, PipelinePlan)
    assert read.config == made.config
    assert yaml.safe_load(shown)["stages"]["more"]["model"]["path"] == "stage://quick"
    with pytest.raises(UserError, match="is a pipeline itself"):
        plan_pipeline({"stages": {"one": "test_stages_recipe"}})
    assert main(["recipe", "show", "test_stages_recipe"]) == 0
    assert capsys.readouterr().out == shown
    assert main(["train", "test_stages_recipe", "more.train.steps=5", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "stage 1 of 2, quick (v_grpo)" in printed
    assert "stage 2 of 2, more (v_grpo)" in printed
    assert printed.count("memory of one process") == 2
    assert "path: stage://quick" not in printed.split("stage 2 of 2")[0]
    assert main(["train", "test_stages_recipe", "mroe.train.steps=5", "--dry-run"]) == 2


def test_the_command_runs_a_file_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pipe.yaml"
    config = pipeline(tmp_path)
    del config["stages"]["second"], config["stages"]["both"]
    config["stages"]["student"]["model"]["path"] = "stage://first"
    path.write_text(to_yaml(PipelineConfig(**config)))
    assert main(["train", str(path), "student.train.steps=1"]) == 0
    printed = capsys.readouterr().out
    assert "stage 2 of 2, student (grpo)" in printed
    assert "exact_match" in printed
    assert "runs/pipe/student/model" in printed
    assert main(["train", str(path), "student.train.steps=1", "--resume"]) == 0
    assert "stage 1 of 2, first (grpo): finished before" in capsys.readouterr().out
