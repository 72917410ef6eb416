"""A small two-tower model of pictures and captions, as CLIP is one: a learned judge of the drawn world that can be fooled.

The image tower is a convolutional network whose features are averaged over the picture, so it sees parts and colours better
than counts, and places hardly at all; the text tower reads windows of three words. Trained by contrast on drawn scenes with
partly wrong captions (`two_tower_build`), never on pictures of a generator.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

from visual_grpo.errors import UserError
from visual_grpo.testbed.scenes import IMAGE_SIZE

__all__ = ["WEIGHTS_DIR", "TwoTower", "contrastive_loss", "load_two_tower", "save_two_tower"]

WEIGHTS_DIR = Path(__file__).parent / "weights" / "two_tower"
"""Where the shipped weights lie."""
PADDING, UNKNOWN = 0, 1
MAX_WORDS = 12
LARGEST_SCALE = 100.0


class TwoTower(nn.Module):
    """Unit features of pictures and captions, and the scale of their cosine in the loss.

    Attributes:
        words: the vocabulary; any other word is unknown.
        logit_scale: logarithm of the scale, as in CLIP.
    """

    def __init__(self, words: Sequence[str], *, dim: int = 64, width: int = 24) -> None:
        """Build both towers with random weights.

        Args:
            words: known words, in lower case.
            dim: of the features.
            width: channels of the first convolution.
        """
        super().__init__()
        self.words, self.dim, self.width = list(words), dim, width
        self._index = {word: i for i, word in enumerate(self.words, 2)}
        self.picture = nn.Sequential(
            nn.Conv2d(3, width, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.GELU(),
        )
        self.picture_head = nn.Sequential(nn.Linear(4 * width, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.embed = nn.Embedding(len(self.words) + 2, dim, padding_idx=PADDING)
        self.caption = nn.Sequential(nn.Conv1d(dim, 2 * dim, 3, padding=1), nn.GELU(), nn.Conv1d(2 * dim, dim, 1))
        self.caption_head = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.logit_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def tokens(self, captions: Sequence[str]) -> Tensor:
        """Word numbers of captions, [N, MAX_WORDS] int64; what is longer is cut."""
        rows = [[self._index.get(w, UNKNOWN) for w in text.lower().split()][:MAX_WORDS] for text in captions]
        return torch.tensor([row + [PADDING] * (MAX_WORDS - len(row)) for row in rows], dtype=torch.int64)

    def image_features(self, images: Tensor) -> Tensor:
        """Unit features [N, dim] of images [N, 3, H, W] in [0, 1]; another size than 48 x 48 is resized."""
        if images.shape[-2:] != (IMAGE_SIZE, IMAGE_SIZE):
            size = (IMAGE_SIZE, IMAGE_SIZE)
            images = interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)
        found: Tensor = self.picture(images * 2 - 1).mean((2, 3))
        return normalize(self.picture_head(found), dim=-1)

    def text_features(self, captions: Sequence[str]) -> Tensor:
        """Unit features [N, dim] of captions."""
        ids = self.tokens(captions).to(self.logit_scale.device)
        found: Tensor = self.caption(self.embed(ids).transpose(1, 2))
        # A window of padding says nothing; a caption without words has the features of its first window.
        empty = (ids == PADDING) & (torch.arange(MAX_WORDS, device=ids.device) > 0)
        return normalize(self.caption_head(found.masked_fill(empty[:, None], -torch.inf).amax(2)), dim=-1)

    def scale(self) -> Tensor:
        """What the cosines are multiplied by in the loss, at most 100."""
        return self.logit_scale.exp().clamp(max=LARGEST_SCALE)


def contrastive_loss(images: Tensor, texts: Tensor, scale: Tensor | float) -> Tensor:
    """CLIP's loss (Radford et al. 2021, arXiv 2103.00020): mean of the cross-entropies of both directions.

    Args:
        images, texts: unit features [N, D]; row i of one belongs to row i of the other.
        scale: of the cosines.

    >>> round(float(contrastive_loss(torch.eye(2), torch.eye(2), 1.0)), 6)
    0.313262
    """
    logits = scale * images @ texts.T
    own = torch.arange(len(logits), device=logits.device)
    return (nn.functional.cross_entropy(logits, own) + nn.functional.cross_entropy(logits.T, own)) / 2


def save_two_tower(model: TwoTower, folder: Path) -> None:
    """Write `model.safetensors` and `config.json` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().contiguous() for k, v in model.state_dict().items()}, str(folder / "model.safetensors"))
    config = {"words": model.words, "dim": model.dim, "width": model.width}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load_two_tower(folder: Path | str | None = None) -> TwoTower:
    """Read a model that `save_two_tower` wrote; None: the shipped one.

    Raises:
        UserError: there is none in the folder, or it is damaged.
    """
    path = WEIGHTS_DIR if folder is None else Path(folder)
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        model = TwoTower(config["words"], dim=config["dim"], width=config["width"])
        model.load_state_dict(load_file(str(path / "model.safetensors")))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"no two-tower model could be read from {str(path)!r} ({reason}); `visual-grpo testbed build two_tower --out DIR` "
            "writes one into DIR"
        ) from None
    return model.eval().requires_grad_(False)
