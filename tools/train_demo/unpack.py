"""The way back: from the folders that `export` writes to the work folder that training starts from.

Weights come back as exactly as files hold them: FP8 in a DiT's blocks, fp16 and bf16 elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from safetensors.torch import load_file
from torch import Tensor

from shared_offload.pipeline import text_encoder
from shared_offload.synth.parts import CLIP_FILE, FP8_FOLDER, T5_FILE, VAE_FILE
from shared_offload.weights.names import to_diffusers
from shared_offload.weights.pth import load_pth
from tests.reference.tiny_model import dequantise_block
from tools.train_demo.export import rename_clip


def unpack(folder: Path, reports: Path) -> dict[str, dict[str, Any]]:
    """What each part would have left in the work folder, by part; `reports` is TRAINING.json.

    Raises FileNotFoundError where the folders or the report are not there.
    """
    known: dict[str, Any] = json.loads(reports.read_text(encoding="utf-8"))["parts"]
    made = {part: {"report": report} for part, report in known.items()}
    for part, state in made.items():
        if part == "vae":
            raw = load_pth(folder / "t2v" / VAE_FILE)
            state["vae"] = _float(convert_wan_vae_to_diffusers(raw))
            continue
        state["dit"] = read_dit(folder / part)
        if part == "t2v":
            state["t5"] = _float(text_encoder.rename(load_pth(folder / part / T5_FILE)))
        else:
            state["clip"] = _float(rename_clip(load_pth(folder / part / CLIP_FILE)))
    return made


def read_dit(folder: Path) -> dict[str, Tensor]:
    """A DiT's weights in fp32 under diffusers' names, from FP8 block files."""
    tensors: dict[str, Tensor] = {}
    for path in sorted((folder / FP8_FOLDER).glob("*.safetensors")):
        tensors |= load_file(path)
    weights = _float(dequantise_block(tensors))
    return {str(to_diffusers(name)): tensor for name, tensor in weights.items()}


def _float(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
