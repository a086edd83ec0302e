"""Registration of host memory with CUDA, in chunks, all or nothing.

A copy must not span two registrations and no page may be in two, so chunks are cut where the caller
says (at units) and only at page boundaries. One registration of everything fails on some hosts and
holds a lock of the driver for seconds; chunks let processes alternate and progress show.

The runtime is called through the libcudart that torch has loaded, by ctypes: torch's own binding
can neither clear the error that a failed registration leaves for the next torch call, nor ask for
device attributes. Torch-free.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shared_offload.errors import PinningError
from shared_offload.memory.limits import gib

# driver_types.h
REGISTER_DEFAULT = 0
REGISTER_READ_ONLY = 8
ATTRIBUTE_REGISTER_READ_ONLY_SUPPORTED = 113
ERROR_INVALID_VALUE = 1
ERROR_OUT_OF_MEMORY = 2
ERROR_UNLOADING = 4
ERROR_ALREADY_REGISTERED = 712
ERROR_NOT_SUPPORTED = 801

HINTS = {
    ERROR_OUT_OF_MEMORY: "allow locked memory (ulimit -l unlimited, docker run --ulimit "
    "memlock=-1), or lower shared_cpu_weight_register_chunk_mb",
    ERROR_ALREADY_REGISTERED: "something else in this process has registered these pages",
    ERROR_NOT_SUPPORTED: "this device or driver cannot register host memory; take a newer driver",
}


class Registrar(Protocol):
    """What CUDA does for us, by address; codes are cudaError_t, 0 for success."""

    @property
    def read_only_supported(self) -> bool:
        """The device takes memory that this process cannot write."""
        ...

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """Page-lock a range and map it for the device."""
        ...

    def unregister(self, address: int) -> int:
        """Undo `register` of the range that starts at `address`."""
        ...

    def explain(self, code: int) -> str:
        """CUDA's words for a code."""
        ...


class CudaRegistrar:
    """The CUDA runtime of this process, for one device. torch must have initialised CUDA."""

    def __init__(self, device_index: int) -> None:
        self._device = device_index
        self._runtime = ctypes.CDLL(_loaded_runtime())
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p

    @property
    def read_only_supported(self) -> bool:
        """The device takes memory that this process cannot write."""
        value = ctypes.c_int(0)
        code = self._call(
            "cudaDeviceGetAttribute",
            ctypes.byref(value),
            ctypes.c_int(ATTRIBUTE_REGISTER_READ_ONLY_SUPPORTED),
            ctypes.c_int(self._device),
        )
        return code == 0 and value.value == 1

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """cudaHostRegister, on this registrar's device whatever thread calls."""
        code = self._call("cudaSetDevice", ctypes.c_int(self._device))
        return code or self._call(
            "cudaHostRegister",
            ctypes.c_void_p(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_uint(flags),
        )

    def unregister(self, address: int) -> int:
        """cudaHostUnregister. The caller has made sure that no copy is under way."""
        return self._call("cudaHostUnregister", ctypes.c_void_p(address))

    def explain(self, code: int) -> str:
        """CUDA's words for a code."""
        text: bytes = self._runtime.cudaGetErrorString(ctypes.c_int(code))
        return text.decode()

    def _call(self, name: str, *arguments: object) -> int:
        code: int = getattr(self._runtime, name)(*arguments)
        if code:  # else the error surfaces in the next, unrelated torch call
            self._runtime.cudaGetLastError()
        return code


def _loaded_runtime() -> str:
    """Path of the libcudart in this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and "/libcudart.so" in path[0]:
            return path[0]
    raise PinningError(
        "the CUDA runtime (libcudart) is not loaded in this process",
        expected="a CUDA build of torch, initialised before memory is registered",
        hint="python -c 'import torch; print(torch.version.cuda)'",
    )


@dataclass(slots=True)
class Pins:
    """Registered ranges of one mapping; `undo` takes them back, once."""

    registrar: Registrar
    read_only_flag: bool
    addresses: list[int] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0

    def undo(self) -> None:
        """Unregister everything; raises one PinningError for the first range that refused."""
        refused: list[tuple[int, int]] = []
        while self.addresses:
            address = self.addresses.pop()
            code = self.registrar.unregister(address)
            if code not in (0, ERROR_UNLOADING):
                refused.append((address, code))
        self.nbytes = 0
        if refused:
            address, code = refused[0]
            raise PinningError(
                f"CUDA refused to unregister {len(refused)} ranges, the first with "
                f"{self.registrar.explain(code)} ({code})",
                address=address,
                code=code,
            )


def chunk_spans(
    nbytes: int, boundaries: Sequence[int], chunk_nbytes: int, page_nbytes: int = mmap.PAGESIZE
) -> Iterator[tuple[int, int]]:
    """(offset, nbytes) of each registration: whole pages, cut at boundaries only.

    As many units as `chunk_nbytes` holds, and at least one. Boundaries off page borders cannot be
    cut at. The last span ends with the content's last page.
    """
    end = -(-nbytes // page_nbytes) * page_nbytes
    cuts = sorted({b for b in boundaries if 0 < b < end and b % page_nbytes == 0} | {end})
    start = previous = 0
    for cut in cuts:
        if cut - start > chunk_nbytes and previous > start:
            yield start, previous - start
            start = previous
        previous = cut
    if previous > start:
        yield start, previous - start


def pin(
    address: int,
    spans: Sequence[tuple[int, int]],
    registrar: Registrar,
    *,
    read_only: bool,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Pins:
    """Register `spans` of a mapping that starts at `address`; all of them, or none and an error.

    `read_only` says that the mapping cannot be written, and asks for the flag that this needs.
    """
    flags = REGISTER_READ_ONLY if read_only else REGISTER_DEFAULT
    pins = Pins(registrar, read_only)
    begun = time.monotonic()
    try:
        for offset, nbytes in spans:
            code = registrar.register(address + offset, nbytes, flags)
            if code:
                raise _refusal(registrar, code, offset, nbytes, sum(n for _, n in spans))
            pins.addresses.append(address + offset)
            pins.nbytes += nbytes
            on_bytes(nbytes)
    except BaseException:
        pins.undo()
        raise
    pins.seconds = time.monotonic() - begun
    return pins


def _refusal(registrar: Registrar, code: int, offset: int, nbytes: int, total: int) -> PinningError:
    return PinningError(
        f"CUDA refused to register {gib(nbytes)} at {gib(offset)} of {gib(total)}: "
        f"{registrar.explain(code)} ({code})",
        expected="page-locked memory to be allowed for the whole arena",
        hint=HINTS.get(code, "see dmesg; a smaller shared_cpu_weight_register_chunk_mb may help"),
        offset=offset,
        nbytes=nbytes,
        code=code,
    )
