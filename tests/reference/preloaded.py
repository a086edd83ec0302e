"""Imported once, by the process that ranks are forked from: all that a run imports, early or late.

The latter takes seconds, which each rank would spend again.
"""

from __future__ import annotations

import importlib

import shared_offload.infer  # noqa: F401
from shared_offload.pipeline.libraries import HOMES

for name, module in HOMES.items():
    getattr(importlib.import_module(module), name, None)  # transformers imports what is asked for
