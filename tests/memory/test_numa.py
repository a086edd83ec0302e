"""What sysfs and the kernel say about nodes; real placement on several is tests/numa's part."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pynvml
import pytest

from shared_offload.errors import NumaError
from shared_offload.memory import numa
from shared_offload.memory.arena import create

MIB = 1 << 20


def tree(root: Path, **nodes_of: int) -> Path:
    """Two nodes with CPUs 0-1,4 and 2-3, and PCI devices with the numa_node given."""
    files = {
        "sys/devices/system/node/has_memory": "0-1\n",
        "sys/devices/system/node/node0/cpulist": "0-1,4\n",
        "sys/devices/system/node/node1/cpulist": "2-3\n",
        "proc/self/status": "Name:\tpython\nMems_allowed_list:\t1-7\n",
    }
    for name, node in nodes_of.items():
        address = name.removeprefix("d").replace("_", ":", 2).replace("_", ".")
        files[f"sys/bus/pci/devices/{address}/numa_node"] = f"{node}\n"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0001:0A:1f.7", "0001:0a:1f.7"),
        ("1b:00.0", "0000:1b:00.0"),
        ("0000:1b:00", "0000:1b:00.0"),
        ("00010000:00:00.0", "10000:00:00.0"),
    ],
)
def test_pci_addresses_as_sysfs_writes_them(text: str, expected: str) -> None:
    assert numa.normalise_pci(text) == expected


@pytest.mark.parametrize("text", ["", "GPU-1234", "0000:1b", "zz:00.0"])
def test_what_is_no_pci_address(text: str) -> None:
    with pytest.raises(NumaError) as caught:
        numa.normalise_pci(text)
    assert caught.value.facts == {"found": text}


def test_lists_as_the_kernel_writes_them() -> None:
    assert numa.parse_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert numa.parse_list("\n") == frozenset()


def test_node_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, d0000_1b_00_0=1, d0000_2b_00_0=-1)
    assert numa.node_of_device("00000000:1B:00.0", root) == 1

    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert numa.node_of_device("0000:2b:00.0", root) is None
    assert numa.node_of_device("0000:3b:00.0", root) is None


@pytest.mark.parametrize(
    ("words", "expected"), [([0b10], 1), ([0b11], None), ([0], None), ([0, 1], 64)]
)
def test_nvml_where_sysfs_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[int], expected: int | None
) -> None:
    root = tree(tmp_path, d0000_2b_00_0=-1)
    asked = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByPciBusId", lambda a: asked.append(a) or "h")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryAffinity", lambda *_: words)
    assert numa.node_of_device("00000000:2B:00.0", root) == expected
    assert asked == ["0000:2b:00.0"]


def test_one_node_is_known_whatever_the_firmware_says(tmp_path: Path) -> None:
    root = tree(tmp_path, d0000_2b_00_0=-1)
    (root / "sys/devices/system/node/has_memory").write_text("0\n")
    assert numa.node_of_device("0000:2b:00.0", root) == 0
    assert numa.node_of_cpus(frozenset({0, 3}), root) == 0


def test_node_of_a_process_without_a_device(tmp_path: Path) -> None:
    root = tree(tmp_path)
    assert numa.node_of_cpus(frozenset({0, 4}), root) == 0
    assert numa.node_of_cpus(frozenset({2}), root) == 1
    assert numa.node_of_cpus(frozenset({1, 2}), root) is None
    assert numa.allowed_nodes(root) == {1}


def test_a_kernel_without_numa(tmp_path: Path) -> None:
    assert numa.memory_nodes(tmp_path) == {0}
    assert numa.allowed_nodes(tmp_path) == {0}
    assert numa.node_memory(0, tmp_path) == {}
    assert numa.placement(0, MIB, tmp_path) is None


def test_placement_counts_what_was_touched() -> None:
    _, mapping = create(16 * MIB, "numa")
    assert numa.placement(mapping.address, mapping.size).nbytes == 0
    mapping.view()[: 5 * MIB] = bytes(5 * MIB)
    found = numa.placement(mapping.address, mapping.size)
    # The same fact from another file of the kernel.
    smaps = Path("/proc/self/smaps").read_text().partition(f"\n{mapping.address:x}-")[2]
    assert found.nbytes == int(re.search(r"\nRss: +(\d+) kB", smaps).group(1)) << 10 == 5 * MIB
    mapping.release()


def test_placement_reads_the_kernels_format(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/numa_maps").write_text(
        "7f0000000000 bind:0 file=/SYSV00000000\\040(deleted) dirty=3 N0=3 kernelpagesize_kB=4\n"
        "7f0000200000 default file=/SYSV00000000 huge N1=2 N12=1 kernelpagesize_kB=2048\n"
        "7f0000a00000 default anon=1 N0=1 kernelpagesize_kB=4\n"
    )
    (tmp_path / "proc/self/smaps").write_text(
        "7f0000000000-7f0000200000 r--s 0 00:01 1 /SYSV\nShmemPmdMapped:        0 kB\n"
        "7f0000200000-7f0000a00000 r--s 0 00:01 1 /SYSV\nShmemPmdMapped:     6144 kB\n"
        "7f0000a00000-7f0000b00000 rw-p 0 00:00 0\nShmemPmdMapped:     9999 kB\n"
    )
    found = numa.placement(0x7F0000000000, 10 * MIB, tmp_path)
    assert found.node_nbytes == {0: 3 * 4096, 1: 4 * MIB, 12: 2 * MIB}
    assert found.huge_nbytes == 6 * MIB
    assert found.outside(1) == 3 * 4096 + 2 * MIB


def test_a_node_that_is_not_there() -> None:
    _, mapping = create(MIB, "numa")
    with pytest.raises(NumaError) as caught:
        numa.set_policy(mapping.address, mapping.size, 77, numa.Policy.BIND)
    assert caught.value.facts["node"] == 77 and "cpuset" in caught.value.hint
    mapping.release()


def test_threads_move_to_the_nodes_cpus() -> None:
    before = os.sched_getaffinity(0)
    try:
        assert numa.run_on_node(None) is None and os.sched_getaffinity(0) == before
        assert numa.run_on_node(77) is None and os.sched_getaffinity(0) == before
        node = numa.node_of_cpus(frozenset(before)) or 0
        cpus = numa.run_on_node(node)
        assert cpus == numa.node_cpus(node) & before == os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, before)
