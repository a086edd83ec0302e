"""From a picture and a size to what the DiT is conditioned on; pure functions.

Rules and numbers are Wan 2.1's, with one change: the square roots of the I2V size are rounded
before they are cut to whole patches, so that a picture that already has the asked size keeps it.
Pictures are RGB (3, H, W), fp32, in [-1, 1]. Shape letters: C channels, T latent frames, Y X latent
height and width, F frames, H W height and width in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from shared_offload.errors import InputError

LATENT_CHANNELS = 16
TIME_STRIDE = 4  # frames per latent frame, after the first
SPACE_STRIDE = 8  # pixels per latent pixel
PATCH_PIXELS = 16  # pixels per token: 8 of the VAE times 2 of the DiT's patch


class VideoEncoder(Protocol):
    """The half of the VAE that conditioning needs."""

    def encode(self, video_3FHW: Tensor, blank: int) -> Tensor: ...


def latent_shape(frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    """(16, T, Y, X) of a video of `frames` (4n + 1) frames of `height` x `width` pixels."""
    latent_frames = (frames - 1) // TIME_STRIDE + 1
    return LATENT_CHANNELS, latent_frames, height // SPACE_STRIDE, width // SPACE_STRIDE


def i2v_size(
    image_height: int, image_width: int, target_height: int, target_width: int
) -> tuple[int, int]:
    """(height, width) of the video: the picture's aspect, at most about the target's area.

    Both are multiples of 16. InputError for a picture so narrow that a side would vanish.
    """
    area = target_height * target_width
    height = round(math.sqrt(area * image_height / image_width)) // PATCH_PIXELS * PATCH_PIXELS
    width = round(math.sqrt(area * image_width / image_height)) // PATCH_PIXELS * PATCH_PIXELS
    if not height or not width:
        raise InputError(
            f"a picture of {image_width}x{image_height} pixels is too narrow for a video of "
            f"{area} pixels a frame: its size would be {width}x{height}",
            expected=f"sides of at least {PATCH_PIXELS} pixels at that area",
            hint="crop the picture",
            height=image_height,
            width=image_width,
        )
    return height, width


def load_image(path: Path) -> Tensor:
    """The picture at `path` (3, H, W), turned upright as its EXIF data say.

    InputError where the file is missing, is no picture, is cut off or is smaller than one patch.
    """
    try:
        with Image.open(path) as opened:
            upright = ImageOps.exif_transpose(opened)
            deep = upright.mode.startswith(("I", "F"))
            rgb = np.array(upright.convert("RGB"))
    except FileNotFoundError as error:
        raise InputError(
            f"there is no file {path}", hint="check --image_path", path=str(path)
        ) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(
            f"{path} cannot be read as a picture ({error})",
            expected="a whole picture of a format that Pillow reads, such as PNG or JPEG",
            hint="check --image_path; open the file in a viewer, or fetch it again",
            path=str(path),
        ) from error
    if deep:  # convert("RGB") cuts such values off at 255: a white picture
        raise InputError(
            f"{path} has more than 8 bits a channel",
            expected="8 bits a channel",
            hint="convert it to an 8-bit PNG",
            path=str(path),
        )
    height, width, _ = rgb.shape
    if min(height, width) < PATCH_PIXELS:
        raise InputError(
            f"{path} is {width}x{height} pixels",
            expected=f"at least {PATCH_PIXELS} pixels on each side",
            hint="give a larger picture",
            path=str(path),
            height=height,
            width=width,
        )
    return torch.from_numpy(rgb).permute(2, 0, 1).contiguous().float().div_(255).sub_(0.5).div_(0.5)


def bicubic(image_3HW: Tensor, height: int, width: int) -> Tensor:
    """The whole picture stretched to a size: bicubic, no antialias, as Wan does everywhere."""
    return F.interpolate(
        image_3HW[None].float(), size=(height, width), mode="bicubic", align_corners=False
    )[0]


def first_frame(image_3HW: Tensor, height: int, width: int) -> Tensor:
    """The picture as the video's first frame (3, height, width); overshoot is kept, as in Wan."""
    return bicubic(image_3HW, height, width)


def i2v_condition(vae: VideoEncoder, frame_3HW: Tensor, frames: int) -> Tensor:
    """(20, T, Y, X) fp32 on the VAE's device: 4 channels of mask, then 16 of latent.

    The latent is that of the frame followed by grey (zero) frames; the mask is 1 on latent frame 0.
    """
    latent_CTYX = vae.encode(frame_3HW[:, None], frames - 1)
    mask_CTYX = latent_CTYX.new_zeros((TIME_STRIDE, *latent_CTYX.shape[1:]))
    mask_CTYX[:, 0] = 1.0
    return torch.cat([mask_CTYX, latent_CTYX])


def initial_noise(shape: Sequence[int], seed: int, device: torch.device | str = "cpu") -> Tensor:
    """fp32 noise drawn on `device`, where it stays.

    On "cpu" a seed means the same everywhere. On "cuda" it does as in Wan, where the numbers depend
    on the GPU model.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, device=device, dtype=torch.float32)
