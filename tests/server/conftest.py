"""Weight servers and runs as real processes around one socket folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared_offload.server import client

DRIVER = Path(__file__).parent / "driver.py"


class Process:
    """One child and what it said."""

    def __init__(self, spec: dict[str, Any], prefix: tuple[str, ...] = ()) -> None:
        self.events: list[dict[str, Any]] = []
        self.finish = Path(spec["board"], "finish") if "board" in spec else None
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

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._said:
                self.events.append(json.loads(line))
                self._said.notify_all()
        with self._said:
            self._said.notify_all()

    def find(self, event: str) -> dict[str, Any] | None:
        return next((e for e in self.events if e["event"] == event), None)

    def lines(self) -> list[str]:
        return [e["text"] for e in self.events if e["event"] == "line"]

    def wait_for(self, event: str, seconds: float = 30) -> dict[str, Any]:
        with self._said:
            deadline = time.monotonic() + seconds
            while self.find(event) is None and time.monotonic() < deadline:
                if self.process.poll() is not None and not self._reader.is_alive():
                    break
                self._said.wait(0.05)
        found = self.find(event)
        assert found is not None, f"no {event!r} of {self.events}; {self.end()}"
        return found

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(signum)

    def end(self, seconds: float = 15) -> int:
        """Its exit status; fails when it outlives `seconds`, or said anything on stderr."""
        if self.finish is not None:
            self.finish.touch()
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
        assert self.stderr == "", self.stderr
        return self.process.returncode


class Stage:
    """A socket folder, and who is around it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "socket"
        self.processes: list[Process] = []

    def serve(self, *, wait: bool = True, prefix: tuple[str, ...] = (), **spec: Any) -> Process:
        """A server; with `wait`, its first order is filled."""
        server = self._start({"role": "serve", **spec}, prefix)
        if wait:
            server.wait_for("told")
        return server

    def run(self, *, prefix: tuple[str, ...] = (), **spec: Any) -> Process:
        """A run of one rank, or one rank of a run whose `board` is given."""
        if "board" not in spec:
            board = self.root / f"run{len(self.processes)}"
            board.mkdir()
            spec["board"] = str(board)
        return self._start(spec, prefix)

    def _start(self, spec: dict[str, Any], prefix: tuple[str, ...]) -> Process:
        process = Process({"folder": str(self.folder), **spec}, prefix)
        self.processes.append(process)
        return process

    def ask(self, **request: Any) -> client.Connection:
        connection = client.send(self.folder, request)
        assert connection is not None
        return connection

    def hold(self, **order: Any) -> dict[str, Any]:
        """Have the server hold one more model."""
        order = {"mib": 4, "pace": 0, "fault": "", **order}
        answer = client.hold(self.folder, order, lambda _: None)
        assert answer is not None
        return answer

    def until_listening(self) -> None:
        while not self.folder.exists() or "weights.sock" not in self.sockets():
            time.sleep(0.01)

    def until_filling(self) -> None:
        """A model is held a moment before its segment exists: until that is there too."""
        self.until_listening()
        while not any(segment is not None for segment in self.held().values()):
            time.sleep(0.01)

    def held(self) -> dict[str, int | None]:
        """Segments, where there are any yet, by the name of what the server holds."""
        with self.ask(op="status") as connection:
            connection.receive()
            found = {}
            while "arena" in (message := connection.receive()):
                found[message["arena"]["path"]] = message["arena"]["segment_id"]
            return found

    def sockets(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    for process in made.processes:
        if process.process.poll() is None:
            process.kill()
            process.kill(signal.SIGCONT)
        process.end()
