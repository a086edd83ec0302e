"""Metrics and the trace, against a schedule worked out by hand."""

from __future__ import annotations

import json

import pytest

from shared_offload.report.metrics import StreamMetrics, UnitTimes
from shared_offload.report.timeline import LANES, trace_events, write_trace

GB = 10**9


def late_copies() -> list[UnitTimes]:
    """Copies of 2 s and computes of 1 s back to back through two slots; unit 1 is resident.

    copy    |0000|2222|3333|
    compute ....|0|1|.|2|..|3|
    """
    return [
        UnitTimes(0, "0", 10 * GB, (0.0, 2.0), 0.0, 2.0, 3.0),
        UnitTimes(1, "1", 10 * GB, None, 3.0, 3.0, 3.5),
        UnitTimes(2, "2", 10 * GB, (2.0, 4.0), 3.5, 4.0, 5.0),
        UnitTimes(3, "3", 10 * GB, (4.0, 6.0), 5.0, 6.0, 7.0),
    ]


def test_a_step_that_waits() -> None:
    metrics = StreamMetrics()
    metrics.add_step(0, late_copies())
    (step,) = metrics.steps
    assert step.copied_nbytes == 30 * GB
    assert step.copy_seconds == 6.0
    assert step.gb_per_second == 5.0
    assert step.wait_seconds == 2.0 + 0.5 + 1.0
    assert step.hidden_share == pytest.approx(1 - 3.5 / 6)
    assert step.prefetch_depth == 0.0  # never was a copy ready in time
    assert step.seconds == 7.0


def test_depth_counts_copies_ready_ahead() -> None:
    times = [  # all copied at once, early; then each is wanted 10 s apart
        UnitTimes(i, str(i), 1, (i * 0.1, i * 0.1 + 0.1), 10.0 * i + 5, 10.0 * i + 5, 10.0 * i + 14)
        for i in range(3)
    ]
    metrics = StreamMetrics()
    metrics.add_step(0, times)
    assert metrics.steps[0].prefetch_depth == (3 + 2 + 1) / 3
    assert metrics.steps[0].hidden_share == 1.0


def test_summary_is_json_and_rows_follow_it() -> None:
    metrics = StreamMetrics(unread_steps=1)
    assert metrics.summary() == {} and metrics.rows() == []
    for step in range(2):
        metrics.add_step(step, late_copies())
    summary = json.loads(json.dumps(metrics.summary()))
    assert summary["steps"] == 2 and summary["unread_steps"] == 1
    assert summary["copied_bytes"] == 60 * GB
    assert summary["copied_bytes_per_step"] == 30 * GB
    assert summary["copy_gb_per_second"] == 5.0
    assert ("speed while copying", "5.0 GB/s") in metrics.rows()


def test_all_resident_divides_by_nothing() -> None:
    metrics = StreamMetrics()
    metrics.add_step(0, [UnitTimes(0, "0", 5, None, 0.0, 0.0, 1.0)])
    assert metrics.summary()["copy_gb_per_second"] == 0.0
    assert metrics.summary()["hidden_copy_share"] == 1.0


def test_trace_has_the_lanes_and_their_total_times(tmp_path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, trace_events([late_copies()], rank=3, start=100.0))
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    total = {lane: sum(e["dur"] for e in spans if e["tid"] == i) for i, lane in enumerate(LANES)}
    assert total == pytest.approx({"copy": 6e6, "wait": 3.5e6, "compute": 3.5e6})
    assert {e["pid"] for e in events} == {3}
    assert min(e["ts"] for e in spans) == 100e6
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == dict(enumerate(LANES))
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
