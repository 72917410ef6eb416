"""The reward iqa: what it says without pyiqa here; with it (pytest -m iqa), its figures."""

import sys

import numpy as np
import pytest
import torch
from scipy.io import savemat

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, as_reward
from visual_grpo.rewards.iqa import METRICS


def request(side=224, count=3):
    smooth = torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    images = torch.nn.functional.interpolate(smooth, size=(side, side), mode="bilinear")
    noise = torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(3))
    return RewardRequest.build(["x"] * count, images=0.8 * images + 0.2 * noise)


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyiqa", None)
    with pytest.raises(UserError, match=r"pip install 'visual-grpo\[iqa\]'"):
        as_reward("iqa")(request())


def test_faults():
    with pytest.raises(UserError, match="metric is 'nima'; give one of musiq, maniqa, clipiqa, niqe, brisque"):
        as_reward("iqa", params={"metric": "nima"})
    with pytest.raises(UserError, match="niqe has no network to run in float16"):
        as_reward("iqa", params={"metric": "niqe", "dtype": "float16"})
    assert {name for name, metric in METRICS.items() if metric.statistics} == {"niqe", "brisque"}


@pytest.mark.iqa
def test_weights_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match=r"'niqe_modelparameters\.mat' was looked for at '.*absent"):
        as_reward("iqa", params={"metric": "niqe", "weights": str(tmp_path / "absent.mat")})(request())


@pytest.mark.iqa
def test_brisque_is_pyiqa_negated(tmp_path):
    import pyiqa

    path = str(tmp_path / "brisque.pth")
    generator = torch.Generator().manual_seed(0)
    vectors = torch.rand(8, 36, generator=generator) * 2 - 1
    torch.save((torch.randn(8, 1, generator=generator), vectors), path)
    made = request()
    reference = pyiqa.create_metric("brisque", device="cpu", pretrained_model_path=path)
    expected = reference((made.images * 255).round() / 255).reshape(-1)
    params = {"metric": "brisque", "weights": path, "device": "cpu", "batch_size": 2}
    output = as_reward("iqa", params=params)(made)
    assert expected.isfinite().all()
    torch.testing.assert_close(output.values, -expected.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.details["raw"], -output.values)


@pytest.mark.iqa
def test_niqe_is_pyiqa_negated(tmp_path):
    import pyiqa

    mixing = np.random.default_rng(0).standard_normal((36, 36))
    model = {"mu_prisparam": mixing[:1], "cov_prisparam": mixing @ mixing.T + np.eye(36)}
    savemat(tmp_path / "niqe.mat", model)
    made = request()
    reference = pyiqa.create_metric("niqe", device="cpu", pretrained_model_path=str(tmp_path / "niqe.mat"))
    expected = reference((made.images * 255).round() / 255).reshape(-1)
    params = {"metric": "niqe", "weights": str(tmp_path / "niqe.mat"), "device": "cpu", "batch_size": 1}
    torch.testing.assert_close(as_reward("iqa", params=params)(made).values, -expected.float(), atol=1e-5, rtol=1e-5)
    assert torch.isfinite(expected).all()
    with pytest.raises(UserError, match="niqe needs images of 192 pixels"):
        as_reward("iqa", params=params)(request(side=100))


@pytest.mark.iqa
def test_musiq_is_pyiqa(iqa_params):
    import pyiqa

    path = iqa_params["weights"]
    reference = pyiqa.create_metric("musiq", device="cpu", pretrained="koniq10k", pretrained_model_path=path)
    made = request(side=96, count=2)
    expected = reference((made.images * 255).round() / 255).reshape(-1)
    torch.testing.assert_close(as_reward("iqa", params=iqa_params)(made).values, expected, atol=1e-5, rtol=1e-5)
