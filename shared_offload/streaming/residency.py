"""Which blocks stay on the device for a run, so that they are copied once and not every step.

Invariant: a choice depends on nothing but its arguments, so all ranks with equal GPUs choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from shared_offload.errors import StreamError
from shared_offload.streaming.slots import resident_nbytes
from shared_offload.weights.layout import Unit

ResidentBlocks = int | Literal["auto"]

# Left free by "auto": what one step of the same shape may need beyond the one that was observed
# (fragments of torch's memory pool, workspaces that libraries allocate late).
HEAD_ROOM_NBYTES = 2 << 30


def spread(units: Sequence[Unit], blocks: int) -> tuple[Unit, ...]:
    """The units of `blocks` blocks, evenly spread over the pass so that copies never bunch up."""
    total = _num_blocks(units)
    if not 0 <= blocks <= total:
        raise StreamError(
            f"resident_blocks is {blocks}",
            expected=f"0 to {total}, the number of blocks",
            found=blocks,
        )
    return tuple(u for u in units if (u.block + 1) * blocks // total > u.block * blocks // total)


def fitting_blocks(units: Sequence[Unit], free_nbytes: int) -> int:
    """How many blocks fit into free memory with head room left."""
    total = _num_blocks(units)
    block_nbytes = resident_nbytes([unit for unit in units if unit.block == units[0].block])
    return max(0, min(total, (free_nbytes - HEAD_ROOM_NBYTES) // block_nbytes))


def _num_blocks(units: Sequence[Unit]) -> int:
    return units[-1].block + 1
