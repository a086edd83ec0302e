"""What streaming cost, step by step, from the times at which units were copied and used.

Invariant: every figure is derived from measured times (CUDA events, or the host's clock without
CUDA); a step whose times could not be read without stalling is counted, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from shared_offload.report.disk import DiskMetrics
from shared_offload.report.progress import amount

_GB = 1e9  # copies are rated in GB/s as PCIe is, not in GiB/s


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """One use of a unit; seconds since the start of the run, on the clock of the device.

    `copied` spans the copy made for this use, None where the unit had stayed on the device.
    Compute asked for the unit at `wanted`, had it at `granted` and was done at `released`.
    """

    unit: int
    label: str
    nbytes: int
    copied: tuple[float, float] | None
    wanted: float
    granted: float
    released: float


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One pass over the model. Bytes and copy time are those of the units that this step used."""

    step: int
    seconds: float
    copied_nbytes: int
    copy_seconds: float
    wait_seconds: float
    prefetch_depth: float  # streamed units ready, the wanted one included, when one was wanted

    @property
    def gb_per_second(self) -> float:
        """Speed while copying; 0 where nothing was copied."""
        return self.copied_nbytes / self.copy_seconds / _GB if self.copy_seconds else 0.0

    @property
    def hidden_share(self) -> float:
        """The share of copy time during which compute did not wait; 1 where nothing was copied."""
        return max(0.0, 1 - self.wait_seconds / self.copy_seconds) if self.copy_seconds else 1.0


@dataclass(slots=True)
class StreamMetrics:
    """All steps of one run, as read so far.

    `started` is when the run began, in seconds since the epoch by the host's clock.
    """

    started: float = 0.0
    units: list[list[UnitTimes]] = field(default_factory=list)  # one list a step that was read
    steps: list[StepMetrics] = field(default_factory=list)
    unread_steps: int = 0
    disk: DiskMetrics | None = None  # where units come from files during the run

    def add_step(self, step: int, times: Sequence[UnitTimes]) -> None:
        """Take the times of one pass, in order of use."""
        self.units.append(list(times))
        self.steps.append(_step(step, times))

    def summary(self) -> dict[str, float | int]:
        """Totals and medians as JSON-able values; empty before a step was read."""
        if not self.steps:
            return {}
        copied = sum(s.copied_nbytes for s in self.steps)
        copying = sum(s.copy_seconds for s in self.steps)
        waiting = sum(s.wait_seconds for s in self.steps)
        found: dict[str, float | int] = {
            "steps": len(self.steps),
            "unread_steps": self.unread_steps,
            "step_seconds_median": median(s.seconds for s in self.steps),
            "copied_bytes": copied,
            "copied_bytes_per_step": round(median(s.copied_nbytes for s in self.steps)),
            "copy_seconds": copying,
            "copy_gb_per_second": copied / copying / _GB if copying else 0.0,
            "wait_seconds": waiting,
            "wait_seconds_per_step": median(s.wait_seconds for s in self.steps),
            "hidden_copy_share": max(0.0, 1 - waiting / copying) if copying else 1.0,
            "prefetch_depth": fmean(s.prefetch_depth for s in self.steps),
        }
        if self.disk is not None:
            found |= self.disk.summary(len(self.steps) + self.unread_steps)
        return found

    def rows(self) -> list[tuple[str, str]]:
        """The summary in words and units, for a table of two columns."""
        if not (s := self.summary()):
            return []
        disk = [] if self.disk is None else self.disk.rows(s)
        return [
            ("steps measured", f"{s['steps']}"),
            ("step on the device", f"{s['step_seconds_median']:.3f} s"),
            ("copied per step", amount(s["copied_bytes_per_step"], "B")),
            ("speed while copying", f"{s['copy_gb_per_second']:.1f} GB/s"),
            ("compute waited per step", f"{s['wait_seconds_per_step'] * 1e3:.1f} ms"),
            ("copy time hidden", f"{s['hidden_copy_share']:.1%}"),
            ("units ready when wanted", f"{s['prefetch_depth']:.2f}"),
            *disk,
        ]


def _step(step: int, times: Sequence[UnitTimes]) -> StepMetrics:
    copies = [(t.nbytes, *t.copied) for t in times if t.copied]
    return StepMetrics(
        step=step,
        seconds=times[-1].released - times[0].wanted,
        copied_nbytes=sum(nbytes for nbytes, _, _ in copies),
        copy_seconds=sum(end - begin for _, begin, end in copies),
        wait_seconds=sum(t.granted - t.wanted for t in times),
        prefetch_depth=_depth(times),
    )


def _depth(times: Sequence[UnitTimes]) -> float:
    """Mean over the uses of copied units of how many copies had finished ahead of need.

    Copies are made in order of use, so one pointer serves. What the next step needs is not seen
    here, so the last units of a step count a little low.
    """
    streamed = [(t.wanted, t.copied[1]) for t in times if t.copied]
    if not streamed:
        return 0.0
    ready, total = 0, 0
    for position, (wanted, _) in enumerate(streamed):
        while ready < len(streamed) and streamed[ready][1] <= wanted:
            ready += 1
        total += max(0, ready - position)
    return total / len(streamed)
