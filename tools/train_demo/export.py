"""From trained modules to a folder in the layout of Wan's releases.

Names are made by the maps with which the pipeline reads such files: they are applied to empty
tensors under Wan's names, and the trained values are written through what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from torch import Tensor

from shared_offload.pipeline import image_encoder, text_encoder
from shared_offload.synth.parts import (
    CLIP_FILE,
    FP8_FOLDER,
    T5_FILE,
    TOKENIZER_FOLDER,
    VAE_FILE,
)
from shared_offload.weights.architecture import (
    CONFIG_NAME,
    Architecture,
    block_shapes,
    non_block_shapes,
    write_config,
)
from shared_offload.weights.checkpoint import block_name
from shared_offload.weights.convert import fp8_files, write_files
from shared_offload.weights.discovery import SINGLE_FILE
from shared_offload.weights.names import to_diffusers
from shared_offload.weights.pth import save_pth
from tools.train_demo.models import CLIP_LAYERS, Shapes

State = Mapping[str, Tensor]


def write_dit(arch: Architecture, state: State, folder: Path, *, fp8: bool) -> None:
    """config.json, and FP8 block files in fp8/ or the unquantised fp32 file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(arch, folder / CONFIG_NAME)
    shapes = non_block_shapes(arch)
    for block in range(arch.num_layers):
        shapes |= {block_name(block, name): shape for name, shape in block_shapes(arch).items()}
    tensors = {name: state[str(to_diffusers(name))].view(shape) for name, shape in shapes.items()}
    _check_all_used(state, [str(to_diffusers(name)) for name in shapes])

    def rows(name: str, first: int, end: int) -> Tensor:
        return tensors[name][first:end].float().cpu()

    if fp8:
        target = folder / FP8_FOLDER
        target.mkdir(exist_ok=True)
        write_config(arch, target / CONFIG_NAME)
        write_files(target, fp8_files(arch, "block", "BF16"), rows, 1, _to_nobody)
    else:
        table = {name: ("F32", shape) for name, shape in shapes.items()}
        write_files(folder, {SINGLE_FILE: table}, rows, 1, _to_nobody)


def write_t5(shapes: Shapes, state: State, folder: Path, dtype: torch.dtype) -> None:
    """T5's file."""
    # The file's one table of tokens stands under two names in the module.
    save_pth(_through(shapes, text_encoder.rename, state, dtype), folder / T5_FILE)


def write_vae(shapes: Shapes, state: State, folder: Path, dtype: torch.dtype) -> None:
    """The VAE's file."""
    save_pth(_through(shapes, convert_wan_vae_to_diffusers, state, dtype), folder / VAE_FILE)


def write_clip(shapes: Shapes, state: State, folder: Path, dtype: torch.dtype) -> None:
    """CLIP's file. The last block and the projection, which Wan never computes, are zeros."""
    plain = {name.removeprefix("vision_model."): tensor for name, tensor in state.items()}
    plain.pop("embeddings.position_ids", None)
    save_pth(_through(shapes, rename_clip, plain, dtype), folder / CLIP_FILE)


def rename_clip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a CLIP file holds under transformers' names, without what Wan never computes."""
    inner = {
        name.removeprefix(image_encoder.VISUAL): tensor
        for name, tensor in tensors.items()
        if name.startswith(image_encoder.VISUAL)
    }
    return image_encoder.rename(inner, blocks=CLIP_LAYERS - 1)


def share(owner: Path, folder: Path) -> None:
    """Let a folder use another one's T5, VAE and tokenizer, through relative links."""
    for name in (T5_FILE, VAE_FILE, TOKENIZER_FOLDER):
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        up = "../" * (len(Path(name).parts))
        link.symlink_to(f"{up}{owner.name}/{name}")


def _through(
    shapes: Shapes,
    rename: Callable[[Any], Mapping[str, Tensor]],
    state: State,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    views = rename(dict(tensors))
    _check_all_used(state, views)
    for name, view in views.items():
        view.copy_(state[name].view(view.shape))
    return tensors


def _check_all_used(state: State, names: Any) -> None:  # noqa: ANN401  any names
    if odd := set(state) ^ set(names):
        raise ValueError(f"trained and written tensors differ: {sorted(odd)}")


def _to_nobody(_: int) -> None:
    """Nobody is told of progress: it takes a second."""
