"""The accuracy benchmark at a size for CPUs: it sees what rounds more, and nothing else."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from torch import Tensor

from shared_offload.bench import accuracy
from shared_offload.bench.workload import filled_arena, lay_out
from shared_offload.errors import ConfigError
from shared_offload.model.attention import Attention, sdpa
from shared_offload.model.operations import PLAIN
from shared_offload.streaming.source import resident_from_host
from shared_offload.synth.sizes import architecture
from shared_offload.weights.views import views

CPU = torch.device("cpu")


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    accuracy.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["accuracy", "--size", "tiny", *flags])
    return args.run(args)


def in_another_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bsnh,benh->bnse", q.double(), k.double()) / q.shape[-1] ** 0.5
    return torch.einsum("bnse,benh->bsnh", scores.softmax(-1), v.double()).to(q.dtype)


def coarse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v).to(torch.float8_e5m2).to(v.dtype)


def test_weights_are_what_their_codes_stand_for() -> None:
    layout = lay_out(architecture("tiny", "t2v"), fp8=True)
    unit = layout.units("block")[3]
    with filled_arena(layout, CPU) as host:
        read = views(unit, host[unit.offset :])
        source = resident_from_host(layout.units("block"), host, CPU)
        real = accuracy.Dequantised(source, torch.float32)
        for other in real.units[: unit.index]:
            with real.borrow(other):
                pass
        with real.borrow(unit) as w:
            scaled = {name.removesuffix("_scale") for name in read if name.endswith("_scale")}
            assert len(scaled) == 10 and w.keys() == {n for n in read if not n.endswith("_scale")}
            for name, tensor in w.items():
                wanted = read[name].double()
                if name in scaled:
                    assert tensor.dtype == torch.float32
                    wanted *= read[f"{name}_scale"].double()
                assert torch.allclose(tensor.double(), wanted, rtol=1e-7, atol=0)


def test_more_rounding_is_seen_and_another_order_of_sums_is_not() -> None:
    kernels = [Attention(run.__name__, run) for run in (sdpa, in_another_order, coarse)]
    ways = [accuracy.Way(False, PLAIN, kernels[0])]
    ways += [accuracy.Way(True, PLAIN, kernel) for kernel in kernels]
    bf16, fp8, other, worse = accuracy.measure("tiny", "i2v", 105, ways, CPU)
    # A mantissa of 3 bits leaves some 31 dB in a product, one of 7 bits some 55.
    assert 27 < fp8.sqnr_db < 38 < bf16.sqnr_db < 52
    assert bf16.gained_db == fp8.gained_db == 0
    assert abs(other.gained_db) < accuracy.MOST_LOST_DB < 0.5 < -worse.gained_db
    assert worse.gained_db == pytest.approx(worse.sqnr_db - fp8.sqnr_db)


def test_a_ratio_is_that_of_the_norms() -> None:
    exact = torch.tensor([3.0, 4.0])
    assert accuracy.sqnr_db(exact + torch.tensor([0.0, 0.05]), exact) == pytest.approx(40)


def test_the_command(tmp_path, capsys) -> None:
    path = tmp_path / "figures.json"
    flags = ("--height", "48", "--width", "32", "--frames", "9", "--attention", "flash_attn3")
    assert run(*flags, "--json", str(path)) == 0
    document = json.loads(path.read_text())
    assert document["tokens"] == 3 * 3 * 2
    assert [figure["weights"] for figure in document["figures"]] == ["bf16", "FP8"]
    said = capsys.readouterr()
    assert f"{document['figures'][1]['sqnr_db']:.2f} dB" in said.out
    assert "flash_attn3 needs a CUDA device" in said.err and "steps: 3 steps" in said.err
    with pytest.raises(ConfigError, match="--tokens 0"):
        run("--tokens", "0")
