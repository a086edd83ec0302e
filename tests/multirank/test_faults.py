"""The command on several ranks, one of which is killed, fails or naps, in every stage."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.reference.processes import Run

LIMIT = 15.0
START = 100.0
STAGES = ("encode text", "load DiT", "denoise", "decode")


@pytest.fixture
def command(checkpoint, settings, ranks, tmp_path):
    """The command over one shared arena, with a rank that misbehaves."""

    def start(fault: str, stage: str, who: int, world: int = 2, torchrun: bool = False) -> Run:
        options = settings(
            dit_quantized=True,
            dit_quant_scheme="fp8-vllm",
            cpu_offload=True,
            shared_cpu_weights=True,
            parallel={"seq_p_size": world},
        )
        config, target = write_json(tmp_path / "config.json", options), tmp_path / "out" / "v.mp4"
        argv = ["--config_json", str(config), "--save_result_path", str(target)]
        job = {"fault": fault, "stage": stage, "who": who, "argv": argv}
        return ranks(world, torchrun=torchrun, kind="command", **job)

    return start


def write_json(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def wait_there(run: Run) -> float:
    """When the fault began."""
    deadline = time.monotonic() + START
    while not (run.folder / "there").exists():
        assert time.monotonic() < deadline, run.stderr()
        time.sleep(0.02)
    return time.monotonic()


def nothing_written(run: Run) -> bool:
    out = run.folder.parent / "out"
    return not out.exists() or not list(out.iterdir())


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_rank_ends_all(command, stage, who) -> None:
    run = command("kill", stage, who)
    began = wait_there(run)
    codes = run.end(LIMIT)
    assert time.monotonic() - began < LIMIT
    assert codes == [-signal.SIGKILL if rank == who else 1 for rank in range(2)]
    errors = run.stderr()
    assert errors.count("RankError: ") == 1, errors
    assert f"rank {who} of 2 (pid {run.pids()[who]} on " in errors
    assert f"disappeared in stage {stage};" in errors
    assert "Traceback" not in errors
    assert nothing_written(run)


@pytest.mark.parametrize(
    ("fault", "text"),
    [("fail", "RuntimeError: injected"), ("run_out", "RankError: out of GPU memory: CUDA out of")],
)
@pytest.mark.parametrize(("stage", "who"), [("load DiT", 1), ("denoise", 0), ("decode", 1)])
def test_a_rank_that_fails_ends_all(command, fault, text, stage, who) -> None:
    run = command(fault, stage, who)
    began = wait_there(run)
    assert run.end(LIMIT) == [1, 1], run.stderr()
    assert time.monotonic() - began < LIMIT
    assert run.stderr().count(text) >= 1, run.stderr()
    assert run.stderr().count(f"in rank {who} of 2, stage {stage}\n") == 1, run.stderr()
    assert run.stderr().count("of 2, stage") == 1
    assert nothing_written(run)


@pytest.mark.slow
def test_a_rank_that_is_slow_is_not_killed(command) -> None:
    """Slower than any bound of the watch, and than what makes another host count as lost."""
    run = command("nap", "denoise", 1)
    wait_there(run)
    assert run.end(START) == [0, 0], run.stderr()
    assert (run.folder.parent / "out" / "v.mp4").stat().st_size > 0


def test_a_kill_under_torchrun(command) -> None:
    run = command("kill", "denoise", 1, torchrun=True)
    wait_there(run)
    assert run.end(LIMIT) == [1], run.stderr()
    assert run.stderr().count("RankError: rank 1 of 2") == 1, run.stderr()
    assert nothing_written(run)


def test_sigint_to_torchrun_ends_everything(command) -> None:
    """Also a rank that is stuck in native code, in the middle of a step."""
    run = command("stick", "denoise", 0, torchrun=True)
    wait_there(run)
    time.sleep(1)
    run.processes[0].send_signal(signal.SIGINT)
    assert run.end(5.0) != [0]
    assert run.stderr().count("RankError") == 1, run.stderr()
    assert nothing_written(run)
