"""The exception tree. Everything that a user can cause is one of these.

    OffloadError
    |- ConfigError        a flag or a JSON key
    |- CheckpointError    a file of weights
    |- PreflightError     what the host has, against what the run needs
    |- ArenaError         a region of host memory: create, attach, fill, close
    |- NumaError          placement of pages on NUMA nodes
    |- PinningError       registration with CUDA
    |- StreamError        moving weights to the GPU
    |- RankError          processes: start, rendezvous, loss of one
    |- InputError         a picture or a prompt
    |- OutputError        the video file
    `- Problems           several of the above, found together

An error says what is wrong with both values, then what was expected, then a hint. Its facts stay
available as fields, so that callers (and tests) compare values and not sentences. Errors cross
process borders as JSON: `to_json` and `from_json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import ClassVar


class OffloadError(Exception):
    """Base of all errors that a user can cause.

    `what` is one sentence with the offending values, `expected` one on what would be right,
    `hint` one thing to do. `facts` are the values themselves (JSON types).
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, expected: str = "", hint: str = "", **facts: object) -> None:
        super().__init__(what)
        self.what = what
        self.expected = expected
        self.hint = hint
        self.facts = facts

    def __str__(self) -> str:
        sentence = f"{type(self).__name__}: {self.what}"
        if self.expected:
            sentence += f"; expected {self.expected}"
        return f"{sentence}\nhint: {self.hint}" if self.hint else sentence

    def __reduce__(self) -> tuple[object, ...]:
        return (from_json, (self.to_json(),))

    def to_json(self) -> str:
        """This error as one JSON object; the inverse of `from_json`."""
        return json.dumps(
            {
                "type": type(self).__name__,
                "what": self.what,
                "expected": self.expected,
                "hint": self.hint,
                "facts": self.facts,
            },
            default=str,
        )


class ConfigError(OffloadError):
    """A flag or a JSON key has a value that cannot work. Facts: key, found."""

    exit_code = 2


class CheckpointError(OffloadError):
    """A checkpoint file is missing, broken or not what the settings say. Facts: path, name."""


class PreflightError(OffloadError):
    """The host lacks what the run needs. Facts: needed, found."""


class ArenaError(OffloadError):
    """A region of host memory could not be created, attached, filled or closed."""


class NumaError(OffloadError):
    """Pages cannot be placed, or are not, where the policy says. Facts: node."""


class PinningError(OffloadError):
    """CUDA refused to register host memory. Facts: offset, nbytes, code."""


class StreamError(OffloadError):
    """Weights could not be moved to the GPU, or were borrowed out of order."""


class RankError(OffloadError):
    """A rank could not start, or was lost. Facts: rank, stage."""


class InputError(OffloadError):
    """A picture or a prompt cannot be used. Facts: path."""

    exit_code = 2


class OutputError(OffloadError):
    """The video cannot be written. Facts: path."""


class Problems(OffloadError):  # noqa: N818 - it is several errors
    """Several errors found together; `errors` holds them in the order found."""

    def __init__(self, errors: Iterable[OffloadError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))
        self.exit_code = max((error.exit_code for error in self.errors), default=1)  # type: ignore[misc]

    def __str__(self) -> str:
        if len(self.errors) == 1:
            return str(self.errors[0])
        listing = "\n".join(f"{n}. {error}" for n, error in enumerate(self.errors, 1))
        return f"{len(self.errors)} problems:\n{listing}"

    def to_json(self) -> str:
        """This error as one JSON object; the inverse of `from_json`."""
        return json.dumps({"type": "Problems", "errors": [e.to_json() for e in self.errors]})


def raise_all(errors: Iterable[OffloadError]) -> None:
    """Raise nothing for no errors, the error itself for one, `Problems` for several."""
    found = list(errors)
    if len(found) == 1:
        raise found[0]
    if found:
        raise Problems(found)


def from_json(text: str) -> OffloadError:
    """The error that `to_json` wrote, of its own type; an unknown type becomes the base."""
    raw = json.loads(text)
    if raw["type"] == "Problems":
        return Problems(from_json(error) for error in raw["errors"])
    types = {cls.__name__: cls for cls in OffloadError.__subclasses__()}
    cls = types.get(raw["type"], OffloadError)
    return cls(raw["what"], expected=raw["expected"], hint=raw["hint"], **raw["facts"])
