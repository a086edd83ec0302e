"""`shared-offload COMMAND`: one module per command, listed here.

A command module offers `add_parser(subparsers)`, which sets `run` as the parser's default, and
`run(args) -> int`, the exit code. Data goes to stdout, everything else to stderr. Only the module
of the command that is asked for is imported, by name: `status` and `stop` need not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence

from shared_offload import __version__
from shared_offload.errors import OffloadError

COMMANDS = ("doctor", "synth", "convert", "serve-weights", "status", "stop", "bench")

INTERRUPTED = 130  # what a shell reports after Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors that a user can cause go to stderr."""
    words = sys.argv[1:] if argv is None else argv
    asked = next((word for word in words if not word.startswith("-")), None)
    args = build_parser([asked] if asked in COMMANDS else COMMANDS).parse_args(words)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except OffloadError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED


def build_parser(commands: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of these commands."""
    parser = argparse.ArgumentParser(
        prog="shared-offload",
        description="Tools around Wan 2.1 video generation with shared host weights.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        module = importlib.import_module(f"{__name__}.{command.replace('-', '_')}")
        module.add_parser(subparsers)
    return parser
