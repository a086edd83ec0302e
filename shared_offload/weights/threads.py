"""How many threads a piece of work gets, and an operation of torch on the CPU for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def usable_threads(most: int) -> int:
    """One for each CPU that this thread may run on, and at most `most`."""
    return min(most, len(os.sched_getaffinity(0)))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """The calling thread splits operations over `count`, and so do threads that begin meanwhile.

    One is for work that has threads of its own: a team of torch's meets after each operation, and
    all wait for the member whose core another thread has taken.
    """
    team = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(team)
