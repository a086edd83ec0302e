"""From an indexed checkpoint to a DiT that computes: where its blocks live is decided here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared_offload.config import Settings
from shared_offload.memory.lifecycle import HostArena
from shared_offload.model.attention import Attention, select_attention
from shared_offload.model.dit import Dit
from shared_offload.model.operations import select_operations
from shared_offload.model.ulysses import SINGLE, Ulysses
from shared_offload.pipeline.arena_blocks import open_blocks, read_threads
from shared_offload.pipeline.disk_blocks import DiskArena, open_disk_blocks
from shared_offload.pipeline.inventory import Inventory, torch_dtype
from shared_offload.ranks.group import Ranks
from shared_offload.report.progress import Progress
from shared_offload.streaming.source import Source, load_resident
from shared_offload.weights.architecture import non_block_shapes
from shared_offload.weights.cast import read_tensors, read_unit
from shared_offload.weights.checkpoint import Checkpoint
from shared_offload.weights.layout import Unit


@dataclass(slots=True)
class LoadedDit:
    """A DiT and the source of its blocks."""

    model: Dit
    source: Source
    attention: str
    arena: HostArena | DiskArena | None

    def arenas(self) -> list[dict[str, Any]]:
        """A row for each arena of the run; waits until every rank has opened its own."""
        return [report.row() for report in self.arena.reports()] if self.arena else []

    def describe(self) -> dict[str, Any]:
        """What runs and what streaming cost, as JSON values."""
        facts: dict[str, Any] = {"attention": self.attention}
        if arenas := self.arenas():
            facts["arenas"] = arenas
        if streaming := self.source.metrics.summary():
            facts["streaming"] = streaming
        return facts

    def close(self) -> None:
        """Free the blocks. Idempotent."""
        try:
            self.source.close()
        finally:
            if self.arena is not None:
                self.arena.close()


def load_dit(
    settings: Settings, inventory: Inventory, ranks: Ranks, progress: Progress, *, name: str
) -> LoadedDit:
    """Collective. Load all weights of the DiT; `name` is new for every call in a run."""
    dtype = torch_dtype(settings.dtype)
    attention, cross_attention = _kernels(settings, ranks, progress)
    names = f"{attention.name} (self), {cross_attention.name} (cross)"
    operations, kind = select_operations(settings.compile, ranks.device, dtype)
    progress.note(f"attention: {names}; {kind}; device: {ranks.device}; dtype: {settings.dtype}")
    for note in inventory.notes:
        progress.note(note)
    checkpoint = inventory.checkpoint
    model = Dit(
        inventory.arch,
        read_tensors(checkpoint, non_block_shapes(inventory.arch)),
        dtype=dtype,
        device=ranks.device,
        self_attention=attention.run,
        cross_attention=cross_attention.run,
        exchange=SINGLE if ranks.seq_group is None else Ulysses(ranks.seq_group),
        operations=operations,
    )
    if settings.lazy_load:
        source, ring = open_disk_blocks(settings, checkpoint, ranks, progress, name=name)
        return LoadedDit(model, source, names, ring)
    if settings.cpu_offload:
        source, arena = open_blocks(settings, checkpoint, ranks, progress, name=name)
        return LoadedDit(model, source, names, arena)
    units = checkpoint.layout(settings.compute_dtype).units("block")
    source = _resident(units, checkpoint, ranks.device, progress, read_threads(settings))
    return LoadedDit(model, source, names, None)


def _kernels(settings: Settings, ranks: Ranks, progress: Progress) -> tuple[Attention, Attention]:
    """Self- and cross-attention; what was asked for and does not run here is told once."""
    dtype = torch_dtype(settings.dtype)
    requested = (settings.self_attn_1_type, settings.cross_attn_1_type)
    chosen = [select_attention(name, ranks.device, dtype) for name in requested]
    for warning in dict.fromkeys(warning for _, warning in chosen if warning):
        progress.warn(warning)
    return chosen[0][0], chosen[1][0]


def _resident(
    units: Sequence[Unit],
    checkpoint: Checkpoint,
    device: torch.device,
    progress: Progress,
    threads: int,
) -> Source:
    """All blocks on the device, read through one staging buffer (pinned where that helps)."""
    with progress.task("read blocks", sum(u.nbytes for u in units), "B") as task:

        def read(unit: Unit, place: Tensor) -> None:
            read_unit(checkpoint, unit, place, threads=threads)
            task.advance(unit.nbytes)

        nbytes = max(unit.nbytes for unit in units)
        staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return load_resident(units, device, read, staging=staging)
