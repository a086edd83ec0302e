"""The parts of a Wan folder: which files each has, how large they are, and how they are made.

Invariant: a file has its own name only when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from shared_offload.synth.models import (
    Recipes,
    clip_recipes,
    dit_recipes,
    t5_recipes,
    vae_recipes,
)
from shared_offload.synth.recipes import values
from shared_offload.synth.sizes import SIZES, Size, Task, architecture
from shared_offload.synth.tokenizer import TOKENIZER_FILES, write_tokenizer
from shared_offload.weights.architecture import CONFIG_NAME, write_config
from shared_offload.weights.convert import Files, RowSource, fp8_files, write_files
from shared_offload.weights.discovery import SINGLE_FILE
from shared_offload.weights.pth import save_pth
from shared_offload.weights.views import TORCH_DTYPES
from shared_offload.weights.writer import (
    INDEX_NAME,
    TensorTable,
    file_nbytes,
    row_chunks,
    run_all,
    tensor_nbytes,
)

PartName = Literal["dit-fp8", "dit", "t5", "clip", "vae", "tokenizer"]
PARTS: tuple[PartName, ...] = ("dit-fp8", "dit", "t5", "clip", "vae", "tokenizer")

FP8_FOLDER = "fp8"
TOKENIZER_FOLDER = "google/umt5-xxl"
T5_FILE = "models_t5_umt5-xxl-enc-bf16.pth"
CLIP_FILE = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
VAE_FILE = "Wan2.1_VAE.pth"

_PIECE_NBYTES = 50  # of tokenizer.json, about

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Part:
    """`files` are relative to the folder; `make(folder, threads, on_bytes)` writes them all."""

    title: str
    files: tuple[str, ...]
    nbytes: int
    make: Callable[[Path, int, OnBytes], None]


def plan_part(name: PartName, size: Size, task: Task, seed: int) -> Part:
    """What one part consists of; nothing is written."""
    spec = SIZES[size]
    if name == "dit-fp8":
        return _fp8_part(size, task, seed)
    if name == "dit":
        return _official_part(size, task, seed)
    if name == "t5":
        return _pth_part("T5", T5_FILE, t5_recipes(spec.t5), "BF16", seed)
    if name == "clip":
        return _pth_part("CLIP", CLIP_FILE, clip_recipes(spec.clip), "F32", seed)
    if name == "vae":
        return _pth_part("VAE", VAE_FILE, vae_recipes(spec.vae_dim), "F32", seed)
    return _tokenizer_part(spec.t5.vocabulary)


def _official_part(size: Size, task: Task, seed: int) -> Part:
    recipes = dit_recipes(architecture(size, task))
    files = _shards(recipes, SIZES[size].shards[task])

    def make(folder: Path, threads: int, on_bytes: OnBytes) -> None:
        write_files(folder, files, _rows(recipes, seed), threads, on_bytes)

    index = (INDEX_NAME,) if len(files) > 1 else ()
    return Part("DiT, fp32 shards", (*files, *index), _nbytes(files), make)


def _fp8_part(size: Size, task: Task, seed: int) -> Part:
    """FP8 block files, made from the same values as the official shards but without them."""
    arch = architecture(size, task)
    recipes = dit_recipes(arch)
    files = fp8_files(arch, "block", "BF16")

    def make(folder: Path, threads: int, on_bytes: OnBytes) -> None:
        target = folder / FP8_FOLDER
        target.mkdir(exist_ok=True)
        write_config(arch, target / CONFIG_NAME)
        write_files(target, files, _rows(recipes, seed), threads, on_bytes)

    names = tuple(f"{FP8_FOLDER}/{name}" for name in (*files, INDEX_NAME))
    return Part("DiT, FP8 block files", names, _nbytes(files), make)


def _pth_part(title: str, file: str, recipes: Recipes, dtype: str, seed: int) -> Part:
    """A dict of tensors as torch.save writes it. Peak memory: all of it."""

    def make(folder: Path, threads: int, on_bytes: OnBytes) -> None:
        tensors = {
            name: torch.empty(recipe.shape, dtype=TORCH_DTYPES[dtype])
            for name, recipe in recipes.items()
        }
        rows = _rows(recipes, seed)
        jobs = (
            partial(_fill, tensors[name], rows, name, first, end)
            for name, recipe in recipes.items()
            for first, end in row_chunks(recipe.shape)
        )
        run_all(jobs, threads, on_bytes)
        save_pth(tensors, folder / file)

    nbytes = sum(tensor_nbytes(dtype, recipe.shape) for recipe in recipes.values())
    return Part(title, (file,), nbytes, make)


def _tokenizer_part(pieces: int) -> Part:
    files = tuple(f"{TOKENIZER_FOLDER}/{name}" for name in TOKENIZER_FILES)

    def make(folder: Path, _threads: int, on_bytes: OnBytes) -> None:
        write_tokenizer(folder / TOKENIZER_FOLDER, pieces=pieces)
        on_bytes(sum((folder / file).stat().st_size for file in files))

    return Part("tokenizer", files, _PIECE_NBYTES * pieces, make)


def _rows(recipes: Recipes, seed: int) -> RowSource:
    def rows(name: str, first: int, end: int) -> Tensor:
        return values(recipes[name], name, seed, first, end)

    return rows


def _fill(tensor: Tensor, rows: RowSource, name: str, first: int, end: int) -> int:
    made = rows(name, first, end)
    target = tensor[first:end] if tensor.dim() else tensor
    target.copy_(made)
    return target.numel() * target.element_size()


def _shards(recipes: Recipes, count: int) -> Files:
    """Tensors in order, cut into `count` files of about equal size, named as Wan names them."""
    table = {name: ("F32", recipe.shape) for name, recipe in recipes.items()}
    if count == 1:
        return {SINGLE_FILE: table}
    total = sum(tensor_nbytes(*entry) for entry in table.values())
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in range(count)]
    done = 0
    for name, entry in table.items():
        shards[done * count // total][name] = entry
        done += tensor_nbytes(*entry)
    stem = SINGLE_FILE.removesuffix(".safetensors")
    named: dict[str, TensorTable] = {
        f"{stem}-{n:05}-of-{count:05}.safetensors": shard for n, shard in enumerate(shards, 1)
    }
    return named


def _nbytes(files: Files) -> int:
    return sum(map(file_nbytes, files.values()))
