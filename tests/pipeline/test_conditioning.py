"""Sizes, pictures, masks and noise against Wan's stated values and plain float64 maths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shared_offload.errors import InputError
from shared_offload.pipeline import conditioning
from shared_offload.pipeline.image_encoder import MEAN, STD, preprocess


def plain_bicubic(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Keys' cubic (a = -0.75), pixel centres aligned, edges repeated; one axis after the other."""

    def matrix(old: int, new: int) -> np.ndarray:
        out = np.zeros((new, old))
        for i in range(new):
            centre = (i + 0.5) * old / new - 0.5
            for j in range(int(np.floor(centre)) - 1, int(np.floor(centre)) + 3):
                d = abs(centre - j)
                near = (1.25 * d - 2.25) * d * d + 1
                far = -0.75 * (((d - 5) * d + 8) * d - 4)
                out[i, min(max(j, 0), old - 1)] += near if d <= 1 else far
        return out

    rows, columns = matrix(image.shape[1], height), matrix(image.shape[2], width)
    return np.einsum("yh,chw,xw->cyx", rows, image, columns)


SMALL, LARGE = (480, 832), (720, 1280)


@pytest.mark.parametrize(
    ("image", "target", "size"),
    [
        ((480, 832), SMALL, (480, 832)),  # Wan itself gives 464 here: sqrt is 479.99999999999994
        ((832, 480), SMALL, (832, 480)),
        ((9, 16), SMALL, (464, 832)),
        ((1, 1), SMALL, (624, 624)),
        ((3, 4), SMALL, (544, 720)),
        ((720, 1280), LARGE, (720, 1280)),
        ((720, 720), LARGE, (960, 960)),
        ((3, 4), LARGE, (816, 1104)),
    ],
)
def test_i2v_size(image, target, size) -> None:
    assert conditioning.i2v_size(*image, *target) == size


def test_a_ribbon_has_no_size() -> None:
    with pytest.raises(InputError) as caught:
        conditioning.i2v_size(16, 40_000, 480, 832)
    assert caught.value.facts == {"height": 16, "width": 40_000}


def test_latent_shape() -> None:
    assert conditioning.latent_shape(81, 480, 832) == (16, 21, 60, 104)
    assert conditioning.latent_shape(1, 16, 32) == (16, 1, 2, 4)


@pytest.mark.parametrize("size", [(28, 28), (96, 64)])
def test_bicubic_without_antialias(size) -> None:
    image = np.random.default_rng(0).uniform(-1, 1, (3, 53, 37))
    got = conditioning.first_frame(torch.from_numpy(image).float(), *size)
    np.testing.assert_allclose(got.numpy(), plain_bicubic(image, *size), atol=2e-5)


def test_clip_sees_the_whole_picture_stretched_then_normalised() -> None:
    image = np.random.default_rng(1).uniform(-1, 1, (3, 40, 90))
    mean, std = np.array(MEAN)[:, None, None], np.array(STD)[:, None, None]
    want = (plain_bicubic(image, 28, 28) / 2 + 0.5 - mean) / std
    np.testing.assert_allclose(preprocess(torch.from_numpy(image).float(), 28), want, atol=5e-5)


def test_picture_values_and_orientation(tmp_path: Path) -> None:
    pixels = np.zeros((20, 30, 3), np.uint8)
    pixels[:, :10] = (255, 0, 128)  # the left third
    upright = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270 degrees to see it upright
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    image = conditioning.load_image(tmp_path / "turned.png")
    assert image.shape == (3, 20, 30)
    assert image[:, 5, 5].tolist() == pytest.approx([1.0, -1.0, 128 / 127.5 - 1], abs=1e-6)
    assert image[:, 5, 25].tolist() == [-1.0, -1.0, -1.0]


def test_grey_and_palette_pictures_become_rgb(tmp_path: Path) -> None:
    grey = Image.new("L", (16, 16), 255)
    grey.save(tmp_path / "grey.png")
    grey.convert("P").save(tmp_path / "palette.png")
    for name in ("grey.png", "palette.png"):
        assert torch.equal(conditioning.load_image(tmp_path / name), torch.ones(3, 16, 16))


def broken(folder: Path) -> dict[str, Path]:
    paths = {name: folder / f"{name}.png" for name in ("missing", "text", "cut", "tiny", "deep")}
    paths["text"].write_text("<html>not found</html>")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(paths["cut"])
    paths["cut"].write_bytes(paths["cut"].read_bytes()[:2000])
    Image.new("RGB", (100, 15)).save(paths["tiny"])
    Image.fromarray(np.full((32, 32), 40_000, np.uint16)).save(paths["deep"])
    return {**paths, "folder": folder}


@pytest.mark.parametrize("name", ["missing", "text", "cut", "tiny", "deep", "folder"])
def test_unusable_pictures(tmp_path: Path, name: str) -> None:
    path = broken(tmp_path)[name]
    with pytest.raises(InputError) as caught:
        conditioning.load_image(path)
    assert caught.value.facts["path"] == str(path)


class Recorder:
    """A VAE that shows what it was given."""

    def encode(self, video_3FHW: torch.Tensor, blank: int) -> torch.Tensor:
        self.video, self.blank = video_3FHW, blank
        return torch.full((16, 3, 4, 6), 7.0)


def test_condition_is_mask_then_latent_of_frame_and_grey() -> None:
    vae = Recorder()
    frame = torch.rand(3, 32, 48)
    condition = conditioning.i2v_condition(vae, frame, frames=9)
    assert torch.equal(vae.video, frame[:, None])
    assert vae.blank == 8
    assert condition.shape == (20, 3, 4, 6)
    assert condition[:4, 0].eq(1).all()
    assert not condition[:4, 1:].any()
    assert condition[4:].eq(7).all()


def test_noise_is_the_seeds() -> None:
    a, b, c = (conditioning.initial_noise((16, 2, 4, 4), seed) for seed in (5, 5, 6))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert a.dtype == torch.float32
    torch.manual_seed(5)  # the global generator's stream of the same seed is the same
    assert torch.equal(a, torch.randn(16, 2, 4, 4))
