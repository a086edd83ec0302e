"""`python -m shared_offload.cli`, for where the entry point is not installed."""

from __future__ import annotations

import sys

from shared_offload.cli import main

if __name__ == "__main__":
    sys.exit(main())
