"""FP8 files: LightX2V's names and keys, values against the source, nothing half done."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared_offload.errors import CheckpointError, OffloadError, OutputError, PreflightError
from shared_offload.weights import convert
from shared_offload.weights.architecture import (
    Architecture,
    block_shapes,
    non_block_shapes,
    write_config,
)
from shared_offload.weights.checkpoint import open_checkpoint
from shared_offload.weights.names import to_diffusers

ARCH = Architecture(
    model_type="i2v",
    dim=32,
    ffn_dim=48,
    freq_dim=16,
    in_dim=36,
    out_dim=16,
    num_heads=2,
    num_layers=4,
    text_len=512,
    eps=1e-6,
    text_dim=24,
    image_dim=20,
)
INDEX = "diffusion_pytorch_model.safetensors.index.json"


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = dict(non_block_shapes(ARCH))
    for block in range(ARCH.num_layers):
        shapes |= {f"blocks.{block}.{name}": shape for name, shape in block_shapes(ARCH).items()}
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def official(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    write_config(ARCH, folder / "config.json")
    made = tensors(dtype)
    save_file(made, folder / "diffusion_pytorch_model.safetensors")
    return made


def read(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        part = load_file(file)
        assert not found.keys() & part.keys()
        found |= part
    return found


@pytest.mark.parametrize("layout", convert.LAYOUTS)
@pytest.mark.parametrize("rest", ["BF16", "FP32"])
def test_layouts(tmp_path: Path, layout: convert.FileLayout, rest: convert.NonLinearDtype) -> None:
    source = official(tmp_path / "source")
    out = tmp_path / "made" / "fp8"
    told: list[int] = []
    convert.convert_to_fp8(tmp_path / "source", out, layout, rest, told.append)
    files = {p.name for p in out.glob("*.safetensors")}
    wanted = {
        "block": {*(f"block_{n}.safetensors" for n in range(4)), "non_block.safetensors"},
        "chunk": {f"diffusion_pytorch_model_part{n}.safetensors" for n in range(2)},
        "single": {"diffusion_pytorch_model.safetensors"},
    }
    assert files == wanted[layout]
    assert (out / INDEX).exists() == (layout != "single")
    if layout != "single":
        index = json.loads((out / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum((out / f).stat().st_size for f in files)
        for file in files:
            held = {n for n, f in index["weight_map"].items() if f == file}
            assert held == load_file(out / file).keys()
            assert layout == "block" or len(held) <= 100

    found = read(out)
    assert sum(told) == sum(t.numel() * t.element_size() for t in found.values())
    quantised = {n for n, t in found.items() if t.dtype == torch.float8_e4m3fn}
    assert len(quantised) == 12 * 4
    assert found.keys() == source.keys() | {n + "_scale" for n in quantised}
    other = {"BF16": torch.bfloat16, "FP32": torch.float32}[rest]
    for name, tensor in source.items():
        if name not in quantised:
            assert torch.equal(found[name], tensor.to(other)), name
            continue
        assert name.split(".")[2] in ("self_attn", "cross_attn", "ffn") and tensor.dim() == 2
        scale = found[name + "_scale"]
        assert scale.dtype == torch.float32 and scale.shape == (len(tensor), 1)
        real = found[name].double() * scale.double()
        bound = tensor.abs().amax(1, keepdim=True) * 2**-4  # half a step at the largest value
        assert bool(((real - tensor.double()).abs() <= bound).all()), name
    checkpoint = open_checkpoint(out, ARCH, quantised=True, task="i2v")
    assert checkpoint.kind == "fp8" and len(checkpoint.entries) == len(found)


def test_diffusers_source_gives_the_same_files(tmp_path: Path) -> None:
    source = official(tmp_path / "wan")
    folder = tmp_path / "diffusers" / "transformer"
    folder.mkdir(parents=True)
    renamed = {to_diffusers(name): tensor for name, tensor in source.items()}
    save_file(renamed, folder / "diffusion_pytorch_model.safetensors")
    config = asdict(ARCH)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "_class_name": "WanTransformer3DModel",
                "num_attention_heads": config["num_heads"],
                "attention_head_dim": ARCH.head_dim,
                "in_channels": config["in_dim"],
                "out_channels": config["out_dim"],
                "added_kv_proj_dim": ARCH.dim,
                "cross_attn_norm": True,
                "qk_norm": "rms_norm_across_heads",
                "patch_size": [1, 2, 2],
                "rope_max_seq_len": 1024,
                "pos_embed_seq_len": None,
            }
            | {k: config[k] for k in ("ffn_dim", "freq_dim", "num_layers", "text_dim", "eps")}
            | {"image_dim": config["image_dim"]}
        )
    )
    for name, path in (("a", tmp_path / "wan"), ("b", tmp_path / "diffusers")):
        convert.convert_to_fp8(path, tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_bf16_source_keeps_fp32_scales(tmp_path: Path) -> None:
    source = official(tmp_path / "source", torch.bfloat16)
    convert.convert_to_fp8(tmp_path / "source", tmp_path / "out")
    name = "blocks.2.ffn.0.weight"
    scale = read(tmp_path / "out")[name + "_scale"]
    assert torch.equal(scale[:, 0], source[name].float().abs().amax(1) / 448)


def test_pieces_join_without_a_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official(tmp_path / "source")
    convert.convert_to_fp8(tmp_path / "source", tmp_path / "whole")
    monkeypatch.setattr("shared_offload.weights.writer.CHUNK_ELEMENTS", 100)  # 3 rows of 32
    convert.convert_to_fp8(tmp_path / "source", tmp_path / "pieces")
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "pieces" / file.name).read_bytes(), file.name


def test_a_full_disk_is_known_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    official(tmp_path / "source")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(PreflightError) as caught:
        convert.convert_to_fp8(tmp_path / "source", tmp_path / "out")
    needed = convert.plan_conversion(tmp_path / "source").nbytes
    assert caught.value.facts["found"] == 1000
    assert caught.value.facts["needed"] == needed
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_nothing_is_left_of_a_failed_conversion(tmp_path: Path) -> None:
    source = official(tmp_path / "source")
    source["blocks.3.ffn.2.weight"][5, 7] = float("nan")
    save_file(source, tmp_path / "source" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        convert.convert_to_fp8(tmp_path / "source", tmp_path / "out")
    assert caught.value.facts["name"] == "blocks.3.ffn.2.weight"
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_the_target_is_not_overwritten(tmp_path: Path) -> None:
    official(tmp_path / "source")
    (tmp_path / "out").mkdir()
    convert.convert_to_fp8(tmp_path / "source", tmp_path / "out")  # an empty folder is fine
    for target in (tmp_path / "out", tmp_path / "source" / "config.json"):
        with pytest.raises(OutputError) as caught:
            convert.convert_to_fp8(tmp_path / "source", target)
        assert caught.value.facts["path"] == str(target)
    (tmp_path / "new.partial").mkdir()
    with pytest.raises(OutputError) as caught:
        convert.convert_to_fp8(tmp_path / "source", tmp_path / "new")
    assert caught.value.facts["path"] == str(tmp_path / "new.partial")


def test_an_fp8_source_is_refused(tmp_path: Path) -> None:
    official(tmp_path / "source")
    convert.convert_to_fp8(tmp_path / "source", tmp_path / "fp8")
    with pytest.raises(OffloadError) as caught:
        convert.convert_to_fp8(tmp_path / "fp8", tmp_path / "again")
    assert "FP8" in str(caught.value)
    assert not (tmp_path / "again").exists()
