"""The comparison with diffusers in miniature: every mode gives a row, whatever happens to it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from shared_offload.synth.sizes import architecture
from tools.side_by_side import main as command
from tools.side_by_side.model import branches, build, place, unplace
from tools.side_by_side.modes import MODES, Mode, usual_modes

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
BY_NAME = {mode.name: mode for mode in MODES}
HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None
needs_accelerate = pytest.mark.skipif(not HAS_ACCELERATE, reason="diffusers needs accelerate here")


def bench(path: Path, *flags: str) -> tuple[dict, subprocess.CompletedProcess[str]]:
    script = str(ROOT / "tools/bench_diffusers.py")
    small = ["--size", "tiny", "--tokens", "42", "--json", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, script, *small, *flags], capture_output=True, text=True, env=environment
    )
    return json.loads(path.read_text()), ran


def test_modes_in_one_run(tmp_path: Path) -> None:
    names = ["ours-fp8", "bf16-resident", "bf16-model-offload", "bf16-block", "fp8-cast-resident"]
    found, ran = bench(tmp_path / "f.json", "--steps", "2", "--modes", ",".join(names))
    assert ran.returncode == 0, ran.stderr
    rows = {row["mode"]: row for row in found["rows"]}
    assert set(rows) == {"ours-fp8 streamed", "ours-fp8 resident", *names[1:]}
    for name, row in rows.items():
        if name == "bf16-block" and not HAS_ACCELERATE:
            assert (row["status"], row["note"]) == ("not run", "accelerate is not installed")
            continue
        assert row["status"] == "measured", row
        assert len(row["step_seconds"]) == 2 and min(row["step_seconds"]) > 0
        assert f"{sorted(row['step_seconds'])[0]:.3f}"[:3] in ran.stdout and name in ran.stdout
    moved, resident = rows["bf16-model-offload"], rows["bf16-resident"]
    assert moved["step_seconds"] == resident["step_seconds"] and moved["prepare_seconds"] > 0
    assert resident["prepare_seconds"] is None
    assert found["diffusers"] and found["device"] == "CPU" and found["run_seconds"] > 0


def test_a_mode_that_fails_ends_no_other(tmp_path: Path) -> None:
    """FlashAttention 3 cannot run here; a native mode after it runs in a new process."""
    flags = ["--attention", "_flash_3", "--modes", "bf16-resident,bf16-resident-native"]
    found, ran = bench(tmp_path / "f.json", "--steps", "1", *flags)
    failed, measured = found["rows"]
    assert failed["status"] == "failed" and failed["note"].startswith("RuntimeError: Flash")
    assert measured["status"] == "measured" and measured["attention"] == "native"
    assert ran.returncode == 0 and failed["note"] in ran.stdout


def test_no_mode_begins_after_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command, "_worker", lambda *_: pytest.fail("a process began"))
    flags = ["--size", "tiny", "--budget-seconds", "0", "--modes", "bf16-resident,ours-fp8"]
    assert command.main([*flags, "--json", str(tmp_path / "f.json")]) == 1
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert [row["mode"] for row in rows] == ["ours-fp8", "bf16-resident"]
    assert {(row["status"], row["note"]) for row in rows} == {("not run", "the time was up")}


def dies(modes, settings, rows) -> None:
    os._exit(9)


def test_a_worker_that_dies_gives_a_row_for_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run", dies)
    settings = command.Settings(
        size="tiny", task="i2v", tokens=42, steps=1, attention="auto", deadline=None
    )
    modes = [BY_NAME["bf16-resident"], BY_NAME["bf16-model-offload"]]
    rows = list(command._rows(modes, settings))
    assert [row.mode for row in rows] == [mode.name for mode in modes]
    assert {row.note for row in rows} == {"the process ended with 9"}


@needs_accelerate
def test_the_model_has_the_dtypes_of_from_pretrained_and_no_zeros(tmp_path: Path) -> None:
    model = build(architecture("tiny", "i2v"), CPU)
    WanTransformer3DModel.from_config(model.config).to(torch.float32).save_pretrained(tmp_path)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    wanted = {name: (p.shape, p.dtype) for name, p in loaded.named_parameters()}
    assert {name: (p.shape, p.dtype) for name, p in model.named_parameters()} == wanted
    assert dict(loaded.named_buffers()).keys() == dict(model.named_buffers()).keys()
    for (name, ours), theirs in zip(model.named_buffers(), loaded.buffers(), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype, name
    for name, parameter in model.named_parameters():
        assert (parameter != 0).float().mean() > 0.99, name


@needs_accelerate
def test_placement_is_undone_and_changes_no_output() -> None:
    arch = architecture("tiny", "i2v")
    model = build(arch, CPU)
    given = branches(arch, 42, CPU)[0]
    with torch.no_grad():
        wanted = model(**given)[0]
        for name in ("bf16-block", "bf16-leaf", "bf16-resident", "bf16-block"):
            unplace(model)
            place(model, BY_NAME[name], CPU)
            assert torch.equal(model(**given)[0], wanted), name
            hooks = [m for m in model.modules() if getattr(m, "_diffusers_hook", None)]
            assert any(m._diffusers_hook.hooks for m in hooks) == (name != "bf16-resident")


def test_families_are_together_and_names_are_unique() -> None:
    assert len(BY_NAME) == len(MODES)
    families = [mode.family for mode in MODES if not mode.fresh]
    assert families == sorted(families, key=families.index)
    for compiled in (False, True):
        usual = usual_modes(compiled=compiled)
        assert all(mode.compiled for mode in usual if mode.ours), "as the product runs"
        assert any(mode.compiled for mode in usual if not mode.ours) == compiled


def test_unknown_modes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--modes", "bf16-resident,nonsense"])
    assert "unknown: nonsense" in capsys.readouterr().err
    assert isinstance(MODES[0], Mode)
