"""Registration with a stand-in for CUDA that keeps a list, refuses on order, and checks ranges."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from shared_offload.errors import PinningError
from shared_offload.memory import numa
from shared_offload.memory.board import LocalBoard
from shared_offload.memory.domain import Scope
from shared_offload.memory.lifecycle import open_arena
from shared_offload.memory.pinning import chunk_spans, pin
from shared_offload.memory.request import ArenaRequest, Party
from shared_offload.ranks.facts import member_facts

PAGE = 4096
MIB = 1 << 20


class Recorder:
    """Registers in a dict; refuses the `refuse_at`-th range with `code`, overlaps with 712."""

    def __init__(
        self, *, supported: bool = True, refuse_at: int = -1, code: int = 2, flags: tuple = (0, 8)
    ):
        self.read_only_supported = supported
        self.refuse_at, self.code, self.flags = refuse_at, code, flags
        self.ranges: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []

    def register(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", flags))
        if len(self.calls) - 1 == self.refuse_at or flags not in self.flags:
            return self.code
        if any(a < address + nbytes and address < a + n for a, n in self.ranges.items()):
            return 712
        self.ranges[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", 0))
        return 0 if self.ranges.pop(address, 0) else 713

    def explain(self, code: int) -> str:
        return f"error {code}"


def test_spans_cover_everything_once_and_are_cut_at_units() -> None:
    dice = random.Random(3)
    for _ in range(200):
        units = [dice.randrange(1, 40) * PAGE for _ in range(dice.randrange(1, 30))]
        starts = [sum(units[:n]) for n in range(len(units))]
        nbytes = sum(units) - dice.randrange(PAGE)  # the last page need not be full
        chunk = dice.randrange(1, 100) * PAGE
        spans = list(chunk_spans(nbytes, starts, chunk, PAGE))
        assert spans[0][0] == 0 and sum(n for _, n in spans) == sum(units)
        assert all(a + n == b for (a, n), (b, _) in pairwise(spans))
        assert {start for start, _ in spans} <= set(starts)
        for start, size in spans:  # too large only where one unit is, and never needlessly small
            assert size <= chunk or size in units
            end = start + size
            following = next((s for s in [*starts, sum(units)] if s > end), end)
            assert end == sum(units) or following - start > chunk


def test_cuts_off_page_borders_are_not_taken() -> None:
    assert list(chunk_spans(4 * PAGE, [0, 100, 2 * PAGE, 2 * PAGE + 256], PAGE, PAGE)) == [
        (0, 2 * PAGE),
        (2 * PAGE, 2 * PAGE),
    ]


def test_all_or_nothing() -> None:
    recorder = Recorder(refuse_at=2)
    spans = [(n * PAGE, PAGE) for n in range(4)]
    with pytest.raises(PinningError) as caught:
        pin(1 << 30, spans, recorder, read_only=True)
    assert recorder.ranges == {}
    assert caught.value.facts == {"offset": 2 * PAGE, "nbytes": PAGE, "code": 2}
    assert "memlock" in caught.value.hint and "error 2 (2)" in caught.value.what


def test_undo_works_once() -> None:
    recorder = Recorder()
    seen: list[int] = []
    spans = [(0, PAGE), (PAGE, 2 * PAGE)]
    pins = pin(1 << 30, spans, recorder, read_only=False, on_bytes=seen.append)
    assert recorder.ranges == {1 << 30: PAGE, (1 << 30) + PAGE: 2 * PAGE}
    assert (pins.nbytes, seen) == (3 * PAGE, [PAGE, 2 * PAGE])
    pins.undo()
    pins.undo()
    assert recorder.ranges == {} and recorder.calls.count(("unregister", 0)) == 2


def test_undo_goes_on_past_a_range_that_refuses() -> None:
    recorder = Recorder()
    pins = pin(1 << 30, [(0, PAGE), (PAGE, PAGE), (2 * PAGE, PAGE)], recorder, read_only=True)
    del recorder.ranges[(1 << 30) + PAGE]
    with pytest.raises(PinningError, match="unregister 1 ranges"):
        pins.undo()
    assert recorder.ranges == {}


def open_with(recorder: Recorder, notes: list[str] | None = None):
    class Notes:
        def progress(self, *_: object) -> None: ...

        def note(self, line: str) -> None:
            if notes is not None:
                notes.append(line)

    def fill(dest, on_bytes, cpus, stop) -> None:
        dest[:] = bytes(len(dest))
        on_bytes(len(dest))

    request = ArenaRequest(
        nbytes=8 * MIB,
        fingerprint="pinning",
        boundaries=range(0, 8 * MIB, MIB),
        scope=Scope.RANK,
        register_chunk_nbytes=2 * MIB,
    )
    party = Party(member_facts(0), numa.own_node(), 1, LocalBoard())
    return open_arena(request, party, fill, recorder, Notes())


@pytest.mark.parametrize(("supported", "flag"), [(True, 8), (False, 0)])
def test_the_device_decides_the_way(supported: bool, flag: int) -> None:
    recorder = Recorder(supported=supported)
    with open_with(recorder) as arena:
        assert arena.registered
        assert recorder.calls == [("register", flag)] * 4
        start = arena.address
        assert recorder.ranges == {start + n * MIB: 2 * MIB for n in range(0, 8, 2)}
    assert recorder.ranges == {} and not arena.registered


def test_a_device_that_does_not_keep_its_word() -> None:
    notes: list[str] = []
    with open_with(Recorder(flags=(0,), code=801), notes) as arena:
        (report,) = arena.reports()
        assert report.registered == "registered, then protected"
    assert "error 801" in notes[0]


def test_refusal_leaves_nothing_registered_or_attached() -> None:
    recorder = Recorder(supported=False, refuse_at=1)
    with pytest.raises(PinningError):
        open_with(recorder)
    assert recorder.ranges == {}  # and no segment: see no_segment_left
