from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shared_offload.errors import CheckpointError
from shared_offload.weights.safetensors_header import Header, read_header

TENSORS = {
    "scalar": torch.tensor(3.0),
    "a.weight": torch.randn(7, 5),
    "b": torch.randn(3).to(torch.bfloat16),
    "q.weight": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "mask": torch.tensor([True, False, True]),
    "n": torch.arange(4, dtype=torch.int64),
}


def write(path: Path, header: object, payload: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + payload)
    return path


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_finds_what_safetensors_wrote(tmp_path: Path) -> None:
    save_file(TENSORS, path := tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(path)
    data = path.read_bytes()
    assert header.problems == () and header.stamp.size == len(data)
    with safe_open(path, "pt") as theirs:
        assert set(header.entries) == set(theirs.keys())
        for name, found in header.entries.items():
            view = theirs.get_slice(name)
            assert list(found.shape) == view.get_shape() and found.dtype == view.get_dtype()
            raw = TENSORS[name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert data[found.offset : found.offset + found.nbytes] == raw


@pytest.mark.parametrize(
    ("header", "reason", "name"),
    [
        (b"[1, 2]", "no JSON object", None),
        (b"{" * 2000, "damaged", None),
        (b"[" * 200_000, "damaged", None),
        (b'{"a": \xff}', "damaged", None),
        ({"__metadata__": 3}, "__metadata__", None),
        ({"a": 3}, "expected an object", "a"),
        ({"a": {"dtype": "F32", "shape": []}}, "expected an object", "a"),
        ({"a": entry(0, 4, [1], "F7")}, "unknown dtype", "a"),
        ({"a": entry(0, 4, [True])}, "shape", "a"),
        ({"a": entry(0, 4, [-1])}, "shape", "a"),
        ({"a": entry(0, 4, [1.0])}, "shape", "a"),
        ({"a": entry(0, 4, [1] * 9)}, "shape", "a"),
        ({"a": entry(0, 4, [1 << 64, 0])}, "shape", "a"),
        ({"a": entry(4, 0, [1])}, "data_offsets", "a"),
        ({"a": entry(0, 8, [1])}, "needs 4 bytes", "a"),
        ({"a": entry(0, 1, [1], "F4")}, "needs 0.5 bytes", "a"),
        ({"a\x1b[2J": entry(0, 4, [1])}, "not printable", "a\x1b[2J"),
        (b'{"a": {"dtype": "F32"}, "a": 1}', "defined twice", "a"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: object, reason: str, name: str | None) -> None:
    path = write(tmp_path / "x.safetensors", header, bytes(16))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert reason in caught.value.what
    assert caught.value.facts["path"] == str(path)
    assert caught.value.facts.get("name") == name
    assert caught.value.hint


@pytest.mark.parametrize("length", [0, 1, (16 << 20) + 1, 1 << 62, (1 << 64) - 1])
def test_length_is_bounded_before_it_is_believed(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "x.safetensors", {}, length=length)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.facts["found"] == length


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git-LFS"),
        (b"\xef\xbb\xbf\n <!DOCTYPE html>\n<html>", "HTML"),
        (b"<html><body>Access denied</body></html>", "HTML"),
        (b"<?xml version='1.0'?><Error/>", "HTML"),
        (b"GGUF\3\0\0\0", "GGUF"),
        (bytes(4096), "zeros"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, head: bytes, found: str) -> None:
    (path := tmp_path / "x.safetensors").write_bytes(head)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert found in str(caught.value.facts["found"]) and caught.value.facts["path"] == str(path)


def only_problem(header: Header) -> CheckpointError:
    (problem,) = header.problems
    assert problem.facts["path"] == str(header.path) and problem.hint
    return problem


def test_places(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    overlap = {"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}
    problem = only_problem(read_header(write(path, overlap, bytes(12))))
    assert "overlaps" in problem.what and problem.facts["name"] == "b"
    twin = {"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}
    assert "overlaps" in only_problem(read_header(write(path, twin, bytes(8)))).what
    hole = {"a": entry(0, 8, [2]), "b": entry(12, 16, [1])}
    problem = only_problem(read_header(write(path, hole, bytes(16))))
    assert "hole" in problem.what and problem.facts["name"] == "b"
    one = {"a": entry(0, 8, [2])}
    assert "belong to no tensor" in only_problem(read_header(write(path, one, bytes(9)))).what
    beyond = {"a": entry(0, 8, [2]), "b": entry(8, 1 << 50, [(1 << 48) - 2])}
    problem = only_problem(read_header(write(path, beyond, bytes(8))))
    assert problem.facts["name"] == "b" and problem.facts["needed"] > 1 << 50


def test_truncation_is_seen_wherever_it_falls(tmp_path: Path) -> None:
    save_file(TENSORS, path := tmp_path / "x.safetensors")
    whole = path.read_bytes()
    names = set(read_header(path).entries)
    payload = 8 + int.from_bytes(whole[:8], "little")
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        if cut < payload:
            with pytest.raises(CheckpointError):
                read_header(path)
        else:
            header = read_header(path)
            assert set(header.entries) == names  # so that nothing else is said to be missing
            problem = only_problem(header)
            assert problem.facts["found"] == cut and problem.facts["needed"] == len(whole)


def test_random_damage_gives_a_header_or_a_checkpoint_error(tmp_path: Path) -> None:
    save_file(TENSORS, path := tmp_path / "x.safetensors")
    whole, rng = path.read_bytes(), random.Random(20)
    header_end = 8 + int.from_bytes(whole[:8], "little")
    tokens = [
        b'"',
        b"{",
        b"}",
        b"[",
        b",",
        b"-1",
        b"1e9",
        b"NaN",
        b"null",
        b"99999999999",
        b"\\u0000",
    ]
    outcomes = {"header": 0, "problems": 0, "error": 0}
    for _ in range(1200):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(header_end)
            kind = rng.randrange(3)
            if kind == 0:
                data[place] = rng.randrange(256)
            elif kind == 1:
                data[place : place + rng.randint(0, 6)] = rng.choice(tokens)
            else:
                del data[place : place + rng.randint(1, 40)]
        path.write_bytes(data)
        try:
            header = read_header(path)
        except CheckpointError as error:
            error.to_json()
            outcomes["error"] += 1
            continue
        outcomes["problems" if header.problems else "header"] += 1
        if not header.problems:  # then every byte of every tensor can be read
            assert all(e.offset + e.nbytes <= len(data) for e in header.entries.values())
            assert sum(e.nbytes for e in header.entries.values()) <= len(data)
    assert all(outcomes.values()), outcomes  # the damage is neither too mild nor too rough
