"""What a failure leaves, what a pipeline holds, and how it ends: whole pipelines on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared_offload.errors import CheckpointError, ConfigError, InputError, OutputError
from shared_offload.pipeline import arena_blocks, generate
from shared_offload.pipeline.generate import Pipeline
from shared_offload.pipeline.scheduler import UniPC
from shared_offload.pipeline.text_encoder import TextEncoder
from shared_offload.pipeline.vae import Vae
from tests.reference.options import FP8, OFFLOAD, PHASES, SHARED
from tests.reference.segments import mapped_segments

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


def test_an_encoder_that_is_cut_later_is_told_and_can_be_mended(studio, resident, tmp_path) -> None:
    whole = next(studio.checkpoints["t2v"].glob("models_t5*.pth")).read_bytes()
    t5 = tmp_path / "t5.pth"
    t5.write_bytes(whole)
    with studio.pipeline("t2v", t5_original_ckpt=str(t5)) as pipeline:
        t5.write_bytes(whole[: len(whole) // 2])
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
