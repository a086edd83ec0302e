"""What the benchmarks measure on a GPU: its clock, its memory, and steps against their floor."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from shared_offload.bench import accuracy, step
from shared_offload.bench.clock import Marks, copy_rate, of_peak
from shared_offload.bench.floors import Part, Workbench
from shared_offload.bench.vae import Convolutions

pytestmark = pytest.mark.gpu
CYCLES = 20_000_000  # some 10 ms


def test_marks_are_on_the_gpus_clock() -> None:
    marks = Marks(torch.device("cuda", 0))
    torch.cuda._sleep(4 * CYCLES)  # the GPU's clock rises from where it idles
    marks.mark()
    for cycles in (CYCLES, 2 * CYCLES, 4 * CYCLES):
        torch.cuda._sleep(cycles)
        marks.mark()
    first, second, third = marks.spans()
    assert second == pytest.approx(2 * first, rel=0.3)
    assert third == pytest.approx(2 * second, rel=0.3)


def test_a_peak_counts_what_is_freed_again_and_not_what_was_there() -> None:
    device = torch.device("cuda", 0)
    held = torch.empty(32 << 20, dtype=torch.uint8, device=device)

    def work() -> None:
        for mebibytes in (64, 8):
            torch.empty(mebibytes << 20, dtype=torch.uint8, device=device)

    assert of_peak(work, device) == 64 << 20
    assert held.nbytes == 32 << 20


def test_pinned_copies_are_no_slower() -> None:
    device = torch.device("cuda", 0)
    assert copy_rate(device, pinned=True) > 0.9 * copy_rate(device, pinned=False) > 1e8


@pytest.mark.parametrize("fp8", [True, False])
def test_the_gpus_product_is_that_of_its_operands(fp8: bool) -> None:
    device = torch.device("cuda", 0)
    out = Workbench(device, fp8=fp8).work(Part("x", "product", (257, 64, 128)))()
    assert out.shape == (257, 64) and out.isfinite().all()
    if out.dtype == torch.bfloat16:  # N(0, 1) times N(0, 1 / K); fp32 stands for bare codes
        assert out.float().std().item() == pytest.approx(1, rel=0.1)


def test_convolutions_are_seen_on_the_gpu() -> None:
    device = torch.device("cuda", 0)
    conv = torch.nn.Conv3d(4, 8, 3, device=device)
    x = torch.randn(1, 4, 5, 6, 7, device=device)
    with torch.inference_mode(), Convolutions(device) as convolutions:
        out = conv(x)
    assert convolutions.flops == 2 * out.numel() * 4 * 27
    assert convolutions.seconds > 0


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # the compiler's advice
@pytest.mark.parametrize("compiled", ["true", "false"])
def test_a_step_takes_longer_than_its_floor(compiled, tmp_path) -> None:
    parser = argparse.ArgumentParser()
    step.add_parser(parser.add_subparsers(required=True))
    path, kernels = tmp_path / "figures.json", tmp_path / "kernels.txt"
    flags = ["--size", "tiny", "--tokens", "2100", "--weights", "both", "--compile", compiled]
    args = parser.parse_args(["step", *flags, "--json", str(path), "--profile", str(kernels)])
    assert args.run(args) == 0
    figures = json.loads(path.read_text())
    assert figures["equal"] is True
    assert all(ratio > 1 for ratio in figures["ratio"].values())
    assert figures["streamed"]["peak_nbytes"] < figures["resident"]["peak_nbytes"]
    assert "CUDA" in kernels.read_text()


def test_no_kernel_rounds_more_than_plain_operations() -> None:
    device = torch.device("cuda", 0)
    ways = accuracy.find_ways(["auto"], device)
    figures = accuracy.measure("tiny", "i2v", 2100, ways, device)
    assert {figure.operations for figure in figures} == {"plain", "fused"}
    assert all(figure.sqnr_db > 27 for figure in figures)
    assert min(figure.gained_db for figure in figures) > -accuracy.MOST_LOST_DB
