"""What stops a run before anything loads, through the command on real ranks: all of it, once."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch

from tests.reference.processes import Run

LIMIT = 60.0


@pytest.fixture
def refused(settings, ranks, tmp_path):
    """What a run prints that must end in its checks, on every rank with exit code 2 or 1."""

    def run(world: int, *, code: int = 2, environment: dict | None = None, **options) -> str:
        config, target = tmp_path / "config.json", tmp_path / "out" / "v.mp4"
        config.write_text(json.dumps(settings(**options)))
        argv = ["--config_json", str(config), "--save_result_path", str(target)]
        job = {"kind": "command", "who": -1, "argv": argv, "environment": environment or {}}
        done: Run = ranks(world, **job)
        codes = done.end(LIMIT)
        assert codes == [code] * world, done.stderr()
        assert not target.parent.exists(), "nothing was made"
        assert "Traceback" not in done.stderr()
        assert " of 2" not in done.stderr(), "it is no one rank's error"
        printing = [r for r in range(world) if (done.folder / f"stderr-{r}").read_text()]
        assert len(printing) == 1, f"one rank prints, not {printing}: {done.stderr()}"
        return done.stderr()

    return run


def test_everything_wrong_is_told_together(refused, checkpoint, tmp_path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    said = refused(
        2,
        model_path=str(bare),
        parallel={"seq_p_size": 3},
        self_attn_1_type="radial_attn",
        device="cuda",
        environment={"CUDA_VISIBLE_DEVICES": "0,0"},
    )
    told = re.findall(r"^\d+\. (\w+): (.*)", said, re.MULTILINE)
    kinds = [kind for kind, _ in told]
    assert kinds == ["ConfigError"] * 3 + ["CheckpointError"] * 4 + ["PreflightError"] * 2, said
    texts = [text for _, text in told]
    assert "(3) x parallel.cfg_p_size (1) is 3, and 2 ranks were started" in texts[0]
    assert "seq_p_size (3) must divide the model's heads (8)" in texts[1]
    assert "hint: use 1, 2, 4 or 8\n" in said
    assert "'radial_attn' is sparse" in texts[2]
    for text, key in zip(
        texts[3:7], ("t5_original_ckpt", "t5_tokenizer_path", "vae_path"), strict=False
    ):
        assert f"for {key}; tried {bare}" in text
    assert "CUDA_VISIBLE_DEVICES is '0,0': 0 is repeated" in texts[7]
    assert "CUDA shows no GPU" in texts[8]


def test_settings_are_refused_once(refused) -> None:
    said = refused(2, infer_step=3, parallel={"seq_p_size": 2, "cfg_p_size": 3}, num_frames=6)
    assert said.startswith("3 problems:\n1. ConfigError: "), said


def test_a_number_of_ranks_that_is_not_the_product(refused) -> None:
    said = refused(2, parallel={"seq_p_size": 2, "cfg_p_size": 2})
    assert said.startswith("ConfigError: parallel.seq_p_size (2) x parallel.cfg_p_size (2) is 4")
    assert "hint: start 4 (--nproc_per_node on each host)" in said


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("GPU-ffffffff", "CUDA shows no GPU"),
        ("0,x", "x is neither a number nor a UUID"),
        ("MIG-a,MIG-b", "a process sees only one MIG device"),
    ],
)
def test_visible_devices(refused, value, what) -> None:
    said = refused(
        1, code=1, device="cuda", environment={"CUDA_VISIBLE_DEVICES": value}, parallel=False
    )
    assert what in said


@pytest.mark.parametrize("where", ["model", "settings"])
def test_what_only_one_rank_sees(checkpoint, settings, ranks, tmp_path, where) -> None:
    """Rank 1 has a mount namespace of its own, in which a file is another, or is missing."""
    if os.geteuid():
        pytest.skip("mount namespaces need root")
    config, other = tmp_path / "config.json", tmp_path / "other.json"
    config.write_text(json.dumps(settings(parallel={"seq_p_size": 2})))
    other.write_text(json.dumps(settings(parallel={"seq_p_size": 2}, seed=8)))
    hidden = checkpoint / "Wan2.1_VAE.pth" if where == "model" else config
    instead = other if where == "settings" else tmp_path / "another.pth"
    if where == "model":
        torch.save({"a": torch.zeros(1)}, instead)
    argv = ["--config_json", str(config), "--save_result_path", str(tmp_path / "v.mp4")]
    job = {"kind": "command", "who": -1, "argv": argv, "mount": [str(instead), str(hidden)]}
    run = ranks(2, **job)
    assert run.end(LIMIT) == ([1, 1] if where == "model" else [2, 2]), run.stderr()
    said = run.stderr()
    if where == "model":
        sizes = [file.stat().st_size for file in (instead, hidden)]
        assert f"{hidden} has {sizes[0]} or {sizes[1]} bytes, depending on the rank" in said
    else:
        assert "rank 1 (on " in said
        assert "has other settings than rank 0" in said


@pytest.mark.gpu
@pytest.mark.multigpu
def test_more_ranks_than_gpus(refused) -> None:
    said = refused(
        2,
        code=1,
        device="cuda",
        environment={"CUDA_VISIBLE_DEVICES": "0"},
        parallel={"seq_p_size": 2},
    )
    assert "2 ranks were started on this host and 1 GPUs are visible" in said


@pytest.mark.slow
def test_through_torchrun(settings, ranks, tmp_path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings(parallel={"seq_p_size": 4}, self_attn_1_type="sage")))
    argv = ["--config_json", str(config), "--save_result_path", str(tmp_path / "v.mp4")]
    run = ranks(2, torchrun=True, kind="command", who=-1, argv=argv)
    assert run.end(LIMIT) != [0]
    assert run.stderr().count("2 problems:\n") == 1
    assert run.stderr().count("unknown attention kernel 'sage'") == 1
