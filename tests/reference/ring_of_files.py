"""A ring over files that hold the units of an arena, with real threads that read them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shared_offload.streaming.disk import DiskReader
from shared_offload.streaming.residency import spread
from shared_offload.streaming.ring import RingPlan, RingState, RingUnits, plan_ring
from shared_offload.weights.cast import cast_bytes
from shared_offload.weights.files import FileStamp
from shared_offload.weights.layout import BlockLayout, Unit
from shared_offload.weights.reader import Piece

HEAD_NBYTES = 37  # before each unit in its file, so that nothing is aligned
PARTS = 3  # that a unit is cut into


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("disk-")}


def open_files(folder: Path) -> int:
    """Descriptors of this process for files below the folder."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this very listing
            names.append(link.readlink())
    return sum(folder in name.parents for name in names)


@dataclass
class Disk:
    """A ring over files that hold the bytes of an arena, one file for each unit."""

    units: Sequence[Unit]
    files: list[Path]
    plan: RingPlan
    reader: DiskReader
    state: RingState
    ring: torch.Tensor
    errors: list[BaseException]

    def rank(
        self,
        rank: int = 0,
        ranks: int = 1,
        check: Callable[[], None] = lambda: None,
        kind: type[RingUnits] = RingUnits,
    ) -> RingUnits:
        reader = self.reader if rank == 0 else None
        return kind(
            self.plan, self.ring, self.state, rank=rank, ranks=ranks, check=check, reader=reader
        )

    @property
    def pass_nbytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)

    def read(self) -> int:
        return self.reader.totals()[0]

    def settled(self) -> int:
        """Bytes read, once nothing more is read."""
        before = -1
        while (now := self.read()) != before:
            before = now
            time.sleep(0.15)
        return now


def budget(units: Sequence[Unit], places: int) -> int:
    return places * (-(-max(u.nbytes for u in units) // 4096) * 4096)


class Case(Protocol):
    layout: BlockLayout
    arena: torch.Tensor


def open_disk(
    case: Case,
    folder: Path,
    granularity: str = "block",
    places: int | None = None,
    *,
    ranks: int = 1,
    workers: int = 2,
    resident: int = 0,
    convert: Callable[..., None] = cast_bytes,
    change: tuple[str, str] | None = None,
    pinned: bool = False,
) -> Disk:
    """Write the files into `folder` and start to read them; the caller closes the reader."""
    units = case.layout.units(granularity)
    often = [u for u in units if u not in spread(units, resident)]
    plan = plan_ring(units, None if places is None else budget(units, places), often)
    folder.mkdir()
    paths, pieces = [], []
    for unit in units:
        path = folder / f"unit{unit.index}"
        raw = case.arena[unit.offset : unit.offset + unit.nbytes].numpy().tobytes()
        path.write_bytes(b"h" * HEAD_NBYTES + raw)
        stamp = FileStamp.of(path.stat())
        cuts = [unit.nbytes * n // PARTS // 256 * 256 for n in range(PARTS)] + [unit.nbytes]
        pieces.append(
            [
                Piece(path, HEAD_NBYTES + a, b - a, a, b - a, change, stamp)
                for a, b in itertools.pairwise(cuts)
            ]
        )
        paths.append(path)
    ring = torch.full((plan.nbytes,), 0xFF, dtype=torch.uint8)
    ring = ring.pin_memory() if pinned else ring
    words = memoryview(bytearray(RingState.nbytes(plan, ranks)))
    state, errors = RingState(plan, ranks, words), []
    reader = DiskReader(
        plan,
        pieces,
        ring.numpy().data,
        state,
        threads=workers,
        convert=convert,
        on_error=errors.append,
    )
    return Disk(units, paths, plan, reader, state, ring, errors)
