"""The command line: exit codes, and which stream says what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared_offload import cli
from shared_offload.errors import ConfigError


def test_synth_then_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, fp8 = tmp_path / "model", tmp_path / "fp8"
    synth = ["synth", "--size", "tiny", "--task", "t2v", "--out", str(model)]
    assert cli.main([*synth, "--only", "dit,dit-fp8", "--threads", "1"]) == 0
    assert cli.main(["convert", "--model_path", str(model), "--out", str(fp8)]) == 0
    assert (fp8 / "block_7.safetensors").read_bytes() == (
        model / "fp8" / "block_7.safetensors"
    ).read_bytes()
    out, err = capsys.readouterr()
    assert out == "", "stdout is for data"
    assert "DiT, FP8 block files" in err and str(fp8) in err


def test_errors_become_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    assert cli.main(["convert", "--model_path", str(missing), "--out", "x"]) == 1
    synth = ["synth", "--size", "tiny", "--task", "t2v", "--out", str(tmp_path), "--only", "clip"]
    assert cli.main(synth) == ConfigError.exit_code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("CheckpointError: ") and "ConfigError: " in err and "hint: " in err
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shared_offload.cli.synth.make_checkpoint", interrupt)
    assert cli.main(["synth", "--size", "tiny", "--task", "t2v", "--out", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    overview = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n    {name}" in overview
        with pytest.raises(SystemExit) as caught:
            cli.main([name, "--help"])
        assert caught.value.code == 0
        assert f"shared-offload {name}" in capsys.readouterr().out


def test_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shared_offload.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("shared-offload ")


def test_doctor_shows_the_host_and_says_what_does_not_fit(capsys, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cli.main(["doctor", "--arena-gb", "0.001"]) == 0
    shown = capsys.readouterr().out
    assert f"of {Path('/proc/sys/kernel/shmmni').read_text().strip()} segments" in shown
    assert torch.__version__ in shown and "An arena of 0.001 GB fits." in shown
    assert cli.main(["doctor", "--arena-gb", "1e6"]) == 1
    shown = capsys.readouterr().out
    assert "PreflightError: " in shown and "hint: " in shown and "fits" not in shown
