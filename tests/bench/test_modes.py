"""The table of modes: real runs of the tiny model, on one rank and on two."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from shared_offload.bench import modes as bench
from shared_offload.errors import ConfigError
from shared_offload.report.progress import Progress
from shared_offload.synth.folder import make_checkpoint
from tests.reference.processes import ROOT

SMALL = ("--size", "tiny", "--height", "32", "--width", "48", "--frames", "5", "--steps", "3")
ON_ONE_NODE = [mode for mode in bench.MODES if mode != "numa"]


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["modes", *flags])
    return args.run(args)


def test_every_mode_has_the_same_latents(tmp_path, capsys) -> None:
    path = tmp_path / "figures.json"
    assert run(*ON_ONE_NODE, *SMALL, "--json", str(path)) == 0
    figures = json.loads(path.read_text())
    results = {result["mode"]: result for result in figures["results"]}
    assert list(results) == ON_ONE_NODE and not figures["failures"]
    assert all(r["latents_equal"] and r["frames_off"] == 0 for r in results.values())
    assert all(r["step_seconds"] > 0 and r["load_seconds"] > 0 for r in results.values())
    copied = {mode: r["streaming"].get("copied_bytes_per_step") for mode, r in results.items()}
    assert copied["host"] == copied["private"] == copied["disk"] == 2 * copied["half"] > 0
    table = capsys.readouterr().out
    assert all(mode in table for mode in ON_ONE_NODE) and "DIFFER" not in table


def test_results_that_differ_are_told(monkeypatch, capsys) -> None:
    monkeypatch.setitem(bench.MODES, "private", {**bench.PRIVATE, "sample_shift": 7})
    assert run("host", "private", *SMALL) == 1
    table = capsys.readouterr().out
    assert "equal" in table and "DIFFER" in table


def test_a_mode_that_cannot_run_has_a_row(monkeypatch, capsys) -> None:
    monkeypatch.setitem(bench.MODES, "half", {**bench.HOST, "t5_original_ckpt": "/nowhere"})
    assert run("resident", "half", "private", *SMALL) == 1
    table = capsys.readouterr().out
    assert "failed" in table and "/nowhere" in table and table.count("equal") == 2


@pytest.mark.slow
def test_two_ranks_have_one_table(tmp_path) -> None:
    folder = tmp_path / "model"
    make_checkpoint(folder, "tiny", "i2v", progress=Progress(enabled=False))
    path = tmp_path / "figures.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "-m", "shared_offload.cli", "bench", "modes", "resident", "host"]
    command += ["private", "one-decodes", *SMALL, "--json", str(path)]
    command += ["--model_path", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("one video in each mode") == 1
    figures = json.loads(path.read_text())
    assert figures["ranks"] == 2
    results = {result["mode"]: result for result in figures["results"]}
    assert list(results) == ["resident", "host", "private", "one-decodes"]
    assert all(result["latents_equal"] for result in results.values())
    assert results["host"]["host_nbytes"] > 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("fast",), "no mode 'fast'"),
        (("--steps", "1"), "--steps 1"),
        (("--frames", "6"), "--frames"),
    ],
)
def test_what_cannot_be_run_is_refused(flags, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(*flags)
