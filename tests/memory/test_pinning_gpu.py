"""Registration with real CUDA: both ways, content, speed, and errors that do not stick."""

from __future__ import annotations

import sys

import pytest
import torch

from shared_offload.bench.register import BLOCK_NBYTES, WritableRegistrar, measure
from shared_offload.memory import numa
from shared_offload.memory.arena import attach, create, seal
from shared_offload.memory.board import LocalBoard
from shared_offload.memory.domain import Scope
from shared_offload.memory.lifecycle import open_arena
from shared_offload.memory.pinning import CudaRegistrar
from shared_offload.memory.request import ArenaRequest, Party
from shared_offload.memory.tensor import as_tensor
from shared_offload.ranks.facts import member_facts

pytestmark = pytest.mark.gpu
MIB = 1 << 20
NBYTES = 256 * MIB


@pytest.fixture
def cuda() -> None:
    torch.cuda.init()
    torch.zeros(1, device="cuda")


def fill(dest, on_bytes, cpus, stop) -> None:
    content = torch.frombuffer(dest, dtype=torch.uint8)
    content.copy_(torch.arange(len(dest), dtype=torch.int64).mul_(31).to(torch.uint8))
    on_bytes(len(dest))


def open_with(registrar: CudaRegistrar):
    request = ArenaRequest(
        nbytes=NBYTES,
        fingerprint="gpu",
        boundaries=range(0, NBYTES, 32 * MIB),
        scope=Scope.RANK,
        strict_numa=False,
        register_chunk_nbytes=64 * MIB,
    )
    return open_arena(
        request, Party(member_facts(0), numa.own_node(), 1, LocalBoard()), fill, registrar
    )


@pytest.mark.parametrize("kind", [CudaRegistrar, WritableRegistrar])
def test_registered_content_arrives(cuda: None, kind: type[CudaRegistrar]) -> None:
    registrar = kind(0)
    arena = open_with(registrar)
    (report,) = arena.reports()
    flagged = kind is CudaRegistrar and registrar.read_only_supported
    sys.stdout.write(
        f"\n{kind.__name__}: read-only supported {registrar.read_only_supported}, {report}"
    )
    assert report.registered == ("read-only flag" if flagged else "registered, then protected")
    host = as_tensor(arena)
    assert host.is_pinned()
    # A unit within one registration, and one that ends with the arena.
    for start, stop in ((32 * MIB, 64 * MIB), (NBYTES - 32 * MIB, NBYTES)):
        device = torch.empty(stop - start, dtype=torch.uint8, device="cuda")
        device.copy_(host[start:stop], non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(device.cpu(), host[start:stop])
    arena.close()
    assert not host.is_pinned() and int(host[1]) == 31  # still mapped, no longer registered
    torch.zeros(4, device="cuda").add_(1).cpu()  # nothing sticks


def test_a_refusal_does_not_stick(cuda: None) -> None:
    registrar = CudaRegistrar(0)
    ticket, mapping = create(4 * MIB, "gpu")
    mapping.view()[:] = bytes(4 * MIB)
    seal(mapping, ticket)
    other = attach(ticket, read_only=True)
    code = registrar.register(other.address, 4 * MIB, 0)  # read-only memory without the flag
    assert code != 0
    sys.stdout.write(f"\nread-only memory with flag 0: {code}, {registrar.explain(code)}")
    assert torch.zeros(4, device="cuda").add_(1).cpu().tolist() == [1.0] * 4
    assert registrar.unregister(other.address) != 0  # it is not registered
    assert torch.zeros(4, device="cuda").add_(1).cpu().tolist() == [1.0] * 4
    other.release()
    mapping.release()


@pytest.mark.parametrize("way", ["read-only", "writable"])
def test_processes_copy_at_the_speed_of_pinned_memory(way: str) -> None:
    nbytes = 4 * BLOCK_NBYTES
    results, (arena,) = measure(processes=3, nbytes=nbytes, chunk_nbytes=1 << 30, device=0, way=way)
    for result in results:
        sys.stdout.write(f"\n{way}: {result}, share {result.ratio:.3f}")
    assert all(result.equal for result in results)
    assert min(result.ratio for result in results) >= 0.97
    assert arena["ranks"] == [0, 1, 2]
    assert sum(result.host_nbytes for result in results) < 1.1 * nbytes
