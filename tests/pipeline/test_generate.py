"""Whole pipelines on the CPU: what changes the latents, and what must not.

Latents are compared bit for bit unless a test says otherwise.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared_offload.pipeline import dit_weights, generate
from shared_offload.pipeline.inventory import take_inventory
from shared_offload.pipeline.runner import encode_room
from shared_offload.weights.convert import convert_to_fp8
from tests.reference import diffusers_dit
from tests.reference.options import FP8, OFFLOAD, PHASES, SHARED, WEIGHTS
from tests.reference.segments import mapped_segments

STEPS, BLOCKS = 3, 8  # of the fixture's settings, of the tiny model


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


def test_a_picture_has_as_much_room_in_every_mode(studio) -> None:
    """On a GPU an encode works in strips that fit into it; their number shows in the latents."""
    modes = ({}, OFFLOAD, SHARED, {**OFFLOAD, **PHASES}, {**OFFLOAD, "resident_blocks": 3})
    rooms = set()
    for mode in (*modes, {**OFFLOAD, "lazy_load": True}, {"unload_modules": True}):
        settings = studio.settings("i2v", **FP8, **mode)
        rooms.add(encode_room(settings, take_inventory(settings), vae_nbytes=1000))
    [room] = rooms
    assert room > 0


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
