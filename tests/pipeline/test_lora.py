"""LoRA through whole pipelines: the latents of weights that were merged beforehand."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared_offload.errors import CheckpointError
from shared_offload.pipeline.generate import Pipeline
from shared_offload.pipeline.text_encoder import TextEncoder
from shared_offload.report.progress import Progress

SHARED = {"cpu_offload": True, "shared_cpu_weights": True, "shared_cpu_weight_scope": "host"}
STRENGTH, ALPHA, RANK = 0.7, 6.0, 4


@pytest.fixture(scope="module")
def official(studio) -> dict[str, torch.Tensor]:
    shards = studio.checkpoints["t2v"].glob("diffusion_pytorch_model*.safetensors")
    return {name: tensor for shard in sorted(shards) for name, tensor in load_file(shard).items()}


@pytest.fixture(scope="module")
def lora(official, tmp_path_factory) -> Path:
    """For every linear layer, of blocks and outside of them."""
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for name, weight in official.items():
        if name.endswith(".weight") and weight.ndim == 2:
            module = f"diffusion_model.{name.removesuffix('.weight')}"
            out, width = weight.shape
            tensors[f"{module}.lora_down.weight"] = torch.randn(RANK, width, generator=generator)
            tensors[f"{module}.lora_up.weight"] = (
                torch.randn(out, RANK, generator=generator) / width / 4
            )
            tensors[f"{module}.alpha"] = torch.tensor(ALPHA)
    path = tmp_path_factory.mktemp("lora") / "style.safetensors"
    save_file(tensors, path)
    return path


@pytest.fixture(scope="module")
def merged(official, lora, tmp_path_factory) -> Path:
    """The DiT with the sums of float64 in its file."""
    pairs = load_file(lora)
    tensors = dict(official)
    for name, weight in official.items():
        module = f"diffusion_model.{name.removesuffix('.weight')}"
        if f"{module}.alpha" in pairs:
            down, up = (pairs[f"{module}.lora_{w}.weight"].double() for w in ("down", "up"))
            total = weight.double() + STRENGTH * ALPHA / RANK * up @ down
            tensors[name] = total.float()
    folder = tmp_path_factory.mktemp("merged")
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    return folder


@pytest.mark.parametrize("where", [{}, SHARED], ids=["resident", "shared"])
def test_latents_are_those_of_weights_merged_beforehand(studio, lora, merged, where) -> None:
    given = {"lora_configs": [{"path": str(lora), "strength": STRENGTH}], "dtype": "FP32"}
    plain = studio.video("t2v", dtype="FP32").latents
    want = studio.video("t2v", dtype="FP32", dit_original_ckpt=str(merged)).latents
    got = studio.video("t2v", **given, **where).latents
    scale = want.abs().max()
    assert (got - want).abs().max() < 1e-4 * scale
    assert (plain - want).abs().max() > 1e-2 * scale


def test_the_run_says_what_it_merged(studio, lora, tmp_path) -> None:
    """And which keys it could not use, where that is allowed."""
    tensors = load_file(lora) | {"text_model.lora_up.weight": torch.ones(2, 2)}
    save_file(tensors, tmp_path / "more.safetensors")
    settings = studio.settings(
        "t2v",
        lora_configs=[{"path": str(tmp_path / "more.safetensors")}],
        lora_allow_unmatched=True,
    )
    stream = io.StringIO()
    with Pipeline(settings, progress=Progress(stream=stream)) as pipeline:
        pipeline.generate()
    said = stream.getvalue()
    assert "LoRA more.safetensors, strength 1: " in said
    assert "1 keys without use: text_model.lora_up.weight" in said


def test_a_lora_that_does_not_fit_is_told_before_anything_loads(
    studio, lora, tmp_path, monkeypatch
) -> None:
    def refuse(*_args, **_options) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(TextEncoder, "load", refuse)
    path = tmp_path / "other.safetensors"
    save_file({"unet.up_blocks.0.lora_up.weight": torch.ones(2, 2)}, path)
    with pytest.raises(CheckpointError) as caught:
        studio.pipeline("t2v", lora_configs=[{"path": str(path)}])
    assert caught.value.facts["names"] == ["unet.up_blocks.0.lora_up.weight"]
