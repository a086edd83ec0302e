"""All files of a run, found and indexed before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import torch

from shared_offload.config import Settings, clip_file, dit_path, t5_file, tokenizer_folder, vae_file
from shared_offload.errors import ConfigError, OffloadError, Problems, raise_all
from shared_offload.weights.architecture import Architecture, read_architecture
from shared_offload.weights.checkpoint import Checkpoint, open_checkpoint

T = TypeVar("T")
_DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Where everything is; `checkpoint` is the index of the DiT's tensors."""

    arch: Architecture
    checkpoint: Checkpoint
    t5: Path
    tokenizer: Path
    clip: Path | None
    """None for t2v."""
    vae: Path


def take_inventory(settings: Settings) -> Inventory:
    """Find all files, and index the DiT's. Everything that is wrong is raised together."""
    errors: list[OffloadError] = []

    def attempt(what: Callable[[], T]) -> T | None:
        try:
            return what()
        except Problems as problems:
            errors.extend(problems.errors)
        except OffloadError as error:
            errors.append(error)
        return None

    arch = attempt(lambda: read_architecture(settings.model_path))
    t5 = attempt(lambda: t5_file(settings))
    tokenizer = attempt(lambda: tokenizer_folder(settings))
    clip = attempt(lambda: clip_file(settings)) if settings.task == "i2v" else None
    vae = attempt(lambda: vae_file(settings))
    checkpoint: Checkpoint | None = None
    if arch is not None:
        known = arch
        errors += _contradictions(settings, arch)
        checkpoint = attempt(
            lambda: open_checkpoint(
                dit_path(settings), known, quantised=settings.dit_quantized, task=settings.task
            )
        )
    raise_all(errors)
    assert arch and checkpoint and t5 and tokenizer and vae  # each lack was an error
    return Inventory(
        arch=arch, checkpoint=checkpoint, t5=t5, tokenizer=tokenizer, clip=clip, vae=vae
    )


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a settings value: BF16, FP16 or FP32."""
    return _DTYPES[name]


def _contradictions(settings: Settings, arch: Architecture) -> list[ConfigError]:
    """The checkpoint's config.json is the only source; a JSON that says otherwise is wrong."""
    actual = {field.name: getattr(arch, field.name) for field in fields(arch)}
    return [
        ConfigError(
            f"{key} is {claimed!r} in the settings and {actual[key]!r} in the checkpoint's "
            "config.json",
            expected="the architecture from config.json alone",
            hint=f"remove {key} from the JSON, or check model_path",
            key=key,
            found=claimed,
        )
        for key, claimed in settings.architecture_claims.items()
        if key in actual and actual[key] != claimed
    ]
