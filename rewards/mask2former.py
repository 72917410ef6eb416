"""GenEval's own kind of detector: Mask2Former Swin-S on COCO instances, colours by OpenAI's CLIP ViT-L/14, zero-shot.

Source: djghosh13/geneval (mmdet weights and open_clip; here the transformers port of the same weights). OpenAI trained CLIP with
QuickGELU; the open_clip of GenEval's time put it in by itself, today's does only under the name "-quickgelu".
Range of scores [0, 1]: class probability times mean mask probability.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from visual_grpo.errors import UserError
from visual_grpo.reward import to_pil
from visual_grpo.rewards.color_names import box_color
from visual_grpo.rewards.geneval_rules import COLORS
from visual_grpo.rewards.loading import load_weights

__all__ = ["COLORS", "ColorClassifier", "Instance", "Mask2FormerDetector", "find_instances"]

TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
RENAMED = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard"}
"""GenEval's names of three COCO classes."""
GREY = (153, 153, 153)


class Instance:
    """One detected object; its colour is worked out when it is first asked for."""

    def __init__(
        self,
        box: tuple[float, float, float, float],
        score: float,
        mask: np.ndarray,
        classify: Callable[[Instance], str | None],
    ) -> None:
        self.box, self.score, self.mask = box, score, mask
        self._classify = classify

    @functools.cached_property
    def color(self) -> str | None:
        """Name of the colour, one of `COLORS`."""
        return self._classify(self)


def find_instances(
    class_logits: Tensor, mask_logits: Tensor, size: tuple[int, int], threshold: float
) -> list[tuple[int, float, tuple[float, float, float, float], np.ndarray]]:
    """Turn the queries of one image into objects, best first.

    Args:
        class_logits: [Q, C + 1], the last column is "no object".
        mask_logits: [Q, h, w] over the image without padding; enlarged to `size` before they are cut at 0.
        size: (height, width) of the image.
        threshold: objects with a score at or below it are left out.

    Returns:
        (class, score, (x1, y1, x2, y2), mask [H, W] bool) an object; a query can give several classes, as in the reference.
    """
    probabilities = class_logits.float().softmax(-1)[:, :-1]
    count = min(len(class_logits), probabilities.numel())
    scores, flat = probabilities.flatten().topk(count)
    queries, labels = flat // probabilities.shape[1], flat % probabilities.shape[1]
    found = []
    for score, query, label in zip(scores.tolist(), queries.tolist(), labels.tolist(), strict=True):
        if score <= threshold:  # sorted, and the mask's part is at most 1
            break
        logits = interpolate(mask_logits[None, query, None].float(), size=size, mode="bilinear", align_corners=False)[
            0, 0
        ]
        mask = logits > 0
        if not mask.any():
            continue
        total = score * logits.sigmoid()[mask].mean().item()
        if total <= threshold:
            continue
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        corners = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        x1, y1, x2, y2 = (float(corner.item()) for corner in corners)
        found.append((label, total, (x1, y1, x2, y2), mask.cpu().numpy()))
    return sorted(found, key=lambda item: -item[1])


class ColorClassifier:
    """Zero-shot colours: the crop with its surroundings in grey, against three templates a colour."""

    def __init__(self, model: Any, transform: Callable[[Image.Image], Tensor], tokenizer: Any, device: str) -> None:
        self.model, self.transform, self.tokenizer, self.device = model, transform, tokenizer, device
        self._weights: dict[str, Tensor] = {}

    @classmethod
    def load(cls, name: str, weights: str, device: str) -> ColorClassifier:
        """Load an open_clip model; `weights` is a tag such as "openai" or a file."""
        import open_clip

        try:
            model, _, transform = open_clip.create_model_and_transforms(name, pretrained=weights, device=device)
        except Exception as error:  # open_clip raises RuntimeError, OSError and the errors of its download client
            raise UserError(
                f"the colour classifier of mask2former needs open_clip {name} weights {weights!r}, which were not found as a "
                f"file, in the Hugging Face cache (HF_HOME) or on the Hub ({(str(error) or repr(error)).splitlines()[0][:200]}). "
                f"Load them once on a machine with network and copy the cache, or give color_weights the path of a file."
            ) from error
        return cls(model.eval().requires_grad_(False), transform, open_clip.get_tokenizer(name), device)

    @torch.no_grad()
    def weights(self, name: str) -> Tensor:
        """Text features [10, D] of the colours of class `name`, made once a class."""
        if name not in self._weights:
            rows = []
            for color in COLORS:
                texts = self.tokenizer([template.format(color=color, name=name) for template in TEMPLATES])
                encoded = normalize(self.model.encode_text(texts.to(self.device)).float(), dim=-1)
                rows.append(normalize(encoded.mean(0), dim=-1))
            self._weights[name] = torch.stack(rows)
        return self._weights[name]

    @torch.no_grad()
    def __call__(self, image: Image.Image, name: str, found: Instance) -> str:
        """Name the colour of an object of class `name`."""
        mask = Image.fromarray(found.mask.astype(np.uint8) * 255)
        x1, y1, x2, y2 = (round(edge) for edge in found.box)
        crop = Image.composite(image, Image.new("RGB", image.size, GREY), mask).crop((x1, y1, x2, y2))
        encoded = self.model.encode_image(self.transform(crop)[None].to(self.device)).float()
        return COLORS[int((normalize(encoded, dim=-1) @ self.weights(name).T).argmax())]


class Mask2FormerDetector:
    """`Detector` of the reward `geneval`: boxes, scores and masks of COCO's 80 classes, colours on demand."""

    def __init__(
        self,
        *,
        model: str = "facebook/mask2former-swin-small-coco-instance",
        color_model: str = "ViT-L-14-quickgelu",
        color_weights: str = "openai",
        threshold: float = 0.3,
        device: str | None = None,
    ) -> None:
        """Choose weights; nothing is loaded before it is needed.

        Args:
            model: Hub id or folder of the detector and its image processor.
            color_model, color_weights: open_clip model and its weights (a tag or a file); color_model="hsv" takes the rule of
                `color_names` instead, which needs no weights and is not GenEval's.
            threshold: weakest object reported; the filter of GenEval's rules comes after it.
            device: where it runs; None: CUDA if there is one, else the CPU.
        """
        self.model, self.threshold = model, threshold
        self.color_model, self.color_weights = color_model, color_weights
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded: tuple[Any, Any, dict[int, str]] | None = None
        self._colors: ColorClassifier | None = None
        self._lock = threading.Lock()

    def _load(self) -> tuple[Any, Any, dict[int, str]]:
        with self._lock:
            if self._loaded is None:
                from transformers import AutoImageProcessor, Mask2FormerForUniversalSegmentation

                what = "the detector mask2former"
                processor = load_weights(what, self.model, AutoImageProcessor.from_pretrained)
                model = load_weights(what, self.model, Mask2FormerForUniversalSegmentation.from_pretrained)
                names = {int(i): RENAMED.get(name, name) for i, name in model.config.id2label.items()}
                self._loaded = model.to(self.device).eval().requires_grad_(False), processor, names
            return self._loaded

    def _classify(self, image: Image.Image, name: str, found: Instance) -> str | None:
        if self.color_model == "hsv":
            return box_color(image, found.box)
        with self._lock:
            if self._colors is None:
                self._colors = ColorClassifier.load(self.color_model, self.color_weights, self.device)
        return self._colors(image, name, found)

    @torch.no_grad()
    def detect(self, images: Tensor) -> list[Mapping[str, list[Instance]]]:
        """Find objects in images [N, 3, H, W] in [0, 1], one image at a time, so that no image changes another's padding."""
        model, processor, names = self._load()
        answers: list[Mapping[str, list[Instance]]] = []
        for image in to_pil(images):
            inputs = processor(images=image, return_tensors="pt").to(self.device)
            output = model(pixel_values=inputs["pixel_values"])
            masks = output.masks_queries_logits  # a quarter of the padded input's size
            masks = interpolate(masks, size=inputs["pixel_values"].shape[-2:], mode="bilinear", align_corners=False)[0]
            inside = inputs["pixel_mask"][0].bool()
            masks = masks[:, : int(inside.any(1).sum()), : int(inside.any(0).sum())]
            size = (image.height, image.width)
            found: dict[str, list[Instance]] = {}
            for label, score, box, mask in find_instances(output.class_queries_logits[0], masks, size, self.threshold):
                name = names[label]
                found.setdefault(name, []).append(
                    Instance(box, score, mask, functools.partial(self._classify, image, name))
                )
            answers.append(found)
        return answers
