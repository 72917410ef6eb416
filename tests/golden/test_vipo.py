"""Worked example of ViPO: components, map, dense advantages and the objective with a ratio a position (float64)."""

import pytest
import torch
from torch import Tensor

from visual_grpo.objectives import clipped_surrogate
from visual_grpo.pipelines.flow.structure_maps import min_max, oriented, patch_scores, structure_map
from visual_grpo.pipelines.flow.vipo import Vipo, VipoConfig
from visual_grpo.types import PromptBatch, RolloutBatch

FEATURES = torch.tensor(
    [[1, 0.2, 0], [0.9, 0.1, 0.3], [0.1, 0.8, 0.2], [0, 1, 0.1], [0.2, 0.1, 0.9], [0.1, 0, 1]], dtype=torch.float64
).view(2, 3, 3)
PROJECTIONS = [
    [-0.075237, 0.758370, -0.029688], [-0.291742, 0.515199, 0.033511], [0.539885, -0.153257, -0.006016],
    [0.780120, -0.199235, 0.007141], [-0.424254, -0.397142, 0.024909], [-0.528773, -0.523935, -0.029857],
]  # fmt: skip
SCORES = [0.341020, 0.516528, 0.436644, 0.358128, 0.910023, 1.0]
MAP = [0, 0.266333, 0.145110, 0.025962, 0.863461, 1.0]
LOG_RATIO = torch.tensor([5e-5, -3e-4, 2e-4, 0, 1e-4, -5e-5], dtype=torch.float64).view(1, 1, 2, 3)


def close(actual: Tensor, expected: object, tolerance: float = 1e-6) -> None:
    wanted = torch.as_tensor(expected, dtype=torch.float64).reshape(actual.shape)
    torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=tolerance)


def decomposition() -> tuple[Tensor, Tensor, Tensor]:
    centred = FEATURES.flatten(0, 1) - FEATURES.flatten(0, 1).mean(0)
    _, singular, vectors = torch.linalg.svd(centred, full_matrices=False)
    return singular, vectors, centred @ vectors.T


def test_components() -> None:
    singular, vectors, projections = decomposition()
    close(singular, [1.204338, 1.155840, 0.060029])
    close(singular.square() / singular.square().sum(), [0.519867, 0.478841, 0.001292])
    close(oriented(vectors, projections, (2, 3), "loading"), PROJECTIONS)


@pytest.mark.parametrize("orient", ["loading", "border"])
def test_the_sign_of_the_decomposition_does_not_matter(orient: str) -> None:
    features = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).flatten(0, 1)
    _, _, vectors = torch.linalg.svd(features - features.mean(0), full_matrices=False)
    projections = (features - features.mean(0)) @ vectors.T
    signs = torch.tensor([1.0, -1, 1, -1, -1, 1], dtype=torch.float64)
    same = oriented(vectors * signs[:, None], projections * signs, (4, 5), orient)
    close(same, oriented(vectors, projections, (4, 5), orient), 1e-12)


def test_scores_and_map() -> None:
    scores = patch_scores(FEATURES, orient="loading")
    close(scores, SCORES)
    found, varies = min_max(scores)
    assert varies
    close(found, MAP)
    made, varies = structure_map(FEATURES, (2, 3), orient="loading", smoothing=0)
    assert varies
    close(made, MAP)


def test_flipped_components_invert_the_map() -> None:
    projections = -torch.tensor(PROJECTIONS, dtype=torch.float64)
    share = decomposition()[0].square() / decomposition()[0].square().sum()
    low, high = projections.amin(0), projections.amax(0)
    close(((high - projections) / (high - low)) @ share, [0.658980, 0.483472, 0.563356, 0.641872, 0.089977, 0])
    close(1 - patch_scores(FEATURES, orient="loading"), [0.658980, 0.483472, 0.563356, 0.641872, 0.089977, 0])


def test_other_poolings() -> None:
    projections = torch.tensor(PROJECTIONS, dtype=torch.float64)
    for pooling, chosen in (("average", projections.mean(1)), ("first_pc", projections[:, 0])):
        close(patch_scores(FEATURES, orient="loading", pooling=pooling), min_max(-chosen)[0], 3e-6)


def dense(advantage: float, **options: object) -> Tensor:
    prompts = PromptBatch(
        prompts=["p"], metadata=[{}], group_ids=torch.zeros(1, dtype=torch.int64), row_ids=torch.zeros(1, dtype=torch.int64)
    )  # fmt: skip
    rollouts = RolloutBatch(
        prompts=prompts, unit_kind="transition", unit_mask=torch.ones(1, 1, dtype=torch.bool),
        data={"structure_map": torch.tensor(MAP, dtype=torch.float64).view(1, 2, 3)},
    )  # fmt: skip
    method = Vipo(VipoConfig(maps="ones", **options))
    return method.adjust_advantages(torch.tensor([advantage]).double(), None, rollouts, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("advantage", "objective", "terms"),
    [(1.2, 0.460167, [0, 0.319504, 0.174149, 0.031155, 1.036257, 1.199940]), (-1.2, -0.460181, None)],
)
def test_objective(advantage: float, objective: float, terms: list[float] | None) -> None:
    weights = dense(advantage)
    assert weights.shape == (1, 1, 2, 3)
    close(weights * (1.2 / advantage), [0, 0.319600, 0.174132, 0.031155, 1.036153, 1.2])
    loss, _ = clipped_surrogate(
        LOG_RATIO, torch.zeros_like(LOG_RATIO), weights, torch.ones(1, 1), clip_low=1e-4, clip_high=1e-4
    )
    if terms is not None:
        close(-loss, terms)
    close(-loss.mean(), objective)


def test_the_clamp_comes_after_the_map() -> None:
    close(dense(8.0), [0, 8 * 0.266333, 8 * 0.145110, 8 * 0.025962, 5, 5])
    close(dense(8.0, advantage_clip=None).max(), 8.0)
    assert float(dense(0.0).abs().max()) == 0.0


@pytest.mark.parametrize("value", [0.3, float("nan"), float("inf")])
def test_features_without_structure_give_a_map_of_ones(value: float) -> None:
    features = torch.full((3, 3, 2), 0.3)
    features[1, 1, 0] = value
    made, varies = structure_map(features, (6, 6))
    assert (float(made.min()), float(made.max()), varies) == (1.0, 1.0, False)
