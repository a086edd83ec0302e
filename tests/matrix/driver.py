"""One rank of the matrix: driver.py JOB.json, as torchrun starts it. All cases in one process.

For each case, a file made<rank>.pt says what came out: latents, the arenas of the run, a hash of
the arena's bytes as this rank sees them, and this rank's share of the shared pages.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from shared_offload.config import Settings
from shared_offload.pipeline.generate import Pipeline
from shared_offload.ranks.group import Ranks
from shared_offload.ranks.run import run_ranks
from shared_offload.ranks.watch import Watch
from tests.reference.garbage import freeze_imports
from tests.reference.processes import become

CPU = torch.device("cpu")


def arena_pages() -> dict[str, int]:
    """Bytes of SysV memory: mapped here, resident here, and this process's share of them."""
    found = {"Size": 0, "Rss": 0, "Pss": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in found and inside:
            found[name] += int(rest.split()[0]) << 10
        elif "-" in line.split()[0]:
            inside = "/SYSV" in line
    return found


def run_case(options: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    settings = Settings.from_json_and_flags(options, {})
    with Pipeline(settings, ranks=ranks) as pipeline:
        latents = pipeline.generate().latents
        dit = pipeline.runner.load_dit()
        arenas = pipeline.runner.describe().get("arenas", [])
        digest = None if dit.arena is None else hashlib.sha256(dit.arena.buffer).hexdigest()
        ranks.barrier()  # all are attached and have touched every page
        pages = arena_pages()
        ranks.barrier()
    return {"latents": latents, "arenas": arenas, "digest": digest, "pages": pages}


def program(watch: Watch) -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    folder, rank = Path(job["folder"]), watch.facts.rank
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    freeze_imports()
    made = {}
    seq = watch.facts.world_size
    with Ranks.start(watch.facts, CPU, seq_p_size=seq, timeout=120, watch=watch) as ranks:
        for name, options in job["cases"].items():
            made[name] = run_case({**options, "parallel": {"seq_p_size": seq}}, ranks)
        ranks.barrier()
    torch.save(made, folder / f"made{rank}.pt")
    return 0


if __name__ == "forked":
    become(globals()["GIVEN"])
if __name__ in ("__main__", "forked"):
    sys.exit(run_ranks(program))
