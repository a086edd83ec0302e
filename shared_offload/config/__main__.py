"""Write docs/configuration.md anew, or the file named as the only argument."""

from __future__ import annotations

import sys
from pathlib import Path

from shared_offload.config.document import write

if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/configuration.md"))
