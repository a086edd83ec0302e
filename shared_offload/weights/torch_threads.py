"""How many threads an operation of torch on the CPU is split over, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Operations run in the thread that calls them, as those of threads that begin meanwhile do.

    For work that has threads of its own. A team of torch's meets after each operation, and all wait
    for the member whose core another thread has taken.
    """
    team = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(team)
