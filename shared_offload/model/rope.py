"""Rotary position embedding over time, height and width.

Adjacent channels (2j, 2j+1) of a head are one complex number, which is turned by the angle

    position * 10000^(-2j / d)          d = channels of the axis, j = 0 .. d/2 - 1

Of a head's H channels, height and width get 2 * (H // 6) each and time, which comes first, the
rest: 44/42/42 channels, or 22/21/21 pairs, for Wan's 128. Positions count tokens from 0 on each
axis. Source: Wan 2.1's attention. Angles are made in fp64, where position 20000 would still be
right to 12 digits, and the tables kept in fp32.

Shape letters: B batch, L tokens on this rank, N heads, H head width, T latent frames, Y X token
rows and columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

THETA = 10000.0


class RopeTable(NamedTuple):
    """Cosine and sine of each token's angles, fp32 (1, L, 1, H/2)."""

    cos: Tensor
    sin: Tensor


def axis_channels(head_dim: int) -> tuple[int, int, int]:
    """Channels of a head that carry time, height and width."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def angles(grid: tuple[int, int, int], head_dim: int, device: torch.device) -> Tensor:
    """Angles of all tokens of a (T, Y, X) grid, fp64 (T*Y*X, H/2); T is the slowest axis."""
    per_axis = []
    for axis, (size, width) in enumerate(zip(grid, axis_channels(head_dim), strict=True)):
        even = torch.arange(0, width, 2, dtype=torch.float64, device=device)
        position = torch.arange(size, dtype=torch.float64, device=device)
        angle = torch.outer(position, THETA ** (-even / width))
        shape = [1, 1, 1, angle.shape[1]]
        shape[axis] = size
        per_axis.append(angle.view(shape).expand(*grid, -1))
    return torch.cat(per_axis, dim=-1).flatten(0, 2)


def rotate(x_BLNH: Tensor, table: RopeTable) -> Tensor:
    """Each pair of channels turned by its token's angle; fp32 in, fp32 out."""
    real, imaginary = x_BLNH.reshape(*x_BLNH.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack(
        (
            real * table.cos - imaginary * table.sin,
            real * table.sin + imaginary * table.cos,
        ),
        dim=-1,
    )
    return turned.flatten(-2)
