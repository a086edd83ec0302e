"""An open arena as one tensor."""

from __future__ import annotations

import torch

from shared_offload.memory.lifecycle import HostArena


def as_tensor(arena: HostArena) -> torch.Tensor:
    """The content as a 1-D uint8 tensor, without a copy. A write through it is a SIGSEGV.

    The tensor and its views keep the memory mapped, also after `close`, but not registered.
    """
    return torch.frombuffer(arena.buffer, dtype=torch.uint8)
