"""Every file in configs/ makes a video in miniature, and the same one as its plain counterpart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared_offload.config import Settings, read_json
from shared_offload.pipeline.generate import Pipeline

ROOT = Path(__file__).parents[2] / "configs"
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.json"))
SMALL = {"size": [32, 48], "num_frames": 5, "device": "cpu", "seed": 5}
# What a file may say of the way a video is made, against what it says of the video.
WAYS = ("offload", "lazy", "unload", "shared", "resident", "num_disk", "use_tiling", "parallel")


def miniature(studio, file: str, content: dict) -> Settings:
    """One rank of the file's settings, on a tiny checkpoint."""
    task = "t2v" if "t2v" in file else "i2v"
    distilled = "distill" in file
    options = {k: v for k, v in content.items() if k != "parallel"}
    options |= {**SMALL, "model_path": str(studio.checkpoints[task]), "task": task}
    options |= {"model_cls": "wan2.1_distill"} if distilled else {"infer_steps": 2}
    options |= {"image_path": str(studio.picture)} if task == "i2v" else {}
    return Settings.from_json_and_flags(options, {})


@pytest.mark.parametrize("file", FILES)
def test_file_makes_the_video_of_resident_weights(studio, file) -> None:
    content = read_json(ROOT / file)
    plain = {k: v for k, v in content.items() if not any(way in k for way in WAYS)}
    settings = miniature(studio, file, content)
    with Pipeline(settings) as pipeline, Pipeline(miniature(studio, file, plain)) as resident:
        video, wanted = pipeline.generate(), resident.generate()
        arenas = video.metadata.get("arenas", [])
    assert torch.equal(video.latents, wanted.latents)
    assert video.frames.shape == wanted.frames.shape
    assert bool(arenas) == settings.cpu_offload
    assert wanted.metadata.get("arenas") is None
    scopes = {arena["scope"] for arena in arenas}
    if settings.shared_cpu_weights:
        assert scopes == {settings.shared_cpu_weight_scope}
    elif settings.cpu_offload:
        assert scopes == {"rank-numa" if settings.cpu_offload_numa else "rank"}
