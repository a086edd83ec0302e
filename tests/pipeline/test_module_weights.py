"""Modules that move: where their weights are, and that host memory holds one copy of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shared_offload.pipeline import module_weights

CPU = torch.device("cpu")


class Small(nn.Module):
    """A linear layer, one that shares its weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.zeros(8))


@pytest.fixture
def loaded(tmp_path) -> tuple[Small, Path]:
    path = tmp_path / "weights.pth"
    module = Small()
    torch.save(module.state_dict(), path)
    mapped = torch.load(path, mmap=True, weights_only=True)
    mapped["two.weight"] = mapped["one.weight"]
    with torch.device("meta"):
        module = Small()
    module_weights.assign(module, mapped, path=path, device=CPU, dtype=torch.float32)
    return module, path


def addresses(module: nn.Module) -> dict[str, int]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.data_ptr() for name, tensor in named}


def assert_mapped(module: nn.Module, path: Path) -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(a, 16) for a in m.split()[0].split("-")] for m in maps if str(path) in m]
    for address in addresses(module).values():
        assert any(start <= address < end for start, end in spans)


def test_staying_where_it_is_copies_nothing(loaded) -> None:
    module, path = loaded
    before = addresses(module)
    assert before["one.weight"] == before["two.weight"]
    module_weights.move(module, CPU)
    assert addresses(module) == before
    assert_mapped(module, path)


@pytest.mark.gpu
def test_there_and_back_on_a_gpu(loaded) -> None:
    module, path = loaded
    device = torch.device("cuda", torch.cuda.current_device())
    before, state = addresses(module), {n: t.clone() for n, t in module.state_dict().items()}
    held = torch.cuda.memory_allocated()
    for _ in range(2):
        module_weights.move(module, device)
        assert module.one.weight.data_ptr() == module.two.weight.data_ptr()
        assert all(torch.equal(t.cpu(), state[name]) for name, t in module.state_dict().items())
        module_weights.move(module, CPU)  # nothing is copied: it is the map of the file again
        assert addresses(module) == before
        assert torch.cuda.memory_allocated() == held
        assert_mapped(module, path)


@pytest.mark.gpu
def test_a_cast_on_the_way(tmp_path) -> None:
    """Host memory keeps the file's own map; the device has the dtype asked for, rounded as here."""
    path, file = tmp_path / "weights.pth", Small()
    torch.save(file.state_dict(), path)
    mapped = torch.load(path, mmap=True, weights_only=True)
    with torch.device("meta"):
        module = Small()
    half = torch.float16
    module_weights.assign(module, mapped, path=path, device=CPU, dtype=half, cast_later=True)
    for _ in range(2):
        assert_mapped(module, path)
        module_weights.move(module, torch.device("cuda", torch.cuda.current_device()))
        for name, tensor in module.state_dict().items():
            assert tensor.dtype == half
            assert torch.equal(tensor.cpu(), file.state_dict()[name].half())
        module_weights.move(module, CPU)


@pytest.mark.gpu
def test_weights_that_were_loaded_on_a_gpu_are_copied_back() -> None:
    module = Small().requires_grad_(False).cuda()
    state = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
    module_weights.move(module, CPU)
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
