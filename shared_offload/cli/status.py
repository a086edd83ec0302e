"""`shared-offload status`: weight servers and arenas of this host, and who is attached."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared_offload.errors import OffloadError
from shared_offload.memory.limits import gib
from shared_offload.report.progress import clock
from shared_offload.report.tables import print_table
from shared_offload.server.census import arenas
from shared_offload.server.client import places, send

COMMAND_WIDTH = 60


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command."""
    parser = subparsers.add_parser(
        "status",
        help="list weight servers and arenas of this host",
        description="Weight servers of this user, and all arenas of this IPC namespace that can be "
        "recognised, with the processes that are attached. Looks only; other programs' segments "
        "are left alone.",
    )
    parser.add_argument("--socket_folder", type=Path, help="look for a server here only")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what there is; always 0."""
    servers = [found for place in places(args.socket_folder) if (found := look(place))]
    rows = merge(servers)
    if args.json:
        sys.stdout.write(json.dumps({"servers": servers, "arenas": rows}, indent=2) + "\n")
        return 0
    console = Console(file=sys.stdout, markup=False, highlight=False)
    for server in servers:
        console.print(_sentence(server), soft_wrap=True)
    if not servers:
        console.print("no weight server")
    if rows:
        print_table(_table(rows), console)
    else:
        console.print("no arenas")
    return 0


def look(place: Path) -> dict[str, Any] | None:
    """The server in a folder and its arenas; `problem` where it does not answer."""
    found: dict[str, Any] = {"folder": str(place), "arenas": []}
    try:
        connection = send(place, {"op": "status"})
        if connection is None:
            return None
        with connection:
            found |= connection.receive()["server"]
            while "arena" in (message := connection.receive()):
                found["arenas"].append(message["arena"])
    except OffloadError as error:
        found["problem"] = error.what
    return found


def merge(servers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per arena: what servers say of theirs, and what /proc shows of all."""
    told = {
        arena["segment_id"]: {**arena, "server": server["pid"]}
        for server in servers
        for arena in server["arenas"]
        if arena["segment_id"] is not None
    }
    rows = []
    for seen in arenas(told):
        plain = dict.fromkeys(("path", "scope", "node", "server", "done"))
        rows.append(
            {
                **plain,
                "nbytes": seen.nbytes,
                "state": "sealed" if seen.sealed else "filling",
                "begun": seen.begun,
                **told.get(seen.segment_id, {}),
                "segment_id": seen.segment_id,
                "holders": [{"pid": h.pid, "command": h.command} for h in seen.holders],
                "attached": seen.attached,
            }
        )
    return rows


def _sentence(server: dict[str, Any]) -> str:
    if "problem" in server:
        return f"weight server in {server['folder']}: {server['problem']}"
    age = clock(time.time() - server["begun"])
    return f"weight server with pid {server['pid']} in {server['folder']}, for {age}"


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Arenas of this host")
    for name in ("model", "scope", "size", "state", "age", "attached"):
        table.add_column(name, overflow="fold")
    for row in rows:
        scope = row["scope"] or ""
        table.add_row(
            row["path"] or "of a run",
            scope if row["node"] is None else f"{scope}, node {row['node']}",
            gib(row["nbytes"]),
            row["state"]
            + (
                f", {row['done'] * 100 // row['nbytes']} %"
                if row["state"] == "filling" and row["done"]
                else ""
            ),
            clock(time.time() - row["begun"]),
            _attached(row),
        )
    return table


def _attached(row: dict[str, Any]) -> str:
    lines = []
    for holder in row["holders"]:
        role = "server " if holder["pid"] == row["server"] else ""
        lines.append(f"{role}{holder['pid']} {holder['command'][:COMMAND_WIDTH]}")
    unseen = row["attached"] - len(row["holders"])
    return "\n".join([*lines, f"{unseen} more"] if unseen > 0 else lines)
