"""One training step as one CUDA graph, and a run of steps that fits a time limit.

A step of models this small is hundreds of kernels of a few microseconds, and waits for the host
to launch them. Captured, it is 4.5 times faster. So a loss draws its own data on the device and
makes nothing on the host.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

GRADIENT_LIMIT = 1.0
EMA_DECAY = 0.999
UNMEASURED = 10  # steps before the pace is measured
MEASURED = 60
REPORTS = 20  # of the loss, in one run
SNAPSHOT_SECONDS = 60.0
MESSAGE = 600  # characters of another library's error
PROBED = 12  # steps that tell how fast a form of the models is


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to train: `seconds`, or a number of `steps` where that is given."""

    seconds: float
    steps: int | None
    peak_lr: float
    warmup: int
    weight_decay: float
    captured: bool = True
    """As a CUDA graph, on CUDA."""
    compiled: bool = True
    """Try torch.compile too where forms are tried."""

    def on_graph(self, device: torch.device) -> bool:
        """Whether steps on this device are CUDA graphs."""
        return self.captured and device.type == "cuda"

    def tries_forms(self, device: torch.device) -> bool:
        """Whether it is worth while to look for the fastest form of the models."""
        return self.on_graph(device) and self.steps != 0

    def lr(self, step: int, steps: int | None) -> float:
        """A rise, then a cosine down to nothing; `steps` is None until the pace is known."""
        rise = min(1.0, (step + 1) / self.warmup)
        fall = 1.0 if steps is None else 0.5 + 0.5 * math.cos(math.pi * step / steps)
        return self.peak_lr * rise * fall + 1e-6


@dataclass(frozen=True, slots=True)
class Run:
    """How a part's training goes, beside its plan."""

    batch: int
    started: float
    """When its time began to run, of time.monotonic()."""
    snapshot: Callable[[], None]
    """Called about once a minute."""


@dataclass(slots=True)
class History:
    """What a run did, for the report."""

    steps: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)


def half(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """bf16 autocast where the device computes in bf16; a graph must not hold its cast weights."""
    if device.type == "cpu" and not torch.cpu.get_capabilities().get("avx512_bf16"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=device.type == "cpu")


class Trainer:
    """AdamW on `parameters` for `loss()`; on CUDA in bf16 autocast and as one graph."""

    def __init__(
        self, loss: Callable[[], Tensor], parameters: Sequence[Parameter], plan: Plan
    ) -> None:
        self._loss, self._parameters = loss, list(parameters)
        self.device = self._parameters[0].device
        self._captured = plan.on_graph(self.device)
        lr = torch.tensor(plan.peak_lr, device=self.device) if self._captured else plan.peak_lr
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=lr,
            betas=(0.9, 0.95),
            weight_decay=plan.weight_decay,
            capturable=self._captured,
            fused=self.device.type == "cuda",
        )
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._graph, self._last_loss = self._capture() if self._captured else (None, None)

    def step(self, lr: float) -> Tensor:
        """One step; returns its loss, which the next step overwrites."""
        group = self._optimizer.param_groups[0]
        if self._graph is None:
            group["lr"] = lr
            return self._whole_step()
        group["lr"].fill_(lr)
        self._graph.replay()
        return self._last_loss

    def pace(self) -> float:
        """Seconds of a step, by some that change no weights."""
        self.step(0.0)
        finish(self.device)
        started = time.monotonic()
        for _ in range(PROBED):
            self.step(0.0)
        finish(self.device)
        return (time.monotonic() - started) / PROBED

    def _whole_step(self) -> Tensor:
        self._optimizer.zero_grad(set_to_none=False)
        with half(self.device):
            loss = self._loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, GRADIENT_LIMIT, foreach=True)
        self._optimizer.step()
        return loss.detach()

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # lazy initialisation must not be captured
                self._optimizer.param_groups[0]["lr"].zero_()
                self._whole_step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._whole_step()
        return graph, loss


def fastest(name: str, forms: Mapping[str, Callable[[], Trainer]], *, tried: bool) -> Trainer:
    """The trainer of the fastest of several forms of the same models, by a try of each.

    Each function puts the models into its form and makes a trainer for it. One that fails is left
    out: a form is about speed alone. Without `tried` it is the first one.
    """
    if not tried:
        return next(iter(forms.values()))()
    paces: dict[str, float] = {}
    trainer = latest = None
    for form, make in forms.items():
        trainer, started = None, time.monotonic()  # the one before goes with its graph's memory
        try:
            trainer, latest = make(), form
            paces[form] = trainer.pace()
        except Exception as error:  # of a compiler or a GPU library
            print(
                f"{name}: {form} fails: {type(error).__name__}: {str(error)[:MESSAGE]}", flush=True
            )
            continue
        took = time.monotonic() - started
        print(f"{name}: {form}: {paces[form] * 1000:.2f} ms a step, {took:.0f} s", flush=True)
    if not paces:
        raise RuntimeError(f"{name}: no form of the models can be trained")
    best = min(paces, key=lambda form: paces[form])
    if trainer is None or best != latest:
        trainer = None
        trainer = forms[best]()
    print(f"{name}: trained {best}", flush=True)
    return trainer


class Average:
    """An exponential moving average of parameters."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = [p.detach() for p in parameters]
        self._means = [p.clone() for p in self._parameters]

    def update(self, step: int) -> None:
        """Take in the parameters as they are after `step` steps."""
        weight = 1 - min(EMA_DECAY, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._means, self._parameters, weight)

    def apply(self) -> None:
        """Make the parameters the average."""
        for parameter, mean in zip(self._parameters, self._means, strict=True):
            parameter.copy_(mean)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The parameters are the average for a moment, and then themselves again."""
        kept = [parameter.clone() for parameter in self._parameters]
        self.apply()
        yield
        for parameter, own in zip(self._parameters, kept, strict=True):
            parameter.copy_(own)


def train(
    name: str,
    trainer: Trainer,
    plan: Plan,
    started: float,
    after_step: Callable[[int], None] = lambda _: None,
    snapshot: Callable[[], None] = lambda: None,
) -> History:
    """Steps until the plan's end; `started` (of time.monotonic) is when its time began to run.

    Without a number of steps, one is chosen from the pace of the first ones. `snapshot` is called
    about once a minute.
    """
    history, steps, reports = History(), plan.steps, []
    paced, kept = 0.0, time.monotonic()
    while steps is None or history.steps < steps:
        loss = trainer.step(plan.lr(history.steps, steps))
        history.steps += 1
        after_step(history.steps)
        if steps is None and history.steps in (UNMEASURED, MEASURED):
            finish(trainer.device)
            if history.steps == UNMEASURED:
                paced = time.monotonic()
                continue
            pace = (time.monotonic() - paced) / (MEASURED - UNMEASURED)
            left = plan.seconds - (time.monotonic() - started)
            steps = history.steps + max(int(left / pace), 1)
            print(f"{name}: {pace * 1000:.2f} ms a step, {steps} steps", flush=True)
        if steps is not None and (
            history.steps == steps or history.steps * REPORTS // steps > len(reports)
        ):
            reports.append((history.steps, loss.item()))
            passed = time.monotonic() - started
            print(f"{name}: step {history.steps} loss {loss.item():.5f} {passed:.0f} s", flush=True)
            if time.monotonic() - kept > SNAPSHOT_SECONDS:
                snapshot()
                kept = time.monotonic()
    history.losses, history.seconds = reports, time.monotonic() - started
    return history


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
