"""The sizes on offer: Wan's own, and a tiny one with the same structure.

The tiny model has 8 heads and 8 blocks, so that heads divide among 2, 4 or 8 ranks and streaming
has something to stream; all of its files together are smaller than a photograph archive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shared_offload.weights.architecture import Architecture

Size = Literal["tiny", "1.3b", "14b"]
Task = Literal["t2v", "i2v"]

IN_DIM: Mapping[Task, int] = {"t2v": 16, "i2v": 36}


@dataclass(frozen=True, slots=True)
class T5Size:
    """umT5's encoder."""

    layers: int
    dim: int
    heads: int
    head_dim: int
    ffn_dim: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class ClipSize:
    """CLIP's visual tower. The number of heads is not in its tensors."""

    layers: int
    dim: int
    mlp_dim: int
    patch: int
    image: int
    projection: int


@dataclass(frozen=True, slots=True)
class SizeSpec:
    """One size: the DiT but for its task, the encoders, the width of the VAE, official shards."""

    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int
    t5: T5Size
    clip: ClipSize
    vae_dim: int
    shards: Mapping[Task, int]  # 1: a single file without index


_T5_XXL = T5Size(24, 4096, 64, 64, 10240, 256384)
_VIT_H = ClipSize(layers=32, dim=1280, mlp_dim=5120, patch=14, image=224, projection=1024)

SIZES: Mapping[Size, SizeSpec] = {
    "tiny": SizeSpec(
        dim=128,
        ffn_dim=512,
        num_heads=8,
        num_layers=8,
        t5=T5Size(2, 64, 4, 16, 160, 1024),
        clip=ClipSize(layers=3, dim=80, mlp_dim=320, patch=14, image=224, projection=64),
        vae_dim=8,
        shards={"t2v": 2, "i2v": 2},
    ),
    "1.3b": SizeSpec(1536, 8960, 12, 30, _T5_XXL, _VIT_H, 96, {"t2v": 1, "i2v": 1}),
    "14b": SizeSpec(5120, 13824, 40, 40, _T5_XXL, _VIT_H, 96, {"t2v": 6, "i2v": 7}),
}


def architecture(size: Size, task: Task) -> Architecture:
    """What the config.json of this size says."""
    spec = SIZES[size]
    return Architecture(
        model_type=task,
        dim=spec.dim,
        ffn_dim=spec.ffn_dim,
        freq_dim=256,
        in_dim=IN_DIM[task],
        out_dim=16,
        num_heads=spec.num_heads,
        num_layers=spec.num_layers,
        text_len=512,
        eps=1e-6,
        text_dim=spec.t5.dim,
        image_dim=spec.clip.dim,
    )
