"""Units from files through the ring: real files, real threads, queues that are late."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shared_offload.errors import CheckpointError, ConfigError, OffloadError, RankError, StreamError
from shared_offload.streaming.disk import DiskReader
from shared_offload.streaming.residency import spread
from shared_offload.streaming.ring import RING_UNITS, RingUnits, plan_ring
from shared_offload.streaming.streamer import StreamedSource
from shared_offload.weights import files as files_module
from shared_offload.weights.cast import cast_bytes
from shared_offload.weights.reader import Piece
from tests.reference.ring_of_files import HEAD_NBYTES, Disk, budget, open_files, threads

CPU = torch.device("cpu")
GRANULARITIES = ("block", "phase")
# -- what is read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("places", [2, None, 100])
@pytest.mark.parametrize("resident", [0, 2, 5, "auto"])
def test_units_are_those_of_the_arena(
    granularity, places, resident, disk, engine, reading, expected
) -> None:
    """With late queues and poisoned slots; twice, and what is read is what is needed."""
    found = disk(granularity, places, resident=0 if resident == "auto" else resident)
    queues = engine(copy_seconds=0.001, seed=places or 0)
    source = StreamedSource(found.units, found.rank(), CPU, resident_blocks=resident, engine=queues)
    steps, read = 3, []
    for _ in range(2):
        source.begin_run(steps)
        assert reading(source, queues, steps) == [expected] * steps
        source.end_run()
        read.append(source.metrics.disk.read_nbytes)
    source.close()
    kept = 0 if resident == "auto" else sum(u.nbytes for u in spread(found.units, resident))
    once, often = found.pass_nbytes, found.pass_nbytes - kept
    assert read == ([once, 0] if places == 100 else [once + (steps - 1) * often] * 2)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_larger_ring_keeps_what_it_can(granularity, disk, engine, reading, expected) -> None:
    found = disk(granularity, RING_UNITS + (1 if granularity == "block" else 5))
    if granularity == "block":
        assert found.plan.places == len(found.units)  # RING_UNITS and one are all there are
    queues = engine()
    source = StreamedSource(found.units, found.rank(), CPU, engine=queues)
    source.begin_run(3)
    assert reading(source, queues, 3) == [expected] * 3
    source.end_run()
    homes = sum(found.units[index].nbytes for index in found.plan.homes)
    assert len(found.plan.homes) == 5
    assert source.metrics.disk.read_nbytes == 3 * found.pass_nbytes - 2 * homes
    source.close()


def test_nothing_is_read_for_steps_that_will_not_come(disk) -> None:
    found = disk("block", 3)
    rank = found.rank()
    assert found.settled() == 0  # nor before a run
    rank.begin_run(1)
    for use in range(len(found.units)):
        rank.take(use, wait=True, last=False)
        rank.taken(use, lambda: True)
    assert found.settled() == found.pass_nbytes
    rank.end_run()
    rank.begin_run(None)  # nobody knows: so the ring is filled
    rank.take(4, wait=True, last=False)
    rank.taken(4, lambda: True)
    assert found.settled() == 2 * found.pass_nbytes + 3 * found.units[0].nbytes


def test_reading_goes_on_across_the_end_of_a_step(disk) -> None:
    found = disk("block", 3)
    rank = found.rank()
    rank.begin_run(2)
    for use in range(len(found.units)):
        rank.take(use, wait=True, last=False)
        rank.taken(use, lambda: True)
    assert found.settled() == found.pass_nbytes + 3 * found.units[0].nbytes
    assert rank.take(5, wait=False, last=False) is not None


def test_a_run_that_broke_off_leaves_nothing_behind(disk, engine, reading, expected) -> None:
    """In the middle of a pass, with copies under way and places full of what nobody will take."""
    found = disk("phase", 3)
    queues = engine(copy_seconds=0.002)
    source = StreamedSource(found.units, found.rank(), CPU, engine=queues)
    for stop in (1, 4, 7):
        source.begin_run(4)
        for unit in found.units[:stop]:
            with source.borrow(unit):
                pass
    source.begin_run(2)
    assert reading(source, queues, 2) == [expected] * 2
    source.close()


def test_only_as_many_passes_as_were_announced(disk) -> None:
    found = disk()
    source = StreamedSource(found.units, found.rank(), CPU)
    source.begin_run(1)
    for unit in found.units:
        with source.borrow(unit):
            pass
    with (
        pytest.raises(StreamError, match="after the last of 1 passes"),
        source.borrow(found.units[0]),
    ):
        pass
    source.close()
    source.close()


# -- order -----------------------------------------------------------------------------------------


class TooEarly(RingUnits):
    """The mistake that the ring must not make: a place is given back before its copy has ended."""

    def taken(self, use: int, copied: Callable[[], bool]) -> None:  # noqa: ARG002
        super().taken(use, lambda: True)


@pytest.mark.parametrize(("kind", "right"), [(RingUnits, True), (TooEarly, False)])
def test_a_place_given_back_too_early_is_caught(
    kind, right, disk, engine, reading, expected
) -> None:
    """Files are fast and copies slow, so the comparison of this file does depend on the order."""
    found = disk("block", 2)
    queues = engine(copy_seconds=0.01)
    source = StreamedSource(found.units, found.rank(kind=kind), CPU, slots=3, engine=queues)
    source.begin_run(2)
    assert (reading(source, queues, 2) == [expected] * 2) == right
    source.close()


def test_a_place_stays_while_any_rank_copies_from_it(disk) -> None:
    """Two ranks, one stalled in its copy of the first unit: the ring fills up, and stops."""
    found = disk("block", 3, ranks=2)
    fast, slow = found.rank(0, 2), found.rank(1, 2)
    fast.begin_run(2)
    assert found.settled() == 0  # the other one has not begun, so it may still use any place
    slow.begin_run(2)
    stalled = slow.take(0, wait=True, last=False)
    before, done = stalled.clone(), []
    slow.taken(0, lambda: bool(done))
    for use in range(3):
        assert fast.take(use, wait=True, last=False) is not None
        fast.taken(use, lambda: True)
    assert found.settled() == 3 * found.units[0].nbytes
    assert fast.take(3, wait=False, last=False) is None
    assert torch.equal(stalled, before)
    done.append(True)
    slow.take(1, wait=True, last=False)  # looks at its copies
    assert fast.take(3, wait=True, last=False) is not None
    assert found.settled() == 4 * found.units[0].nbytes


def test_ranks_of_unequal_speed_get_every_unit(disk, case) -> None:
    """Three ranks on threads, one of which keeps units on its device; each looks at every byte."""
    found = disk("phase", 5, ranks=3)
    steps, wrong, count = 4, [], len(found.units)
    kept = {index for index in range(count) if index % 3 == 0}

    def use_all(rank: int) -> None:
        units = found.rank(rank, 3)
        units.begin_run(steps)
        for use in range(steps * count):
            unit = found.units[use % count]
            if rank == 1 and use >= count and unit.index in kept:
                units.pass_over(use, last=True)
                continue
            last = rank == 1 and unit.index in kept
            place = units.take(use, wait=True, last=last)
            time.sleep((0.0, 0.002, 0.0005)[rank])
            wanted = case.arena[unit.offset : unit.offset + unit.nbytes]
            if not torch.equal(place, wanted):
                wrong.append((rank, use))
            units.taken(use, lambda: True)

    workers = [threading.Thread(target=use_all, args=(rank,)) for rank in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not wrong
    assert found.settled() == steps * found.pass_nbytes - (steps - 1) * sum(
        found.units[index].nbytes for index in found.plan.homes
    )


def test_no_unit_is_read_before_it_is_known_whether_it_stays(disk) -> None:
    """The reader would be far ahead, over units that stay, at one that the rank has yet to use."""
    found = disk("block", 4)
    rank = found.rank()
    rank.begin_run(4)
    for use in range(5):
        assert found.settled() == min(5, use + 4) * found.units[0].nbytes
        rank.take(use, wait=True, last=True)
        rank.taken(use, lambda: True)
    for use in range(5, 20):
        rank.pass_over(use, last=True)
    assert found.settled() == found.pass_nbytes


def test_what_no_rank_needs_is_not_read(disk) -> None:
    found = disk("block", 2, ranks=2)
    ranks = [found.rank(n, 2) for n in range(2)]
    for rank in ranks:
        rank.begin_run(3)
    for use in range(15):
        for rank in ranks:
            if use % 5 in (1, 3) and use >= 5:
                rank.pass_over(use, last=True)
            else:
                rank.take(use, wait=True, last=use % 5 in (1, 3))
                rank.taken(use, lambda: True)
    assert found.settled() == 9 * found.units[0].nbytes + 2 * found.units[0].nbytes


# -- waiting ---------------------------------------------------------------------------------------


def test_the_host_waits_for_files_and_says_how_long(disk, monkeypatch) -> None:
    found = disk("block", 2, workers=1)
    slow(monkeypatch, 0.01)
    source = StreamedSource(found.units, found.rank(), CPU)
    source.begin_run(2)
    begun = time.perf_counter()
    for _ in range(2):
        for unit in found.units:
            with source.borrow(unit):
                pass
    seconds = time.perf_counter() - begun
    source.end_run()
    summary = source.metrics.summary()
    assert 0.5 * seconds < summary["disk_wait_seconds"] <= seconds
    assert len(source.metrics.disk.waits) == 2
    assert summary["disk_read_bytes"] == 2 * found.pass_nbytes
    assert summary["disk_read_bytes_per_step"] == found.pass_nbytes
    speed = summary["disk_read_bytes"] / summary["disk_read_seconds"] / 1e9
    assert summary["disk_gb_per_second"] == pytest.approx(speed)
    assert 0.8 * seconds < summary["disk_read_seconds"] < 1.1 * seconds + 0.05
    rows = dict(source.metrics.rows())
    assert "2 of 5 units" in rows["ring in host memory"]
    assert {"read from files per step", "waited for files per step"} < rows.keys()
    source.close()


def test_a_slow_device_is_no_wait_for_files(disk, engine) -> None:
    """The host cannot run further ahead than the ring is long, but that is not the disk's doing."""
    found = disk("block", 2)
    queues = engine(copy_seconds=0.02, jitter=0.0)
    source = StreamedSource(found.units, found.rank(), CPU, engine=queues)
    source.begin_run(3)
    begun = time.perf_counter()
    for _ in range(3):
        for unit in found.units:
            with source.borrow(unit):
                pass
    seconds = time.perf_counter() - begun
    source.end_run()
    assert seconds > 0.3
    assert sum(source.metrics.disk.waits) < 0.25 * seconds
    source.close()


def slow(monkeypatch, seconds: float) -> None:
    plain = os.preadv

    def late(*args):
        time.sleep(seconds)
        return plain(*args)

    monkeypatch.setattr(files_module.os, "preadv", late)


def test_a_full_ring_waits_quietly(disk) -> None:
    """A consumer that stalls: nothing is read beyond the ring, and no processor is burnt."""
    found = disk("block", 3)
    rank = found.rank()
    rank.begin_run(None)
    assert found.settled() == 3 * found.units[0].nbytes
    cpu, begun = time.process_time(), time.perf_counter()
    time.sleep(1)
    assert (time.process_time() - cpu) / (time.perf_counter() - begun) < 0.15
    assert found.settled() == 3 * found.units[0].nbytes
    rank.close()
    assert not threads()


# -- failures --------------------------------------------------------------------------------------


def cut(found: Disk, _patch) -> None:
    os.truncate(found.files[3], HEAD_NBYTES + 100)


def touch(found: Disk, _patch) -> None:
    os.utime(found.files[3], ns=(1, 1))


def unreadable(found: Disk, patch) -> None:
    plain = os.preadv

    def failing(descriptor: int, *rest):
        if Path(f"/proc/self/fd/{descriptor}").readlink() == found.files[3]:
            raise OSError(errno.EIO, "Input/output error")
        return plain(descriptor, *rest)

    patch.setattr(files_module.os, "preadv", failing)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (cut, "ends at byte"),
        (touch, "changed while it was in use"),
        (unreadable, "Input/output error"),
    ],
)
def test_a_file_that_fails_in_the_middle_of_a_run(harm, says, disk, monkeypatch) -> None:
    found = disk("block", 2)
    source = StreamedSource(found.units, found.rank(), CPU)
    source.begin_run(None)
    for unit in found.units:
        with source.borrow(unit):
            pass
    harm(found, monkeypatch)
    with pytest.raises(CheckpointError, match=says) as caught:
        for unit in found.units * 2:
            with source.borrow(unit):
                pass
    assert caught.value.facts["path"] == str(found.files[3])
    if harm is not touch:
        assert caught.value.facts["offset"] >= HEAD_NBYTES
    assert found.errors == [caught.value]  # told once, for the others
    assert source.broken
    source.close()
    assert not threads()


@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), MemoryError(), SystemExit(3)])
def test_a_thread_that_dies_is_an_error_and_not_a_silence(error, disk) -> None:
    def convert(*_) -> None:
        raise error

    found = disk("block", 2, convert=convert, change=("BF16", "BF16"))
    rank = found.rank()
    rank.begin_run(1)
    with pytest.raises(type(error)) as caught:
        rank.take(0, wait=True, last=False)
    assert caught.value is error
    assert found.errors == [error]
    rank.close()


def test_a_rank_that_waits_looks_after_the_others(disk) -> None:
    """It follows a reader in another process, which is gone or has failed."""
    looks = []

    def check() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise RankError("rank 0 is gone", rank=0)

    found = disk("block", 2, ranks=2)
    follower = found.rank(1, 2, check)
    follower.begin_run(1)
    with pytest.raises(RankError, match="rank 0"):
        follower.take(0, wait=True, last=False)
    assert looks[-1] - looks[0] < 2
    assert follower.broken


def test_a_reader_that_closes_leaves_nobody_waiting(disk) -> None:
    found = disk("block", 2, ranks=2)
    follower, leader = found.rank(1, 2), found.rank(0, 2)
    follower.begin_run(1)
    closing = threading.Timer(0.2, leader.close)
    closing.start()
    with pytest.raises(StreamError, match="closed while unit 0"):
        follower.take(0, wait=True, last=False)
    closing.join()
    with pytest.raises(StreamError, match="after it was closed"):
        leader.take(0, wait=False, last=False)


def test_a_file_that_is_missing_when_the_ring_opens(disk, case) -> None:
    found = disk()
    folder = found.files[0].parent
    before = open_files(folder), threads()
    found.files[1].unlink()
    unit = case.layout.units("block")[0]
    pieces = [[Piece(p, 0, 8, 0, 8, None)] for p in found.files]
    with pytest.raises(CheckpointError, match="unit1"):
        DiskReader(
            plan_ring([unit] * 5, None, []),
            pieces,
            memoryview(bytearray(8)),
            found.state,
            threads=1,
            convert=cast_bytes,
            on_error=lambda _: None,
        )
    assert (open_files(folder), threads()) == before


# -- the plan --------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_places_follow_the_budget(granularity, case) -> None:
    units = case.layout.units(granularity)
    count = len(units)
    for places in range(2, count + 3):
        plan = plan_ring(units, budget(units, places) + 17, units)
        assert plan.nbytes <= budget(units, places)
        assert plan.places == min(places, count)
        kept = count if places >= count else max(0, places - RING_UNITS)
        assert len(plan.homes) == kept
        assert sorted(plan.homes.values()) == list(range(kept))
        assert len(plan.free_places) == plan.places - kept
    assert plan_ring(units, None, units).places == min(RING_UNITS, count)


def test_what_stays_on_the_device_is_not_kept_in_the_ring(case) -> None:
    units = case.layout.units("phase")
    often = [unit for unit in units if unit.block != 2]
    plan = plan_ring(units, budget(units, RING_UNITS + 6), often)
    assert len(plan.homes) == 6
    assert plan.homes.keys() <= {unit.index for unit in often}
    gaps = sorted(often.index(units[index]) for index in plan.homes)
    assert {b - a for a, b in itertools.pairwise(gaps)} == {2}


def test_a_budget_for_one_unit_is_refused(case) -> None:
    units = case.layout.units("block")
    with pytest.raises(ConfigError) as caught:
        plan_ring(units, budget(units, 2) - 1, units)
    assert caught.value.facts["key"] == "lazy_load_ring_gib"
    assert issubclass(ConfigError, OffloadError)
