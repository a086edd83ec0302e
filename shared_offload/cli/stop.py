"""`shared-offload stop`: end this user's weight server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shared_offload.errors import ArenaError
from shared_offload.server.client import places, send


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command."""
    parser = subparsers.add_parser(
        "stop",
        help="end the weight server",
        description="Runs that are attached go on; their memory goes when the last of them ends.",
    )
    parser.add_argument("--socket_folder", type=Path, help="of the server, where it is not default")
    parser.add_argument("--wait", action="store_true", help="return when it has let go of all")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tell the server to end."""
    connection = send(args.socket_folder, {"op": "stop"})
    if connection is None:
        where = " or ".join(map(str, places(args.socket_folder)))
        raise ArenaError(f"no weight server listens in {where}", hint="nothing is to be stopped")
    with connection:
        pid = connection.receive()["server"]["pid"]
        if args.wait:
            connection.wait_for_end()
    sys.stderr.write(f"weight server with pid {pid}: {'ended' if args.wait else 'told to end'}\n")
    return 0
