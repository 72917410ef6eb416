"""The wire format of reward servers: JSON, images as PNG or raw arrays in base64. Nothing is ever unpickled.

Request (POST /score): `id`, `reward` (null: the only one), `prompts` [N], `metadata` [N] objects, `group_ids` [N], and where
there are any `texts` [N], `images`, `extra`; `whole_groups` true from a client that sends whole groups. Images are
`{"encoding": "png", "data": [N base64 texts]}` or an array `{"encoding": "raw", "dtype", "shape", "data"}` in [0, 1].
Answer: `id`, `reward`, `values` [N] (null unless ok), `status` [N] (ok, not_applicable, failed), `details` {name: [N]} and
`errors` {row: message}. A refusal is `{"error": message}`.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from visual_grpo.pictures import to_rgb
from visual_grpo.reward import RewardOutput, RewardRequest
from visual_grpo.types import RewardStatus

__all__ = [
    "ScoreAnswer",
    "ScoreRequest",
    "WireError",
    "decode_output",
    "decode_request",
    "encode_output",
    "encode_request",
]

DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
STATES = [state.name.lower() for state in RewardStatus]


class WireError(ValueError):
    """A message that does not have the form above; says what is wrong with it."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, body: bytes) -> Any:
        """Parse and check JSON.

        Raises:
            WireError: no JSON, or a field that is missing, unknown or of another type.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise WireError(f"{where + ': ' if where else ''}{first['msg']}") from None
        except (RecursionError, ValueError) as error:
            raise WireError(f"the body cannot be read: {str(error)[:200]}") from None


class WireImages(_Message):
    """N images."""

    encoding: Literal["png", "raw"]
    data: list[str] | str
    dtype: str | None = None
    shape: list[int] | None = None


class ScoreRequest(_Message):
    """What a client sends."""

    id: str
    prompts: list[str]
    metadata: list[dict[str, Any]]
    group_ids: list[int]
    reward: str | None = None
    texts: list[str] | None = None
    images: WireImages | None = None
    extra: dict[str, Any] = {}
    whole_groups: bool = False


class ScoreAnswer(_Message):
    """What a server answers."""

    id: str
    reward: str
    values: list[float | None]
    status: list[Literal["ok", "not_applicable", "failed"]]
    details: dict[str, list[float | None]] = {}
    errors: dict[int, str] = {}


def encode_array(array: Tensor) -> dict[str, Any]:
    """A tensor as dtype, shape and base64 of its values in C order, little-endian."""
    values = array.detach().cpu().contiguous().numpy()
    data = base64.b64encode(values.tobytes()).decode()
    return {"dtype": str(values.dtype), "shape": list(values.shape), "data": data}


def decode_array(dtype: Any, shape: Any, data: Any) -> Tensor:
    """The tensor back.

    Raises:
        WireError: a dtype that is not plain numbers, or a shape that does not fit the data.
    """
    if dtype not in DTYPES or not isinstance(data, str) or not isinstance(shape, list):
        raise WireError(
            f"an array needs a dtype of {', '.join(DTYPES)}, a shape and base64 data; its dtype is {dtype!r}"
        )
    raw = _base64(data)
    sizes_ok = all(isinstance(size, int) and size >= 0 for size in shape)
    if not sizes_ok or math.prod(shape) * np.dtype(dtype).itemsize != len(raw):
        raise WireError(f"an array of shape {shape} and dtype {dtype} does not have {len(raw)} bytes")
    return torch.from_numpy(np.frombuffer(raw, dtype=dtype).reshape(shape).copy())


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"not base64: {error}") from None


def encode_request(
    request: RewardRequest,
    *,
    id: str,
    reward: str | None,
    encoding: Literal["png", "raw"] = "png",
    columns: Sequence[str] | None = None,
    whole_groups: bool = False,
) -> dict[str, Any]:
    """Make the JSON object of a request.

    Args:
        request: what to score.
        id: comes back in the answer.
        reward: its name on the server; None: the only one.
        encoding: "png" rounds to 8 bits as `to_pil` does; "raw" keeps float32.
        columns: metadata columns to send; None: all.
        whole_groups: the request holds whole groups.
    """
    images: dict[str, Any] | None = None
    if request.images is not None and encoding == "raw":
        images = {"encoding": "raw", **encode_array(request.images)}
    elif request.images is not None:
        images = {"encoding": "png", "data": [_png(image) for image in request.pil_images]}
    keep = None if columns is None else set(columns)
    return {
        "id": id,
        "reward": reward,
        "prompts": request.prompts,
        "texts": request.texts,
        "images": images,
        "metadata": [{k: v for k, v in row.items() if keep is None or k in keep} for row in request.metadata],
        "group_ids": request.group_ids.tolist(),
        "extra": {k: {"array": encode_array(v)} if isinstance(v, Tensor) else v for k, v in request.extra.items()},
        "whole_groups": whole_groups,
    }


def _png(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()


def decode_request(message: ScoreRequest, *, max_rows: int, max_pixels: int) -> RewardRequest:
    """Make the request of a checked message.

    Args:
        message: as read.
        max_rows: most rows.
        max_pixels: most pixels of all images together, known from their headers before anything is decoded.

    Raises:
        WireError: too large, or its parts do not fit together.
    """
    if len(message.prompts) > max_rows:
        raise WireError(
            f"{len(message.prompts)} rows are more than the server's limit of {max_rows}; send fewer at a time"
        )
    extra = {}
    for key, value in message.extra.items():
        array = value.get("array") if isinstance(value, Mapping) and list(value) == ["array"] else None
        extra[key] = decode_array(**_parts(array)) if array is not None else value
    try:
        return RewardRequest(
            prompts=message.prompts,
            metadata=message.metadata,
            group_ids=torch.tensor(message.group_ids, dtype=torch.int64),
            images=None if message.images is None else _images(message.images, max_pixels),
            texts=message.texts,
            extra=extra,
        )
    except (ValueError, OverflowError, RuntimeError) as error:  # lengths, ranges, integers beyond 64 bits
        raise WireError(str(error)) from None


def _parts(array: Any) -> dict[str, Any]:
    if not isinstance(array, Mapping):
        raise WireError("an array is an object of dtype, shape and data")
    return {key: array.get(key) for key in ("dtype", "shape", "data")}


def _images(images: WireImages, max_pixels: int) -> Tensor:
    """[N, 3, H, W] float32 in [0, 1]."""
    if images.encoding == "raw":
        shape = images.shape or []
        if len(shape) == 4 and shape[0] * shape[2] * shape[3] > max_pixels:
            raise WireError(_too_large(shape[0] * shape[2] * shape[3], max_pixels))
        array = decode_array(images.dtype, images.shape, images.data)
        return array.float() / 255 if array.dtype == torch.uint8 else array
    if not isinstance(images.data, list):
        raise WireError("images of encoding png need a list of base64 texts")
    opened, pixels = [], 0
    for row, text in enumerate(images.data):
        image = _header(_base64(text), row)
        pixels += image.width * image.height
        if pixels > max_pixels:
            raise WireError(_too_large(pixels, max_pixels))
        opened.append(image)
    sizes = {image.size for image in opened}
    if len(sizes) > 1:
        raise WireError(f"the images of one request need one size; these have {sorted(sizes)[:3]}")
    arrays = [_pixels(image, row) for row, image in enumerate(opened)]
    stacked = np.stack(arrays) if arrays else np.zeros((0, 1, 1, 3), np.uint8)
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).float() / 255


def _header(data: bytes, row: int) -> Image.Image:
    """Open an image without decoding it: a few bytes can claim billions of pixels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit follows
            return Image.open(io.BytesIO(data), formats=["PNG"])
    except Image.DecompressionBombError as error:
        raise WireError(f"image {row}: {error}") from None
    except Exception as error:  # Pillow has many for broken files
        raise WireError(f"image {row} is no PNG ({type(error).__name__})") from None


def _pixels(image: Image.Image, row: int) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return np.asarray(to_rgb(image))
    except Exception as error:
        raise WireError(f"image {row} is damaged ({type(error).__name__}: {error})") from None


def _too_large(pixels: int, limit: int) -> str:
    return f"the images have {pixels} pixels or more, above the server's limit of {limit}; send fewer or smaller ones"


def encode_output(output: RewardOutput, errors: Mapping[int, str], *, id: str, reward: str) -> dict[str, Any]:
    """Make the JSON object of an answer; NaN becomes null."""
    assert output.status is not None

    def numbers(values: Tensor) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in values.double().tolist()]

    return {
        "id": id,
        "reward": reward,
        "values": numbers(output.values),
        "status": [STATES[state] for state in output.status.tolist()],
        "details": {key: numbers(figure) for key, figure in output.details.items()},
        "errors": {str(row): message for row, message in errors.items()},
    }


def decode_output(answer: ScoreAnswer, *, id: str, rows: int) -> RewardOutput:
    """Make the output of an answer.

    Raises:
        WireError: it answers another request, or has another number of rows.
    """
    if answer.id != id:
        raise WireError(f"the answer belongs to request {answer.id!r}, not {id!r}")
    lengths = {"values": len(answer.values), "status": len(answer.status)}
    lengths |= {f"details.{key}": len(figure) for key, figure in answer.details.items()}
    if wrong := {key: count for key, count in lengths.items() if count != rows}:
        raise WireError(f"the answer to {rows} rows has {wrong}")
    if any((value is None) == (state == "ok") for value, state in zip(answer.values, answer.status, strict=True)):
        raise WireError("the answer has a row that is ok without a value, or has a value and is not ok")

    def figures(values: Sequence[float | None]) -> Tensor:
        return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)

    return RewardOutput(
        values=figures(answer.values),
        status=torch.tensor([STATES.index(state) for state in answer.status], dtype=torch.int8),
        details={key: figures(figure) for key, figure in answer.details.items()},
    )
