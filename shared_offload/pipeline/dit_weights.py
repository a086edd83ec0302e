"""From an indexed checkpoint to a DiT that computes: where its blocks live is decided here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared_offload.config import Settings
from shared_offload.model.attention import select_attention
from shared_offload.model.dit import Dit
from shared_offload.model.ulysses import SINGLE, Exchange, Ulysses
from shared_offload.pipeline.inventory import Inventory, torch_dtype
from shared_offload.ranks.group import Ranks
from shared_offload.report.progress import Progress
from shared_offload.streaming.source import Source, load_resident
from shared_offload.weights.architecture import non_block_shapes
from shared_offload.weights.cast import read_tensors, read_unit
from shared_offload.weights.layout import BlockLayout, Unit

READ_THREADS = 8


@dataclass(slots=True)
class LoadedDit:
    """A DiT and the source of its blocks."""

    model: Dit
    source: Source
    attention: str

    def describe(self) -> dict[str, Any]:
        """What runs and what streaming cost, as JSON values."""
        facts: dict[str, Any] = {"attention": self.attention}
        if streaming := self.source.metrics.summary():
            facts["streaming"] = streaming
        return facts

    def close(self) -> None:
        """Free the blocks. Idempotent."""
        self.source.close()


def load_dit(
    settings: Settings, inventory: Inventory, ranks: Ranks, progress: Progress
) -> LoadedDit:
    """Collective. Load all weights of the DiT."""
    dtype = torch_dtype(settings.dtype)
    kernels = [
        select_attention(name, ranks.device, dtype)
        for name in (settings.self_attn_1_type, settings.cross_attn_1_type)
    ]
    for warning in dict.fromkeys(warning for _, warning in kernels if warning):
        progress.warn(warning)
    (self_attention, _), (cross_attention, _) = kernels
    names = f"{self_attention.name} (self), {cross_attention.name} (cross)"
    progress.note(f"attention: {names}; device: {ranks.device}; dtype: {settings.dtype}")
    checkpoint = inventory.checkpoint
    source = _blocks(
        settings, inventory, checkpoint.layout(settings.compute_dtype), ranks, progress
    )
    exchange: Exchange = SINGLE if ranks.seq_group is None else Ulysses(ranks.seq_group)
    model = Dit(
        inventory.arch,
        read_tensors(checkpoint, non_block_shapes(inventory.arch)),
        dtype=dtype,
        device=ranks.device,
        self_attention=self_attention.run,
        cross_attention=cross_attention.run,
        exchange=exchange,
    )
    return LoadedDit(model, source, names)


def _blocks(
    settings: Settings,
    inventory: Inventory,
    layout: BlockLayout,
    ranks: Ranks,
    progress: Progress,
) -> Source:
    units = layout.units("block")
    threads = settings.load_threads or READ_THREADS
    with progress.task("load blocks", sum(u.nbytes for u in units), "B") as task:

        def read(unit: Unit, place: Tensor) -> None:
            read_unit(inventory.checkpoint, unit, place, threads=threads)
            task.advance(unit.nbytes)

        staging = None
        if ranks.device.type == "cuda":
            largest = max(unit.nbytes for unit in units)
            staging = torch.empty(largest, dtype=torch.uint8, pin_memory=True)
        return load_resident(units, ranks.device, read, staging=staging)
