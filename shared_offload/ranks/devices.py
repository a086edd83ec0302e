"""Which GPU a rank holds: CUDA_VISIBLE_DEVICES against NVML, the device, its PCI address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pynvml
import torch

from shared_offload.errors import PreflightError
from shared_offload.ranks.facts import RankFacts

HINT = "CUDA_VISIBLE_DEVICES=0,1 names two GPUs; nvidia-smi -L lists numbers and UUIDs"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this host as NVML reports it, with the UUIDs of its MIG parts."""

    index: int
    uuid: str
    name: str = ""
    mig_uuids: tuple[str, ...] = ()


def host_gpus() -> tuple[Gpu, ...] | None:
    """All GPUs of this host, visible to CUDA or not; None where NVML is missing."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    return Gpu(index, uuid, name, tuple(_mig_uuids(handle)))


def _mig_uuids(handle: object) -> list[str]:
    found = []
    try:
        for part in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, part)
            found.append(pynvml.nvmlDeviceGetUUID(mig))
    except pynvml.NVMLError:  # no MIG, or no part under this number and above
        pass
    return found


def visible_devices_problem(value: str | None, gpus: Sequence[Gpu] | None) -> PreflightError | None:
    """What is wrong with this CUDA_VISIBLE_DEVICES; None when CUDA takes all of it.

    CUDA itself silently drops the first unknown entry and all after it, and everything when one is
    repeated. `gpus` None (no NVML): only what the text alone shows is checked.
    """
    if value is None:
        return None
    entries = [entry.strip() for entry in value.split(",")]
    problem = _text_problem(value, entries) or _unknown(entries, gpus)
    if not problem:
        return None
    return PreflightError(
        f"CUDA_VISIBLE_DEVICES is {value!r}: {problem}",
        expected="numbers or UUIDs of this host's GPUs, each once",
        hint=HINT,
        found=value,
    )


def _text_problem(value: str, entries: Sequence[str]) -> str:
    if not value.strip() or entries[0] == "-1":
        return "it hides every GPU"
    if "" in entries:
        return f"entry {entries.index('') + 1} is empty"
    repeated = sorted({entry for entry in entries if entries.count(entry) > 1})
    if repeated:
        return f"{', '.join(repeated)} is repeated"
    kinds = {_kind(entry) for entry in entries}
    strange = [entry for entry in entries if _kind(entry) == "strange"]
    if strange:
        return f"{', '.join(strange)} is neither a number nor a UUID"
    if len(kinds) > 1:
        return f"it mixes {' and '.join(sorted(kinds))}"
    if "MIG ids" in kinds and len(entries) > 1:
        return "a process sees only one MIG device, so only the first would count"
    return ""


def _kind(entry: str) -> Literal["numbers", "UUIDs", "MIG ids", "strange"]:
    if entry.isdecimal():
        return "numbers"
    if entry.startswith("GPU-"):
        return "UUIDs"
    return "MIG ids" if entry.startswith("MIG-") else "strange"


def _unknown(entries: Sequence[str], gpus: Sequence[Gpu] | None) -> str:
    if gpus is None:
        return ""
    matches = {entry: _matches(entry, gpus) for entry in entries}
    for entry, found in matches.items():
        if not found:
            return f"there is no {entry} among the {len(gpus)} GPUs of this host"
        if len(found) > 1:
            return f"{entry} fits {len(found)} GPUs"
    named = [found[0] for found in matches.values()]
    repeated = sorted({name for name in named if named.count(name) > 1})
    return f"{repeated[0]} is named twice" if repeated else ""


def _matches(entry: str, gpus: Sequence[Gpu]) -> list[str]:
    """UUIDs that `entry` names: a number, or a UUID, which may be cut short as long as it is clear.

    A MIG device may also be written MIG-<UUID of its GPU>/<GPU instance>/<compute instance>.
    """
    if entry.isdecimal():
        return [gpu.uuid for gpu in gpus if gpu.index == int(entry)]
    if entry.startswith("MIG-GPU-"):
        parent = entry.removeprefix("MIG-").split("/")[0]
        return [entry for gpu in gpus if gpu.uuid == parent and gpu.mig_uuids]
    uuids = [uuid for gpu in gpus for uuid in (gpu.uuid, *gpu.mig_uuids)]
    return [uuid for uuid in uuids if uuid.startswith(entry)]


def visible_gpu_count() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(
    facts: RankFacts, requested: Literal["auto", "cpu", "cuda"], allow_shared_gpu: bool
) -> torch.device:
    """This rank's device: the visible GPU with its local rank's number, or the CPU.

    With `allow_shared_gpu`, ranks beyond the number of GPUs take turns. Raises PreflightError.
    """
    count = visible_gpu_count()
    if requested == "cpu" or (requested == "auto" and count == 0):
        return torch.device("cpu")
    if facts.local_rank < count:
        return torch.device("cuda", facts.local_rank)
    if count == 0:
        raise PreflightError(
            "device cuda was asked for, and CUDA shows no GPU",
            expected="a GPU and a driver that this torch build can use",
            hint="see nvidia-smi and CUDA_VISIBLE_DEVICES, or set device to cpu",
            needed=1,
            found=0,
        )
    if not allow_shared_gpu:
        raise too_few_gpus(facts.local_world_size, count)
    return torch.device("cuda", facts.local_rank % count)


def too_few_gpus(ranks: int, visible: int) -> PreflightError:
    """The error for more ranks on this host than visible GPUs."""
    return PreflightError(
        f"{ranks} ranks were started on this host and {visible} GPUs are visible",
        expected="a GPU of its own for each rank",
        hint=f"start {visible} (--nproc_per_node={visible}), name more GPUs in "
        "CUDA_VISIBLE_DEVICES, or set allow_shared_gpu for a test",
        needed=ranks,
        found=visible,
    )


def pci_id(device: torch.device) -> str | None:
    """PCI address of `device` as sysfs writes it (0000:1b:00.0); None for a CPU."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks these fields
    domain, bus = properties.pci_domain_id, properties.pci_bus_id
    return f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
