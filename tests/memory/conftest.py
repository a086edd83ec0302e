"""Ranks as real processes: `crew` starts them, follows their events, and sees that all end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).parent / "driver.py"
GONE_SECONDS = 10.0


class Rank:
    """One child process and what it said."""

    def __init__(self, spec: dict[str, Any], prefix: tuple[str, ...] = ()) -> None:
        self.events: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(DRIVER), json.dumps(spec)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._said:
                self.events.append(json.loads(line))
                self._said.notify_all()
        with self._said:
            self._said.notify_all()

    def find(self, event: str) -> dict[str, Any] | None:
        return next((e for e in self.events if e["event"] == event), None)

    def wait_for(self, event: str, seconds: float = 60) -> dict[str, Any]:
        def known() -> bool:
            return self.find(event) is not None or self.process.poll() is not None

        with self._said:
            deadline = time.monotonic() + seconds
            while not known() and time.monotonic() < deadline:
                self._said.wait(0.1)
        found = self.find(event)
        assert found is not None, f"no {event!r} of {self.events}; {self.end()}"
        return found

    def kill(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def end(self, seconds: float = GONE_SECONDS) -> tuple[int, str]:
        """(exit status, stderr); fails when the process outlives `seconds`."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"still there after {seconds} s: {self.events}")
        self._reader.join()
        if not self.process.stderr.closed:
            with self.process.stderr:
                self.stderr = self.process.stderr.read()
            self.process.stdout.close()
        return self.process.returncode, self.stderr

    @property
    def peak(self) -> int:
        """High-water mark of the resident set, in bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", text).group(1)) << 10

    @property
    def pss(self) -> int:
        """Proportional set size in bytes: shared pages count by their share."""
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        return next(int(li.split()[1]) << 10 for li in text.splitlines() if li.startswith("Pss:"))


class Crew(list[Rank]):
    """The ranks of one run, with the folder they talk through."""

    folder: Path

    def finish(self) -> None:
        (self.folder / "finish").touch()

    def wait_for(self, event: str) -> list[dict[str, Any]]:
        return [rank.wait_for(event) for rank in self]

    def claimed(self) -> None:
        """Return once every rank has published what it asks for."""
        while len(list(self.folder.glob("*claim*"))) < len(self):
            time.sleep(0.002)


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    """`crew(world, per_rank={1: {...}}, prefix={1: (...)}, **spec)` starts a run."""
    started: list[Crew] = []

    def start(
        world: int,
        per_rank: dict[int, dict[str, Any]] | None = None,
        prefix: dict[int, tuple[str, ...]] | None = None,
        **spec: object,
    ) -> Crew:
        new = Crew()
        new.folder = tmp_path / f"run{len(started)}"
        new.folder.mkdir()
        started.append(new)
        for rank in range(world):
            common = {"folder": str(new.folder), "rank": rank, "world": world, **spec}
            own = {**common, **(per_rank or {}).get(rank, {})}
            new.append(Rank(own, (prefix or {}).get(rank, ())))
        return new

    yield start
    for run in started:
        for rank in run:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.end()
