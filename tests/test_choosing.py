"""The figures of docs/choosing.md against the layouts that runs use."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from shared_offload.streaming.ring import plan_ring
from shared_offload.streaming.streamer import SLOTS
from shared_offload.synth.models import clip_recipes, t5_recipes, vae_recipes
from shared_offload.synth.sizes import SIZES, architecture
from shared_offload.weights.architecture import block_shapes, is_quantised, non_block_shapes
from shared_offload.weights.layout import BlockLayout, build_layout

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/choosing.md").read_text()


def layout(task: str, weights: str) -> BlockLayout:
    arch = architecture("14b", task)
    dtypes = {
        name: "F8_E4M3" if weights == "FP8" and is_quantised(name, shape) else "BF16"
        for name, shape in block_shapes(arch).items()
    }
    return build_layout(arch, dtypes, "BF16")


def pair(figure) -> str:
    """'i2v / t2v' in GB, as the table writes it."""
    return " / ".join(f"{figure(task) / 1e9:.2f}" for task in ("i2v", "t2v"))


def gpu(weights: str, granularity: str) -> str:
    def figure(task: str) -> float:
        return SLOTS * max(u.nbytes for u in layout(task, weights).units(granularity))

    return pair(figure)


def all_blocks(weights: str) -> str:
    def figure(task: str) -> float:
        found = layout(task, weights)
        return found.num_blocks * found.block_nbytes

    return pair(figure)


def arena(weights: str) -> str:
    return pair(lambda task: layout(task, weights).arena_nbytes)


def ring(weights: str, granularity: str) -> str:
    def figure(task: str) -> float:
        units = layout(task, weights).units(granularity)
        return plan_ring(units, None, units).nbytes

    return pair(figure)


def columns(mode: str) -> list[str]:
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| {mode}"))
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parametrize(("at", "weights"), [(2, "FP8"), (3, "BF16")])
def test_gpu_memory(at: int, weights: str) -> None:
    assert columns("resident")[at] == columns("model")[at] == all_blocks(weights)
    for mode in ("block, private |", "block, private, on", "block, one copy per n", "disk, block"):
        assert columns(mode)[at] == gpu(weights, "block")
    for mode in ("phase", "disk, phase"):
        assert columns(mode)[at] == gpu(weights, "phase")


@pytest.mark.parametrize(("at", "weights"), [(4, "FP8"), (5, "BF16")])
def test_host_memory(at: int, weights: str) -> None:
    for mode, copies in (
        ("block, private |", "P x "),
        ("block, private, on", "P x "),
        ("block, one copy per node", "N x "),
        ("block, one copy per host", ""),
    ):
        assert columns(mode)[at] == copies + arena(weights)
    assert columns("disk, block")[at] == ring(weights, "block")
    assert columns("disk, phase")[at] == ring(weights, "phase")


def test_disk_and_what_is_beside_the_blocks() -> None:
    assert columns("disk, block")[6] == f"{all_blocks('FP8')} (BF16: {all_blocks('BF16')}) a step"

    def outside(task: str) -> int:
        return sum(map(math.prod, non_block_shapes(architecture("14b", task)).values()))

    text = " ".join(TEXT.split())
    assert f"{pair(lambda task: 4 * outside(task))} GB of weights outside" in text
    assert f"({pair(lambda task: 2 * outside(task))} GB from a BF16 file)" in text
    blocks = [
        " / ".join(f"{layout(t, w).block_nbytes / 1e9:.3f}" for t in ("i2v", "t2v"))
        for w in ("FP8", "BF16")
    ]
    assert f"n x {blocks[0]} GB more there (BF16: {blocks[1]})" in text


def test_encoders() -> None:
    size = SIZES["14b"]
    t5 = {name: math.prod(r.shape) for name, r in t5_recipes(size.t5).items()}
    linear = {n: c for n, c in t5.items() if re.search(r"\.(attn|ffn)\.", n)}
    fp8 = 2 * sum(t5.values()) - sum(linear.values())  # scales are a thousandth
    block = {n: c for n, c in t5.items() if n.startswith("blocks.0.")}
    block_fp8 = 2 * sum(block.values()) - sum(c for n, c in block.items() if n in linear)
    unused = ("visual.transformer.31.", "visual.head", "log_scale")
    clip = sum(
        math.prod(recipe.shape)
        for name, recipe in clip_recipes(size.clip).items()
        if not name.startswith(unused)
    )
    vae = sum(math.prod(r.shape) for r in vae_recipes(size.vae_dim).values())
    text = " ".join(TEXT.split())
    for figure in (
        f"T5 stays: {2 * sum(t5.values()) / 1e9:.2f} GB in BF16, {fp8 / 1e9:.2f} GB in FP8",
        f"{2 * sum(block.values()) / 1e9:.2f} GB in BF16, {block_fp8 / 1e9:.2f} GB in FP8, while",
        f"{2 * clip / 1e9:.2f} GB (FP16), {4 * vae / 1e9:.2f} GB (FP32)",
    ):
        assert figure in text


def test_files_that_it_names_exist() -> None:
    for name in re.findall(r"`(configs/[^`]+)`", TEXT):
        assert (ROOT / name).is_file()
        if "offload" in name:
            twin = name.removesuffix(".json") + "_t2v.json"
            assert (ROOT / twin).is_file()
