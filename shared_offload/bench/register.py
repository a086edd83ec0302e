"""Processes on one GPU attach to one arena, register it and copy a block each.

Answers three questions on the machine at hand: how long registration takes, whether copies from a
registered segment are as fast as from torch's own pinned memory, and how much host memory it all
takes. Each way of registering is a round of its own, with fresh processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shared_offload.bench.clock import host_nbytes
from shared_offload.errors import OffloadError, PreflightError
from shared_offload.memory import numa
from shared_offload.memory.board import FolderBoard
from shared_offload.memory.domain import Scope
from shared_offload.memory.lifecycle import HostArena, open_arena
from shared_offload.memory.pinning import CudaRegistrar
from shared_offload.memory.request import ArenaRequest, Party
from shared_offload.memory.tensor import as_tensor
from shared_offload.ranks.devices import pci_id
from shared_offload.ranks.facts import member_facts
from shared_offload.report.arena_table import arena_table
from shared_offload.report.tables import print_table

WAYS = ("read-only", "writable")
BLOCK_NBYTES = 386 << 20  # a block of Wan 14B in FP8, in whole 2 MiB pages
COPIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What every process of one round is told."""

    folder: str
    processes: int
    nbytes: int
    chunk_nbytes: int
    device: int
    way: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one process measured."""

    rank: int
    register_seconds: float
    registered: str
    arena_gb_per_second: float
    pinned_gb_per_second: float
    """From torch's pinned memory: same process, same block, alternating with the arena."""
    equal: bool
    """The block came back from the GPU as it had been written."""
    host_nbytes: int
    """Growth of this process's proportional set size until all had the whole arena mapped."""

    @property
    def ratio(self) -> float:
        """Speed from the arena as a share of that from pinned memory."""
        return self.arena_gb_per_second / self.pinned_gb_per_second


class WritableRegistrar(CudaRegistrar):
    """CUDA on a device that is taken not to know the read-only flag."""

    @property
    def read_only_supported(self) -> bool:
        """False."""
        return False


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this benchmark to those of `shared-offload bench`."""
    parser = subparsers.add_parser(
        "register",
        help="attach, register and copy: processes on one GPU, one arena",
        description="Start processes on one GPU that attach to one arena, register it both ways "
        "and copy a block each, beside torch's pinned memory.",
    )
    parser.add_argument("--processes", type=int, default=8, help="on the one GPU (default 8)")
    parser.add_argument("--gib", type=float, default=16.0, help="size of the arena (default 16)")
    parser.add_argument("--chunk-mb", type=int, default=1024, help="of registration (default 1024)")
    parser.add_argument("--device", type=int, default=0, help="CUDA device (default 0)")
    parser.add_argument("--way", choices=[*WAYS, "both"], default="both")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Both rounds, as tables on stdout; 0 when every block arrived intact."""
    console = Console()
    ways = WAYS if args.way == "both" else (args.way,)
    good = True
    for way in ways:
        results, arenas = measure(
            processes=args.processes,
            nbytes=int(args.gib * (1 << 30)) // BLOCK_NBYTES * BLOCK_NBYTES or BLOCK_NBYTES,
            chunk_nbytes=args.chunk_mb << 20,
            device=args.device,
            way=way,
        )
        print_table(arena_table(arenas), console)
        print_table(result_table(way, results, arenas[0]["nbytes"]), console)
        good = good and all(result.equal for result in results)
    return 0 if good else 1


def measure(
    *, processes: int, nbytes: int, chunk_nbytes: int, device: int, way: str
) -> tuple[list[Result], list[dict[str, Any]]]:
    """Results by rank, and the arena's report; starts `processes` processes and waits for them.

    Raises the error of the first process that failed. Needs `nbytes` of host memory, and a block
    on the GPU and in pinned memory for one process at a time.
    """
    if not torch.cuda.is_available():
        raise PreflightError("no CUDA device", hint="this measures a GPU; run it on a GPU host")
    with tempfile.TemporaryDirectory(prefix="shared-offload-bench-") as folder:
        plan = Round(
            folder=folder,
            processes=processes,
            nbytes=nbytes,
            chunk_nbytes=chunk_nbytes,
            device=device,
            way=way,
        )
        command = [sys.executable, "-m", "shared_offload.bench.register", json.dumps(asdict(plan))]
        children = [subprocess.Popen([*command, str(rank)]) for rank in range(processes)]
        statuses = [child.wait() for child in children]
        if any(statuses):
            raise PreflightError(
                f"processes of the measurement ended with status {statuses}",
                hint="their message is above",
                statuses=statuses,
            )
        board = FolderBoard(Path(folder))
        notes = [board.read(f"result/{rank}") or {} for rank in range(processes)]
        report = board.read("report") or {}
        return [Result(**note) for note in notes], report["arenas"]


def result_table(way: str, results: Sequence[Result], nbytes: int) -> Table:
    """One line a process; host memory and the slowest process below."""
    host = sum(result.host_nbytes for result in results)
    worst = min(result.ratio for result in results)
    table = Table(
        title=f"Way: {way}",
        caption=f"host memory of all processes together: {host / (1 << 30):.2f} GiB for an arena "
        f"of {nbytes / (1 << 30):.2f} GiB ({host / nbytes:.3f} copies); slowest registration "
        f"{max(r.register_seconds for r in results):.2f} s; least share of pinned speed "
        f"{worst:.3f}",
        caption_justify="left",
    )
    for name in ("rank", "registered", "s", "arena GB/s", "pinned GB/s", "share", "intact"):
        table.add_column(name)
    for r in results:
        table.add_row(
            str(r.rank),
            r.registered,
            f"{r.register_seconds:.2f}",
            f"{r.arena_gb_per_second:.2f}",
            f"{r.pinned_gb_per_second:.2f}",
            f"{r.ratio:.3f}",
            "yes" if r.equal else "NO",
        )
    return table


# -- one process -----------------------------------------------------------------------------------


def _work(plan: Round, rank: int) -> None:
    torch.cuda.set_device(plan.device)
    torch.zeros(1, device="cuda")  # the context, before host memory is counted
    board = FolderBoard(Path(plan.folder))
    registrar = CudaRegistrar if plan.way == "read-only" else WritableRegistrar
    request = ArenaRequest(
        name="bench",
        nbytes=plan.nbytes,
        fingerprint=f"bench {plan.nbytes}",
        boundaries=range(0, plan.nbytes, BLOCK_NBYTES),
        scope=Scope.HOST,
        strict_numa=False,
        register_chunk_nbytes=plan.chunk_nbytes,
    )
    pci = pci_id(torch.device("cuda", plan.device))
    party = Party(member_facts(rank, pci), numa.own_node(pci), plan.processes, board)
    before = host_nbytes()
    with open_arena(request, party, _fill, registrar(plan.device)) as arena:
        content = as_tensor(arena)
        int(content[::4096].sum())  # every page counts, whether registration has mapped it or not
        board.publish(f"touched/{rank}", {})
        for other in range(plan.processes):
            _wait_for(board, arena, f"touched/{other}")
        grown = host_nbytes() - before
        reports = [report.row() for report in arena.reports()]
        mine = board.read(f"bench/open/{rank}") or {}
        if rank == 0:
            board.publish("report", {"arenas": reports})
        else:
            _wait_for(board, arena, f"result/{rank - 1}")  # one process on the bus at a time
        speeds = _speeds(content, rank)
        del content  # closing detaches
        result = Result(
            rank=rank,
            register_seconds=mine["register_seconds"],
            registered=mine["registered"],
            host_nbytes=grown,
            **speeds,
        )
        board.publish(f"result/{rank}", asdict(result))
        _wait_for(board, arena, f"result/{plan.processes - 1}")


def _wait_for(board: FolderBoard, arena: HostArena, key: str) -> None:
    while board.read(key) is None:
        arena.check()
        time.sleep(0.02)


def _fill(
    dest: memoryview, on_bytes: Callable[[int], None], cpus: frozenset[int] | None, stop: Event
) -> None:
    """Each block its own bytes; torch copies with several threads."""
    del cpus  # a benchmark of registration: where its threads run does not matter
    content = torch.frombuffer(dest, dtype=torch.uint8)
    for number, start in enumerate(range(0, len(dest), BLOCK_NBYTES)):
        if stop.is_set():
            return
        content[start : start + BLOCK_NBYTES].copy_(_block(number))
        on_bytes(BLOCK_NBYTES)


def _block(number: int) -> torch.Tensor:
    piece = torch.arange(1 << 20, dtype=torch.int32).mul_(number + 1).to(torch.uint8)
    return piece.repeat(BLOCK_NBYTES >> 20)


def _speeds(arena: torch.Tensor, rank: int) -> dict[str, Any]:
    number = rank % (arena.numel() // BLOCK_NBYTES)
    ours = arena[number * BLOCK_NBYTES :][:BLOCK_NBYTES]
    pinned = torch.empty(BLOCK_NBYTES, dtype=torch.uint8, pin_memory=True)
    pinned.copy_(ours)
    device = torch.empty(BLOCK_NBYTES, dtype=torch.uint8, device="cuda")
    rates: dict[str, list[float]] = {"arena": [], "pinned": []}
    for turn in range(COPIES + 1):
        for name, source in (("pinned", pinned), ("arena", ours)):
            rate = _copy_rate(device, source)
            if turn:  # the first pays for page tables and clocks
                rates[name].append(rate)
    return {
        "arena_gb_per_second": sorted(rates["arena"])[COPIES // 2],
        "pinned_gb_per_second": sorted(rates["pinned"])[COPIES // 2],
        "equal": torch.equal(device.cpu(), _block(number)),
    }


def _copy_rate(device: torch.Tensor, source: torch.Tensor) -> float:
    """GB/s of one asynchronous copy, by the GPU's clock."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    device.zero_()
    begin.record()
    device.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return source.numel() / milliseconds / 1e6


def _main(plan: str, rank: str) -> int:
    try:
        _work(Round(**json.loads(plan)), int(rank))
    except OffloadError as error:
        sys.stderr.write(f"process {rank}: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
