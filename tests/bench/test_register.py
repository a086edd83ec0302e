"""The parts of the benchmark that need no GPU."""

from __future__ import annotations

import argparse

import pytest
import torch
from rich.console import Console

from shared_offload.bench.register import Result, add_parser, result_table
from shared_offload.errors import PreflightError


def test_the_table_tells_the_worst(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        Result(
            rank=rank,
            register_seconds=0.5 + rank,
            registered="read-only flag",
            arena_gb_per_second=50.0 - rank,
            pinned_gb_per_second=50.0,
            equal=rank == 0,
            host_nbytes=1 << 29,
        )
        for rank in range(2)
    ]
    Console(width=160).print(result_table("read-only", results, 1 << 30))
    text = " ".join(capsys.readouterr().out.split())
    assert "1.00 GiB for an arena of 1.00 GiB (1.000 copies)" in text
    assert "slowest registration 1.50 s" in text and "share of pinned speed 0.980" in text
    assert "yes" in text and "NO" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["register", "--processes", "2", "--gib", "1"])
    with pytest.raises(PreflightError, match="no CUDA device"):
        args.run(args)
