"""Whole pipelines on the CPU: what changes the latents, what must not, what a failure leaves.

Latents are compared bit for bit unless a test says otherwise.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared_offload.errors import CheckpointError, ConfigError, InputError, OutputError
from shared_offload.pipeline import arena_blocks, dit_weights, generate
from shared_offload.pipeline.generate import Pipeline
from shared_offload.pipeline.scheduler import UniPC
from shared_offload.pipeline.text_encoder import TextEncoder
from shared_offload.pipeline.vae import Vae
from shared_offload.weights.convert import convert_to_fp8
from tests.reference import diffusers_dit

FP8 = {"dit_quantized": True, "dit_quant_scheme": "fp8-vllm"}
WEIGHTS = {"bf16": {}, "fp32": {"dtype": "FP32"}, "fp8": FP8}
OFFLOAD = {"cpu_offload": True}
SHARED = {**OFFLOAD, "shared_cpu_weights": True, "shared_cpu_weight_scope": "host"}
PHASES = {"offload_granularity": "phase"}
STEPS, BLOCKS = 3, 8  # of the fixture's settings, of the tiny model


@pytest.fixture(scope="module")
def resident(studio) -> Callable[[str, str], Tensor]:
    """The latents of a run with everything resident, by task and kind of weights."""

    @functools.cache
    def latents(task: str, weights: str) -> Tensor:
        return studio.video(task, **WEIGHTS[weights]).latents

    return latents


# -- what the latents depend on --------------------------------------------------------------------


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_the_seed_alone_decides(studio, task) -> None:
    with studio.pipeline(task) as pipeline:
        first, again, other = (pipeline.generate(seed=seed) for seed in (3, 3, 4))
    fresh = studio.video(task, seed=3)
    assert torch.equal(first.latents, again.latents)
    assert torch.equal(first.latents, fresh.latents)
    assert torch.equal(first.frames, fresh.frames)
    assert not torch.equal(first.latents, other.latents)
    assert first.latents.dtype == torch.float32
    assert first.latents.shape == ((16, 2, 4, 6) if task == "t2v" else (16, 2, 4, 4))


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "a cat"},
        {"negative_prompt": ""},
        {"sample_guide_scale": 2},
        {"sample_shift": 3},
        {"infer_steps": 4},
        {"enable_cfg": False},
        {"dtype": "FP32"},
        FP8,
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_setting_changes_the_latents(studio, resident, change) -> None:
    assert not torch.equal(studio.video("t2v", **change).latents, resident("t2v", "bf16"))


def test_the_picture_changes_the_latents(studio, resident, checkpoints, tmp_path) -> None:
    mirrored = tmp_path / "mirrored.png"
    with generate.conditioning.Image.open(studio.picture) as picture:
        picture.transpose(0).save(mirrored)
    with studio.pipeline("i2v") as pipeline:
        other = pipeline.generate(image_path=mirrored)
        assert torch.equal(pipeline.generate().latents, resident("i2v", "bf16"))
    assert not torch.equal(other.latents, resident("i2v", "bf16"))
    assert other.metadata["image_path"] == str(mirrored)


# -- where the weights come from -------------------------------------------------------------------


def write_diffusers(source: Path, folder: Path) -> Path:
    """The DiT of an official folder as diffusers saves it, through the tests' own name map."""
    weights = {}
    for shard in source.glob("diffusion_pytorch_model*.safetensors"):
        weights |= load_file(shard)
    config = json.loads((source / "config.json").read_text())
    target = folder / "transformer"
    target.mkdir(parents=True)
    renamed = {diffusers_dit.rename(name): tensor for name, tensor in weights.items()}
    save_file(renamed, target / "diffusion_pytorch_model.safetensors")
    image = config["model_type"] == "i2v"
    theirs = {
        "_class_name": "WanTransformer3DModel",
        "added_kv_proj_dim": config["dim"] if image else None,
        "attention_head_dim": config["dim"] // config["num_heads"],
        "cross_attn_norm": True,
        "eps": config["eps"],
        "ffn_dim": config["ffn_dim"],
        "freq_dim": config["freq_dim"],
        "image_dim": config["image_dim"] if image else None,
        "in_channels": config["in_dim"],
        "num_attention_heads": config["num_heads"],
        "num_layers": config["num_layers"],
        "out_channels": config["out_dim"],
        "patch_size": [1, 2, 2],
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
        "text_dim": config["text_dim"],
    }
    (target / "config.json").write_text(json.dumps(theirs))
    return folder


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_a_diffusers_folder_of_the_same_weights(
    studio, resident, checkpoints, tmp_path, task
) -> None:
    official = checkpoints[task]
    folder = write_diffusers(official, tmp_path / "model")
    beside = {
        "model_path": str(folder),
        "t5_original_ckpt": str(official / "models_t5_umt5-xxl-enc-bf16.pth"),
        "t5_tokenizer_path": str(official / "google/umt5-xxl"),
        "vae_path": str(official / "Wan2.1_VAE.pth"),
    }
    if task == "i2v":
        beside["clip_original_ckpt"] = str(next(official.glob("models_clip*.pth")))
    got = studio.video(task, **beside)
    assert torch.equal(got.latents, resident(task, "bf16"))


@pytest.mark.parametrize("layout", ["block", "chunk", "single"])
def test_fp8_layouts_of_the_same_weights(studio, resident, checkpoints, tmp_path, layout) -> None:
    """The reference reads the block files that came with the checkpoint."""
    out = tmp_path / "converted"
    convert_to_fp8(checkpoints["i2v"], out, layout)
    found = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(found) == {"block": BLOCKS + 1, "single": 1}.get(layout, len(found))
    got = studio.video("i2v", **FP8, **SHARED, dit_quantized_ckpt=str(out))
    assert torch.equal(got.latents, resident("i2v", "fp8"))


# -- where the weights live ------------------------------------------------------------------------

# options, scope of the arena, blocks copied in a run of STEPS steps
PLACEMENTS = {
    "private": (OFFLOAD, "rank", STEPS * BLOCKS),
    "shared": (SHARED, "host", STEPS * BLOCKS),
    "shared phases": ({**SHARED, **PHASES}, "host", STEPS * BLOCKS),
    "whole model": ({**SHARED, "offload_granularity": "model"}, "host", BLOCKS),
    "3 resident": ({**OFFLOAD, "resident_blocks": 3}, "rank", STEPS * BLOCKS - (STEPS - 1) * 3),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_streamed_is_resident(studio, resident, task, weights, placement) -> None:
    options, scope, copies = PLACEMENTS[placement]
    video = studio.video(task, **WEIGHTS[weights], **options)
    assert torch.equal(video.latents, resident(task, weights))
    (arena,), streaming = video.metadata["arenas"], video.metadata["streaming"]
    assert (arena["scope"], streaming["steps"]) == (scope, STEPS)
    block = arena["nbytes"] / BLOCKS  # with its padding, 2 % of so small a block
    assert streaming["copied_bytes"] / block == pytest.approx(copies, rel=0.05)


@pytest.mark.parametrize(
    "options",
    [
        {"unload_modules": True},
        {"unload_modules": True, **SHARED, **PHASES},
        {"t5_cpu_offload": True, "clip_cpu_offload": True, "vae_cpu_offload": True},
        {**SHARED, "t5_cpu_offload": False, "clip_cpu_offload": False, "vae_cpu_offload": False},
    ],
    ids=["unload", "unload shared", "encoders offloaded", "encoders stay"],
)
def test_where_modules_wait_changes_nothing(studio, resident, options) -> None:
    with studio.pipeline("i2v", **FP8, **options) as pipeline:
        for _ in range(2):
            assert torch.equal(pipeline.generate().latents, resident("i2v", "fp8"))


def test_unload_modules_holds_nothing_between_requests(studio, monkeypatch) -> None:
    loads = []
    load = dit_weights.load_dit
    monkeypatch.setattr(
        "shared_offload.pipeline.runner.load_dit",
        lambda *a, **k: loads.append(k["name"]) or load(*a, **k),
    )
    for unload, expected in ((False, 1), (True, 2)):
        loads.clear()
        with studio.pipeline("t2v", **FP8, **SHARED, unload_modules=unload) as pipeline:
            pipeline.generate()
            assert mapped_segments() == (0 if unload else 1)
            pipeline.generate()
        assert len(loads) == expected


# -- failures --------------------------------------------------------------------------------------


class BrokenAtSecondStep(UniPC):
    """Fails in the middle of denoising."""

    error: BaseException

    def step(self, velocity: Tensor, index: int, latent: Tensor) -> Tensor:
        if index == 1:
            raise self.error
        return super().step(velocity, index, latent)


def failing(error: BaseException) -> Callable[..., None]:
    def fail(*_args, **_options) -> None:
        raise error

    return fail


def break_step(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    def make(*, steps, shift, device, **_):
        broken = BrokenAtSecondStep(steps=steps, shift=shift, device=device)
        broken.error = error
        return broken

    patch.setattr(generate, "make_scheduler", make)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch, BaseException], None]] = {
    "text encoder": lambda patch, e: patch.setattr(TextEncoder, "encode", failing(e)),
    "vae encode": lambda patch, e: patch.setattr(Vae, "encode", failing(e)),
    "fill arena": lambda patch, e: patch.setattr(arena_blocks, "fill_tensors", failing(e)),
    "attach source": lambda patch, e: patch.setattr(arena_blocks, "StreamedSource", failing(e)),
    "step": break_step,
    "vae decode": lambda patch, e: patch.setattr(Vae, "decode", failing(e)),
    "write video": lambda patch, e: patch.setattr(generate, "write_video", failing(e)),
}


FAULTS_LATER = [name for name in FAULTS if name not in ("fill arena", "attach source")]


@pytest.mark.parametrize(
    ("fault", "when"), [(f, "first") for f in FAULTS] + [(f, "later") for f in FAULTS_LATER]
)
def test_a_failure_leaves_the_pipeline_usable(
    studio, resident, tmp_path, monkeypatch, fault, when
) -> None:
    error = KeyboardInterrupt() if fault == "step" else RuntimeError("injected")
    target = tmp_path / "out.mp4"
    with studio.pipeline("i2v", **FP8, **SHARED, **PHASES) as pipeline:
        if when == "later":
            pipeline.generate()
        with monkeypatch.context() as patch:
            FAULTS[fault](patch, error)
            with pytest.raises(type(error)) as caught:
                pipeline.generate(save_result_path=target)
        assert caught.value is error
        assert list(tmp_path.iterdir()) == []
        video = pipeline.generate(save_result_path=target)
        assert torch.equal(video.latents, resident("i2v", "fp8"))
        assert target.stat().st_size > 0


def test_what_the_caller_gets_wrong_is_told_before_anything_loads(
    studio, resident, tmp_path, monkeypatch
) -> None:
    (tmp_path / "file").touch()
    small = tmp_path / "small.png"
    generate.conditioning.Image.new("RGB", (8, 8)).save(small)
    wrong = [
        ({"image_path": tmp_path / "none.png"}, InputError, {"path": str(tmp_path / "none.png")}),
        ({"image_path": small}, InputError, {"height": 8, "width": 8}),
        ({"save_result_path": tmp_path / "file/out.mp4"}, OutputError, {}),
        ({"save_result_path": tmp_path / "out.txt"}, OutputError, {}),
        ({"seed": -1}, ConfigError, {"key": "seed", "found": -1}),
        ({"seed": 2**63}, ConfigError, {"key": "seed", "found": 2**63}),
    ]
    with studio.pipeline("i2v") as pipeline:
        with monkeypatch.context() as patch:
            patch.setattr(TextEncoder, "load", failing(AssertionError("loaded")))
            for request, kind, facts in wrong:
                with pytest.raises(kind) as caught:
                    pipeline.generate(**request)
                assert facts.items() <= caught.value.facts.items()
        assert torch.equal(pipeline.generate().latents, resident("i2v", "bf16"))


def test_a_trace_that_cannot_be_written_costs_no_video(studio, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(TextEncoder, "load", failing(AssertionError("loaded")))
    for name in ("file/trace.json", "trace.txt", "."):
        with studio.pipeline("t2v", **OFFLOAD, trace=str(tmp_path / name)) as pipeline:
            with pytest.raises(OutputError) as caught:
                pipeline.generate()
            assert caught.value.hint


def test_i2v_needs_a_picture_from_somewhere(studio, resident) -> None:
    settings = studio.settings("i2v", image_path=None)
    with Pipeline(settings) as pipeline:
        with pytest.raises(ConfigError) as caught:
            pipeline.generate()
        assert caught.value.facts["key"] == "image_path"
        given = pipeline.generate(image_path=studio.picture)
    assert torch.equal(given.latents, resident("i2v", "bf16"))


def test_a_truncated_encoder_is_told_and_can_be_mended(studio, resident, tmp_path) -> None:
    whole = next(studio.checkpoints["t2v"].glob("models_t5*.pth")).read_bytes()
    t5 = tmp_path / "t5.pth"
    t5.write_bytes(whole[: len(whole) // 2])
    with studio.pipeline("t2v", t5_original_ckpt=str(t5)) as pipeline:
        with pytest.raises(CheckpointError) as caught:
            pipeline.generate()
        assert caught.value.facts["path"] == str(t5)
        t5.write_bytes(whole)
        assert torch.equal(pipeline.generate().latents, resident("t2v", "bf16"))


def test_ranks_that_were_not_started_are_told(studio) -> None:
    with pytest.raises(ConfigError) as caught:
        studio.pipeline("t2v", parallel={"seq_p_size": 4})
    assert (caught.value.facts["needed"], caught.value.facts["found"]) == (4, 1)


# -- the end ---------------------------------------------------------------------------------------


def mapped_segments() -> int:
    return sum("/SYSV" in line for line in Path("/proc/self/maps").read_text().splitlines())


def held() -> tuple[int, int, int]:
    """File descriptors, threads and mapped segments of this process."""
    descriptors, threads = (len(list(Path("/proc/self", n).iterdir())) for n in ("fd", "task"))
    return descriptors, threads, mapped_segments()


@pytest.fixture
def settled() -> Iterator[Callable[[tuple[int, int, int]], None]]:
    """Asserts that what this process holds goes down to a level; threads end a moment later."""

    def check(level: tuple[int, int, int]) -> None:
        deadline = time.monotonic() + 3
        while any(a > b for a, b in zip(held(), level, strict=True)):
            assert time.monotonic() < deadline, f"{held()} where {level} was expected"
            time.sleep(0.02)

    yield check


@pytest.mark.parametrize("unload", [False, True])
def test_five_videos_hold_no_more_than_one(studio, settled, unload) -> None:
    before = held()
    with studio.pipeline("i2v", **FP8, **SHARED, unload_modules=unload) as pipeline:
        pipeline.generate()
        after_one = held()
        assert after_one[2] == (0 if unload else 1)
        for seed in range(4):
            pipeline.generate(seed=seed)
        settled(after_one)
    settled((*before[:2], 0))


@pytest.mark.parametrize("options", [{}, SHARED], ids=["resident", "shared"])
def test_close_may_be_called_again_and_anywhere(studio, resident, options) -> None:
    pipeline = studio.pipeline("t2v", **FP8, **options)
    pipeline.close()  # before anything was loaded
    assert torch.equal(pipeline.generate().latents, resident("t2v", "fp8"))
    pipeline.runner.close()
    assert mapped_segments() == 0
    pipeline.close()
    pipeline.runner.close()
    with pipeline:  # what was closed loads again when it is used again
        assert torch.equal(pipeline.generate().latents, resident("t2v", "fp8"))
    pipeline.close()
    assert mapped_segments() == 0


def test_close_after_a_failure(studio, monkeypatch) -> None:
    break_step(monkeypatch, RuntimeError("injected"))
    pipeline = studio.pipeline("t2v", **FP8, **SHARED)
    with pytest.raises(RuntimeError, match="injected"), pipeline:
        pipeline.generate()
    pipeline.close()
    assert mapped_segments() == 0


def test_pipelines_side_by_side_and_one_after_the_other(studio, resident) -> None:
    with studio.pipeline("t2v", **FP8, **SHARED) as one:
        a = one.generate()
        with studio.pipeline("i2v", **FP8, **SHARED, **PHASES) as two:
            b = two.generate()
            with studio.pipeline("t2v", **FP8, **SHARED) as three:
                c = three.generate()
                assert mapped_segments() == 3
                assert torch.equal(a.latents, one.generate().latents)
            assert torch.equal(b.latents, two.generate().latents)
        assert torch.equal(a.latents, one.generate().latents)
    for video, task in ((a, "t2v"), (b, "i2v"), (c, "t2v")):
        assert torch.equal(video.latents, resident(task, "fp8"))
    assert torch.equal(studio.video("t2v", **FP8, **SHARED).latents, a.latents)


# -- what is said ----------------------------------------------------------------------------------


def test_metadata_is_of_this_request(studio, tmp_path) -> None:
    """Values that the call overrode, and the times of this video alone."""
    target = tmp_path / "new folder/out.mp4"
    with studio.pipeline("t2v", **FP8, **OFFLOAD, save_result_path="elsewhere.mp4") as pipeline:
        pipeline.generate(save_result_path=tmp_path / "first.mp4")
        started = time.monotonic()
        video = pipeline.generate(prompt="a cat", seed=9, save_result_path=target)
        seconds = time.monotonic() - started
    said = json.loads(target.with_name("out.mp4.json").read_text())
    assert said == json.loads(json.dumps(video.metadata))
    assert (said["prompt"], said["seed"], said["negative_prompt"]) == ("a cat", 9, "blurry, static")
    assert said["save_result_path"] == str(target)
    assert said["streaming"]["steps"] == STEPS
    assert {"encode text", "load DiT", "denoise", "decode"} <= set(said["stage_seconds"])
    assert sum(said["stage_seconds"].values()) <= seconds
