"""Several ranks make what one rank makes: over gloo, with sizes that divide and that do not."""

from __future__ import annotations

import pytest
import torch

from shared_offload.config import Settings
from shared_offload.pipeline.generate import Pipeline

START = 100.0  # seconds for eight ranks on a busy machine
FP32 = {"dtype": "FP32"}
FP8 = {"dit_quantized": True, "dit_quant_scheme": "fp8-vllm"}
PRIVATE = {**FP8, "cpu_offload": True}
SHARED = {**PRIVATE, "shared_cpu_weights": True, "shared_cpu_weight_scope": "host"}
# Tokens: 12 divide among 2 and 4, 30 among 2; 9 among none, and leave a rank of 8 without any.
CASES = {
    "12 tokens": {**FP32},
    "30 tokens": {**FP32, "size": [48, 80]},
    "9 tokens": {**FP32, "size": [48, 48], "num_frames": 1},
    "fp8 resident": {**FP8, "size": [48, 80]},
    "fp8 private": {**PRIVATE, "size": [48, 80]},
    "fp8 shared": {**SHARED, "size": [48, 80]},
    "fp8 phases": {**SHARED, "size": [48, 80], "offload_granularity": "phase"},
}
WITHOUT_CFG = {"one branch": {**FP32, "size": [48, 80], "enable_cfg": False}}
STEPS, BLOCKS = 2, 8


@pytest.fixture(scope="module")
def alone():
    """The video of one rank, made once for each of the settings."""
    made: dict[str, object] = {}

    def video(options):
        key = str(sorted(options.items()))
        if key not in made:
            with Pipeline(Settings.from_json_and_flags(options, {})) as pipeline:
                made[key] = pipeline.generate()
        return made[key]

    return video


SLOW = [pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((4, 1), (2, 2), (8, 1), (4, 2))]


@pytest.mark.parametrize(("seq", "cfg"), [(2, 1), (1, 2), *SLOW])
def test_latents_and_frames_are_those_of_one_rank(settings, ranks, alone, seq, cfg) -> None:
    cases = CASES if cfg == 2 else CASES | WITHOUT_CFG
    world = seq * cfg
    wanted = {name: settings(**options) for name, options in cases.items()}
    run = ranks(world, kind="videos", cfg=cfg, settings=wanted)
    assert run.end(START) == [0] * world, run.stderr()
    made = [torch.load(run.folder / f"made{rank}.pt") for rank in range(world)]
    for name, options in wanted.items():
        one = alone(options)
        latents, frames, counts, arenas = made[0][name]
        tolerance = 2e-5 if options.get("dtype") == "FP32" else 0.02
        scale = one.latents.abs().max()
        assert (latents - one.latents).abs().max() < tolerance * scale, name
        assert frames.shape == one.frames.shape
        if seq == 1:  # halves of the ranks: nothing is added in another order
            assert torch.equal(latents, one.latents), name
        if options.get("dtype") == "FP32":
            assert (frames.int() - one.frames.int()).abs().max() <= 1, name
        for other in made[1:]:
            assert torch.equal(other[name][0], latents), name
            assert other[name][1] is None, "only the first rank needs frames"
        # Two in each block for each branch that a rank computes.
        branches = (2 if options["enable_cfg"] else 1) // cfg
        expected = 2 * BLOCKS * STEPS * branches if seq > 1 else 0
        assert counts["all_to_all"] == expected
        shared = options.get("shared_cpu_weights")
        private = options.get("cpu_offload") and not shared
        everyone = list(range(world))
        sharers = [list(arena["ranks"]) for arena in arenas]
        assert sharers == ([everyone] if shared else [[r] for r in everyone] if private else [])
    for name in ("fp8 private", "fp8 shared", "fp8 phases"):
        assert torch.equal(made[0][name][0], made[0]["fp8 resident"][0]), name


@pytest.mark.gpu
@pytest.mark.parametrize(("seq", "cfg"), [(2, 1), (1, 2)])
def test_on_gpus(settings, ranks, alone, seq, cfg) -> None:
    """Through NCCL with two GPUs, else gloo: one shared arena, two ranks, and one rank."""
    options = settings(**SHARED, size=[48, 80], device="cuda")
    run = ranks(2, kind="videos", cfg=cfg, device="cuda", settings={"v": options})
    assert run.end(START) == [0, 0], run.stderr()
    latents = torch.load(run.folder / "made0.pt")["v"][0]
    one = alone(options).latents.cpu()
    assert (latents - one).abs().max() < 0.02 * one.abs().max()
