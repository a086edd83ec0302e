"""Starts `python -m shared_offload.infer` again and again without importing libraries each time.

Reads one JSON object per line ({"argv", "cwd", "stdout", "stderr"}), forks a process that runs the
module as `-m` does, and answers with its exit code. What Python does after the exit functions is
left out: tearing down torch's modules takes a second.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import sys

import shared_offload.config
import shared_offload.pipeline.generate
import shared_offload.ranks.run  # noqa: F401
from shared_offload.pipeline import libraries


def become(job: dict) -> int:
    os.chdir(job["cwd"])
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["shared_offload.infer", *job["argv"]]
    try:
        runpy.run_module("shared_offload.infer", run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        assert isinstance(ending.code, int)
        return ending.code
    raise AssertionError("the module returned")


for library in libraries.HOMES:
    getattr(libraries, library)
gc.collect()
gc.freeze()
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = become(json.loads(line))
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
    sys.stdout.flush()
