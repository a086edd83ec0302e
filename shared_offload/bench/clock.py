"""Time, memory and copy speed on the device at hand, as all measurements take them.

Invariant: work on a GPU is timed on the GPU's own clock, between events on the compute stream; on
the CPU by the host's clock. Nothing that is copied or multiplied is zero.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from shared_offload.report.tables import print_table

COPIES = 5
GB = 1e9
COPY_NBYTES = {"cuda": 1 << 28, "cpu": 1 << 24}


class Marks:
    """Points on the device's time line."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """Here, after all that was handed to the device."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Seconds between neighbouring marks. Waits for the last of them."""
        if not self._cuda:
            return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
        self._events[-1].synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [float(a.elapsed_time(b)) / 1e3 for a, b in pairs]


def first_device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def seconds_of(work: Callable[[], object], device: torch.device, rounds: int = 1) -> float:
    """The median of `rounds`; host time in which the device has nothing to do counts."""
    found = []
    for _ in range(rounds):
        wait(device)
        begun = time.perf_counter()
        work()
        wait(device)
        found.append(time.perf_counter() - begun)
    return median(found)


def of_peak(work: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that `work` needs on the GPU beyond what is held before it; None on the CPU."""
    if device.type != "cuda":
        work()
        return None
    wait(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def host_nbytes() -> int:
    """Proportional set size of this process in bytes: shared pages count by their share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def copy_rate(device: torch.device, *, pinned: bool) -> float:
    """Bytes per second from host memory to the device, nothing else running; median of a few."""
    count = COPY_NBYTES[device.type] // 4
    source = torch.randn(count)
    if pinned and device.type == "cuda":
        source = source.pin_memory()
    place = torch.empty(count, device=device)
    place.copy_(source)  # pages are touched, clocks are up
    seconds = seconds_of(lambda: place.copy_(source, non_blocking=pinned), device, COPIES)
    return source.nbytes / seconds


def publish(table: Table, document: object, path: Path | None) -> None:
    """Print the table; write the figures where a file is asked for."""
    print_table(table, Console())
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def gigabytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / GB:.2f} GB"


def stopwatch(device: torch.device) -> Callable[[], float]:
    """Starts now; call it to stop and for the seconds, on the clock of the device if it has one."""
    marks = Marks(device)
    marks.mark()

    def elapsed() -> float:
        marks.mark()
        return sum(marks.spans())

    return elapsed
