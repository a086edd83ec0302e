"""Tables for people, in a terminal and in a log."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

UNBOUNDED = 10_000  # columns


def print_table(table: Table, console: Console) -> None:
    """Print it. Where no terminal ends lines, they are as long as cells ask for: none is cut."""
    if not console.is_terminal:
        unbounded = console.options.update(max_width=UNBOUNDED)
        console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table)
