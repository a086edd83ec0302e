"""What is left when a pipeline goes without `close`: as garbage, or with the interpreter."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shared_offload.memory.pinning import CudaRegistrar

ROOT = Path(__file__).parents[2]
FP8 = {"dit_quantized": True, "dit_quant_scheme": "fp8-vllm"}
PRIVATE = {**FP8, "cpu_offload": True}
SHARED = {**PRIVATE, "shared_cpu_weights": True, "shared_cpu_weight_scope": "host"}
LAZY = {**PRIVATE, "lazy_load": True}
OPTIONS = {"resident": FP8, "private": PRIVATE, "shared": SHARED, "lazy": LAZY}


def mapped_segments() -> int:
    return sum("/SYSV" in line for line in Path("/proc/self/maps").read_text().splitlines())


def settles(condition: Callable[[], bool]) -> bool:
    """Threads end a moment after they were told to."""
    deadline = time.monotonic() + 3
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_pipeline_that_is_garbage_holds_nothing(studio, kind) -> None:
    studio.video("t2v")  # whatever libraries keep for good
    threads = threading.active_count()
    pipeline = studio.pipeline("t2v", **OPTIONS[kind])
    pipeline.generate()
    assert (mapped_segments() > 0) == (kind != "resident")
    runner = weakref.ref(pipeline.runner)
    del pipeline
    gc.collect()
    assert runner() is None
    assert mapped_segments() == 0
    assert settles(lambda: threading.active_count() <= threads)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_request_leaves_no_memory_to_the_collector(studio, kind, device) -> None:
    """It looks for cycles after a failure alone: gigabytes must go without it."""
    with studio.pipeline("i2v", device=device, **OPTIONS[kind]) as pipeline:
        pipeline.generate()  # imports make cycles
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            pipeline.generate()
            gc.collect()
            left = [kept for kept in gc.garbage if isinstance(kept, torch.Tensor | memoryview)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert left == []


def test_the_interpreter_ends_with_open_pipelines(studio, tmp_path) -> None:
    """Three at once, none closed, one of them in the middle of a request that failed."""
    settings = tmp_path / "settings.json"
    settings.write_text(studio.settings("t2v").model_dump_json(exclude_defaults=True))
    program = f"""
import json
from pathlib import Path
from shared_offload.config import Settings
from shared_offload.pipeline.generate import Pipeline
written = json.loads(Path({str(settings)!r}).read_text())
options = {OPTIONS!r}
pipelines = []
for kind in ("private", "shared", "lazy"):
    written = {{k: v for k, v in written.items() if k not in ("notes", "parallel")}}
    pipelines.append(Pipeline(Settings.from_json_and_flags({{**written, **options[kind]}}, {{}})))
    pipelines[-1].generate()
maps = Path("/proc/self/maps").read_text()
print(maps.count("/SYSV"))
pipelines[0].runner.decode = lambda _: 1 / 0
try:
    pipelines[0].generate()
except ZeroDivisionError as error:
    kept = error
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    mapped, end = done.stdout.split()
    assert int(mapped) >= 3
    assert end == "end"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("how", ["close", "garbage"])
def test_nothing_stays_registered_or_allocated(studio, monkeypatch, kind, how) -> None:
    registered: set[int] = set()
    register, unregister = CudaRegistrar.register, CudaRegistrar.unregister

    def counted_register(self, address: int, nbytes: int, flags: int) -> int:
        code = register(self, address, nbytes, flags)
        registered.update([address] if code == 0 else [])
        return code

    def counted_unregister(self, address: int) -> int:
        registered.discard(address)
        return unregister(self, address)

    monkeypatch.setattr(CudaRegistrar, "register", counted_register)
    monkeypatch.setattr(CudaRegistrar, "unregister", counted_unregister)
    studio.video("t2v", device="cuda", **OPTIONS[kind])  # workspaces of libraries stay
    gc.collect()
    before = torch.cuda.memory_allocated()
    one, two = (studio.pipeline("t2v", device="cuda", **OPTIONS[kind]) for _ in range(2))
    first = one.generate().latents
    assert torch.equal(two.generate().latents, first)
    assert bool(registered) == (kind != "resident")
    if how == "close":
        one.close()
        assert torch.equal(two.generate().latents, first)
        two.close()
    del one, two, first
    gc.collect()
    assert registered == set()
    assert torch.cuda.memory_allocated() <= before
    assert mapped_segments() == 0
