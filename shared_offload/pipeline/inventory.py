"""All files of a run, found and indexed before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from shared_offload.config import Settings, clip_file, dit_path, t5_file, tokenizer_folder, vae_file
from shared_offload.errors import ConfigError, OffloadError, Problems, raise_all
from shared_offload.model.attention import check_attention_name
from shared_offload.pipeline.disk_blocks import ring_plan
from shared_offload.pipeline.tokenizer import tokenizer_file
from shared_offload.preflight import gpu_plan
from shared_offload.streaming.streamer import SLOTS
from shared_offload.weights.architecture import Architecture, read_architecture
from shared_offload.weights.checkpoint import Checkpoint, open_checkpoint
from shared_offload.weights.lora import Loaded, LoraFile, with_loras
from shared_offload.weights.pth import check_pth

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
    notes: tuple[str, ...] = ()
    """A line about each LoRA."""

    def paths(self) -> tuple[Path, ...]:
        """All files that every rank must find alike."""
        parts = (self.t5, self.clip, self.vae)
        loras = {path for merge in self.checkpoint.merges.values() for path in merge.files()}
        return (
            *self.checkpoint.files,
            *sorted(loras),
            *(path for path in parts if path is not None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found, and everything that is wrong."""

    arch: Architecture | None
    inventory: Inventory | None
    """None where anything is wrong."""
    errors: tuple[OffloadError, ...]


def take_inventory(settings: Settings) -> Inventory:
    """Find all files, and index the DiT's. Everything that is wrong is raised together."""
    survey = survey_files(settings)
    raise_all(survey.errors)
    assert survey.inventory is not None  # each lack was an error
    return survey.inventory


def survey_files(settings: Settings) -> Survey:
    """As `take_inventory`, for callers with more to check: raises nothing of a user's making."""
    errors: list[OffloadError] = []

    def attempt(what: Callable[[], T]) -> T | None:
        try:
            return what()
        except Problems as problems:
            errors.extend(problems.errors)
        except OffloadError as error:
            errors.append(error)
        return None

    for name in dict.fromkeys((settings.self_attn_1_type, settings.cross_attn_1_type)):
        attempt(partial(check_attention_name, name))
    arch = attempt(lambda: read_architecture(settings.model_path))
    t5 = attempt(lambda: _whole(t5_file(settings)))
    tokenizer = attempt(lambda: _with_tokenizer(tokenizer_folder(settings)))
    clip = attempt(lambda: _whole(clip_file(settings))) if settings.task == "i2v" else None
    vae = attempt(lambda: _whole(vae_file(settings)))
    loaded = attempt(partial(_index, settings, arch, errors)) if arch else None
    if loaded and settings.lazy_load:
        attempt(partial(ring_plan, settings, loaded.checkpoint))
    if errors:
        return Survey(arch=arch, inventory=None, errors=tuple(errors))
    assert arch and loaded and t5 and tokenizer and vae  # each lack was an error
    files = Inventory(
        arch=arch,
        checkpoint=loaded.checkpoint,
        t5=t5,
        tokenizer=tokenizer,
        clip=clip,
        vae=vae,
        notes=loaded.notes,
    )
    return Survey(arch=arch, inventory=files, errors=())


def _whole(path: Path) -> Path:
    if path.is_file():  # the VAE may be a folder in diffusers' form
        check_pth(path)
    return path


def _with_tokenizer(folder: Path) -> Path:
    tokenizer_file(folder)
    return folder


def index_dit(settings: Settings) -> Loaded:
    """The DiT's files alone, for who needs no encoders."""
    errors: list[OffloadError] = []
    loaded = _index(settings, read_architecture(settings.model_path), errors)
    raise_all(errors)
    return loaded


def _index(settings: Settings, arch: Architecture, errors: list[OffloadError]) -> Loaded:
    errors += _contradictions(settings, arch)
    checkpoint = open_checkpoint(
        dit_path(settings), arch, quantised=settings.dit_quantized, task=settings.task
    )
    loras = [LoraFile(lora.path, lora.strength) for lora in settings.lora_configs]
    return with_loras(checkpoint, loras, allow_unmatched=settings.lora_allow_unmatched)


def gpu_needs(settings: Settings, files: Inventory) -> dict[str, int]:
    """What each rank certainly holds at once on its GPU, by name, in bytes; see `gpu_plan`."""
    layout = files.checkpoint.layout(settings.compute_dtype)
    units = layout.units("phase" if settings.offload_granularity == "phase" else "block")
    streams = settings.cpu_offload and settings.offload_granularity != "model"
    slots = SLOTS * max(unit.nbytes for unit in units)
    blocks = layout.num_blocks * layout.block_nbytes
    if streams:
        kept = 0 if settings.resident_blocks == "auto" else settings.resident_blocks
        blocks = min(blocks, slots + kept * layout.block_nbytes)
    height, width = settings.size
    return gpu_plan(
        files.arch,
        frames=settings.num_frames,
        height=height,
        width=width,
        block_weights=blocks,
        dtype_nbytes=torch_dtype(settings.dtype).itemsize,
        seq_p_size=settings.parallel.seq_p_size,
        branches=settings.branches // settings.parallel.cfg_p_size,
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
