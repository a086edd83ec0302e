from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from shared_offload.errors import CheckpointError
from shared_offload.weights.pth import load_pth

TENSORS = {"a.weight": torch.randn(300, 70), "b": torch.arange(5, dtype=torch.bfloat16)}


class Bomb:
    """Unpickling this would create a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (os.mknod, (str(self.target),))


def test_round_trip(tmp_path: Path) -> None:
    for legacy in (False, True):
        path = tmp_path / f"{legacy}.pth"
        torch.save(TENSORS, path, _use_new_zipfile_serialization=not legacy)
        loaded = load_pth(path)
        assert list(loaded) == list(TENSORS)
        assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    for legacy in (False, True):
        torch.save(
            {"a": Bomb(tmp_path / "boom")},
            path := tmp_path / "x.pth",
            _use_new_zipfile_serialization=not legacy,
        )
        with pytest.raises(CheckpointError, match="more than tensors"):
            load_pth(path)
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "boom")))
    with pytest.raises(CheckpointError):
        load_pth(path)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({"state_dict": TENSORS, "step": 3}, "state_dict"),
        ({1: torch.zeros(1)}, "1"),
        ([torch.zeros(1)], None),
        ({}, None),
        (torch.zeros(3), None),
    ],
)
def test_other_content(tmp_path: Path, content: object, name: str | None) -> None:
    torch.save(content, path := tmp_path / "x.pth")
    with pytest.raises(CheckpointError) as caught:
        load_pth(path)
    assert caught.value.facts["path"] == str(path)
    assert caught.value.facts.get("name") == name
    assert caught.value.hint


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
        b"<!DOCTYPE html><html>not found</html>",
        b"\0" * 4096,
        b"random bytes",
        b"\x80\x02garbage",
    ],
)
def test_files_that_are_something_else(tmp_path: Path, data: bytes) -> None:
    (path := tmp_path / "x.pth").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        load_pth(path)
    assert caught.value.facts["path"] == str(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_pth(tmp_path / "none.pth")
    assert caught.value.facts["errno"] == 2


def test_any_truncation_and_any_flipped_byte_of_the_structure(tmp_path: Path) -> None:
    torch.save(TENSORS, path := tmp_path / "x.pth")
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for cut in torch.randint(0, len(whole), (60,), generator=generator).tolist():
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            load_pth(path)
    for place in torch.randint(0, 700, (200,), generator=generator).tolist():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            load_pth(path)
        except CheckpointError:
            continue
