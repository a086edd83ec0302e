"""Time, memory and copy speed on the device at hand, as all measurements take them.

Invariant: work on a GPU is timed on the GPU's own clock, between events on the compute stream; on
the CPU by the host's clock. Nothing that is copied or multiplied is zero.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from shared_offload.errors import ConfigError

COPIES = 5
_GB = 1e9
COPY_NBYTES = {"cuda": 1 << 28, "cpu": 1 << 24}
PIXELS = 16  # height and width of a video are multiples of it


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


def publish(table: Table, document: Mapping[str, object], path: Path | None) -> None:
    """Print the table; write the figures where a file is asked for."""
    Console().print(table)
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def at_least(flag: str, value: int, least: int = 1) -> None:
    """Raises ConfigError for a number that is too small."""
    if value < least:
        raise ConfigError(f"{flag} {value}", expected=f"{least} or more", key=flag, found=value)


def video_size(frames: int, height: int, width: int) -> None:
    """Raises ConfigError for a video that Wan cannot make."""
    if frames < 1 or frames % 4 != 1:
        raise ConfigError(
            f"--frames {frames}",
            expected="4n + 1, as in 81",
            hint=f"use {max(1, frames - 1) // 4 * 4 + 1}",
            key="--frames",
            found=frames,
        )
    for name, side in (("height", height), ("width", width)):
        if side < PIXELS or side % PIXELS:
            raise ConfigError(
                f"a video of {name} {side}",
                expected=f"a multiple of {PIXELS}",
                key=name,
                found=side,
            )


def stopwatch(device: torch.device) -> Callable[[], float]:
    """Starts now; call it to stop and for the seconds, on the clock of the device if it has one."""
    if device.type != "cuda":
        begun = time.perf_counter()
        return lambda: time.perf_counter() - begun
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()

    def elapsed() -> float:
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    return elapsed


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def gigabytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / _GB:.2f} GB"


def share_of_ranks(text: str) -> int:
    """P of "1/P", or of "1"."""
    numerator, _, denominator = text.partition("/")
    if numerator != "1":
        raise argparse.ArgumentTypeError(f"{text!r} is not 1/P")
    return int(denominator or 1)
