"""Tables in a log, where nothing ends a line, and in a terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from shared_offload.report.progress import Progress
from shared_offload.report.tables import print_table

CELLS = [f"a cell of some length, number {number}" for number in range(8)]


def wide() -> Table:
    table = Table()
    for _ in CELLS:
        table.add_column("one of many columns", justify="right")
    table.add_row(*CELLS)
    return table


def test_a_log_has_every_cell_whole() -> None:
    first, second = io.StringIO(), io.StringIO()
    print_table(wide(), Console(file=first))
    Progress(stream=second).show(wide())
    for out in (first, second):
        [row] = [line for line in out.getvalue().splitlines() if "number 0" in line]
        assert all(cell in row for cell in CELLS)


def test_a_terminal_is_not_overrun() -> None:
    out = io.StringIO()
    print_table(wide(), Console(file=out, force_terminal=True, width=90, color_system=None))
    assert max(map(len, out.getvalue().splitlines())) <= 90
