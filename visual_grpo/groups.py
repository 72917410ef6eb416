"""Integer row tags -> group ids, and the one implementation of per-group statistics that every method uses.

Letters: `N` rows, `S` segments (groups). Ids are dense, 0-based int64; a tag is never a float and never text, because
two prompts with one text are two groups and a float key merges or splits groups by rounding.
"""

from typing import Literal

import torch
from torch import Tensor

StdKind = Literal["bessel", "population"]

_INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _check_ids(ids: object, name: str, rows: int | None = None) -> Tensor:
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"{name} must be an int64 tensor [N], got {type(ids).__name__}; "
            "number the distinct values (0, 1, 2, ...) and pass the numbers"
        )
    if ids.dtype not in _INTEGER_DTYPES:
        raise ValueError(f"{name} must hold integers (int64), got {ids.dtype}; convert the keys to integer ids first")
    if ids.dim() != 1:
        raise ValueError(f"{name} must have one entry per row, shape [N], got shape {list(ids.shape)}")
    if rows is not None and ids.shape[0] != rows:
        raise ValueError(f"{name} has {ids.shape[0]} entries for {rows} rows; pass one id per row")
    return ids.long()


def group_index(*tags: Tensor) -> Tensor:
    """Number the distinct tuples of row tags.

    Args:
        tags: one or more integer tensors [N]; rows that agree in every tag share a group.

    Returns:
        Dense 0-based ids [N] int64, numbered in ascending order of the tag tuples (so not by first appearance, and
        hence independent of the order of the rows).

    Raises:
        ValueError: no tag given, a tag is not an integer tensor [N], or the tags differ in length.

    Example:
        >>> group_index(torch.tensor([7, 3, 7, 3]), torch.tensor([0, 0, 1, 0]))
        tensor([1, 0, 2, 0])
    """
    if not tags:
        raise ValueError("group_index needs at least one tag tensor [N], got none")
    first = _check_ids(tags[0], "tag 0")
    columns = [first, *(_check_ids(tag, f"tag {i}", first.shape[0]) for i, tag in enumerate(tags[1:], start=1))]
    if first.shape[0] == 0:
        return first.clone()
    ids: Tensor = torch.unique(torch.stack(columns, dim=1), dim=0, return_inverse=True)[1]
    return ids


def num_segments_of(ids: Tensor) -> int:
    """Return `max(ids) + 1`, the number of segments that dense ids [N] describe (0 for no row)."""
    checked = _check_ids(ids, "ids")
    if checked.shape[0] == 0:
        return 0
    if int(checked.min()) < 0:
        raise ValueError(f"ids must be 0-based, got {int(checked.min())}; use group_index to number the groups")
    return int(checked.max()) + 1


def _prepare(values: Tensor, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    if not isinstance(values, Tensor) or values.dim() != 1:
        shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"values must be a tensor [N], got {shape}; call once per column of a matrix")
    checked = _check_ids(ids, "ids", values.shape[0])
    if mask is None:
        kept = torch.ones_like(checked, dtype=torch.bool)
    elif mask.shape != values.shape:
        raise ValueError(f"mask must have the shape of values {list(values.shape)}, got {list(mask.shape)}")
    else:
        kept = mask != 0
    wide = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    wide = wide.to(torch.promote_types(wide.dtype, torch.float32))
    # where, not a product: an excluded row may be NaN, and NaN * 0 is NaN.
    return torch.where(kept, wide, torch.zeros_like(wide)), checked, kept, num_segments_of(checked)


def segment_sum(values: Tensor, ids: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Sum `values` [N] over each segment, leaving out rows whose `mask` [N] is 0.

    Returns:
        [S] in float32 or wider; a segment without a kept row gives 0.

    Raises:
        ValueError: shapes disagree, or `ids` are floats, text or negative.

    Example:
        >>> segment_sum(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 1, 0]))
        tensor([6., 2.])
    """
    kept_values, checked, _, segments = _prepare(values, ids, mask)
    return torch.zeros(segments, dtype=kept_values.dtype, device=values.device).index_add(0, checked, kept_values)


def segment_count(ids: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Count the kept rows of each segment: [S] int64. Same errors as `segment_sum`."""
    _, checked, kept, segments = _prepare(torch.zeros_like(_check_ids(ids, "ids"), dtype=torch.float32), ids, mask)
    return torch.zeros(segments, dtype=torch.int64, device=checked.device).index_add(0, checked, kept.long())


def segment_mean(values: Tensor, ids: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Average `values` [N] over the kept rows of each segment: [S]; a segment without a kept row gives 0."""
    count = segment_count(ids, mask=mask)
    return segment_sum(values, ids, mask=mask) / count.clamp(min=1)


def segment_std(values: Tensor, ids: Tensor, *, mask: Tensor | None = None, kind: StdKind = "bessel") -> Tensor:
    """Standard deviation of `values` [N] in each segment.

    Args:
        values: [N].
        ids: segment of each row, [N] int64.
        mask: rows that count, [N]; `None` means all.
        kind: "bessel" divides the squared deviations by n - 1, "population" by n.

    Returns:
        [S]; a segment with fewer than two kept rows has no spread and gives 0 (never NaN). No eps is added.

    Raises:
        ValueError: `kind` is unknown, or as in `segment_sum`.

    Example:
        >>> segment_std(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([0, 0, 1]), kind="population")
        tensor([1., 0.])
    """
    if kind not in ("bessel", "population"):
        raise ValueError(f"kind must be 'bessel' or 'population', got {kind!r}")
    mean = segment_mean(values, ids, mask=mask)
    squares = (values.to(mean.dtype) - mean[ids.long()]).square()
    count = segment_count(ids, mask=mask)
    divisor = count - 1 if kind == "bessel" else count
    variance = segment_sum(squares, ids, mask=mask) / divisor.clamp(min=1)
    spread = (count >= 2) & (variance > 0)
    # The inner where keeps the gradient of the root finite in segments without a spread.
    return torch.where(spread, torch.where(spread, variance, 1.0).sqrt(), torch.zeros_like(variance))


def segment_range(values: Tensor, ids: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Largest minus smallest kept value of each segment: [S]; fewer than two kept rows give 0."""
    kept_values, checked, kept, segments = _prepare(values, ids, mask)
    infinity = torch.full_like(kept_values, torch.inf)
    low, high = torch.where(kept, kept_values, infinity), torch.where(kept, kept_values, -infinity)
    empty = torch.zeros(segments, dtype=kept_values.dtype, device=values.device)
    smallest = empty.scatter_reduce(0, checked, low, reduce="amin", include_self=False)
    largest = empty.scatter_reduce(0, checked, high, reduce="amax", include_self=False)
    return torch.where(segment_count(ids, mask=mask) >= 2, largest - smallest, empty)


def extreme_rows(values: Tensor, ids: Tensor, keep: int) -> Tensor:
    """Choose the `keep / 2` highest and the `keep / 2` lowest rows of each segment (DanceGRPO, arXiv 2505.07818).

    Ties are broken by a stable ascending sort: of equal values the earlier row counts as the lower one.

    Args:
        values: [N]; a NaN row is never chosen.
        ids: segment of each row, [N] int64.
        keep: rows a segment, even; a segment of at most so many rows that are not NaN keeps them all.

    Returns:
        [N] bool.

    Raises:
        ValueError: `keep` is odd or below 2, or as in `segment_sum`.

    Example:
        >>> extreme_rows(torch.tensor([0.1, 0.9, 0.5, 0.2]), torch.tensor([0, 0, 0, 0]), 2)
        tensor([ True,  True, False, False])
    """
    if keep < 2 or keep % 2:
        raise ValueError(f"keep must be even and at least 2 (half of it best, half worst), got {keep}")
    known = ~values.isnan()
    _, checked, _, segments = _prepare(values, ids, known)
    chosen = torch.zeros_like(known)
    for segment in range(segments):
        rows = torch.nonzero(known & (checked == segment)).flatten()
        rows = rows[torch.argsort(values[rows], stable=True)]
        ends = rows if len(rows) <= keep else torch.cat([rows[: keep // 2], rows[-(keep // 2) :]])
        chosen[ends] = True
    return chosen
