"""Synthetic weights in the library's own modules: names and shapes fit, activations are sane."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.loaders.single_file_utils import (
    convert_wan_transformer_to_diffusers,
    convert_wan_vae_to_diffusers,
)
from torch import Tensor

from shared_offload.pipeline.image_encoder import ImageEncoder
from shared_offload.pipeline.text_encoder import TextEncoder
from shared_offload.pipeline.tokenizer import load_tokenizer
from shared_offload.synth import parts
from shared_offload.synth.models import clip_recipes, dit_recipes, t5_recipes, vae_recipes
from shared_offload.synth.recipes import Recipe, values
from shared_offload.synth.sizes import SIZES, architecture
from shared_offload.weights.writer import row_chunks


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def made(recipes: Mapping[str, Recipe], seed: int = 0) -> dict[str, Tensor]:
    return {
        name: torch.cat([values(r, name, seed, *rows) for rows in row_chunks(r.shape)])
        for name, r in recipes.items()
    }


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_full_sizes_count_as_the_released_files_do() -> None:
    """Tensors and parameters of the original files, as counted in their classes."""

    def count(recipes: Mapping[str, Recipe]) -> tuple[int, int]:
        return len(recipes), sum(math.prod(r.shape) for r in recipes.values())

    assert count(dit_recipes(architecture("1.3b", "t2v"))) == (825, 1_418_996_800)
    assert count(dit_recipes(architecture("14b", "t2v"))) == (1095, 14_288_491_584)
    assert count(dit_recipes(architecture("14b", "i2v"))) == (1303, 16_394_878_784)
    assert count(t5_recipes(SIZES["14b"].t5)) == (242, 5_680_910_336)
    assert count(vae_recipes(SIZES["14b"].vae_dim)) == (194, 126_892_531)
    visual = {n: r for n, r in clip_recipes(SIZES["14b"].clip).items() if n.startswith("visual.")}
    assert len(visual) == 392


def test_residual_stream_stays_within_one_order_of_magnitude_for_40_blocks() -> None:
    arch = replace(architecture("tiny", "i2v"), num_layers=40)
    model = WanTransformer3DModel(
        num_attention_heads=arch.num_heads,
        attention_head_dim=arch.head_dim,
        in_channels=36,
        out_channels=16,
        text_dim=arch.text_dim,
        freq_dim=arch.freq_dim,
        ffn_dim=arch.ffn_dim,
        num_layers=40,
        cross_attn_norm=True,
        image_dim=arch.image_dim,
        added_kv_proj_dim=arch.dim,
    ).eval()
    weights = convert_wan_transformer_to_diffusers(made(dit_recipes(arch)))
    model.load_state_dict(weights, strict=True)
    sizes: list[float] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _m, _i, out: sizes.append(float(out.std())))
    outputs = []
    for seed in (1, 2):  # two prompts
        text = randn(1, 512, arch.text_dim, seed=seed)
        text[:, 20:] = 0
        x, image = randn(1, 36, 3, 16, 16), randn(1, 257, arch.image_dim)
        outputs.append(model(x, torch.tensor([500]), text, image).sample)
    assert min(sizes) > 0.5 and max(sizes) < 10
    assert 0.5 < float(outputs[0].std()) < 2, "a velocity is about as large as noise"
    assert float((outputs[0] - outputs[1]).std()) > 0.05, "the prompt matters"


@pytest.mark.parametrize("seed", [0, 1])
def test_vae_fits_diffusers_and_makes_soft_pictures(seed: int) -> None:
    dim = SIZES["tiny"].vae_dim
    vae = AutoencoderKLWan(base_dim=dim, z_dim=16).eval()
    weights = made(vae_recipes(dim), seed)
    vae.load_state_dict(convert_wan_vae_to_diffusers(weights), strict=True)
    mean, std = (
        torch.tensor(v).view(1, 16, 1, 1, 1)
        for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    for scale in (0.5, 1, 3):
        video = vae.decode(randn(1, 16, 2, 16, 16) * scale * std + mean).sample
        assert video.shape == (1, 3, 5, 128, 128)
        assert 0.1 < float(video.std()) < 0.7
        assert float((video.abs() >= 1).float().mean()) < 0.2, "not saturated"
        step = float((video[..., 1:] - video[..., :-1]).square().mean().sqrt())
        assert step < 0.3 * float(video.std()), "neighbouring pixels are alike"
    latent = (vae.encode(randn(1, 3, 5, 64, 64).clamp(-1, 1)).latent_dist.mode() - mean) / std
    assert 0.3 < float(latent.std()) < 3


def test_encoders_tell_inputs_apart(tiny_i2v: Path) -> None:
    text = TextEncoder.load(
        tiny_i2v / parts.T5_FILE,
        load_tokenizer(tiny_i2v / parts.TOKENIZER_FOLDER),
        device="cpu",
        dtype=torch.float32,
        text_len=512,
    )
    cat, dogs, empty = text.encode(["A cat sits.", "Two dogs run.", ""])
    assert cat.shape[1] == architecture("tiny", "i2v").text_dim and len(empty) == 1
    for rows in (cat, dogs, empty):
        assert 0.3 < float(rows.square().mean().sqrt()) < 3
    assert float((cat[0] - dogs[0]).std()) > 0.3

    image = ImageEncoder.load(tiny_i2v / parts.CLIP_FILE, device="cpu", dtype=torch.float32)
    one, two = (image.encode(randn(3, 90, 60, seed=s).clamp(-1, 1)) for s in (1, 2))
    assert one.shape == (257, architecture("tiny", "i2v").image_dim)
    assert 0.3 < float(one.square().mean().sqrt()) < 5
    assert float((one - two).std()) > 0.1


def test_no_tensor_is_constant(tiny_i2v: Path) -> None:
    for name, tensor in made(dit_recipes(architecture("tiny", "i2v"))).items():
        assert float(tensor.std()) > 0.01, name
    for file in (parts.T5_FILE, parts.CLIP_FILE, parts.VAE_FILE):
        for name, tensor in torch.load(tiny_i2v / file, weights_only=True).items():
            assert tensor.numel() < 2 or float(tensor.float().std()) > 0.001, name
