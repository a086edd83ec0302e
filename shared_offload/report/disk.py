"""What the disk tier did in one run, as one rank saw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from shared_offload.report.progress import amount

_GB = 1e9


@dataclass(slots=True, kw_only=True)
class DiskMetrics:
    """Bytes and seconds of a run. Where this rank does not read itself, bytes are zero.

    `read_nbytes` are those of files, before a change of dtype. `read_seconds` is the time during
    which at least one read was under way, so their quotient is the speed of the disk (or of the
    kernel's page cache), not of one thread.
    """

    units: int  # in one pass
    places: int  # in the ring; each holds any one unit
    cached_units: int  # units with a place of their own, read once
    ring_nbytes: int
    ranks: int  # that share the ring
    reads: bool = True  # this rank's threads read for all of them
    read_nbytes: int = 0
    read_seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    """Seconds by step in which a unit was awaited while no copy was left to make, so that files (or
    a slower rank) were the reason; shorter where later steps did not wait.
    """

    @property
    def gb_per_second(self) -> float:
        """Speed while reading; 0 where nothing was read."""
        return self.read_nbytes / self.read_seconds / _GB if self.read_seconds else 0.0

    def summary(self, steps: int) -> dict[str, float | int]:
        """Totals as JSON-able values, and what they are for each of `steps`."""
        waits = [*self.waits, *[0.0] * (steps - len(self.waits))]
        return {
            "disk_ring_bytes": self.ring_nbytes,
            "disk_ring_units": self.places,
            "disk_cached_units": self.cached_units,
            "disk_ring_ranks": self.ranks,
            "disk_read_bytes": self.read_nbytes,
            "disk_read_bytes_per_step": round(self.read_nbytes / max(1, steps)),
            "disk_read_seconds": self.read_seconds,
            "disk_gb_per_second": self.gb_per_second,
            "disk_wait_seconds": sum(self.waits),
            "disk_wait_seconds_per_step": median(waits) if waits else 0.0,
        }

    def rows(self, summary: Mapping[str, float | int]) -> Sequence[tuple[str, str]]:
        """The summary in words and units."""
        kept = f", {self.cached_units} of them kept" if self.cached_units else ""
        size = amount(self.ring_nbytes, "B")
        ring = f"{self.places} of {self.units} units{kept}, {size}"
        rows = [("ring in host memory", ring)]
        if self.reads:
            per_step = amount(summary["disk_read_bytes_per_step"], "B")
            sharers = f", for {self.ranks} ranks" if self.ranks > 1 else ""
            rows += [
                ("read from files per step", f"{per_step}{sharers}"),
                ("speed while reading", f"{self.gb_per_second:.2f} GB/s"),
            ]
        waited = summary["disk_wait_seconds_per_step"]
        return [*rows, ("waited for files per step", f"{waited * 1e3:.1f} ms")]
