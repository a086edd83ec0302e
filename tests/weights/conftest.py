"""Small Wan checkpoints in every layout, written by safetensors itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import save_file

from shared_offload.weights.architecture import (
    Architecture,
    block_shapes,
    is_quantised,
    non_block_shapes,
)

INDEX = "diffusion_pytorch_model.safetensors.index.json"
Files = Literal["single", "shards", "blocks", "blocks+index", "chunks"]
Tensors = dict[str, torch.Tensor]


def _arch(model_type: str = "t2v", **changes: object) -> Architecture:
    in_dim = 36 if model_type == "i2v" else 16
    small = {
        "model_type": model_type,
        "dim": 64,
        "ffn_dim": 96,
        "freq_dim": 32,
        "in_dim": in_dim,
        "out_dim": 16,
        "num_heads": 8,
        "num_layers": 3,
        "text_len": 16,
        "eps": 1e-6,
        "text_dim": 48,
        "image_dim": 40,
    }
    return Architecture(**{**small, **changes})


def _tensors(arch: Architecture, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    shapes = non_block_shapes(arch)
    for n in range(arch.num_layers):
        shapes |= {f"blocks.{n}.{k}": v for k, v in block_shapes(arch).items()}
    return {k: torch.randn(v, generator=generator).to(dtype) for k, v in shapes.items()}


def _fp8(tensors: Tensors, scale_dtype: torch.dtype, rest: torch.dtype) -> Tensors:
    """As wan-formats describes LightX2V's converter: one scale per row, amax / 448."""
    result = {}
    for name, tensor in tensors.items():
        relative = name.split(".", 2)[2] if name.startswith("blocks.") else ""
        if is_quantised(relative, tuple(tensor.shape)):
            scale = tensor.abs().amax(1, keepdim=True).clamp(min=1e-5) / 448
            result[name] = (tensor / scale).to(torch.float8_e4m3fn)
            result[f"{name}_scale"] = scale.to(scale_dtype)
        else:
            result[name] = tensor.to(rest)
    return result


def _assign(tensors: Tensors, files: Files) -> dict[str, Tensors]:
    names = list(tensors)
    if files == "single":
        return {"diffusion_pytorch_model.safetensors": tensors}
    if files == "shards":
        parts = [names[i::3] for i in range(3)]
        label = "diffusion_pytorch_model-0000{}-of-00003.safetensors"
        return {label.format(i + 1): {n: tensors[n] for n in p} for i, p in enumerate(parts)}
    if files == "chunks":
        parts = [names[i : i + 20] for i in range(0, len(names), 20)]
        return {f"wan_part{i}.safetensors": {n: tensors[n] for n in p} for i, p in enumerate(parts)}
    result: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        stem = f"block_{name.split('.')[1]}" if name.startswith("blocks.") else "non_block"
        result.setdefault(f"{stem}.safetensors", {})[name] = tensor
    return result


def _write(folder: Path, tensors: Tensors, files: Files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    parts = _assign(tensors, files)
    for file, content in parts.items():
        save_file({k: v.contiguous() for k, v in content.items()}, folder / file)
    if files in ("shards", "chunks", "blocks+index"):
        weight_map = {name: file for file, content in parts.items() for name in content}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def small_arch() -> Callable[..., Architecture]:
    return _arch


@pytest.fixture
def random_tensors() -> Callable[..., Tensors]:
    return _tensors


@pytest.fixture
def to_fp8() -> Callable[..., Tensors]:
    return _fp8


@pytest.fixture
def write_checkpoint() -> Callable[..., Path]:
    return _write


@pytest.fixture
def published() -> dict[str, Architecture]:
    """The three sizes that Wan 2.1 was released in."""
    wan = {"freq_dim": 256, "text_dim": 4096, "image_dim": 1280, "text_len": 512}
    large = dict(wan, dim=5120, ffn_dim=13824, num_heads=40, num_layers=40)
    return {
        "t2v-1.3B": _arch(**dict(wan, dim=1536, ffn_dim=8960, num_heads=12, num_layers=30)),
        "t2v-14B": _arch(**large),
        "i2v-14B": _arch("i2v", **large),
    }
