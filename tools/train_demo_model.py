"""Train the demo model and write it as Wan folders; see docs/demo-model.md.

python tools/train_demo_model.py --out assets/demo --minutes 16
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tools.train_demo.main import main

    main()
