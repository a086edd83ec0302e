"""CUDA_VISIBLE_DEVICES and the choice of a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared_offload.errors import PreflightError
from shared_offload.ranks import devices
from shared_offload.ranks.devices import Gpu, choose_device, pci_id, visible_devices_problem
from shared_offload.ranks.facts import RankFacts

GPUS = (
    Gpu(0, "GPU-aaaa1111", "H200"),
    Gpu(1, "GPU-aaaa2222", "H200"),
    Gpu(2, "GPU-bbbb3333", "H200", ("MIG-cccc", "MIG-dddd")),
)


@pytest.mark.parametrize(
    "value",
    [
        *(None, "0", "2,0,1", " 1 , 0"),
        *("GPU-bbbb", "GPU-aaaa2222,GPU-aaaa1"),
        *("MIG-dddd", "MIG-GPU-bbbb3333/1/0"),
    ],
)
def test_values_that_cuda_takes_whole(value):
    assert visible_devices_problem(value, GPUS) is None


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("", "hides every GPU"),
        ("-1", "hides every GPU"),
        ("0,,1", "entry 2 is empty"),
        ("0,1,", "entry 3 is empty"),
        ("0,1,0", "0 is repeated"),
        ("0,3", "no 3 among the 3 GPUs"),
        ("0,-1", "-1 is neither"),
        ("0 1", "0 1 is neither"),
        ("cuda:0", "cuda:0 is neither"),
        ("0,GPU-bbbb", "mixes UUIDs and numbers"),
        ("GPU-aaaa", "GPU-aaaa fits 2 GPUs"),
        ("GPU-bbbb,GPU-bbbb3333", "named twice"),
        ("GPU-ffff", "no GPU-ffff"),
        ("MIG-eeee", "no MIG-eeee"),
        ("MIG-GPU-aaaa1111/1/0", "no MIG-GPU-aaaa1111/1/0"),
        ("MIG-cccc,MIG-dddd", "only one MIG device"),
    ],
)
def test_values_of_which_cuda_would_drop_a_part(value, word):
    problem = visible_devices_problem(value, GPUS)
    assert problem is not None
    assert word in problem.what
    assert problem.facts["found"] == value


def test_without_nvml_only_the_text_is_checked():
    assert visible_devices_problem("7,9", None) is None
    assert visible_devices_problem("7,7", None) is not None


def place(local_rank: int, ranks: int = 4) -> RankFacts:
    facts = {"rank": local_rank, "world_size": ranks}
    return RankFacts(local_rank=local_rank, local_world_size=ranks, **facts)


def test_a_rank_holds_the_gpu_of_its_local_number(monkeypatch):
    monkeypatch.setattr(devices, "visible_gpu_count", lambda: 4)
    assert choose_device(place(3), "auto", False) == torch.device("cuda:3")
    assert choose_device(place(3), "cuda", False) == torch.device("cuda:3")
    assert choose_device(place(3), "cpu", False) == torch.device("cpu")


def test_ranks_share_a_gpu_only_when_allowed(monkeypatch):
    monkeypatch.setattr(devices, "visible_gpu_count", lambda: 2)
    with pytest.raises(PreflightError) as caught:
        choose_device(place(2), "auto", False)
    assert (caught.value.facts["needed"], caught.value.facts["found"]) == (4, 2)
    assert choose_device(place(3), "auto", True) == torch.device("cuda:1")


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(devices, "visible_gpu_count", lambda: 0)
    assert choose_device(place(0), "auto", False) == torch.device("cpu")
    with pytest.raises(PreflightError, match="no GPU"):
        choose_device(place(0), "cuda", True)
    assert pci_id(torch.device("cpu")) is None


@pytest.mark.gpu
def test_the_pci_address_names_a_device_in_sysfs():
    address = pci_id(torch.device("cuda:0"))
    uuids = {gpu.uuid for gpu in devices.host_gpus() or ()}
    assert f"GPU-{torch.cuda.get_device_properties(0).uuid}" in uuids
    assert Path(f"/sys/bus/pci/devices/{address}/vendor").read_text().strip() == "0x10de"
