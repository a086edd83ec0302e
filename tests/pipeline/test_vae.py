"""The VAE from Wan-named files against diffusers' module with the same weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

from shared_offload.errors import CheckpointError
from shared_offload.pipeline.vae import Vae

BASE = 4
# Wan's published statistics of the 16 latent channels.
MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)

RESIDUAL = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3",
            "conv2": "residual.6", "conv_shortcut": "shortcut"}  # fmt: skip
WHOLE = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    **{f"{half}.conv_in": f"{half}.conv1" for half in ("encoder", "decoder")},
    **{f"{half}.norm_out": f"{half}.head.0" for half in ("encoder", "decoder")},
    **{f"{half}.conv_out": f"{half}.head.2" for half in ("encoder", "decoder")},
}


def wan_name(name: str) -> str:
    """diffusers' name of a VAE tensor in Wan's words."""
    module, _, end = name.rpartition(".")
    if module in WHOLE:
        return f"{WHOLE[module]}.{end}"
    half, *rest = module.split(".")
    rest = [RESIDUAL.get(part, part) for part in rest]
    path = ".".join(rest)
    if match := re.match(r"mid_block\.(resnets|attentions)\.(\d)\.", path):
        at = 1 if match[1] == "attentions" else 2 * int(match[2])
        path = f"middle.{at}.{path[match.end() :]}"
    elif match := re.match(r"up_blocks\.(\d)\.(?:resnets\.(\d)|upsamplers\.0)\.", path):
        at = 4 * int(match[1]) + int(match[2] or 3)
        path = f"upsamples.{at}.{path[match.end() :]}"
    return f"{half}.{path.replace('down_blocks', 'downsamples')}.{end}"


@pytest.fixture(scope="module")
def library_vae() -> AutoencoderKLWan:
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=BASE).eval().requires_grad_(False)
    for name, weight in vae.named_parameters():
        if name.endswith("gamma"):
            weight.data = 1 + 0.2 * torch.randn_like(weight)
        elif name.endswith("weight"):
            weight.data *= 2
    return vae


@pytest.fixture
def wan_file(library_vae, tmp_path) -> Path:
    tensors = {wan_name(n): t.clone() for n, t in library_vae.state_dict().items()}
    torch.save(tensors, tmp_path / "vae.pth")
    return tmp_path / "vae.pth"


@pytest.fixture
def video() -> torch.Tensor:
    return torch.rand(3, 9, 32, 48, generator=torch.Generator().manual_seed(2)) * 2 - 1


def load(path: Path, dtype=torch.float32, tiling: bool = False) -> Vae:
    return Vae.load(path, device="cpu", dtype=dtype, tiling=tiling)


def column(values) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1, 1, 1)


def test_latents_are_the_librarys_mode_normalised(wan_file, library_vae, video) -> None:
    got = load(wan_file).encode(video)
    mode = library_vae.encode(video[None]).latent_dist.mode()[0]
    assert got.shape == (16, 3, 4, 6)
    torch.testing.assert_close(got, (mode - column(MEAN)) / column(STD), rtol=1e-5, atol=1e-5)


def test_videos_are_the_librarys(wan_file, library_vae) -> None:
    latent = torch.randn(16, 3, 4, 6)
    want = library_vae.decode((latent * column(STD) + column(MEAN))[None]).sample[0]
    got = load(wan_file).decode(latent)
    assert got.shape == (3, 9, 32, 48)
    assert 0.1 < want.std() < 0.9  # neither flat nor clamped away
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_diffusers_folder_gives_the_same(wan_file, library_vae, video, tmp_path) -> None:
    library_vae.save_pretrained(tmp_path / "vae")
    assert torch.equal(load(tmp_path / "vae").encode(video), load(wan_file).encode(video))


def test_bf16_computes_in_bf16_and_returns_fp32(wan_file, video) -> None:
    exact, rounded = load(wan_file), load(wan_file, torch.bfloat16)
    latent, close = exact.encode(video), rounded.encode(video)
    assert rounded.nbytes * 2 == exact.nbytes == 4 * exact.num_parameters
    assert close.dtype == rounded.decode(latent).dtype == torch.float32
    assert 0 < (close - latent).square().mean() < 1e-3 * latent.square().mean()


@pytest.mark.parametrize(("tiling", "calls"), [(False, 2), (True, 2 * 2 * 1)])
def test_progress_is_told_for_each_latent_frame(wan_file, tiling, calls) -> None:
    """34 x 6 latent pixels are cut into tiles 24 apart: 2 x 1 of them."""
    vae = load(wan_file, tiling=tiling)
    latent = torch.randn(16, 2, 34, 6)
    seen = []
    video = vae.decode(latent, lambda: seen.append(1))
    assert len(seen) == vae.decode_calls(latent) == calls
    assert video.shape == (3, 5, 272, 48)
    vae.decode(latent[:, :1, :2, :2])
    assert len(seen) == calls  # the callback went with its call


def test_tiled_is_close_to_whole_and_not_the_same(wan_file) -> None:
    """The middle block attends over its whole tile, so equality cannot be had."""
    latent = torch.randn(16, 1, 40, 6)
    whole, tiled = (load(wan_file, tiling=tiling).decode(latent) for tiling in (False, True))
    difference = (whole - tiled).abs()
    assert 0 < difference.mean() < 0.1 * whole.std()


def test_a_failed_decode_keeps_no_features(wan_file) -> None:
    vae = load(wan_file)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vae.decode(torch.randn(16, 1, 2, 2), stop)
    assert all(f is None for f in vae._model._feat_map)
    assert not vae._model.decoder._forward_pre_hooks


def test_faults_are_named(library_vae, tmp_path) -> None:
    tensors = {wan_name(n): t.clone() for n, t in library_vae.state_dict().items()}
    tensors.pop("decoder.middle.1.proj.bias")
    torch.save(tensors, tmp_path / "vae.pth")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "vae.pth")
    assert caught.value.facts["names"] == ["decoder.mid_block.attentions.0.proj.bias"]


def test_a_vae_of_another_family(tmp_path) -> None:
    other = AutoencoderKLWan(base_dim=BASE, z_dim=8, latents_mean=[0.0] * 8, latents_std=[1.0] * 8)
    torch.save({wan_name(n): t for n, t in other.state_dict().items()}, tmp_path / "vae.pth")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "vae.pth")
    assert caught.value.facts["name"] == "conv2.weight"


def test_broken_folders(library_vae, tmp_path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert caught.value.facts["path"] == str(tmp_path)
    library_vae.save_pretrained(tmp_path / "vae")
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"<html>")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "vae")
    assert caught.value.facts["path"] == str(tmp_path / "vae")


def test_close_is_idempotent(wan_file) -> None:
    vae = load(wan_file)
    vae.close()
    vae.close()
    with pytest.raises(RuntimeError, match="closed"):
        vae.decode(torch.randn(16, 1, 2, 2))
