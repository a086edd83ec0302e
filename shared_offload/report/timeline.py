"""A run as a Chrome trace: one process a rank, with lanes for copies, compute and waiting.

The file opens in https://ui.perfetto.dev and chrome://tracing. Invariant: intervals are drawn as
they were measured; lanes of one rank share one clock, ranks are aligned by their hosts' clocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from shared_offload.report.metrics import UnitTimes

LANES: Final = ("compute", "wait", "copy")  # their place is the thread id in the trace

Event = dict[str, object]  # JSON; see the Trace Event Format, phases "X" and "M"


def trace_events(
    steps: Iterable[Iterable[UnitTimes]], *, rank: int = 0, start: float = 0.0
) -> list[Event]:
    """The events of one rank; `start` is when its run began, `StreamMetrics.started`.

    They are plain JSON values, so that ranks can send them to the one that writes the file.
    """
    events: list[Event] = [_name("process_name", rank, 0, f"rank {rank}")]
    events += [_name("thread_name", rank, lane, name) for lane, name in enumerate(LANES)]
    for step, times in enumerate(steps):
        for use in times:
            for lane, begin, end in _intervals(use):
                events.append(
                    {
                        "name": use.label,
                        "cat": lane,
                        "ph": "X",
                        "pid": rank,
                        "tid": LANES.index(lane),
                        "ts": (start + begin) * 1e6,
                        "dur": max(0.0, end - begin) * 1e6,
                        "args": {"step": step, "unit": use.unit, "bytes": use.nbytes},
                    }
                )
    return events


def write_trace(path: Path, events: Iterable[Event]) -> None:
    """Write the trace whole or not at all."""
    part = path.with_name(path.name + ".part")
    document = {"traceEvents": list(events), "displayTimeUnit": "ms"}
    part.write_text(json.dumps(document), encoding="utf-8")
    part.replace(path)


def _intervals(use: UnitTimes) -> Iterator[tuple[str, float, float]]:
    if use.copied:
        yield "copy", *use.copied
    yield "wait", use.wanted, use.granted
    yield "compute", use.granted, use.released


def _name(kind: str, rank: int, lane: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}
