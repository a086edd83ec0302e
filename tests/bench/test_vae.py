"""The VAE benchmark at a size for CPUs; its convolutions against a count by the layers' shapes."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from shared_offload.bench import vae as bench
from shared_offload.errors import ConfigError
from shared_offload.pipeline.vae import Vae
from shared_offload.report.progress import Progress
from shared_offload.synth.folder import make_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("vae") / "tiny"
    make_checkpoint(path, "tiny", "t2v", parts=("vae",), progress=Progress(enabled=False))
    return path


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["vae", "--size", "tiny", *flags])
    return args.run(args)


def layers_flops(vae: Vae, work) -> int:
    """Operations by the shapes of the layers' weights and of what comes out of them."""
    total = 0

    def count(layer, _inputs, out) -> None:
        nonlocal total
        total += 2 * out.numel() * math.prod(layer.weight.shape[1:])

    model = vae._model
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    handles = [conv.register_forward_hook(count) for conv in convs]
    work()
    for handle in handles:
        handle.remove()
    return total


def test_every_convolution_is_counted_and_timed(folder) -> None:
    vae = Vae.load(folder / "Wan2.1_VAE.pth", device=CPU, dtype=torch.float32)
    latent, video = torch.randn(16, 2, 4, 6), torch.randn(3, 5, 32, 48).clamp(-1, 1)
    for work in (lambda: vae.decode(latent), lambda: vae.encode(video)):
        with bench.Convolutions(CPU) as convolutions:
            work()
        assert convolutions.flops == layers_flops(vae, work) > 0
        assert convolutions.seconds > 0


def test_figures_of_a_small_run(folder, tmp_path, capsys) -> None:
    path = tmp_path / "figures.json"
    flags = ["--video", "16x32", "--frames", "5", "--dtype", "fp32", "bf16", "--rounds", "1"]
    assert run(*flags, "--model_path", str(folder), "--json", str(path)) == 0
    exact, rounded = json.loads(path.read_text())["settings"]
    for setting in (exact, rounded):
        for name in ("encode", "decode"):
            found = setting[name]
            assert found["seconds"] > 0 and found["convolution_seconds"] > 0
            assert found["ratio"] == found["seconds"] / found["convolution_seconds"]
    assert exact["decode"]["error_db"] is None
    assert 20 < rounded["decode"]["error_db"] < 60  # bf16 keeps 8 bits
    assert rounded["decode"]["convolution_flops"] == exact["decode"]["convolution_flops"]
    out = capsys.readouterr().out
    assert "16x32" in out and "bf16 decode" in out


def test_tiles_are_compared_with_the_whole(tmp_path) -> None:
    path = tmp_path / "figures.json"
    flags = ["--video", "32x272", "--frames", "1", "--dtype", "fp32", "--rounds", "1"]
    assert run(*flags, "--tiling", "--json", str(path)) == 0
    whole, tiled = json.loads(path.read_text())["settings"]
    assert tiled["tiling"] and not whole["tiling"]
    assert 5 < tiled["decode"]["error_db"] < 60 and tiled["decode"]["worst"] > 0
    assert tiled["decode"]["convolution_flops"] > whole["decode"]["convolution_flops"]


def test_a_limit_is_kept_to_in_strips_that_change_nothing(folder, tmp_path, monkeypatch) -> None:
    strips = []
    counted = Vae.strips

    def count(self, *args, **more) -> int:
        strips.append((self.limit, counted(self, *args, **more)))
        return strips[-1][1]

    monkeypatch.setattr(Vae, "strips", count)
    path = tmp_path / "figures.json"
    flags = ["--video", "16x512", "--frames", "5", "--dtype", "fp32", "--rounds", "1"]
    assert run(*flags, "--limit", "0.001", "--model_path", str(folder), "--json", str(path)) == 0
    whole, limited = json.loads(path.read_text())["settings"]
    assert whole["limit_gib"] is None and limited["limit_gib"] == 0.001
    assert all((count > 1) == (limit is not None) for limit, count in strips)
    assert {limit for limit, _ in strips} == {None, round(0.001 * 2**30)}
    error = limited["decode"]["error_db"]  # None: equal bit for bit
    assert (error is None) == (limited["decode"]["worst"] == 0) and (error or 100) > 80


def test_videos_that_wan_cannot_make_are_refused() -> None:
    with pytest.raises(ConfigError, match="a video of width 50"):
        run("--video", "32x50")
    with pytest.raises(ConfigError, match="--rounds 0"):
        run("--rounds", "0")
    with pytest.raises(SystemExit):
        run("--video", "32")
