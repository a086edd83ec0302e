"""Measures the modes of one family, in a process of its own, and sends their rows.

Invariant: a mode that fails is the last of its process: what it left behind (a broken context,
half the weights moved) cannot touch another figure.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from diffusers.utils.logging import set_verbosity_error
from torch import Tensor

from shared_offload.bench import stream
from shared_offload.bench.workload import lay_out
from shared_offload.model.attention import AUTO, select_attention
from shared_offload.synth.sizes import architecture
from tools.side_by_side.model import (
    branches,
    build,
    pinned_nbytes,
    place,
    quantise,
    unplace,
    use_attention,
    wait,
)
from tools.side_by_side.modes import Mode, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all modes have in common."""

    size: str
    task: str
    tokens: int
    steps: int
    attention: str
    deadline: float | None  # on time.monotonic's clock, one for all processes of a machine

    def time_is_up(self) -> bool:
        """No further mode may begin."""
        return self.deadline is not None and time.monotonic() >= self.deadline


def run(modes: Sequence[Mode], settings: Settings, rows: Connection) -> None:
    """Send the rows of the modes in order; stop after one that failed, or when the time is up."""
    set_verbosity_error()  # a line about attention backends for each mode
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    theirs = Theirs(settings, device)
    for mode in modes:
        if settings.time_is_up():
            break
        try:
            rows.send(ours(mode, settings, device) if mode.ours else [theirs.measure(mode)])
        except Exception as error:  # any mode may fail in any way; the others go on
            rows.send([Row(mode=mode.name, status="failed", note=_first_line(error))])
            break
    rows.close()


class Theirs:
    """diffusers' model and what has been done to it."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._arch = architecture(cast("Any", settings.size), cast("Any", settings.task))
        self._model: Any = None
        self._quantised: float | None = None
        self._given: list[dict[str, Any]] = []
        self._resident: Row | None = None

    def measure(self, mode: Mode) -> Row:
        """One mode from placement to the last step."""
        settings, device = self._settings, self._device
        if self._model is None:
            self._model = build(self._arch, device)
            self._quantised = quantise(self._model, mode.weights)
            self._given = branches(self._arch, settings.tokens, device)
        model = self._model
        unplace(model)
        attention = use_attention(model, mode.attention or settings.attention, device)
        prepared, note = place(model, mode, device)
        row = Row(
            mode=mode.name,
            status="measured",
            prepare_seconds=_sum(prepared, self._quantised),
            host_nbytes=pinned_nbytes() if mode.place == "streamed" else None,
            attention=attention,
            note=note,
        )
        if mode.place == "moved" and self._resident and self._resident.attention == attention:
            steps = self._resident.step_seconds
            note = f"steps are those of {self._resident.mode}"
            return replace(
                row, step_seconds=steps, peak_nbytes=self._resident.peak_nbytes, note=note
            )
        if mode.compiled:
            torch.compiler.reset()
            # Hooks that move weights break the graph; without hooks a break would be a defect.
            model.compile_repeated_blocks(fullgraph=mode.place == "resident" and not hooked(mode))
        row = replace(row, **self._steps())
        if mode.place == "resident" and not mode.compiled and mode.attention is None:
            self._resident = row
        return row

    def _steps(self) -> dict[str, Any]:
        """Seconds of the first forward and of each step, and the peak of the steps.

        Steps follow each other without a pause and are timed on the compute stream.
        """
        device = self._device
        gc.collect()
        _empty_cache(device)
        begun = time.perf_counter()
        self._forward(0)
        wait(device)
        first = time.perf_counter() - begun
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        marks = [_mark(device)]
        for _ in range(self._settings.steps):
            outputs = [self._forward(branch) for branch in range(2)]
            marks.append(_mark(device))
        wait(device)
        if not all(bool(out.isfinite().all()) for out in outputs):
            raise ArithmeticError("outputs are not finite")
        return {
            "first_forward_seconds": first,
            "step_seconds": [_between(*pair) for pair in pairwise(marks)],
            "peak_nbytes": torch.cuda.max_memory_allocated(device)
            if device.type == "cuda"
            else None,
        }

    def _forward(self, branch: int) -> Tensor:
        return cast("Tensor", self._model(**self._given[branch])[0])


def hooked(mode: Mode) -> bool:
    """Layers of the model change their weights' dtype as they run."""
    return mode.weights == "fp8-cast"


def ours(mode: Mode, settings: Settings, device: torch.device) -> list[Row]:
    """Our streamed step and our resident one."""
    kernel, _ = select_attention(AUTO, device, torch.bfloat16)
    dtype = mode.weights.removeprefix("ours-")
    result = stream.measure(
        stream.Options(
            size=settings.size,
            task=settings.task,
            tokens=settings.tokens,
            share=1,
            granularity="block",
            dtype=dtype,
            steps=settings.steps,
            slots=2,
            attention=AUTO,
            compiled="auto" if mode.compiled else False,
        ),
        device,
        kernel.run,
    )
    if not result.equal:
        raise ArithmeticError("streamed and resident steps differ")
    arch = architecture(cast("Any", settings.size), cast("Any", settings.task))
    common = Row(mode=mode.name, status="measured", attention=kernel.name)
    return [
        replace(
            common,
            mode=f"{mode.name} streamed",
            step_seconds=result.streamed_seconds,
            peak_nbytes=result.streamed_peak_nbytes,
            host_nbytes=lay_out(arch, fp8=dtype == "fp8").arena_nbytes,
            note="one arena for all ranks of a host",
        ),
        replace(
            common,
            mode=f"{mode.name} resident",
            step_seconds=result.resident_seconds,
            peak_nbytes=result.resident_peak_nbytes,
        ),
    ]


def _mark(device: torch.device) -> Any:  # noqa: ANN401
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:  # noqa: ANN401
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)


def _empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _sum(*seconds: float | None) -> float | None:
    known = [value for value in seconds if value is not None]
    return sum(known) if known else None


def _first_line(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}"
