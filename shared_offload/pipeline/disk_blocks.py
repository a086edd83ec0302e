"""Blocks that stay in their files: the ring that a run asks for, and the threads that fill it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

from shared_offload.config import Settings
from shared_offload.memory import numa
from shared_offload.memory.arena import attach
from shared_offload.memory.lifecycle import HostArena, open_arena
from shared_offload.memory.pinning import CudaRegistrar
from shared_offload.memory.request import ArenaRequest, Fill, Party, Stage
from shared_offload.memory.summary import ArenaReport
from shared_offload.memory.tensor import as_tensor
from shared_offload.memory.vigil import Vigil
from shared_offload.pipeline.arena_blocks import (
    ArenaTeller,
    arena_request,
    party_of,
    weights_fingerprint,
)
from shared_offload.ranks.group import Ranks
from shared_offload.report.progress import Progress
from shared_offload.streaming.disk import DiskReader
from shared_offload.streaming.residency import spread
from shared_offload.streaming.ring import RingPlan, RingState, RingUnits, plan_ring
from shared_offload.streaming.source import Source
from shared_offload.streaming.streamer import StreamedSource
from shared_offload.weights.cast import cast_bytes
from shared_offload.weights.checkpoint import Checkpoint
from shared_offload.weights.reader import unit_pieces

TITLES: dict[Stage, str] = {
    "wait": "ring, made by the leader",
    "fill": "make the ring",
    "register": "register with CUDA",
}
_TOUCH_NBYTES = 64 << 20
GIB = 1 << 30


class DiskArena:
    """The ring and the words of its state: two arenas of one domain."""

    def __init__(self, ring: HostArena, state: HostArena) -> None:
        self._ring = ring
        self._state = state

    def reports(self) -> list[ArenaReport]:
        """What became of the ring of each domain."""
        return self._ring.reports()

    def close(self) -> None:
        """Idempotent. The source is closed before."""
        try:
            self._state.close()
        finally:
            self._ring.close()


def ring_plan(settings: Settings, checkpoint: Checkpoint) -> RingPlan:
    """The ring of a run; ConfigError where its budget is too small."""
    layout = checkpoint.layout(settings.compute_dtype)
    units = layout.units("phase" if settings.offload_granularity == "phase" else "block")
    budget = settings.lazy_load_ring_gib
    kept = 0 if settings.resident_blocks == "auto" else settings.resident_blocks
    on_device = {unit.index for unit in spread(units, kept)}
    return plan_ring(
        units,
        None if budget is None else int(budget * GIB),
        [unit for unit in units if unit.index not in on_device],
    )


def open_disk_blocks(
    settings: Settings, checkpoint: Checkpoint, ranks: Ranks, progress: Progress, *, name: str
) -> tuple[Source, DiskArena]:
    """Collective. Open the ring of the settings' scope, and stream from files through it.

    `name` is new for every opening of a run. The caller closes the source, then the arena. Peak
    host memory: the ring, and a bounce buffer for each reading thread.
    """
    plan = ring_plan(settings, checkpoint)
    party = party_of(ranks)
    fingerprint = weights_fingerprint(settings, checkpoint, progress)
    request = replace(
        arena_request(
            settings, f"{name} ring", f"ring of {plan.places} x {plan.place_nbytes}: {fingerprint}"
        ),
        nbytes=plan.nbytes,
        boundaries=range(0, plan.nbytes, plan.place_nbytes),
    )
    registrar = CudaRegistrar(ranks.device.index) if ranks.device.type == "cuda" else None
    with ExitStack() as undo:
        with ArenaTeller(progress, TITLES) as teller:
            fill = _zeros(settings.num_disk_workers)
            ring = open_arena(request, party, fill, registrar, teller)
        undo.callback(ring.close)
        # As many ranks as there may be in a domain: who is in it is known only now.
        words = RingState.nbytes(plan, ranks.world_size)
        own = replace(request, name=f"{name} state", nbytes=words, boundaries=())
        state = open_arena(own, party, _zeros(1))
        undo.callback(state.close)
        units = _ring_units(settings, checkpoint, plan, party, (request, ring, state))
        undo.callback(units.close)
        source = StreamedSource(
            plan.units,
            units,
            ranks.device,
            resident_blocks=settings.resident_blocks,
            note=progress.note,
        )
        undo.pop_all()
    return source, DiskArena(ring, state)


def _ring_units(
    settings: Settings,
    checkpoint: Checkpoint,
    plan: RingPlan,
    party: Party,
    opened: tuple[ArenaRequest, HostArena, HostArena],
) -> RingUnits:
    """This rank's side of the ring; on the leader of its domain with the threads that read."""
    request, ring, state = opened
    members = ring.domain.ranks
    rank = members.index(party.me.rank)
    words = attach(state.ticket, read_only=False).view()
    vigil = Vigil(party.board, party.me, request.name)
    reader = None
    if rank == 0:
        try:
            reader = DiskReader(
                plan,
                [unit_pieces(checkpoint, unit) for unit in plan.units],
                attach(ring.ticket, read_only=False).view(),
                RingState(plan, len(members), words),
                threads=settings.num_disk_workers,
                convert=cast_bytes,
                on_error=vigil.fail,
                cpus=numa.usable_cpus(ring.domain.node),
            )
        except BaseException as error:
            vigil.fail(error)
            raise
    return RingUnits(
        plan,
        as_tensor(ring),
        RingState(plan, len(members), words),
        rank=rank,
        ranks=len(members),
        check=ring.check,
        reader=reader,
    )


def _zeros(threads: int) -> Fill:
    """Touches every page, so that placement can be verified and registration finds them there."""

    def write(
        dest: memoryview,
        on_bytes: Callable[[int], None],
        cpus: frozenset[int] | None,  # noqa: ARG001 - the policy of the pages decides, not the CPU
        stop: threading.Event,
    ) -> None:
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(dest))

        def touch(start: int) -> None:
            if not stop.is_set():
                nbytes = min(_TOUCH_NBYTES, len(dest) - start)
                ctypes.memset(address + start, 0, nbytes)
                on_bytes(nbytes)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(touch, range(0, len(dest), _TOUCH_NBYTES)))

    return write
