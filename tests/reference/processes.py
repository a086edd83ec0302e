"""Programs on several ranks, as real processes, with or without torchrun."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.reference.preloaded"])


def import_path() -> str:
    """PYTHONPATH of a child: this checkout before what the parent was given."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def become(given: dict) -> None:
    """Become a process as torchrun would have started it."""
    sys.argv = given["ARGV"]
    os.environ.update(given["ENVIRONMENT"])
    os.dup2(os.open(given["STDERR"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)


class Run:
    """N ranks of a driver, a script that writes pid<rank> to `folder`, and what they print.

    Without torchrun they are forked from a process that has imported torch and more already, which
    saves seconds for each. Such a driver runs as module "forked" and calls `become`.
    """

    def __init__(
        self, driver: Path, arguments: Sequence[str], folder: Path, world: int, torchrun: bool
    ) -> None:
        self.folder, self.world = folder, world
        self.arguments = [str(driver), *arguments]
        self.processes: list[subprocess.Popen | multiprocessing.Process] = []
        if torchrun:
            self.processes.append(self._launcher())
        else:
            port = str(free_port())
            # CUDA cannot be used after a fork from a process that has counted its devices, and
            # libraries count them when they are imported.
            begin = self._begun if torch.cuda.is_available() else self._forked
            self.processes += [begin(rank, port) for rank in range(world)]

    def _launcher(self) -> subprocess.Popen:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.world}"]
        environment = dict(os.environ, PYTHONPATH=import_path(), OMP_NUM_THREADS="1")
        with (self.folder / "stderr-launcher").open("w") as stderr:
            command = [sys.executable, *launch, *self.arguments]
            return subprocess.Popen(command, env=environment, stderr=stderr, cwd=self.folder)

    def _environment(self, rank: int, port: str) -> dict[str, str]:
        mine = {"RANK": rank, "LOCAL_RANK": rank}
        mine |= {"WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world}
        mine |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return {name: str(value) for name, value in mine.items()}

    def _begun(self, rank: int, port: str) -> subprocess.Popen:
        environment = dict(os.environ, PYTHONPATH=import_path(), **self._environment(rank, port))
        with (self.folder / f"stderr-{rank}").open("w") as stderr:
            command = [sys.executable, *self.arguments]
            return subprocess.Popen(command, env=environment, stderr=stderr, cwd=self.folder)

    def _forked(self, rank: int, port: str) -> multiprocessing.Process:
        given = {
            "ARGV": self.arguments,
            "ENVIRONMENT": self._environment(rank, port),
            "STDERR": str(self.folder / f"stderr-{rank}"),
        }
        arguments = (self.arguments[0], {"GIVEN": given}, "forked")
        process = CONTEXT.Process(target=runpy.run_path, args=arguments, daemon=True)
        process.start()
        return process

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 60
        while not all((self.folder / f"ready{r}").exists() for r in range(self.world)):
            assert time.monotonic() < deadline, self.stderr()
            time.sleep(0.02)
        time.sleep(0.3)  # into the collective that never ends

    def pids(self) -> list[int]:
        return [int((self.folder / f"pid{r}").read_text()) for r in range(self.world)]

    def end(self, within: float) -> list[int]:
        """Exit codes; fails when a process outlives `within` seconds."""
        deadline = time.monotonic() + within
        codes = [self._wait(process, deadline - time.monotonic()) for process in self.processes]
        missing = [r for r in range(self.world) if not (self.folder / f"pid{r}").exists()]
        assert not missing, f"ranks {missing} ended before they began\n{self.stderr()}"
        for pid in self.pids():
            assert not Path(f"/proc/{pid}").exists(), f"process {pid} is left"
        return codes

    def _wait(self, process: subprocess.Popen | multiprocessing.Process, seconds: float) -> int:
        if isinstance(process, subprocess.Popen):
            return process.wait(max(0.01, seconds))
        process.join(max(0.01, seconds))
        assert process.exitcode is not None, f"process {process.pid} still runs\n{self.stderr()}"
        return process.exitcode

    def stderr(self) -> str:
        return "".join(p.read_text() for p in sorted(self.folder.glob("stderr-*")))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            self._wait(process, 10)
        for path in self.folder.glob("pid*"):
            if Path(f"/proc/{path.read_text()}").exists():
                os.kill(int(path.read_text()), signal.SIGKILL)
