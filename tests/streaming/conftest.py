"""A tiny model's blocks in an arena, and a run over them that reads every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared_offload.streaming.source import Source, resident_from_host
from shared_offload.weights.architecture import Architecture
from shared_offload.weights.layout import BlockLayout, Unit, build_layout
from shared_offload.weights.views import TORCH_DTYPES, views
from tests.reference import tiny_model
from tests.reference.queues import LateCopies, TwoThreads
from tests.reference.ring_of_files import Disk, open_disk, open_files, threads

CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Case:
    arch: Architecture
    layout: BlockLayout
    arena: Tensor


def make_case(
    model_type: str, *, dtype: torch.dtype, fp8: bool, layers: int = 5, **sizes: int
) -> Case:
    """Weights as a checkpoint has them, placed into an arena tensor by tensor."""
    arch = tiny_model.make_architecture(model_type, num_layers=layers, **sizes)
    blocks = [tiny_model.block_weights(arch, i) for i in range(layers)]
    if fp8:
        blocks = [tiny_model.quantise_block(block) for block in blocks]
    on_disk = {name: CODES[tensor.dtype] for name, tensor in blocks[0].items()}
    layout = build_layout(arch, on_disk, CODES[dtype])
    arena = torch.zeros(layout.arena_nbytes, dtype=torch.uint8)
    for unit, block in zip(layout.units("block"), blocks, strict=True):
        placed = views(unit, arena[unit.offset :])
        read = tiny_model.as_read(block, dtype)
        assert placed.keys() == read.keys()
        for name, tensor in placed.items():
            tensor.copy_(read[name])
    return Case(arch, layout, arena)


@pytest.fixture(scope="session")
def case() -> Case:
    return make_case("i2v", dtype=torch.bfloat16, fp8=True)


@pytest.fixture(scope="session")
def cases() -> Callable[..., Case]:
    return make_case


@pytest.fixture
def engine() -> Iterator[Callable[..., TwoThreads]]:
    """Makes engines on threads and stops them; `late=True` keeps compute on the calling thread."""
    made: list[TwoThreads] = []

    def make(*, late: bool = False, **options: object) -> TwoThreads:
        made.append((LateCopies if late else TwoThreads)(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def disk(case: Case, tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """Makes rings over files, of `case` unless `of` another one, and ends their threads."""
    made: list[Disk] = []

    def make(*how: object, of: Case = case, **options: object) -> Disk:
        made.append(open_disk(of, tmp_path / f"disk{len(made)}", *how, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.reader.close()
    assert not threads()
    assert not open_files(tmp_path)


def digest(state: Tensor, unit: Unit, weights: dict[str, Tensor]) -> Tensor:
    """A number that every byte of the unit, its place and the order of units change.

    By phase, so that it is the same for blocks and for phases.
    """
    for placed in sorted(weights):
        raw = weights[placed].contiguous().view(-1).view(torch.uint8).long()
        place = torch.arange(1, raw.numel() + 1)
        state = (state * 31 + (raw * place).sum() + unit.block) % (2**31 - 1)
    return state


def read_all(source: Source, engine: TwoThreads | None, steps: int) -> list[int]:
    """One number for each step, from both branches; enqueued on the engine where there is one."""
    out: list[int] = []
    run = engine.compute if engine else lambda work: work()
    states: dict[str, Tensor] = {}

    def phase(unit: Unit, name: str, weights: dict[str, Tensor]) -> None:
        own = {n: t for n, t in weights.items() if tiny_model._phase(n) == name}
        states[name] = digest(states.get(name, torch.tensor(1)), unit, own)

    def finish() -> None:
        out.append(hash(tuple((name, int(state)) for name, state in sorted(states.items()))))

    for _ in range(steps):
        run(states.clear)
        for unit in source.units:
            with source.borrow(unit) as weights:
                for name in unit.phases:
                    for _ in range(2):  # the branches
                        run(lambda u=unit, n=name, w=weights: phase(u, n, w))
        run(finish)
    if engine:
        engine.drain()
    return out


@pytest.fixture(scope="session")
def expected(case: Case) -> int:
    """What a step reads, by the resident source."""
    units = case.layout.units("block")
    return read_all(resident_from_host(units, case.arena, torch.device("cpu")), None, 1)[0]


@pytest.fixture
def reading() -> Callable[..., list[int]]:
    return read_all


@pytest.fixture
def gpu_case() -> Callable[[str, bool], Case]:
    """A case large enough that copies take a while, in pinned memory."""

    def make(model_type: str, fp8: bool) -> Case:
        sizes = {"dim": 512, "ffn_dim": 1536, "num_heads": 4}
        found = make_case(model_type, dtype=torch.bfloat16, fp8=fp8, layers=6, **sizes)
        return Case(found.arch, found.layout, found.arena.pin_memory())

    return make
