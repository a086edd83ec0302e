"""Pictures of a shape over a plain background, drawn by Pillow."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from tests.reference.judge import BACKGROUND_COLORS, OBJECT_COLORS

SIZE = 64
FINER = 4  # drawn larger by this and shrunk, so that edges are soft


def picture(
    color: str, background: str, shape: str, centre: tuple[float, float], radius: float = 9.0
) -> Tensor:
    """uint8 (64, 64, 3)."""
    image = Image.new("RGB", (SIZE * FINER, SIZE * FINER), BACKGROUND_COLORS[background])
    draw, (x, y), r = ImageDraw.Draw(image), [FINER * c for c in centre], FINER * radius
    fill = OBJECT_COLORS[color]
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "square":
        draw.rectangle((x - r, y - r, x + r, y + r), fill=fill)
    else:
        draw.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill=fill)
    return torch.from_numpy(np.array(image.resize((SIZE, SIZE), Image.Resampling.BOX)))
