"""Programs on several ranks, as real processes, with or without torchrun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("driver.py")
ROOT = DRIVER.parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Run:
    """N processes of the driver and what they wrote."""

    def __init__(self, folder: Path, what: str, who: int, world: int, torchrun: bool) -> None:
        self.folder, self.world = folder, world
        self.arguments = [str(DRIVER), what, str(who), str(folder)]
        environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        if torchrun:
            launch = ["-m", "torch.distributed.run", f"--nproc_per_node={world}"]
            launch.append(f"--master_port={free_port()}")
            self.processes = [self._start("launcher", launch, environment)]
        else:
            port = str(free_port())
            self.processes = [
                self._start(str(r), [], self._rank(environment, r, port)) for r in range(world)
            ]

    def _rank(self, environment: dict[str, str], rank: int, port: str) -> dict[str, str]:
        mine = {"RANK": rank, "LOCAL_RANK": rank}
        mine |= {"WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world}
        mine |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return environment | {name: str(value) for name, value in mine.items()}

    def _start(self, name: str, launch: list[str], environment: dict[str, str]) -> subprocess.Popen:
        with (self.folder / f"stderr-{name}").open("w") as stderr:
            command = [sys.executable, *launch, *self.arguments]
            return subprocess.Popen(command, env=environment, stderr=stderr, cwd=self.folder)

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
        codes = [p.wait(max(0.01, deadline - time.monotonic())) for p in self.processes]
        for pid in self.pids():
            assert not Path(f"/proc/{pid}").exists(), f"process {pid} is left"
        return codes

    def stderr(self) -> str:
        return "".join(p.read_text() for p in sorted(self.folder.glob("stderr-*")))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for path in self.folder.glob("pid*"):
            if Path(f"/proc/{path.read_text()}").exists():
                os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(what: str, who: int = 0, world: int = 3, torchrun: bool = False) -> Run:
        runs.append(Run(tmp_path, what, who, world, torchrun))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()
