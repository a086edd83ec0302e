"""The step benchmark at a size for CPUs; its floor against Wan's shapes as the paper has them."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable

import pytest
import torch

from shared_offload.bench import step
from shared_offload.bench.clock import Marks
from shared_offload.bench.floors import Part, Workbench, block_parts, time_parts
from shared_offload.errors import ConfigError
from shared_offload.model.attention import sdpa
from shared_offload.synth.sizes import architecture

CPU = torch.device("cpu")


@pytest.fixture
def bench(tmp_path) -> Callable[..., dict]:
    """Run `step` on the tiny model and give back its JSON."""

    def run(*flags: str) -> dict:
        parser = argparse.ArgumentParser()
        step.add_parser(parser.add_subparsers(required=True))
        path = tmp_path / "figures.json"
        args = parser.parse_args(["step", "--size", "tiny", *flags, "--json", str(path)])
        assert args.run(args) == 0
        return json.loads(path.read_text())

    return run


@pytest.mark.parametrize("task", ["t2v", "i2v"])
@pytest.mark.parametrize(("tokens", "share"), [(32760, 1), (32760, 8), (75600, 1)])
def test_a_block_of_14b_has_the_operations_of_wan(task, tokens, share) -> None:
    parts = block_parts(architecture("14b", task), tokens, share)
    mine = tokens // share
    image = task == "i2v"
    products = 2 * 5120 * (mine * (6 * 5120 + 2 * 13824) + (512 + 257 * image) * 2 * 5120)
    scores = 4 * 128 * (40 // share * tokens**2 + 40 * mine * (512 + 257 * image))
    assert sum(p.flops for p in parts if p.kind == "product") == products
    assert sum(p.flops for p in parts if p.kind == "attention") == scores
    assert len({p.name for p in parts}) == len(parts) == (15 if image else 12)


def test_each_part_does_what_its_shape_says() -> None:
    seen = []

    def attention(q, k, v):
        seen.append((q, k, v))
        return sdpa(q, k, v)

    for fp8 in (True, False):
        bench = Workbench(CPU, fp8=fp8, attention=attention)
        out = bench.work(Part("x", "product", (5, 32, 16)))()
        assert out.shape == (5, 32)
        assert out.float().std() > 0.1
    bench.work(Part("y", "attention", (6, 7, 2, 4)))()
    q, k, v = seen[0]
    assert q.shape == (1, 6, 2, 4) and k.shape == v.shape == (1, 7, 2, 4)
    assert all(t.count_nonzero() == t.numel() for t in (q, k, v))


def test_a_part_is_told_the_time_it_takes(monkeypatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("shared_offload.bench.clock.time.perf_counter", lambda: next(clock))
    parts = [Part(name, "product", (2, 2, 2)) for name in "ab"]
    found = time_parts(parts, Workbench(CPU, fp8=False), CPU, passes=3)
    assert found == {"a": 1, "b": 1}
    marks = Marks(CPU)
    marks.mark()
    assert marks.spans() == []


def test_figures_belong_together(bench, tmp_path, capsys) -> None:
    kernels = tmp_path / "kernels.txt"
    flags = ("--weights", "both", "--steps", "2", "--profile", str(kernels))
    figures = bench("--height", "48", "--width", "32", "--frames", "9", *flags)
    floor = figures["floor"]
    assert figures["options"]["step"]["tokens"] == 3 * 3 * 2
    assert floor["calls"] == 2 * 8
    parts = sum(part["seconds"] for part in floor["parts"])
    assert floor["seconds"] == pytest.approx(parts)
    assert floor["seconds"] == pytest.approx(floor["product_seconds"] + floor["attention_seconds"])
    assert floor["seconds"] == pytest.approx((floor["before_seconds"] + floor["after_seconds"]) / 2)
    for kind in ("streamed", "resident"):
        timing = figures[kind]
        assert len(timing["seconds"]) == 2
        assert timing["step"] == pytest.approx(sum(timing["seconds"]) / 2)
        assert figures["ratio"][kind] == pytest.approx(timing["step"] / floor["seconds"])
        # A step has all that the floor has, and more. The best of each: a busy machine adds.
        assert min(timing["seconds"]) > min(floor["before_seconds"], floor["after_seconds"])
    assert figures["streamed"]["weights_nbytes"] < figures["resident"]["weights_nbytes"]
    assert figures["streamed"]["stream"]["steps"] == 4 and figures["resident"]["stream"] == {}
    assert figures["equal"] is True and figures["first_step_seconds"] > 0
    assert "aten::" in kernels.read_text()
    assert "over resident" in capsys.readouterr().out


def test_one_branch_is_half_the_floor_and_runs_once(bench, monkeypatch) -> None:
    branches = []
    velocities = step.Workload.step

    def count(self, source):
        found = velocities(self, source)
        branches.append(len(found))
        return found

    monkeypatch.setattr(step.Workload, "step", count)
    figures = bench("--tokens", "42", "--no-cfg", "--share", "1/2", "--dtype", "bf16")
    assert set(branches) == {1}
    assert figures["floor"]["calls"] == 8 and list(figures["ratio"]) == ["streamed"]
    shapes = {part["name"]: part["shape"] for part in figures["floor"]["parts"]}
    assert shapes["self_attn.q"] == [21, 128, 128] and shapes["self-attention"] == [42, 42, 4, 16]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--share", "1/3"), "cannot split 8 heads"),
        (("--tokens", "0"), "--tokens 0"),
        (("--frames", "80"), "--frames 80"),
        (("--height", "100"), "a video of height 100"),
        (("--steps", "0"), "--steps 0"),
        (("--slots", "1"), "--slots 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(bench, flags, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        bench(*flags)


def test_operations_of_a_product_and_an_attention() -> None:
    assert Part("", "product", (2, 3, 4)).flops == 2 * math.prod((2, 3, 4))
    assert Part("", "attention", (2, 3, 4, 5)).flops == 2 * 2 * math.prod((2, 3, 4, 5))
