"""`shared-offload COMMAND`: one module per command, listed here.

A command module offers `add_parser(subparsers)`, which sets `run` as the parser's default, and
`run(args) -> int`, the exit code. Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from shared_offload import __version__
from shared_offload.cli import bench, convert, doctor, serve_weights, status, stop, synth
from shared_offload.errors import OffloadError

COMMANDS = (doctor, synth, convert, serve_weights, status, stop, bench)

INTERRUPTED = 130  # what a shell reports after Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors that a user can cause go to stderr."""
    args = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except OffloadError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="shared-offload",
        description="Tools around Wan 2.1 video generation with shared host weights.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser
