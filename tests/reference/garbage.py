"""Collections of garbage without what imports made."""

from __future__ import annotations

import gc

from shared_offload.pipeline import libraries


def freeze_imports() -> None:
    """Every request ends with a collection, which would look at all of it: 0.3 s."""
    for name in libraries.HOMES:
        getattr(libraries, name)
    gc.collect()
    gc.freeze()
