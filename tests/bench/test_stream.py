"""The streaming benchmark at a size for CPUs, and what its workload stands for."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from shared_offload.bench import stream
from shared_offload.bench.workload import LocalShare, filled_arena, grid_of, lay_out
from shared_offload.errors import ConfigError
from shared_offload.synth.sizes import architecture
from shared_offload.weights.views import views

CPU = torch.device("cpu")


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    stream.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["stream", *flags])
    return args.run(args)


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("granularity", ["block", "phase"])
def test_figures_of_a_small_run(dtype, granularity, tmp_path, capsys) -> None:
    path = tmp_path / "figures.json"
    flags = ["--size", "tiny", "--tokens", "42", "--share", "1/4", "--steps", "2"]
    assert run(*flags, "--dtype", dtype, "--granularity", granularity, "--json", str(path)) == 0
    figures = json.loads(path.read_text())
    assert figures["equal"] is True
    assert len(figures["resident_seconds"]) == len(figures["streamed_seconds"]) == 2
    layout = lay_out(architecture("tiny", "i2v"), fp8=dtype == "fp8")
    assert figures["resident_weights_nbytes"] >= 8 * layout.block_nbytes - 8 * 3 * 4096
    assert figures["streamed_weights_nbytes"] <= 2 * (layout.block_nbytes + 256)
    assert figures["stream"]["steps"] == 2 * stream.STEPS_IN_A_ROW
    table = capsys.readouterr().out
    assert "equal, bit for bit" in table and "yes" in table


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot split 8 heads"):
        run("--size", "tiny", "--share", "1/3")
    with pytest.raises(ConfigError, match="--tokens 0"):
        run("--size", "tiny", "--tokens", "0")
    with pytest.raises(SystemExit):
        run("--size", "tiny", "--share", "2/3")


@pytest.mark.parametrize("fp8", [True, False])
def test_weights_are_finite_not_zero_and_of_a_models_size(fp8: bool) -> None:
    layout = lay_out(architecture("tiny", "i2v"), fp8=fp8)
    seen = set()
    with filled_arena(layout, CPU) as host:
        for unit in layout.units("block"):
            tensors = views(unit, host[unit.offset :])
            for name, tensor in tensors.items():
                values = tensor.float()
                assert values.isfinite().all() and values.any(), name
            q = tensors["self_attn.q.weight"].float()
            if fp8:
                q = q * tensors["self_attn.q.weight_scale"]
            assert q.std().item() == pytest.approx(q.shape[1] ** -0.5, rel=0.05)
            seen.add(q.sum().item())
    assert len(seen) == layout.num_blocks  # blocks differ


@pytest.mark.parametrize("tokens", [24, 22])
def test_a_share_has_the_shapes_and_values_of_one_rank(tokens: int) -> None:
    share = LocalShare(4)
    x_BSC = torch.randn(1, tokens, 5)
    chunk = share.split_tokens(x_BSC)
    assert chunk.shape == (1, 6, 5) and torch.equal(chunk, x_BSC[:, :6])
    x_BLNH = torch.randn(1, 6, 8, 3)
    out = share.outgoing(x_BLNH.flatten(2), 8)
    for part in range(3):
        out.place(part).copy_(x_BLNH.unflatten(2, (4, 2)) * (part + 1))
    q, k, v = out.send((x_BLNH, x_BLNH, x_BLNH), tokens)()
    assert q.shape == (1, tokens, 2, 3) and torch.equal(k, 2 * q) and torch.equal(v, 3 * q)
    back = share.to_tokens(q)()
    assert back.shape == (1, 6, 4, 2, 3)
    if tokens == 24:
        assert torch.equal(back.flatten(2, 3), x_BLNH)
    assert share.gather_tokens(chunk, tokens).shape == (1, tokens, 5)


def test_grids_multiply_to_the_tokens() -> None:
    assert grid_of(32760)[0] == 21
    for tokens in (1, 7, 21, 75600, 4680):
        t, y, x = grid_of(tokens)
        assert t * y * x == tokens
