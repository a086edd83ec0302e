"""Blocks that live in host memory: the arena that a run asks for, filled from its checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

from shared_offload.config import Settings, dit_path
from shared_offload.memory import numa
from shared_offload.memory.board import StoreBoard
from shared_offload.memory.domain import Scope
from shared_offload.memory.lifecycle import HostArena, open_arena
from shared_offload.memory.pinning import CudaRegistrar
from shared_offload.memory.request import ArenaRequest, Fill, Party, Stage
from shared_offload.memory.tensor import as_tensor
from shared_offload.ranks.group import Ranks
from shared_offload.report.progress import Progress, Task
from shared_offload.server.client import ServerLender
from shared_offload.streaming.source import Source
from shared_offload.streaming.streamer import StreamedSource
from shared_offload.weights.cast import fill_tensors
from shared_offload.weights.checkpoint import Checkpoint
from shared_offload.weights.layout import BlockLayout, Unit
from shared_offload.weights.reader import block_pieces
from shared_offload.weights.threads import usable_threads
from shared_offload.weights.verify import content_fingerprint

# Where load_threads leaves it open. 16 threads fill 2 MiB pages at 22 GB/s, 8 at 15 (H200 host).
MOST_READ_THREADS = 16
CONTENT_VERSION = 1  # of arenas; to be raised when their bytes change for the same files and layout
TITLES: dict[Stage, str] = {
    "wait": "blocks, read by the leader",
    "fill": "read blocks",
    "register": "register with CUDA",
}


class ArenaPlan(NamedTuple):
    """The arena of a checkpoint's blocks: for a run, or for a weight server."""

    units: tuple[Unit, ...]
    request: ArenaRequest
    fill: Fill


class ArenaBlocks(NamedTuple):
    """A source and the arena under it."""

    source: Source
    arena: HostArena


def open_blocks(
    settings: Settings,
    checkpoint: Checkpoint,
    ranks: Ranks,
    progress: Progress,
    *,
    name: str,
) -> ArenaBlocks:
    """Collective. Open the arena of the settings' scope and stream from it.

    `name` is new for every opening of a run. The caller closes the source, then the arena.
    """
    plan = plan_arena(settings, checkpoint, progress, name=name)
    with ArenaTeller(progress) as teller:
        arena = open_arena(
            plan.request,
            party_of(ranks),
            plan.fill,
            CudaRegistrar(ranks.device.index) if ranks.device.type == "cuda" else None,
            teller,
            _lender(settings, plan.request.fingerprint),
        )
    try:
        whole = settings.offload_granularity == "model"
        source = StreamedSource(
            plan.units,
            as_tensor(arena),
            ranks.device,
            resident_blocks=checkpoint.arch.num_layers if whole else settings.resident_blocks,
            note=progress.note,
        )
    except BaseException:
        arena.close()
        raise
    return ArenaBlocks(source, arena)


def plan_arena(
    settings: Settings, checkpoint: Checkpoint, progress: Progress, *, name: str
) -> ArenaPlan:
    """What is to be in the arena, and how it gets there; with `verify_weights` reads every byte."""
    layout = checkpoint.layout(settings.compute_dtype)
    units = layout.units("phase" if settings.offload_granularity == "phase" else "block")
    request = replace(
        arena_request(settings, name, weights_fingerprint(settings, checkpoint, progress)),
        nbytes=layout.arena_nbytes,
        boundaries=[unit.offset for unit in units],
    )
    return ArenaPlan(units, request, _filler(checkpoint, layout, read_threads(settings)))


def read_threads(settings: Settings) -> int:
    """How many threads read block weights."""
    return settings.load_threads or usable_threads(MOST_READ_THREADS)


def weights_fingerprint(settings: Settings, checkpoint: Checkpoint, progress: Progress) -> str:
    """Of layout and index, and with `verify_weights` of every byte: only equal ones share."""
    layout = checkpoint.layout(settings.compute_dtype)
    parts = [str(CONTENT_VERSION), layout.fingerprint(), checkpoint.fingerprint()]
    if settings.verify_weights:
        total = sum(entry.nbytes for entry in checkpoint.entries.values())
        threads = read_threads(settings)
        with progress.task("hash weights", total, "B") as task:
            content = content_fingerprint(checkpoint, threads=threads, on_bytes=task.advance)
        progress.note(f"weights: sha256 {content}")
        parts.append(content)
    return " ".join(parts)


def arena_request(settings: Settings, name: str, fingerprint: str) -> ArenaRequest:
    """What the settings say about any arena; its size is left to the caller."""
    return ArenaRequest(
        name=name,
        nbytes=0,
        fingerprint=fingerprint,
        scope=_scope(settings),
        strict_numa=settings.shared_cpu_weight_strict_numa or settings.cpu_offload_numa,
        register_chunk_nbytes=settings.shared_cpu_weight_register_chunk_mb << 20,
    )


def _scope(settings: Settings) -> Scope:
    if settings.shared_cpu_weights:
        return Scope(settings.shared_cpu_weight_scope)
    return Scope.RANK_NUMA if settings.cpu_offload_numa else Scope.RANK


def _lender(settings: Settings, fingerprint: str) -> ServerLender | None:
    if not settings.shared_cpu_weights or settings.weight_server == "off":
        return None
    return ServerLender(
        fingerprint,
        str(dit_path(settings).resolve()),
        required=settings.weight_server == "require",
        folder=settings.weight_server_folder,
    )


def party_of(ranks: Ranks) -> Party:
    """This rank among those that open arenas together; its threads move to its device's node."""
    node = numa.own_node(ranks.member.pci_id)
    if ranks.device.type == "cuda":
        numa.run_on_node(node)
    return Party(ranks.member, node, ranks.world_size, StoreBoard(ranks.store))


def _filler(checkpoint: Checkpoint, layout: BlockLayout, threads: int) -> Fill:
    pieces = block_pieces(checkpoint, layout)
    # Readers count bytes of files, which differ from the arena's where dtypes change.
    read, kept = sum(p.nbytes for p in pieces), sum(p.dest_nbytes for p in pieces)

    def write(
        dest: memoryview,
        on_bytes: Callable[[int], None],
        cpus: frozenset[int] | None,
        stop: threading.Event,
    ) -> None:
        def tell(nbytes: int) -> None:
            on_bytes(nbytes * kept // read)

        fill_tensors(pieces, dest, threads=threads, cpus=cpus, on_bytes=tell, stop=stop)

    return write


class ArenaTeller:
    """Shows an arena's stages as progress; a stage's task lasts until the next one begins."""

    def __init__(self, progress: Progress, titles: Mapping[Stage, str] = TITLES) -> None:
        self._progress = progress
        self._titles = titles
        self._stack = ExitStack()
        self._stage: Stage | None = None
        self._task: Task | None = None

    def progress(self, stage: Stage, done: int, total: int) -> None:
        """Bytes of a stage so far."""
        if stage != self._stage:
            self._stack.close()
            self._stage = stage
            self._task = self._stack.enter_context(
                self._progress.task(self._titles[stage], total, "B")
            )
        if self._task is not None:
            self._task.advance(done - self._task.done)

    def note(self, line: str) -> None:
        """A line for the reader."""
        self._progress.note(line)

    def __enter__(self) -> ArenaTeller:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.__exit__(None, None, None)
