"""The report: its statistics against worked values, and pages of finished, unfinished, empty, picture and text runs."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from visual_grpo.errors import RunError, UserError
from visual_grpo.evaluation import summarise
from visual_grpo.grid import save_grid
from visual_grpo.json_lines import json_line
from visual_grpo.report import plots, write_report
from visual_grpo.report.data import load_run
from visual_grpo.report.page import _number, _signed
from visual_grpo.report.stats import Sample, mean_interval, mean_of_tags, paired
from visual_grpo.run_folder import RunFolder

TAGS = ("colors", "<counting>")


def score_row(index: int, sample: int, value: float | None, *, text: str | None = None) -> dict:
    row = {
        "row": index,
        "index": index,
        "sample": sample,
        "prompt": f"a photo of <b>{index}</b> & 'two'",
        "tag": TAGS[index % 2] if text is None else None,
        "values": {"ocr": value, "format": 1.0},
        "details": {"ocr/edits": 2.0},
    }
    return row if text is None else {**row, "text": text}


def make_run(
    path: Path, *, steps: int = 6, evals: tuple[int, ...] = (0, 3, 6), text: bool = False, planned: int = 6
) -> Path:
    """A run folder whose score is 0.25 at step 0 and 0.75 after."""
    folder = RunFolder(path)
    folder.eval.mkdir(parents=True)
    folder.samples.mkdir()
    rewards = "rewards: {ocr: {weight: 1.0}, format: {weight: 0.5, eval_only: true}}"
    folder.config.write_text(
        f"name: demo\nsummary: a <i>summary</i>\nmodel: {{adapter: sd3, path: testbed/sd3}}\nmethod: [{{flow_grpo: {{}}}}]\n"
        f"{rewards}\ntrain: {{steps: {planned}, seed: 3}}\n"
    )
    for step in sorted({0, *range(1, steps + 1)}):
        if step:
            folder.append_metrics(train_record(step))
        if step in evals:
            rows = [
                score_row(
                    i,
                    k,
                    float((i + k) % 4 < (1 if step == 0 else 3)),
                    text="<script>alert(1)</script>" if text else None,
                )
                for i in range(8)
                for k in range(2)
            ]
            folder.write_eval(step, rows)
            metrics, by_tag = summarise(rows)
            folder.append_metrics(
                {
                    "kind": "eval",
                    "step": step,
                    "metrics": metrics,
                    "by_tag": by_tag,
                    "n": len(rows),
                    "time": {"evaluate": 2.0},
                }
            )
            if not text:
                images = torch.full((4, 3, 8, 8), step / 10)
                prompts = [r["prompt"] for r in rows[:4]]
                save_grid(images, prompts, [0.0] * 4, folder.samples_path(step, ".png"))
    return path


def train_record(step: int) -> dict:
    counts = {"edges": [0.0, 0.9, 1.0, 1.1, math.inf], "counts": [0, 5, 5, 1]}
    return {
        "kind": "train",
        "step": step,
        "metrics": {
            "reward/total": 0.1 * step,
            "loss": math.nan if step == 2 else 0.1 / step,
            "kl": 10.0**-step,
            "lr": 3e-4,
        },
        "histograms": {
            "advantage": {"edges": [-1, 0, 1], "counts": [2, 2]},
            "ratio": counts,
            "reward": {"edges": [0, 1], "counts": [0]},
        },
        "time": {"rollout": 1.0, "train": 3.0, "total": 4.0, "images_per_s": 8.0 * step},
        "memory_gb": {"resident": 1.5},
    }


class Checker(HTMLParser):
    """Tags that are not closed, and addresses that the page would load."""

    VOID = frozenset({"meta", "img", "br", "use", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.loaded += [v for k, v in attrs if k in {"src", "href", "data"} and v and not v.startswith(("#", "data:"))]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def read(path: Path) -> str:
    """The page, after the checks that every page must pass."""
    page = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.loaded == []
    assert "script" not in checker.tags
    assert "i>summary" not in page
    assert "nan" not in re.sub(r"base64,[^\"]*", "", page)
    assert len(page) < 3_000_000
    return page


def test_finished_run_shows_every_section(tmp_path):
    page = read(write_report(make_run(tmp_path / "demo-2")))
    for words in (
        "<h1>demo-2</h1>",
        "steps</b>6 of 6<",
        "Better than before training: +0.500",
        "0.250</span>",
        "held-out ocr, 95 % interval",
        "on the same 16 samples (8 prompts",
        "&lt;counting&gt;",
        "mean of the kinds",
        "ocr/edits",
        "a photo of &lt;b&gt;0&lt;/b&gt; &amp;",
        "Left: step 0; right: step 6",
        "KL to the reference",
        "The same at every step: learning rate 0.0003",
        "step 4</li>",
        "train <span>18 s, 60%</span>",
        "peak resident memory 1.50 GB",
        "32 images a second (median step)",
        "None went off",
        "seed: 3",
    ):
        assert words in page, words


def test_report_is_reproducible(tmp_path):
    folder = make_run(tmp_path / "demo")
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


def test_text_run_has_a_table_of_completions_and_runs_no_script(tmp_path):
    page = read(write_report(make_run(tmp_path / "demo", text=True)))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<th>step 0</th><th>step 6</th>" in page
    assert "by kind of prompt" not in page


def test_long_completion_is_cut(tmp_path):
    folder = RunFolder(make_run(tmp_path / "demo", text=True))
    folder.write_eval(6, [score_row(i, k, 1.0, text="word " * 1000) for i in range(8) for k in range(2)])
    assert "3500 more characters" in read(write_report(folder.path))


def test_unfinished_run_compares_what_it_has(tmp_path):
    page = read(write_report(make_run(tmp_path / "demo", steps=4, planned=60)))
    assert "4 of 60, not finished" in page
    assert "step 0 against step 3" in page


def test_run_without_evaluations_says_that_it_proves_nothing(tmp_path):
    page = read(write_report(make_run(tmp_path / "demo", evals=())))
    assert "No held-out comparison yet" in page
    assert "only a held-out score is proof" in page
    assert "0.100</span>" in page
    assert "0.600</div>" in page


def test_run_with_the_first_evaluation_only(tmp_path):
    page = read(write_report(make_run(tmp_path / "demo", steps=0, evals=(0,))))
    assert "held-out ocr before training" in page
    assert "Step 0. The first 4 held-out samples" in page


def test_run_before_its_first_record(tmp_path):
    page = read(write_report(make_run(tmp_path / "demo", steps=0, evals=())))
    assert "no step has been logged yet" in page


def test_worse_and_unclear_runs_are_called_that(tmp_path):
    folder = RunFolder(make_run(tmp_path / "worse"))
    folder.write_eval(6, [score_row(i, k, 0.0) for i in range(8) for k in range(2)])
    assert 'class="verdict worse"' in read(write_report(folder.path))
    folder.write_eval(6, folder.read_eval(0))
    page = read(write_report(folder.path))
    assert "No clear change: 0.000" in page


def test_failed_scores_are_left_out_of_the_pairs(tmp_path):
    folder = RunFolder(make_run(tmp_path / "demo"))
    rows = folder.read_eval(6)
    rows[0]["values"]["ocr"] = None
    folder.write_eval(6, rows)
    assert "on the same 15 samples" in read(write_report(folder.path))


def test_alarms_and_self_test_are_listed(tmp_path):
    folder = RunFolder(make_run(tmp_path / "demo"))
    folder.write_json(folder.self_test, [{"name": "ratio = 1", "status": "failed", "detail": "<off>"}])
    for step in range(1, 61):
        folder.append_metrics({"kind": "alarm", "step": step, "name": "kl", "message": "KL & more", "action": "warn"})
    page = read(write_report(folder.path))
    assert '<span class="badge failed">failed</span></td><td>ratio = 1</td><td>&lt;off&gt;</td>' in page
    assert page.count("KL &amp; more") == 50
    assert "and 10 more in metrics.jsonl" in page


def test_large_pictures_stay_small_in_the_page(tmp_path):
    folder = RunFolder(make_run(tmp_path / "demo"))
    noise = torch.rand(6, 3, 512, 512, generator=torch.Generator().manual_seed(0))
    for step in (0, 6):
        save_grid(noise, ["x"] * 6, None, folder.samples_path(step, ".png"))
    page = read(write_report(folder.path))
    assert page.count("data:image/jpeg") == 12
    assert len(page) < 1_000_000  # noise is the worst case


def test_weighted_total_leads_when_several_rewards_are_trained(tmp_path):
    folder = RunFolder(make_run(tmp_path / "demo"))
    folder.config.write_text(folder.config.read_text().replace(", eval_only: true", ""))
    run = load_run(folder)
    assert run.scores == ["weighted total", "ocr", "format", "ocr/edits"]
    assert run.compare("weighted total").before == pytest.approx(0.25 + 0.5)


def test_many_steps_stay_small(tmp_path):
    folder = RunFolder(make_run(tmp_path / "demo"))
    with folder.metrics.open("a") as file:  # not append_metrics: it waits for the disk at every record
        file.writelines(json_line(train_record(min(step, 200)) | {"step": step}) for step in range(7, 3000))
    page = read(write_report(folder.path))
    assert len(page) < 1_000_000
    x, y = plots._thin(range(3000), [math.nan, 1.0, 3.0] * 1000)
    assert len(x) == 400
    assert np.nanmax(abs(y - 2)) <= 1


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("config.yaml", None, "is not a run folder"),
        ("metrics.jsonl", "x\n{}\n", "line 1 of"),
        ("self_test.json", "{", "not valid JSON"),
    ],
)
def test_broken_folder_is_a_clear_error(tmp_path, file, content, match):
    path = make_run(tmp_path / "demo")
    (path / file).unlink(missing_ok=True)
    if content is not None:
        (path / file).write_text(content)
    with pytest.raises(UserError, match=match):
        write_report(path)


def test_report_that_cannot_be_written(tmp_path, monkeypatch):
    path = make_run(tmp_path / "demo")
    (path / "report.html").mkdir()
    with pytest.raises(RunError, match="cannot write"):
        write_report(path)


def samples(values: dict[tuple[int, int], float], tag: str = "") -> list[Sample]:
    return [Sample(prompt=p, sample=s, tag=tag, value=v) for (p, s), v in values.items()]


def test_paired_uses_the_shared_samples_only():
    found = paired(samples({(0, 0): 0.0, (1, 0): 1.0, (2, 0): 9.0}), samples({(1, 0): 0.5, (0, 0): 1.0, (3, 0): 7.0}))
    assert (found.n, found.prompts, found.before, found.after) == (2, 2, 0.5, 0.75)
    assert found.difference == 0.25
    assert found.interval == (-0.5, 1.0)
    assert found.verdict == "unclear"
    assert paired([], samples({(0, 0): 1.0})) is None


def test_interval_covers_the_normal_approximation_over_prompts():
    rng = np.random.default_rng(1)
    shifts = rng.normal(0.2, 1.0, 400)  # the samples of a prompt move together
    before = samples({(p, s): 0.0 for p in range(400) for s in range(4)})
    after = samples({(p, s): float(shifts[p]) for p in range(400) for s in range(4)})
    found = paired(before, after)
    half = 1.96 * shifts.std(ddof=1) / 20
    assert found.interval == pytest.approx((shifts.mean() - half, shifts.mean() + half), abs=0.012)


def test_single_prompt_has_no_interval():
    found = paired(samples({(0, 0): 0.0, (0, 1): 0.0}), samples({(0, 0): 1.0, (0, 1): 1.0}))
    assert (found.interval, found.verdict) == (None, "unclear")
    assert mean_interval(samples({(0, 0): 0.5})) == (0.5, 0.5, 0.5)
    assert mean_interval([]) is None


def test_mean_of_tags_weighs_tags_equally():
    before = samples({(0, 0): 0.0, (1, 0): 0.0}, "a") + samples({(p, 0): 1.0 for p in range(2, 8)}, "b")
    after = samples({(0, 0): 1.0, (1, 0): 1.0}, "a") + samples({(p, 0): 1.0 for p in range(2, 8)}, "b")
    found = mean_of_tags(before, after)
    assert (found.before, found.after, found.n) == (0.5, 1.0, 8)
    assert found.interval == (0.5, 0.5)
    assert mean_of_tags([], []) is None


def test_mean_of_tags_draws_each_tag_by_itself():
    values = np.random.default_rng(2).normal(0, 1, (4, 100))
    before = [Sample(prompt=100 * t + p, sample=0, tag=str(t), value=0.0) for t in range(4) for p in range(100)]
    after = [Sample(prompt=s.prompt, sample=0, tag=s.tag, value=float(values.flat[s.prompt])) for s in before]
    low, high = mean_of_tags(before, after).interval
    expected = 2 * 1.96 * math.sqrt(sum(v.var(ddof=1) / 100 for v in values)) / 4
    assert high - low == pytest.approx(expected, rel=0.1)


def test_numbers_keep_three_digits_that_say_something():
    assert [_number(v) for v in (0.0, 0.5123, 12.34, 0.00412, 123456.0, -0.25)] == [
        "0.000",
        "0.512",
        "12.3",
        "0.00412",
        "1.23e+05",
        "-0.250",
    ]
    assert [_signed(v) for v in (0.25, -0.25, 0.0, -0.0)] == ["+0.250", "−0.250", "0.000", "0.000"]


def test_open_and_empty_histograms():
    edges, counts = plots._bars({"edges": [0.0, 0.9, 1.0, 1.1, None], "counts": [0, 5, 5, 1]})
    assert edges.tolist() == pytest.approx([0.7, 0.9, 1.0, 1.1, 1.3])
    assert counts.tolist() == [0, 5, 5, 1]
    assert plots._bars({"edges": [0, 1], "counts": [0]}) is None
    assert plots._bars(None) is None
