"""Tensors between ranks beyond what the model exchanges: to the first, and to neighbours.

Tensors travel as bytes, so every dtype passes through every backend. Each function is one
all-to-all with unequal parts, the one collective that gloo and NCCL both have for this. Counts are
known to all ranks beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

# Into one tensor. torch 2.13 renamed it and warns about the old name, the only one that 2.11 has.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def gather_equal(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Collective over `group`. The tensors of its ranks, alike in shape and dtype, in its order."""
    mine = tensor.contiguous()
    received = mine.new_empty(dist.get_world_size(group), *mine.shape)
    all_gather(as_bytes(received), as_bytes(mine), group=group)
    return list(received.unbind(0))


def collect(tensor: Tensor, shapes: Sequence[Sequence[int]], rank: int) -> list[Tensor]:
    """Collective over all ranks. On rank 0 the tensor of each, of these shapes; elsewhere none.

    One dtype. Peak memory on rank 0: all of them, and a copy of its own.
    """
    sizes = [math.prod(shape) * tensor.itemsize for shape in shapes]
    outgoing = [tensor.nbytes] + [0] * (len(shapes) - 1)
    incoming = sizes if rank == 0 else [0] * len(shapes)
    parts = _all_to_all(as_bytes(tensor.contiguous()), outgoing, incoming)
    if rank:
        return []
    return [part.view(tensor.dtype).view(*s) for part, s in zip(parts, shapes, strict=True)]


def swap_edges(first: Tensor, last: Tensor, rank: int, chain: int) -> tuple[Tensor, Tensor]:
    """Collective over all ranks, of which the first `chain` are in a row, each beside the next.

    Gives `first` to the rank before and `last` to the one after; all are alike in shape. Returns
    what those gave: the last of the rank before and the first of the one after; zeros at the ends
    of the row. Ranks behind the row pass anything and get zeros.
    """
    world = dist.get_world_size()
    before = rank - 1 if 0 < rank < chain else None
    after = rank + 1 if rank + 1 < chain else None
    sizes = [first.nbytes if other in (before, after) else 0 for other in range(world)]
    given = [t for t, other in ((first, before), (last, after)) if other is not None]
    flat = [as_bytes(t.contiguous()) for t in given]
    send = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=first.device)
    parts = _all_to_all(send, sizes, sizes)

    def got(other: int | None) -> Tensor:
        if other is None:
            return torch.zeros_like(first)
        return parts[other].view(first.dtype).view(first.shape)

    return got(before), got(after)


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as one row of bytes; the same memory."""
    return tensor.view(-1).view(torch.uint8)


def _all_to_all(send: Tensor, outgoing: list[int], incoming: list[int]) -> list[Tensor]:
    received = send.new_empty(sum(incoming))
    dist.all_to_all_single(received, send, incoming, outgoing)
    return list(torch.split(received, incoming))
