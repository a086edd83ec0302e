"""Files written here are read back by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from shared_offload.errors import OutputError, PreflightError
from shared_offload.weights import writer

TABLE = {
    "w": ("F8_E4M3", (5, 3)),
    "s": ("F32", (5, 1)),
    "b": ("BF16", (7,)),
    "scalar": ("F32", ()),
    "half": ("F16", (1, 2, 3)),
}


def test_the_library_reads_back_rows_put_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        "w": torch.arange(15.0).reshape(5, 3).to(torch.float8_e4m3fn),
        "s": torch.randn(5, 1),
        "b": torch.randn(14)[::2].to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "half": torch.randn(1, 2, 3).half(),
    }
    with writer.SafetensorsWriter(path, TABLE) as file:
        assert not path.exists()
        assert file.put("w", tensors["w"][3:], first_row=3) == 6
        file.put("w", tensors["w"][:3])
        for name in ("half", "scalar", "b", "s"):
            file.put(name, tensors[name])
    assert path.stat().st_size == writer.file_nbytes(TABLE) == file.nbytes
    assert list(tmp_path.iterdir()) == [path]
    found = load_file(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float()), name
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="stop"), writer.SafetensorsWriter(path, TABLE):
        raise ValueError("stop")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def test_unwritable_folder(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "a.safetensors"
    with pytest.raises(OutputError) as caught:
        writer.SafetensorsWriter(path, TABLE)
    assert caught.value.facts["path"] == str(path)


def test_index(tmp_path: Path) -> None:
    writer.write_index(tmp_path, {"a": "x.safetensors"}, 12)
    assert json.loads((tmp_path / writer.INDEX_NAME).read_text()) == {
        "metadata": {"total_size": 12},
        "weight_map": {"a": "x.safetensors"},
    }


def test_disk_space_names_both_numbers(tmp_path: Path) -> None:
    writer.require_disk_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(PreflightError) as caught:
        writer.require_disk_space(tmp_path / "not" / "yet", 10**18)
    assert caught.value.facts["needed"] == 10**18
    assert 0 < caught.value.facts["found"] < 10**18
