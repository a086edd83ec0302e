"""The table of arenas, read back as text."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from shared_offload.report.arena_table import arena_table

GIB = 1 << 30
ROW: dict[str, Any] = {
    "hostname": "gpu1",
    "scope": "numa",
    "node": 1,
    "nbytes": 15 * GIB,
    "node_nbytes": {1: 15 * GIB + 4096},
    "huge_nbytes": 15 * GIB,
    "ranks": (0, 1, 2, 6),
    "fill_seconds": 1.5,
    "fill_gb_per_second": 10.7,
    "registered": "read-only flag",
    "register_seconds": 0.84,
    "saved_nbytes": 45 * GIB,
    "lender": "",
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ["numa, node 1", "0-2,6", "15.00 GiB", "2 MiB", "10.7 GB/s", "flag, 0.84 s"]),
        ({}, ["45.00 GiB of host memory saved"]),
        ({"node": None, "scope": "host", "nbytes": 3 << 20}, ["gpu1, host", "3.0 MiB"]),
        ({"node_nbytes": {0: 3 * GIB, 1: 12 * GIB}}, ["node 0 20.0 %, node 1 80.0 %"]),
        ({"node_nbytes": None}, ["unknown"]),
        ({"huge_nbytes": 3 * GIB}, ["2 MiB pages 20 %, rest 4 KiB"]),
        ({"huge_nbytes": 0}, ["node 1; 4 KiB pages", "echo advise"]),
        ({"lender": "weight server, pid 7"}, ["weight server, pid 7"]),
        ({"lender": "server", "saved_nbytes": 0}, ["Lent by a weight server"]),
        ({"saved_nbytes": 0}, ["No memory saved"]),
        ({"registered": "not registered", "register_seconds": 0.0}, ["not registered"]),
    ],
)
def test_a_row(
    change: dict[str, Any], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Console(width=200).print(arena_table([{**ROW, **change}]))
    text = capsys.readouterr().out
    assert all(part in text for part in expected), text
