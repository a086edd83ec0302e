"""The encoders' benchmark at a size for CPUs; its floors against the tensors of the files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from shared_offload.bench import encoders as bench
from shared_offload.errors import CheckpointError, ConfigError
from shared_offload.report.progress import Progress
from shared_offload.synth.folder import make_checkpoint

T5 = "models_t5_umt5-xxl-enc-bf16.pth"
CLIP = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
PARTS = ("t5", "clip", "tokenizer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("encoders") / "tiny"
    make_checkpoint(path, "tiny", "i2v", parts=PARTS, progress=Progress(enabled=False))
    return path


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["encoders", "--size", "tiny", *flags])
    return args.run(args)


def matrices(path: Path, prefix: str, blocks: int) -> dict[str, torch.Tensor]:
    """Weights of linear layers in the first `blocks` blocks."""
    tensors = torch.load(path, weights_only=True)
    starts = tuple(f"{prefix}{n}." for n in range(blocks))
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(starts) and name.endswith(".weight") and tensor.dim() == 2
        if "pos_embedding" not in name
    }


def test_figures_of_a_small_run(folder, tmp_path, capsys, monkeypatch) -> None:
    operations = []

    def time_parts(parts, bench, device, passes):
        operations.append(passes * sum(part.flops for part in parts))
        return {part.name: 1.0 for part in parts}

    monkeypatch.setattr(bench, "time_parts", time_parts)
    path = tmp_path / "figures.json"
    assert run("--model_path", str(folder), "--rounds", "1", "--json", str(path)) == 0
    document = json.loads(path.read_text())
    results = document["results"]
    ways = [(r["encoder"], r["weights"], r["way"]) for r in results]
    assert ways == [
        (encoder, weights, way)
        for encoder, second in (("t5", "passing"), ("clip", "moved"))
        for weights in ("original", "fp8")
        for way in ("resident", second)
    ]
    t5 = matrices(folder / T5, "blocks.", 2)
    clip = matrices(folder / CLIP, "visual.transformer.", 2)  # of 3: the last is not run
    for result, weights in ((results[0], t5), (results[4], clip)):
        count = sum(w.numel() for w in weights.values())
        assert result["tokens"] == (257 if weights is clip else result["tokens"]) > 20
        mine = operations[:2] if weights is t5 else operations[8:9]
        assert sum(mine) == 2 * result["tokens"] * count
    assert results[0]["products_seconds"] == 2 * 2 * 7 and results[4]["products_seconds"] == 2 * 6
    for result in results:
        assert result["seconds"] > 0
        floor = max(result["products_seconds"], result["copy_seconds"])
        assert result["ratio"] == result["seconds"] / floor
    assert "t5 fp8 passing" in capsys.readouterr().out


def test_passing_and_moving_copy_each_weight_once(folder, tmp_path) -> None:
    path = tmp_path / "figures.json"
    flags = ["--model_path", str(folder), "--rounds", "1", "--weights", "original"]
    assert run(*flags, "--json", str(path)) == 0
    document = json.loads(path.read_text())
    t5_resident, t5, clip_resident, clip = document["results"]
    tensors = torch.load(folder / T5, weights_only=True)
    inside = sum(t.numel() for n, t in tensors.items() if n != "token_embedding.weight")
    assert t5["copied_nbytes"] == 4 * inside  # fp32 on a CPU
    assert clip["copied_nbytes"] == clip["weights_nbytes"] == clip_resident["weights_nbytes"]
    assert t5_resident["copied_nbytes"] == clip_resident["copied_nbytes"] == 0
    rate = document["pinned_gb_per_second"] * 1e9
    for result in (t5, clip):
        assert result["copy_seconds"] == pytest.approx(result["copied_nbytes"] / rate)


def test_what_cannot_be_measured_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="--rounds 0"):
        run("--rounds", "0")
    with pytest.raises(CheckpointError):
        run("--model_path", str(tmp_path))
