"""The streamer against the resident source, with queues that are late, jitter and poison."""

from __future__ import annotations

import gc
import math
import time

import pytest
import torch

from shared_offload.errors import StreamError
from shared_offload.streaming.engine import HostEngine
from shared_offload.streaming.residency import HEAD_ROOM_NBYTES, fitting_blocks, spread
from shared_offload.streaming.slots import resident_nbytes
from shared_offload.streaming.source import resident_from_host
from shared_offload.streaming.streamer import StreamedSource

CPU = torch.device("cpu")
GRANULARITIES = ("block", "phase")


class CountingEngine(HostEngine):
    """Notes every copy by where it came from, in order."""

    def __init__(self, free: int = 0) -> None:
        self.copied: list[int] = []
        self._free = free

    def copy(self, dst, src) -> None:
        self.copied.append(src.storage_offset())
        super().copy(dst, src)

    def free_nbytes(self) -> int:
        return self._free


def pass_over(source) -> None:
    for unit in source.units:
        with source.borrow(unit):
            pass


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("copy_seconds", [0.0, 0.004])
def test_late_queues_change_nothing(
    granularity, slots, copy_seconds, case, engine, reading, expected
) -> None:
    queues = engine(copy_seconds=copy_seconds, seed=slots)
    units = case.layout.units(granularity)
    source = StreamedSource(units, case.arena, CPU, slots=slots, engine=queues)
    assert reading(source, queues, 3) == [expected] * 3


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("resident", [1, 2, 3, 4, 5, "auto"])
def test_resident_blocks_change_nothing(
    granularity, resident, case, engine, reading, expected
) -> None:
    units = case.layout.units(granularity)
    free = HEAD_ROOM_NBYTES + 3 * resident_nbytes(units) // 5 + 4096
    queues = engine(copy_seconds=0.001, free=free)
    notes = []
    source = StreamedSource(
        units, case.arena, CPU, resident_blocks=resident, engine=queues, note=notes.append
    )
    for _ in range(2):  # a second run, too
        assert reading(source, queues, 4) == [expected] * 4
        source.end_run()
    if resident == "auto":
        assert len(notes) == 2 and "3 of 5 stay" in notes[0]


@pytest.mark.parametrize("ignored", ["copy", "compute"])
def test_a_missing_wait_is_caught(ignored, case, engine, reading, expected) -> None:
    """Each of the two orderings matters here: without it these comparisons fail."""
    queues = engine(copy_seconds=0.004 if ignored == "compute" else 0.0, ignores={ignored})
    source = StreamedSource(case.layout.units("block"), case.arena, CPU, engine=queues)
    assert reading(source, queues, 3) != [expected] * 3


def test_the_host_never_waits_inside_a_step(case, engine, reading, expected) -> None:
    """With both queues stopped the host still gets through six steps, and all of them are right."""
    queues = engine()
    source = StreamedSource(case.layout.units("phase"), case.arena, CPU, engine=queues)
    source.begin_run()
    queues.gate.clear()
    original = queues.drain
    queues.drain = lambda: queues.gate.set()  # reading() drains at its end: only then let them run
    results = reading(source, queues, 6)
    queues.drain = original
    queues.drain()
    assert results == [expected] * 6
    source.end_run()
    assert abs(source.metrics.started - time.time()) < 60
    # Marks of four passes are kept; what came round again before it was reached is not guessed.
    assert source.metrics.unread_steps > 0
    assert source.metrics.unread_steps + len(source.metrics.steps) == 6


@pytest.mark.parametrize("end", ["begin_run", "end_run", "close"])
def test_memory_is_not_given_back_under_a_copy(end, case, engine) -> None:
    """Freed device memory may be anyone's, so whatever frees it waits for copies into it."""
    queues = engine(copy_seconds=0.02)
    source = StreamedSource(
        case.layout.units("block"), case.arena, CPU, resident_blocks=4, engine=queues
    )
    source.begin_run()
    with source.borrow(source.units[0]):
        pass
    under_way = queues.mark()
    queues.record(under_way, "copy")
    assert not queues.reached(under_way)
    getattr(source, end)()
    assert queues.reached(under_way)


def test_prefetch_is_right_from_the_first_unit_and_crosses_steps(case) -> None:
    counting = CountingEngine()
    units = case.layout.units("block")
    source = StreamedSource(units, case.arena, CPU, engine=counting)
    source.begin_run()
    assert len(counting.copied) == 2  # before anything was asked for
    for step in range(3):
        for unit in units:
            assert len(counting.copied) == step * len(units) + unit.index + 2
            with source.borrow(unit):
                assert len(counting.copied) == step * len(units) + unit.index + 2
    offsets = [unit.offset for unit in units]
    assert counting.copied == (offsets * 4)[: 3 * len(units) + 2]  # each once a step, none twice


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("resident", range(6))
def test_resident_units_are_copied_once(granularity, resident, case) -> None:
    counting = CountingEngine()
    units = case.layout.units(granularity)
    source = StreamedSource(units, case.arena, CPU, resident_blocks=resident, engine=counting)
    for _ in range(6):  # more than the passes whose marks are kept
        pass_over(source)
    source.end_run()
    kept = {unit.offset for unit in spread(units, resident)}
    assert len(kept) == resident * len(units) // 5
    assert all(counting.copied.count(offset) == 1 for offset in kept)
    streamed = len(units) - len(kept)
    steps = source.metrics.steps
    assert [s.step for s in steps] == [0, 1, 2, 3, 4, 5]
    assert steps[0].copied_nbytes == sum(unit.nbytes for unit in units)
    if streamed > 2:
        assert steps[5].copied_nbytes == sum(u.nbytes for u in units if u.offset not in kept)
    else:  # they fit into the slots, and stay there
        assert steps[5].copied_nbytes == 0


def test_auto_moves_blocks_in_after_the_first_step(case) -> None:
    units = case.layout.units("block")
    counting = CountingEngine(HEAD_ROOM_NBYTES + 2 * resident_nbytes(units[:1]))
    notes = []
    source = StreamedSource(
        units, case.arena, CPU, resident_blocks="auto", engine=counting, note=notes.append
    )
    slots = source.device_nbytes
    pass_over(source)
    assert not notes and source.device_nbytes == slots
    for _ in range(3):
        pass_over(source)
    assert source.device_nbytes == slots + 2 * resident_nbytes(units[:1])
    assert len(notes) == 1 and "2 of 5 stay" in notes[0]
    source.end_run()
    assert source.device_nbytes == slots
    assert source.metrics.steps[-1].copied_nbytes == 3 * units[0].nbytes


def test_auto_takes_no_more_than_there_is(case) -> None:
    units = case.layout.units("block")
    block = resident_nbytes(units[:1])
    assert fitting_blocks(units, HEAD_ROOM_NBYTES + 2 * block - 1) == 1
    assert fitting_blocks(units, HEAD_ROOM_NBYTES - 1) == 0
    assert fitting_blocks(units, 1 << 50) == 5
    with pytest.raises(StreamError, match="resident_blocks is 6"):
        spread(units, 6)


def test_resident_blocks_are_spread_evenly(cases) -> None:
    layout = cases("t2v", dtype=torch.bfloat16, fp8=False, layers=40).layout
    for count in range(1, 41):
        kept = [unit.block for unit in spread(layout.units("block"), count)]
        assert len(kept) == count
        gaps = [b - a for a, b in zip(kept, [*kept[1:], kept[0] + 40], strict=True)]
        assert set(gaps) <= {math.floor(40 / count), math.ceil(40 / count)}


def storages(source) -> dict[int, int]:
    """Bytes by address of everything that one pass hands out."""
    found = {}
    for unit in source.units:
        with source.borrow(unit) as weights:
            for tensor in weights.values():
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def test_device_memory_is_ordered_and_is_what_it_says(case) -> None:
    block, phase = (case.layout.units(g) for g in GRANULARITIES)
    sources = [
        StreamedSource(phase, case.arena, CPU),
        StreamedSource(block, case.arena, CPU),
        StreamedSource(block, case.arena, CPU, resident_blocks=2),
        resident_from_host(block, case.arena, CPU),
    ]
    for source in sources:
        assert sum(storages(source).values()) == source.device_nbytes
    held = [source.device_nbytes for source in sources]
    assert held == sorted(set(held))
    assert held[1] <= 2 * (block[0].nbytes + 256)
    whole = StreamedSource(block, case.arena, CPU, resident_blocks=5)
    assert whole.device_nbytes == 0  # granularity "model": in at the start, out at the end
    whole.begin_run()
    assert whole.device_nbytes == held[3]
    whole.end_run()
    assert whole.device_nbytes == 0


def test_addresses_are_fixed_and_nothing_is_made_after_the_first_step(case) -> None:
    source = StreamedSource(case.layout.units("phase"), case.arena, CPU)

    def handed_out() -> set[tuple[str, int, int]]:
        found = set()
        for unit in source.units:
            with source.borrow(unit) as weights:
                found |= {(name, id(t), t.data_ptr()) for name, t in weights.items()}
        return found

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    first = handed_out()
    names = {placed.name for placed in case.layout.tensors}
    assert len(first) == 2 * len(names)  # in each of two slots, whatever the number of blocks
    before = tensors()
    for _ in range(5):
        assert handed_out() == first
    assert tensors() == before


def test_metrics_count_what_was_copied_and_waited_for(case, engine) -> None:
    queues = engine(copy_seconds=0.01, jitter=0.0)
    units = case.layout.units("block")
    source = StreamedSource(units, case.arena, CPU, engine=queues)
    for _ in range(3):
        pass_over(source)
    source.end_run()
    summary = source.metrics.summary()
    assert summary["steps"] == 3 and summary["unread_steps"] == 0
    assert summary["copied_bytes"] == 3 * sum(unit.nbytes for unit in units)
    # Compute does nothing, so it waits for all of every copy: two sleeps of 10 ms each.
    assert summary["copy_seconds"] >= 15 * 0.02
    assert summary["wait_seconds"] >= 0.9 * summary["copy_seconds"]
    assert summary["prefetch_depth"] == 0.0
    assert summary["hidden_copy_share"] < 0.1
