"""Order of borrows, and the resident source against the arena's bytes."""

from __future__ import annotations

import pytest
import torch

from shared_offload.errors import StreamError
from shared_offload.memory.arena import create
from shared_offload.streaming.source import ResidentSource, load_resident, resident_from_host
from shared_offload.streaming.streamer import StreamedSource

CPU = torch.device("cpu")


def make(kind: str, case, granularity: str = "block"):
    units = case.layout.units(granularity)
    if kind == "resident":
        return resident_from_host(units, case.arena, CPU)
    return StreamedSource(units, case.arena, CPU)


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_borrow_out_of_order_and_nested_is_refused(kind: str, case) -> None:
    source = make(kind, case)
    first, second, *_ = source.units
    with pytest.raises(StreamError, match="out of order") as caught, source.borrow(second):
        pass
    assert caught.value.facts == {"unit": 1}
    with (
        source.borrow(first),
        pytest.raises(StreamError, match="while another"),
        source.borrow(second),
    ):
        pass
    with source.borrow(second):  # the refusals changed nothing
        pass
    with pytest.raises(StreamError, match="out of order"), source.borrow(second):
        pass


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_another_layouts_unit_is_refused(kind: str, case) -> None:
    source = make(kind, case, "block")
    with (
        pytest.raises(StreamError, match="out of order"),
        source.borrow(case.layout.units("phase")[0]),
    ):
        pass


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_a_failed_run_does_not_spoil_the_next(kind: str, case, reading) -> None:
    source = make(kind, case)
    expected = reading(source, None, 2)
    for failing in range(len(source.units)):
        source.begin_run()
        with pytest.raises(ZeroDivisionError):
            for unit in source.units:
                with source.borrow(unit):
                    1 // (failing - unit.index)
        source.begin_run()
        assert reading(source, None, 2) == expected


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_closed_twice_and_used_after(kind: str, case) -> None:
    source = make(kind, case)
    with source.borrow(source.units[0]):
        pass
    source.close()
    source.close()
    source.end_run()
    assert source.device_nbytes == 0
    with pytest.raises(StreamError, match="closed"), source.borrow(source.units[0]):
        pass
    with pytest.raises(StreamError, match="closed"):
        source.begin_run()


def test_units_must_be_numbered() -> None:
    with pytest.raises(StreamError, match="not numbered"):
        ResidentSource([], torch.empty(0, dtype=torch.uint8))


def test_load_resident_reads_each_unit_through_one_buffer(case, reading) -> None:
    units = case.layout.units("block")
    buffers = set()

    def read_unit(unit, staging) -> None:
        buffers.add((staging.data_ptr(), staging.numel()))
        staging.copy_(case.arena[unit.offset : unit.offset + unit.nbytes])

    source = load_resident(units, CPU, read_unit)
    assert buffers == {(next(iter(buffers))[0], case.layout.block_nbytes)}
    assert reading(source, None, 1) == reading(make("resident", case), None, 1)
    with pytest.raises(StreamError, match="staging"):
        load_resident(units, CPU, read_unit, staging=torch.empty(5, dtype=torch.uint8))


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_a_closed_source_lets_go_of_the_arena(kind: str, case) -> None:
    _, mapping = create(case.layout.arena_nbytes, "test")
    host = torch.frombuffer(mapping.view(), dtype=torch.uint8)
    host.copy_(case.arena)
    units = case.layout.units("block")
    source = (
        resident_from_host(units, host, CPU)
        if kind == "resident"
        else StreamedSource(units, host, CPU, resident_blocks=2)
    )
    with source.borrow(units[0]):
        pass
    mapping.release()
    del host
    assert mapping.attached == (kind == "streamed")
    source.close()
    assert not mapping.attached


def test_buffer_of_the_wrong_size(case) -> None:
    units = case.layout.units("block")
    with pytest.raises(StreamError, match="buffer for 5 units"):
        ResidentSource(units, torch.empty(100, dtype=torch.uint8))
    with pytest.raises(StreamError, match="arena"):
        StreamedSource(units, case.arena[: -case.layout.stride], CPU)
    with pytest.raises(StreamError, match="0 slots"):
        StreamedSource(units, case.arena, CPU, slots=0)
