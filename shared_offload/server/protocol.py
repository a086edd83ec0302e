"""Messages between a weight server and its peers: one JSON object per line.

Each carries the protocol's version; none is longer than `MOST_NBYTES`. Whatever a peer sends either
becomes a message here or an ArenaError.
"""

from __future__ import annotations

import json
from typing import Any

from shared_offload.errors import ArenaError

Message = dict[str, Any]

VERSION = 1
MOST_NBYTES = 64 << 10


def encode(message: Message) -> bytes:
    """One line. ArenaError when it would be too long to be read."""
    line = json.dumps({"v": VERSION, **message}).encode() + b"\n"
    if len(line) > MOST_NBYTES:
        raise ArenaError(
            f"a message to or from the weight server has {len(line)} bytes",
            expected=f"at most {MOST_NBYTES}",
        )
    return line


def decode(line: bytes) -> Message:
    """The message in a line; ArenaError for anything else, and for another version."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ArenaError("what came over the weight server's socket is not JSON") from error
    if not isinstance(message, dict):
        raise ArenaError(f"a message to or from the weight server is a {type(message).__name__}")
    if message.get("v") != VERSION:
        raise ArenaError(
            f"the weight server and its peer speak different versions: {message.get('v')!r} and "
            f"{VERSION}",
            hint="restart the server with the installed version of shared_offload",
        )
    return message


def text(message: Message, name: str) -> str:
    """A string of a message; ArenaError when it is missing or something else."""
    value = message.get(name)
    if not isinstance(value, str):
        raise ArenaError(f"{name} is {value!r} in a message", expected="a string")
    return value


def node(message: Message) -> int | None:
    """A NUMA node of a message, or null."""
    value = message.get("node")
    if value is None or type(value) is int:
        return value
    raise ArenaError(f"node is {value!r} in a message", expected="a number or null")
