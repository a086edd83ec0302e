"""Progress for a person: bars on a terminal, plain lines elsewhere, stage times at the end.

Everything goes to stderr; data goes elsewhere. A task always ends with one line (amount, seconds,
rate), in both forms and also when it fails. A disabled Progress (ranks other than 0) prints nothing
but still measures stages. A stream that cannot be written (a closed pipe) never ends a run.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TextColumn
from rich.progress import Progress as Bars
from rich.progress import Task as Bar
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shared_offload.report.tables import print_table

WorkUnit = Literal["B", "step", "it"]

SCALES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


class Task:
    """One measured piece of work, made by `Progress.task`. Any thread may call `advance`."""

    def __init__(
        self,
        title: str,
        total: float | None,
        unit: WorkUnit,
        *,
        on_advance: Callable[[Task], None] | None = None,
    ) -> None:
        self.title = title
        self.total = total
        self.unit = unit
        self.done = 0.0
        self.started = time.monotonic()
        self._lock = threading.Lock()
        self._on_advance = on_advance

    def advance(self, n: float = 1) -> None:
        """Count n more units as done. `advance(0)` only gives a due line its chance."""
        with self._lock:
            self.done += n
        if self._on_advance is not None:
            self._on_advance(self)

    @property
    def seconds(self) -> float:
        """Wall time since the task began."""
        return time.monotonic() - self.started

    def describe(self) -> str:
        """Amount, total, rate and time left, as far as they are known."""
        done, seconds = self.done, self.seconds
        parts = [amount(done, self.unit)]
        if self.total is not None:
            share = 100 * done / self.total if self.total else 100
            parts = [f"{amount(done, self.unit, of=self.total)} ({share:.0f} %)"]
        if done > 0:
            parts.append(rate(done, seconds, self.unit))
        if self.total is not None and 0 < done < self.total:
            parts.append(f"{clock(seconds * (self.total - done) / done)} left")
        return ", ".join(parts)

    def conclude(self, failed: bool) -> str:
        """The line that ends the task."""
        done, seconds = self.done, self.seconds
        if failed:
            return f"{self.title}: stopped at {self.describe()}, after {clock(seconds)}"
        ending = f" ({rate(done, seconds, self.unit)})" if done > 0 else ""
        return f"{self.title}: {amount(done, self.unit)} in {clock(seconds)}{ending}"


def amount(done: float, unit: WorkUnit, of: float | None = None) -> str:
    """`1.50 / 16.17 GB`, `12 / 40 steps`, or without a total `1.50 GB`."""
    if unit == "B":
        scale, name = next((s for s in SCALES if (of or done) >= s[0]), SCALES[-1])
        numbers = [f"{n / scale:.2f}" if scale > 1 else f"{n:.0f}" for n in (done, of or 0)]
    else:
        name = unit if (of or done) == 1 else unit + "s"
        numbers = [f"{n:g}" for n in (done, of or 0)]
    return f"{' / '.join(numbers) if of is not None else numbers[0]} {name}"


def rate(done: float, seconds: float, unit: WorkUnit) -> str:
    """`2.31 GB/s` or `0.33 MB/s` for bytes, `4.65 s/step` for steps."""
    if unit == "B":
        speed = done / max(seconds, 1e-9)
        return f"{speed / 1e9:.2f} GB/s" if speed >= 1e8 else f"{speed / 1e6:.2f} MB/s"
    return f"{seconds / done:.3g} s/{unit}"


def clock(seconds: float) -> str:
    """`0.42 s`, `5.3 s`, `42 s`, `3:05`, `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds < 1 else f"{seconds:.{1 if seconds < 10 else 0}f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Fall silent; rich would end the process and redirect its stdout."""
        self.quiet = True


class _Description(ProgressColumn):
    def render(self, task: Bar) -> Text:
        ours: Task = task.fields["ours"]
        return Text(ours.describe())


class Progress:
    """Bars on a terminal, a line per task every `interval` seconds elsewhere."""

    def __init__(
        self, *, stream: TextIO | None = None, enabled: bool = True, interval: float = 5.0
    ) -> None:
        self.enabled = enabled
        self.interval = interval
        self.stage_seconds: dict[str, float] = {}
        self._console = _Console(file=stream or sys.stderr, soft_wrap=True, highlight=False)
        self._fancy = self._console.is_terminal and not self._console.is_dumb_terminal
        self._lock = threading.Lock()
        self._next_line: dict[Task, float] = {}
        self._bars: Bars | None = None
        self._depth = 0
        self._total = 0.0

    @contextmanager
    def task(self, title: str, total: float | None, unit: WorkUnit) -> Iterator[Task]:
        """Show a piece of work for as long as the block runs; tasks may overlap."""
        plain = self.enabled and not self._fancy
        task = Task(title, total, unit, on_advance=self._line_if_due if plain else None)
        with self._lock:
            self._next_line[task] = task.started + self.interval
        bar = self._add_bar(task) if self.enabled and self._fancy else None
        failed = True
        try:
            yield task
            failed = False
        finally:
            with self._lock:
                del self._next_line[task]
            if bar is not None:
                self._remove_bar(bar)
            self.note(task.conclude(failed))

    def _add_bar(self, task: Task) -> Callable[[], None]:
        """Put a bar on the screen; returns what takes it away."""
        with self._lock:
            if self._bars is None:
                columns = (TextColumn("{task.description}", markup=False), _Bar(), _Description())
                # stdout carries data, so only stderr is routed around the live display.
                self._bars = Bars(
                    *columns, console=self._console, transient=True, redirect_stdout=False
                )
                self._bars.start()
            bars = self._bars
        number = bars.add_task(task.title, total=task.total, ours=task)
        return lambda: bars.remove_task(number)

    def _remove_bar(self, remove: Callable[[], None]) -> None:
        with self._lock:
            remove()
            if self._bars is not None and not self._bars.tasks:
                self._bars.stop()
                self._bars = None

    def _line_if_due(self, task: Task) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next_line.get(task, float("inf")):
                return
            self._next_line[task] = now + self.interval
        self.note(f"{task.title}: {task.describe()}")

    def note(self, line: str) -> None:
        """One line for the reader, above the bars."""
        self._print(line)

    def show(self, table: Table) -> None:
        """A rich table."""
        if self.enabled:
            with suppress(OSError):
                print_table(table, self._console)

    def warn(self, line: str) -> None:
        """One line that starts with `warning:`."""
        self._print(f"warning: {line}", style="yellow")

    def _print(self, line: str, style: str | None = None) -> None:
        if self.enabled:
            with suppress(OSError):
                self._console.print(line, style=style, markup=False, emoji=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to `stage_seconds[name]`, also when it fails.

        A stage inside a stage is listed too, but only the outer one counts towards the total.
        """
        started = time.monotonic()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            seconds = time.monotonic() - started
            self.stage_seconds[name] = self.stage_seconds.get(name, 0.0) + seconds
            if self._depth == 0:
                self._total += seconds

    def summary(self) -> None:
        """Table of stages in the order in which they first ended, with their share of the total."""
        width = max(map(len, (*self.stage_seconds, "total")))
        for name, seconds in (*self.stage_seconds.items(), ("total", self._total)):
            share = 100 * seconds / self._total if self._total else 0
            self._print(f"{name:<{width}}  {seconds:10.2f} s  {share:5.1f} %")


class _Bar(BarColumn):
    """The bar of our own counters: rich's are not told of each advance."""

    def render(self, task: Bar) -> ProgressBar:
        ours: Task = task.fields["ours"]
        task.completed = ours.done
        return super().render(task)
