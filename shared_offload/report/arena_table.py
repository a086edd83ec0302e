"""Arenas as a table: what was allocated, where it is, how fast it came, what it saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

GIB, MIB = 1 << 30, 1 << 20


def arena_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line an arena, from plain values by name: hostname, scope, node, nbytes, node_nbytes,
    huge_nbytes, ranks, fill_seconds, fill_gb_per_second, registered, register_seconds,
    saved_nbytes, lender. Seconds of registration are those of the slowest rank. A weight server's
    own arenas have no ranks.
    """
    table = Table(title="Arenas in host memory", caption=_caption(rows), caption_justify="left")
    for name in ("host, scope", "ranks", "size", "pages", "filled", "registered"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            f"{row['hostname']}, {row['scope']}"
            + ("" if row["node"] is None else f", node {row['node']}"),
            _ranges(row["ranks"]),
            _size(row["nbytes"]),
            f"{_placement(row['node_nbytes'])}; {_page_size(row)}",
            row["lender"] or f"{row['fill_seconds']:.2f} s, {row['fill_gb_per_second']:.1f} GB/s",
            _registration(row),
        )
    return table


def _caption(rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(filter(None, (_saving(rows), _page_hint(rows))))


def _page_hint(rows: Sequence[Mapping[str, Any]]) -> str:
    """What 4 KiB pages cost: 4.6 GB/s of filling against 15 to 22 in 2 MiB pages (H200 host)."""
    if not any(row["nbytes"] >= GIB and not row["huge_nbytes"] for row in rows):
        return ""
    return (
        "2 MiB pages would load 3 to 5 times as fast from the page cache; as root:\n"
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    )


def _saving(rows: Sequence[Mapping[str, Any]]) -> str:
    if not any(row["ranks"] for row in rows):
        return ""
    saved = sum(row["saved_nbytes"] for row in rows)
    if not saved and all(row["lender"] for row in rows):
        return "Lent by a weight server: this run loaded nothing of it."
    if not saved:
        return "No memory saved: every rank has a copy of its own."
    return f"{_size(saved)} of host memory saved against a copy for each rank."


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"


def _placement(node_nbytes: Mapping[int, int] | None) -> str:
    """`node 0`, or with shares where there are several; "unknown" where the kernel is mute."""
    if not node_nbytes:
        return "unknown"
    total = sum(node_nbytes.values())
    if len(node_nbytes) == 1:
        return f"node {next(iter(node_nbytes))}"
    return ", ".join(f"node {n} {100 * b / total:.1f} %" for n, b in node_nbytes.items())


def _page_size(row: Mapping[str, Any]) -> str:
    share = min(1.0, row["huge_nbytes"] / row["nbytes"]) if row["nbytes"] else 0.0
    if share == 0:
        return "4 KiB pages"
    return "2 MiB pages" if share > 0.995 else f"2 MiB pages {100 * share:.0f} %, rest 4 KiB"


def _registration(row: Mapping[str, Any]) -> str:
    if not row["register_seconds"]:
        return str(row["registered"])
    return f"{row['registered']}, {row['register_seconds']:.2f} s"


def _ranges(ranks: Sequence[int]) -> str:
    """0-3,6 for 0, 1, 2, 3, 6."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
