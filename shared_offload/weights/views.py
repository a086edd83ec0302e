"""Tensors over the bytes of a unit. Nothing is copied; a view lives only as long as its buffer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shared_offload.weights.layout import Unit

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}


def views(unit: Unit, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The unit's tensors inside `buffer`, by their names in the block.

    `buffer` is 1-D uint8 on any device, at least `unit.nbytes` long, and holds the unit from its
    first byte on; kernels expect it to start at a multiple of 256 bytes.
    """
    if buffer.dtype != torch.uint8 or buffer.ndim != 1 or buffer.numel() < unit.nbytes:
        raise ValueError(
            f"unit {unit.index} needs a 1-D uint8 buffer of {unit.nbytes} bytes, "
            f"got {tuple(buffer.shape)} {buffer.dtype}"
        )
    return {
        t.name: buffer[t.offset : t.offset + t.nbytes].view(TORCH_DTYPES[t.dtype]).view(t.shape)
        for t in unit.tensors
    }
