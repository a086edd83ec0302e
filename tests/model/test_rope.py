"""Rotary embedding against complex numbers made one by one."""

from __future__ import annotations

import pytest
import torch

from shared_offload.model.rope import RopeTable, angles, axis_channels, rotate
from tests.reference import wan_dit

CPU = torch.device("cpu")


def test_wan_splits_its_pairs_22_21_21() -> None:
    assert axis_channels(128) == (44, 42, 42)
    assert axis_channels(24) == (8, 8, 8)
    assert axis_channels(16) == (8, 4, 4)


@pytest.mark.parametrize("head_dim", [16, 24, 128])
def test_rotation_equals_complex_multiplication(head_dim: int) -> None:
    grid, heads = (3, 2, 5), 2
    x = torch.randn(2, 30, heads, head_dim, generator=torch.Generator().manual_seed(0))
    angle = angles(grid, head_dim, CPU)
    assert angle.dtype == torch.float64
    table = RopeTable(*(part.float()[None, :, None] for part in (angle.cos(), angle.sin())))
    found = rotate(x, table)
    for row, turned in zip(x, found, strict=True):
        exact = wan_dit.rotate(row.flatten(1).double(), grid, heads)
        torch.testing.assert_close(turned.flatten(1).double(), exact, rtol=0, atol=1e-6)


def test_angles_keep_their_digits_far_out() -> None:
    angle = angles((1, 1, 20001), 128, CPU)
    exact = wan_dit.rotation((0, 0, 20000), 128)
    found = torch.polar(torch.ones(64, dtype=torch.float64), angle[20000])
    torch.testing.assert_close(
        found, torch.tensor(exact, dtype=torch.complex128), rtol=0, atol=1e-9
    )
