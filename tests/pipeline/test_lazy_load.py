"""Blocks that stay in their files: whole pipelines, alone and on two ranks that share a ring.

Latents are compared bit for bit with a run whose blocks are all resident.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared_offload.config import Settings
from shared_offload.errors import CheckpointError, ConfigError, Problems
from shared_offload.report.progress import Progress
from shared_offload.synth import sizes
from shared_offload.synth.folder import make_checkpoint
from shared_offload.weights.architecture import read_architecture
from shared_offload.weights.checkpoint import open_checkpoint
from shared_offload.weights.convert import convert_to_fp8
from shared_offload.weights.reader import block_pieces
from tests.reference.processes import Run

DRIVER = Path(__file__).with_name("lazy_rank.py")
LAZY = {"cpu_offload": True, "lazy_load": True}
SCOPES = {"private": {}, "shared": {"shared_cpu_weights": True, "shared_cpu_weight_scope": "host"}}
WEIGHTS = {"bf16": {}, "fp8": {"dit_quantized": True, "dit_quant_scheme": "fp8-vllm"}}
GRANULARITIES = ("block", "phase")
TASKS = ("t2v", "i2v")
STEPS, BLOCKS = 3, 8  # of the fixture's settings, of the tiny model
LIMIT = 15.0  # seconds until all ranks are gone
MIB = 1 << 20


@pytest.fixture(scope="module")
def resident(studio) -> Callable[[str, str], Tensor]:
    @functools.cache
    def latents(task: str, weights: str) -> Tensor:
        return studio.video(task, **WEIGHTS[weights]).latents

    return latents


def pass_nbytes(folder: Path, task: str, weights: str) -> int:
    """Bytes of all blocks as they are in their files."""
    path = folder / "fp8" if weights == "fp8" else folder
    found = open_checkpoint(path, read_architecture(folder), quantised=weights == "fp8", task=task)
    return sum(piece.nbytes for piece in block_pieces(found, found.layout("BF16")))


# -- one rank --------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("task", TASKS)
def test_one_rank(studio, resident, task, weights, scope, granularity) -> None:
    options = {**WEIGHTS[weights], **LAZY, **SCOPES[scope], "offload_granularity": granularity}
    video = studio.video(task, **options)
    assert torch.equal(video.latents, resident(task, weights))
    streaming, (arena,) = video.metadata["streaming"], video.metadata["arenas"]
    once = pass_nbytes(studio.checkpoints[task], task, weights)
    assert streaming["disk_read_bytes"] == STEPS * once
    assert streaming["disk_read_bytes_per_step"] == once
    assert streaming["disk_ring_units"] == 4
    assert arena["nbytes"] == streaming["disk_ring_bytes"]
    assert arena["scope"] == {"private": "rank", "shared": "host"}[scope]
    assert mapped_segments() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_one_gpu(studio, weights, scope, granularity) -> None:
    """The ring is registered with CUDA, while the disk threads write through another mapping."""
    gpu = {**WEIGHTS[weights], "device": "cuda", "infer_steps": 6}
    whole = studio.video("i2v", **gpu)
    options = {**LAZY, **SCOPES[scope], "offload_granularity": granularity}
    lazy = studio.video("i2v", **gpu, **options)
    assert torch.equal(lazy.latents, whole.latents)
    (arena,) = lazy.metadata["arenas"]
    assert arena["registered"] in ("read-only flag", "registered, then protected")
    once = pass_nbytes(studio.checkpoints["i2v"], "i2v", weights)
    assert lazy.metadata["streaming"]["disk_read_bytes"] == 6 * once


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("options", "blocks_read"),
    [
        ({"lazy_load_ring_gib": 1}, BLOCKS),  # all fit, and are read once
        ({"lazy_load_ring_gib": 6}, BLOCKS),
        ({"resident_blocks": 3}, STEPS * BLOCKS - (STEPS - 1) * 3),
        ({"resident_blocks": 8}, BLOCKS),
        ({"resident_blocks": "auto"}, STEPS * BLOCKS),  # nothing is free without CUDA
        ({"num_disk_workers": 1}, STEPS * BLOCKS),
        ({"num_disk_workers": 16}, STEPS * BLOCKS),
    ],
    ids=str,
)
def test_how_much_is_read(studio, resident, options, blocks_read, granularity) -> None:
    asked = {**LAZY, "offload_granularity": granularity, **options}
    with studio.pipeline("t2v", **asked) as pipeline:
        videos = [pipeline.generate() for _ in range(2)]
    once = pass_nbytes(studio.checkpoints["t2v"], "t2v", "bf16")
    for number, video in enumerate(videos):
        assert torch.equal(video.latents, resident("t2v", "bf16"))
        again = 0 if number and "lazy_load_ring_gib" in options else blocks_read
        read = video.metadata["streaming"]["disk_read_bytes"]
        assert read / once * BLOCKS == pytest.approx(again, abs=0.01)


@pytest.mark.parametrize("layout", ["block", "chunk", "single"])
def test_layouts_of_files(studio, resident, tmp_path, layout) -> None:
    out = tmp_path / "converted"
    convert_to_fp8(studio.checkpoints["i2v"], out, layout)
    got = studio.video("i2v", **WEIGHTS["fp8"], **LAZY, dit_quantized_ckpt=str(out))
    assert torch.equal(got.latents, resident("i2v", "fp8"))


def test_fp32_is_converted_on_its_way(studio) -> None:
    """The files hold fp32: as it is for fp32 arithmetic, rounded for bf16."""
    whole = studio.video("t2v", dtype="FP32").latents
    lazy = studio.video("t2v", dtype="FP32", **LAZY)
    assert torch.equal(lazy.latents, whole)
    assert not torch.equal(studio.video("t2v", **LAZY).latents, whole)


def mapped_segments() -> int:
    return sum("/SYSV" in line for line in Path("/proc/self/maps").read_text().splitlines())


def held() -> tuple[int, int, int]:
    descriptors, threads = (len(list(Path("/proc/self", n).iterdir())) for n in ("fd", "task"))
    return descriptors, threads, mapped_segments()


def test_nothing_is_held_after_it(studio) -> None:
    studio.video("t2v", **LAZY)
    before = held()
    for unload in (False, True):
        with studio.pipeline("t2v", **LAZY, unload_modules=unload) as pipeline:
            pipeline.generate()
            pipeline.generate()
        deadline = time.monotonic() + 3
        while any(a > b for a, b in zip(held(), before, strict=True)):
            assert time.monotonic() < deadline, f"{held()} where {before} was expected"
            time.sleep(0.02)


def copy_of(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def test_a_file_that_shrinks_is_told_and_can_be_mended(
    studio, resident, tmp_path, monkeypatch
) -> None:
    folder = copy_of(studio.checkpoints["t2v"], tmp_path / "model")
    victim = next(folder.glob("fp8/block_5*.safetensors"))
    whole = victim.read_bytes()
    stamp = victim.stat()
    options = {**WEIGHTS["fp8"], **LAZY, "model_path": str(folder)}
    with studio.pipeline("t2v", **options) as pipeline:
        assert torch.equal(pipeline.generate().latents, resident("t2v", "fp8"))
        os.truncate(victim, 3000)
        with pytest.raises(CheckpointError) as caught:
            pipeline.generate()
        assert caught.value.facts["path"] == str(victim)
        assert mapped_segments() == 0  # the ring went with its reader
        victim.write_bytes(whole)
        os.utime(victim, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        assert torch.equal(pipeline.generate().latents, resident("t2v", "fp8"))


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"cpu_offload": False}, ["lazy_load", "cpu_offload"]),
        ({"offload_granularity": "model"}, ["lazy_load", "offload_granularity"]),
        ({"lora_configs": [{"path": "a", "strength": 1}]}, ["lazy_load", "lora_configs"]),
        ({"cpu_offload_numa": True}, ["cpu_offload_numa", "lazy_load"]),
        ({"lazy_load_ring_gib": 0}, None),
        ({"num_disk_workers": 0}, None),
        ({"lazy_load": False, "t5_lazy_load": True}, None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_makes_no_sense_is_refused(options, keys) -> None:
    with pytest.raises((ConfigError, Problems)) as caught:
        Settings.from_json_and_flags({"model_path": ".", **LAZY, **options}, {})
    errors = getattr(caught.value, "errors", [caught.value])
    (error,) = (e for e in errors if e.facts["key"] in (keys or options))
    if keys:
        assert error.facts["keys"] == keys


def test_a_budget_below_two_units_is_told_before_anything_loads(studio) -> None:
    with pytest.raises(ConfigError) as caught:
        studio.pipeline("t2v", **LAZY, lazy_load_ring_gib=0.0005)
    assert caught.value.facts["key"] == "lazy_load_ring_gib"


def test_options_of_the_disk_tier_without_it_are_remarked() -> None:
    settings = Settings.from_json_and_flags(
        {"model_path": ".", "num_disk_workers": 4, "lazy_load_ring_gib": 2}, {}
    )
    said = " ".join(settings.notes)
    assert "num_disk_workers has no effect" in said and "lazy_load_ring_gib has no effect" in said


# -- two ranks -------------------------------------------------------------------------------------


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(world: int = 2, **job: Any) -> Run:
        folder = tmp_path / f"run{len(runs)}"
        folder.mkdir()
        path = folder / "job.json"
        path.write_text(json.dumps({**job, "folder": str(folder)}))
        runs.append(Run(DRIVER, [str(path)], folder, world, torchrun=False))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()


def options_of(studio, task: str, **options: Any) -> dict[str, Any]:
    small = {
        "task": task,
        "model_path": str(studio.checkpoints[task]),
        "size": [32, 48],
        "num_frames": 5,
        "infer_steps": STEPS,
        "enable_cfg": True,
        "device": "cpu",
        "prompt": "a train",
        "seed": 7,
    }
    return {**small, **({"image_path": str(studio.picture)} if task == "i2v" else {}), **options}


ROWS = [(g, s, w, t) for g in GRANULARITIES for s in SCOPES for w in WEIGHTS for t in TASKS]
SPECIAL = {
    "numa": {"shared_cpu_weights": True, "shared_cpu_weight_scope": "numa"},
    "cache": {**SCOPES["shared"], "lazy_load_ring_gib": 1},
    "3 resident": {**SCOPES["shared"], "resident_blocks": 3},
    "auto": {**SCOPES["shared"], "resident_blocks": "auto", "offload_granularity": "phase"},
}


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [1, 2], ids=["sequence", "branches"])
def test_two_ranks(studio, ranks, cfg) -> None:
    """All cases in one pair of processes; the files are read once a step when a ring is shared."""
    cases = {}
    for task in TASKS:
        for weights, kind in WEIGHTS.items():
            cases[f"{task} {weights} resident"] = options_of(studio, task, **kind)
    rows = ROWS if cfg == 1 else [row for row in ROWS if row[2:] == ("fp8", "t2v")]
    for granularity, scope, weights, task in rows:
        cases[f"{task} {weights} {scope} {granularity}"] = options_of(
            studio,
            task,
            **WEIGHTS[weights],
            **LAZY,
            **SCOPES[scope],
            offload_granularity=granularity,
        )
    for name, special in SPECIAL.items():
        cases[f"t2v bf16 {name}"] = options_of(studio, "t2v", **LAZY, **special)
    run = ranks(cases=cases, cfg=cfg)
    assert run.end(200) == [0, 0], run.stderr()
    made = [torch.load(run.folder / f"made{rank}.pt") for rank in range(2)]
    for name, options in cases.items():
        if options.get("lazy_load"):
            check_case(name, [rank[name] for rank in made], made[0], studio)


def check_case(name: str, found: list[dict[str, Any]], made: dict[str, Any], studio) -> None:
    task, weights, *kind = name.split()
    for rank in found:
        assert torch.equal(rank["latents"], made[f"{task} {weights} resident"]["latents"]), name
        assert rank["same"], name
    once = pass_nbytes(studio.checkpoints[task], task, weights)
    steps = {"cache": 0, "3": STEPS - (STEPS - 1) * 3 / BLOCKS}.get(kind[0], STEPS)
    copies = 2 if kind[0] == "private" else 1
    # Three counts of one thing: ours, that of the calls, and the kernel's for the whole process,
    # in which messages between the ranks and looks at /proc are some 100 KiB.
    ours, calls, kernel = (
        sum(counts)
        for counts in zip(
            *((r["streaming"][1]["disk_read_bytes"], r["preadv"], r["rchar"]) for r in found),
            strict=True,
        )
    )
    assert ours == calls, name
    assert ours == pytest.approx(copies * steps * once, rel=1e-3), name
    assert ours <= kernel < ours + MIB, name
    if copies == 1:
        assert found[1]["preadv"] == 0, name  # the leader reads for both
        assert [row["ranks"] for row in found[0]["arenas"]] in ([(0, 1)], [[0, 1]]), name


SLOW = 0.004  # seconds a read, of some 100 a step


@pytest.mark.parametrize("victim", [0, 1], ids=["leader", "follower"])
def test_a_killed_rank_ends_the_other(studio, ranks, victim) -> None:
    options = options_of(studio, "t2v", **LAZY, **SCOPES["shared"], infer_steps=50)
    run = ranks(cases={"one": options}, slow=SLOW)
    run.wait_ready()
    os.kill(run.pids()[victim], signal.SIGKILL)
    begun = time.monotonic()
    codes = run.end(LIMIT)
    assert time.monotonic() - begun < LIMIT
    assert sorted(codes) == [-signal.SIGKILL, 1]
    assert run.stderr().count("RankError") == 1, run.stderr()
    assert f"rank {victim}" in run.stderr()
    assert "Traceback" not in run.stderr()


@pytest.mark.parametrize("fault", ["io", "shrinks"])
def test_a_file_that_fails_ends_all_with_one_error(studio, ranks, tmp_path, fault) -> None:
    folder = copy_of(studio.checkpoints["t2v"], tmp_path / "model")
    victim = next(folder.glob("fp8/block_6*.safetensors"))
    options = options_of(
        studio, "t2v", **WEIGHTS["fp8"], **LAZY, **SCOPES["shared"], infer_steps=50
    )
    run = ranks(cases={"one": {**options, "model_path": str(folder)}}, slow=SLOW, fault=fault)
    if fault == "shrinks":
        run.wait_ready()
        os.truncate(victim, 9000)
    assert run.end(60 if fault == "io" else LIMIT) == [1, 1]
    said = run.stderr()
    assert said.count("CheckpointError") == 1, said
    assert "Traceback" not in said
    if fault == "io":
        assert "Input/output error" in said and "at byte" in said and str(folder) in said
    else:
        assert str(victim) in said and "ends at byte" in said


def test_a_thread_that_dies_ends_all(studio, ranks) -> None:
    options = options_of(studio, "t2v", **LAZY, **SCOPES["shared"], infer_steps=50)
    run = ranks(cases={"one": options}, slow=SLOW, fault="thread")
    assert run.end(60) == [1, 1]
    assert run.stderr().count("nobody foresaw this") >= 1, run.stderr()
    assert run.stderr().count("\nin rank") == 1, run.stderr()


# -- memory ----------------------------------------------------------------------------------------

MEASURE = """
import json, sys, torch
from pathlib import Path
from shared_offload.config import Settings
from shared_offload.pipeline.generate import Pipeline
torch.set_num_threads(1)
def peak():
    text = Path("/proc/self/status").read_text()
    return next(int(li.split()[1]) << 10 for li in text.splitlines() if li.startswith("VmHWM"))
with Pipeline(Settings.from_json_and_flags(json.loads(sys.argv[1]), {})) as pipeline:
    pipeline.runner.encode_texts(["a train"])
    before = peak()
    pipeline.generate()
    segments = {}  # by inode: mapped twice where this process reads files into it
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, inode, name = line.split()[:6] + [""] * (6 - len(line.split()))
        if name.startswith("/SYSV"):
            first, last = (int(a, 16) for a in addresses.split("-"))
            segments[inode] = last - first
    print(json.dumps([peak() - before, sum(segments.values())]))
"""


@pytest.fixture
def wide_model(tmp_path, monkeypatch) -> Path:
    """A model whose blocks are most of it: 24 of 8 MiB."""
    wide = dataclasses.replace(sizes.SIZES["tiny"], dim=512, ffn_dim=2048, num_layers=24)
    monkeypatch.setattr(sizes, "SIZES", {**sizes.SIZES, "tiny": wide})
    make_checkpoint(tmp_path / "wide", "tiny", "t2v", progress=Progress(enabled=False))
    return tmp_path / "wide"


@pytest.mark.slow
def test_host_memory_is_bounded_by_the_ring(studio, wide_model) -> None:
    """The high-water mark of a process, against that of one whose arena holds all blocks."""
    options = options_of(studio, "t2v", cpu_offload=True, infer_steps=2, enable_cfg=False)
    options |= {"model_path": str(wide_model)}
    peaks, shared = [], []
    for more in ({"lazy_load": True}, {}):
        command = [sys.executable, "-c", MEASURE, json.dumps({**options, **more})]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peak, segments = json.loads(done.stdout)
        peaks.append(peak)
        shared.append(segments)
    found = open_checkpoint(wide_model, read_architecture(wide_model), quantised=False, task="t2v")
    layout = found.layout("BF16")
    assert layout.num_blocks == 24
    page = 4096
    assert 0 < shared[0] - 4 * layout.stride < 10 * page  # the ring, its state, two stamps
    assert 0 <= shared[1] - 24 * layout.stride < 10 * page
    # Resident pages count twice where they are mapped twice. Beside the ring: two slots, a bounce
    # buffer for each of four threads, and what any run of this model needs.
    # (60 to 80 MiB here, and threads of the allocator make that vary by some 20).
    assert peaks[0] < (2 * 4 + 2) * layout.stride + 16 * MIB + 112 * MIB
    assert peaks[1] - peaks[0] > (24 - 2 * 4) * layout.stride - 64 * MIB
