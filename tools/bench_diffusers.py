"""A step of diffusers' Wan DiT, in each of its ways to place weights, beside ours.

python tools/bench_diffusers.py --size 14b --task i2v --json figures.json
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tools.side_by_side.main import main

    sys.exit(main())
