from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shared_offload.errors import CheckpointError, NumaError
from shared_offload.weights import files as files_module
from shared_offload.weights.cast import buffer_view, cast_bytes, read_tensors, read_unit
from shared_offload.weights.checkpoint import open_checkpoint
from shared_offload.weights.reader import Piece, block_pieces, fill, unit_pieces
from shared_offload.weights.views import TORCH_DTYPES, views


def expected_block(folder: Path, block: int) -> dict[str, torch.Tensor]:
    """A block's tensors as safetensors itself reads them, modulation in halves."""
    loaded = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    prefix = f"blocks.{block}."
    tensors = {k.removeprefix(prefix): v for k, v in loaded.items() if k.startswith(prefix)}
    modulation = tensors.pop("modulation")
    halves = {"self_attn.modulation": modulation[:, :3], "ffn.modulation": modulation[:, 3:]}
    return tensors | halves


def filled(checkpoint, layout, threads: int = 2) -> torch.Tensor:
    arena = torch.full((layout.arena_nbytes,), 0xFF, dtype=torch.uint8)
    seen: list[int] = []
    pieces = block_pieces(checkpoint, layout)
    fill(pieces, buffer_view(arena), threads=threads, on_bytes=seen.append, convert=cast_bytes)
    assert sum(seen) == sum(piece.nbytes for piece in pieces)
    return arena


def assert_equals_safetensors(folder: Path, layout, arena: torch.Tensor) -> None:
    for unit in layout.units("block"):
        found = views(unit, arena[unit.offset : unit.offset + unit.nbytes])
        wanted = expected_block(folder, unit.block)
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            reference = wanted[name].to(tensor.dtype)
            assert torch.equal(tensor.view(torch.uint8), reference.contiguous().view(torch.uint8))


@pytest.mark.parametrize("disk", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", ["BF16", "F16", "F32"])
def test_official(
    tmp_path, small_arch, random_tensors, write_checkpoint, disk: torch.dtype, compute: str
) -> None:
    arch = small_arch("i2v")
    folder = write_checkpoint(tmp_path / "wan", random_tensors(arch, disk), "shards")
    checkpoint = open_checkpoint(folder, arch, quantised=False, task="i2v")
    layout = checkpoint.layout(compute)
    assert {t.dtype for t in layout.tensors} == {compute, "F32"}
    assert_equals_safetensors(folder, layout, filled(checkpoint, layout))


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rest", [torch.float32, torch.bfloat16])
def test_fp8(tmp_path, small_arch, random_tensors, to_fp8, write_checkpoint, scales, rest) -> None:
    arch = small_arch()
    tensors = to_fp8(random_tensors(arch), scales, rest)
    folder = write_checkpoint(tmp_path / "wan", tensors, "blocks")
    checkpoint = open_checkpoint(folder, arch, quantised=True, task="t2v")
    layout = checkpoint.layout("BF16")
    assert_equals_safetensors(folder, layout, filled(checkpoint, layout, threads=3))


def test_pieces_are_cut_at_any_size(
    tmp_path, small_arch, random_tensors, write_checkpoint, monkeypatch
) -> None:
    """Requests far smaller than the tensors: conversions and halves still meet their places."""
    arch = small_arch()
    folder = write_checkpoint(tmp_path / "wan", random_tensors(arch), "single")
    checkpoint = open_checkpoint(folder, arch, quantised=False, task="t2v")
    layout = checkpoint.layout("BF16")
    whole = filled(checkpoint, layout)
    monkeypatch.setattr("shared_offload.weights.reader.REQUEST_NBYTES", 1000)
    monkeypatch.setattr("shared_offload.weights.reader.BOUNCE_NBYTES", 100)
    assert torch.equal(filled(checkpoint, layout, threads=4), whole)


def test_units_read_alone_equal_the_arena(
    tmp_path, small_arch, random_tensors, to_fp8, write_checkpoint
) -> None:
    arch = small_arch("i2v")
    tensors = to_fp8(random_tensors(arch), torch.bfloat16, torch.float32)
    folder = write_checkpoint(tmp_path / "wan", tensors, "chunks")
    checkpoint = open_checkpoint(folder, arch, quantised=True, task="i2v")
    layout = checkpoint.layout("BF16")
    arena = filled(checkpoint, layout)
    for granularity in ("block", "phase"):
        for unit in layout.units(granularity):
            buffer = torch.full((unit.nbytes,), 0xFF, dtype=torch.uint8)
            read_unit(checkpoint, unit, buffer)
            assert torch.equal(buffer, arena[unit.offset : unit.offset + unit.nbytes])
    view = bytearray(unit.nbytes)
    read_unit(checkpoint, unit, memoryview(view))
    used = [slice(t.offset, t.offset + t.nbytes) for t in unit.tensors]
    assert all(view[s] == buffer.numpy()[s].tobytes() for s in used)


def test_read_tensors(tmp_path, small_arch, random_tensors, write_checkpoint) -> None:
    arch = small_arch("i2v")
    tensors = random_tensors(arch, torch.bfloat16)
    folder = write_checkpoint(tmp_path / "wan", tensors, "shards")
    checkpoint = open_checkpoint(folder, arch, quantised=False, task="i2v")
    names = [name for name in tensors if not name.startswith("blocks.")]
    as_is = read_tensors(checkpoint, names)
    wide = read_tensors(checkpoint, names, lambda name: "F32" if "head" in name else "F16")
    assert list(as_is) == list(wide) == names
    for name in names:
        dtype = torch.float32 if "head" in name else torch.float16
        assert torch.equal(as_is[name], tensors[name])
        assert torch.equal(wide[name], tensors[name].to(dtype))
    assert read_tensors(checkpoint, []) == {}


@pytest.mark.parametrize("source", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("target", ["F32", "BF16", "F16"])
def test_cast_equals_torch(source: str, target: str) -> None:
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1.00390625, 65504.0, 1e-8])
    values = torch.cat([special, torch.randn(100_001)]).to(TORCH_DTYPES[source])
    wanted = values.to(TORCH_DTYPES[target])
    result = torch.zeros_like(wanted)
    raw = [buffer_view(t.view(torch.uint8)) for t in (values, result)]
    cast_bytes(raw[0], source, raw[1], target)
    assert torch.equal(result.view(torch.uint8), wanted.view(torch.uint8))


@pytest.fixture
def one_file(tmp_path: Path) -> tuple[Path, list[Piece], bytes]:
    data = os.urandom(3 << 20)
    (path := tmp_path / "x.bin").write_bytes(data)
    stamp = files_module.FileStamp.of(path.stat())
    step = 1 << 18
    places = range(0, len(data), step)
    return path, [Piece(path, n, step, n, step, None, stamp) for n in places], data


def test_a_file_that_changed_since_its_header_was_read(one_file) -> None:
    path, pieces, data = one_file
    dest = memoryview(bytearray(len(data)))
    os.utime(path, ns=(0, 0))
    with pytest.raises(CheckpointError) as caught:
        fill(pieces, dest, threads=2)
    assert caught.value.facts["path"] == str(path)
    assert caught.value.facts["found"] == [len(data), 0]
    path.unlink()
    with pytest.raises(CheckpointError) as caught:
        fill(pieces, dest, threads=2)
    assert caught.value.facts["errno"] == errno.ENOENT


def test_a_file_that_changes_while_it_is_read(one_file) -> None:
    path, pieces, data = one_file
    with pytest.raises(CheckpointError) as caught:
        fill(
            pieces,
            memoryview(bytearray(len(data))),
            threads=2,
            on_bytes=lambda _: os.utime(path, ns=(0, 0)),
        )
    assert caught.value.facts["path"] == str(path)


def test_short_read_says_where(one_file) -> None:
    path, pieces, data = one_file
    pieces = [Piece(path, p.offset + 100, p.nbytes, p.dest, p.nbytes, None) for p in pieces]
    with pytest.raises(CheckpointError) as caught:
        fill(pieces, memoryview(bytearray(len(data))), threads=2)
    assert caught.value.facts == {"path": str(path), "offset": len(data)}


def test_a_read_error_in_one_thread_stops_the_others(one_file, monkeypatch) -> None:
    path, pieces, data = one_file
    monkeypatch.setattr("shared_offload.weights.reader.REQUEST_NBYTES", 1 << 12)
    real, broken = os.preadv, pieces[3].offset

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        time.sleep(0.001)
        if offset == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    seen: list[int] = []
    before = threading.active_count()
    with pytest.raises(CheckpointError) as caught:
        fill(pieces, memoryview(bytearray(len(data))), threads=4, on_bytes=seen.append)
    assert caught.value.facts == {"path": str(path), "offset": broken, "errno": errno.EIO}
    assert broken <= sum(seen) + (4 << 12) and sum(seen) < len(data) * 0.6
    assert threading.active_count() == before
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(path)]


def test_stop(one_file, monkeypatch) -> None:
    _, pieces, data = one_file
    monkeypatch.setattr("shared_offload.weights.reader.REQUEST_NBYTES", 1 << 12)
    stop = threading.Event()
    seen: list[int] = []

    def on_bytes(count: int) -> None:
        seen.append(count)
        if len(seen) == 5:
            stop.set()

    with pytest.raises(CheckpointError, match="stopped"):
        fill(pieces, memoryview(bytearray(len(data))), threads=1, on_bytes=on_bytes, stop=stop)
    assert len(seen) == 5


def test_threads_run_where_they_are_told(one_file) -> None:
    _, pieces, data = one_file
    ours = os.sched_getaffinity(0)
    cpu, dest = max(ours), bytearray(len(data))
    seen: list[set[int]] = []
    fill(
        pieces,
        memoryview(dest),
        threads=2,
        cpus=[cpu],
        on_bytes=lambda _: seen.append(os.sched_getaffinity(0)),
    )
    assert dest == data and all(cpus == {cpu} for cpus in seen) and seen
    assert os.sched_getaffinity(0) == ours
    with pytest.raises(NumaError) as caught:
        fill(pieces, memoryview(dest), threads=2, cpus=[100_000])
    assert caught.value.facts["cpus"] == [100_000]


PEAK = """
import mmap, sys, json
from pathlib import Path
import torch
from shared_offload.weights.architecture import Architecture
from shared_offload.weights.cast import cast_bytes
from shared_offload.weights.checkpoint import open_checkpoint
from shared_offload.weights.reader import block_pieces, fill

def peak():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])

arch = Architecture(**json.loads(sys.argv[2]))
checkpoint = open_checkpoint(Path(sys.argv[1]), arch, quantised=False, task="t2v")
layout = checkpoint.layout("BF16")
pieces = block_pieces(checkpoint, layout)
dest = memoryview(mmap.mmap(-1, layout.arena_nbytes))
cast_bytes(memoryview(bytearray(8)), "F32", memoryview(bytearray(4)), "BF16")
before = peak()
fill(pieces, dest, threads=2, convert=cast_bytes)
print(peak() - before, layout.arena_nbytes, sum(p.nbytes for p in pieces))
"""


def test_peak_memory_is_the_destination_and_a_constant(
    tmp_path, small_arch, random_tensors, write_checkpoint
) -> None:
    arch = small_arch(dim=1024, ffn_dim=2048, num_heads=16, num_layers=4)
    folder = write_checkpoint(tmp_path / "wan", random_tensors(arch), "single")
    fields = {name: getattr(arch, name) for name in type(arch).__slots__}
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), json.dumps(fields)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    grown, arena, read = map(int, run.stdout.split())
    assert read > 190 << 20 and arena < 0.55 * read
    # Two bounce buffers of 4 MiB, thread stacks, Python objects: nothing that grows with the file.
    assert arena * 0.99 <= grown <= arena + (24 << 20)


def test_unit_pieces_cover_the_unit(tmp_path, small_arch, random_tensors, write_checkpoint) -> None:
    folder = write_checkpoint(tmp_path / "wan", random_tensors(small_arch()), "single")
    checkpoint = open_checkpoint(folder, small_arch(), quantised=False, task="t2v")
    layout = checkpoint.layout("F32")
    pieces = block_pieces(checkpoint, layout)
    order = [(str(p.path), p.offset) for p in pieces]
    assert order == sorted(order)
    # Every byte of the file that belongs to a block is read once.
    entries = [e for n, e in checkpoint.entries.items() if n.startswith("blocks.")]
    assert sum(p.nbytes for p in pieces) == sum(e.nbytes for e in entries)
    per_phase = [len(unit_pieces(checkpoint, u)) for u in layout.units("phase")]
    assert sum(per_phase) == len(pieces)
