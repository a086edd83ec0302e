"""The branches of a request: embedded prompts and picture, and room for what steps repeat.

Keys and values over text and image are the same in every step. Kept, they save 12 products a block
and branch; at 14B they take 0.63 GB a branch (image-to-video, 512 + 257 rows).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared_offload.memory.limits import read_limits
from shared_offload.model.dit import Branch, Dit

# Of the free memory of the device, at most, for what only saves time. A step needs more than this
# leaves only where it would hardly have fitted without.
SHARE_FOR_MEMOS = 0.1


def make_branches(dit: Dit, texts: Sequence[Tensor], features: Tensor | None) -> list[Branch]:
    """One branch for each prompt's rows; all get memos, or none where memory is short.

    `features` are CLIP's, for image-to-video. Call it with the DiT's weights in their places.
    """
    image = None if features is None else dit.embed_image(features)
    rows = 0 if image is None else image.shape[0]
    room = SHARE_FOR_MEMOS * _free_nbytes(dit.device)
    keep = len(texts) * dit.memo_nbytes(rows) <= room
    return [dit.make_branch(text, image, keep=keep) for text in texts]


def _free_nbytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = read_limits()
    return min(limits.available, limits.cgroup_available or limits.available)
