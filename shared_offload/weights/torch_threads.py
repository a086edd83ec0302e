"""How many threads an operation of torch on the CPU is split over, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
