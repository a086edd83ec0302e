"""Folders: layout, the same bytes however they are made, and nothing overwritten."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shared_offload.errors import ConfigError, OutputError, PreflightError
from shared_offload.report.progress import Progress
from shared_offload.synth import parts
from shared_offload.synth.folder import MARKER, make_checkpoint
from shared_offload.synth.sizes import architecture
from shared_offload.weights.architecture import read_architecture
from shared_offload.weights.checkpoint import open_checkpoint
from shared_offload.weights.convert import convert_to_fp8
from shared_offload.weights.writer import row_chunks


def digests(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def test_layout_is_that_of_a_release(tiny_i2v: Path, tiny_t2v: Path) -> None:
    names = set(digests(tiny_i2v))
    assert names >= {
        "config.json",
        "Wan2.1_VAE.pth",
        "models_t5_umt5-xxl-enc-bf16.pth",
        "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
        "diffusion_pytorch_model-00001-of-00002.safetensors",
        "diffusion_pytorch_model.safetensors.index.json",
        "google/umt5-xxl/tokenizer.json",
        "fp8/block_7.safetensors",
        "fp8/non_block.safetensors",
        "fp8/diffusion_pytorch_model.safetensors.index.json",
    }
    assert not any("clip" in name for name in digests(tiny_t2v))
    assert sum(p.stat().st_size for p in tiny_i2v.rglob("*") if p.is_file()) < 25e6
    dtypes = {
        file: {t.dtype for t in torch.load(tiny_i2v / file, weights_only=True).values()}
        for file in (parts.T5_FILE, parts.CLIP_FILE, parts.VAE_FILE)
    }
    assert list(dtypes.values()) == [{torch.bfloat16}, {torch.float32}, {torch.float32}]


@pytest.mark.parametrize("task", ["i2v", "t2v"])
def test_our_own_reader_takes_both_forms(task: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(f"tiny_{task}")
    arch = read_architecture(folder)
    assert arch == architecture("tiny", task) == read_architecture(folder / "fp8")
    assert open_checkpoint(folder, arch, quantised=False, task=task).kind == "official"
    assert open_checkpoint(folder / "fp8", arch, quantised=True, task=task).kind == "fp8"


def test_bytes_depend_on_the_seed_alone(tiny_i2v: Path, tmp_path: Path, quiet: Progress) -> None:
    """One thread and part by part, against two threads and all at once."""
    again = tmp_path / "again"
    for part in reversed(parts.PARTS):
        make_checkpoint(again, "tiny", "i2v", parts=(part,), threads=1, progress=quiet)
    assert digests(again) == digests(tiny_i2v)
    other = tmp_path / "other"
    make_checkpoint(other, "tiny", "i2v", parts=("vae", "dit"), seed=1, progress=quiet)
    same = {
        name
        for name, digest in digests(other).items()
        if digests(tiny_i2v)[name] == digest and not name.endswith(".json")
    }
    assert same == set()


def test_chunks_cover_each_row_once() -> None:
    for shape in ((13824, 5120), (5120,), (), (7, 3), (3, 1 << 23)):
        found = [row for first, end in row_chunks(shape) for row in range(first, end)]
        assert found == list(range(shape[0] if shape else 1))
    assert len(list(row_chunks((13824, 5120)))) > 10


def test_fp8_is_what_a_conversion_gives(tiny_i2v: Path, tmp_path: Path) -> None:
    convert_to_fp8(tiny_i2v, tmp_path / "fp8")
    assert digests(tmp_path / "fp8") == digests(tiny_i2v / "fp8")


def test_a_lost_file_is_made_again_and_the_rest_is_kept(tmp_path: Path, quiet: Progress) -> None:
    make_checkpoint(tmp_path, "tiny", "t2v", parts=("dit", "vae"), progress=quiet)
    before = digests(tmp_path)
    vae = (tmp_path / parts.VAE_FILE).stat().st_mtime_ns
    (tmp_path / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    told = io.StringIO()
    make_checkpoint(tmp_path, "tiny", "t2v", parts=("dit", "vae"), progress=Progress(stream=told))
    assert digests(tmp_path) == before
    assert (tmp_path / parts.VAE_FILE).stat().st_mtime_ns == vae
    assert "VAE: already there" in told.getvalue()


def test_another_model_is_never_touched(tmp_path: Path, quiet: Progress) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "config.json").write_text("{}")
    with pytest.raises(OutputError) as caught:
        make_checkpoint(real, "tiny", "t2v", progress=quiet)
    assert caught.value.facts["found"] == ["config.json"]
    assert digests(real).keys() == {"config.json"}

    synthetic = tmp_path / "synthetic"
    make_checkpoint(synthetic, "tiny", "t2v", parts=("tokenizer",), progress=quiet)
    with pytest.raises(OutputError) as caught:
        make_checkpoint(synthetic, "tiny", "t2v", seed=3, progress=quiet)
    assert caught.value.facts["found"] == {"size": "tiny", "task": "t2v", "seed": 0}
    assert json.loads((synthetic / MARKER).read_text())["seed"] == 0


def test_disk_space_is_known_before_anything_is_written(tmp_path: Path, quiet: Progress) -> None:
    usage = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**9})())
        with pytest.raises(PreflightError) as caught:
            make_checkpoint(usage, "14b", "i2v", parts=("dit-fp8",), progress=quiet)
    assert caught.value.facts["found"] == 10**9
    # 40 blocks of 404,255,744 bytes and 482.7 MB beside them, as LightX2V's converter writes.
    assert caught.value.facts["needed"] == pytest.approx(40 * 404_255_744 + 482.7e6, rel=1e-4)
    assert not usage.exists()


def test_parts_that_the_task_has_not(tmp_path: Path, quiet: Progress) -> None:
    with pytest.raises(ConfigError) as caught:
        make_checkpoint(tmp_path, "tiny", "t2v", parts=("clip", "vea"), progress=quiet)
    assert caught.value.facts["found"] == ["clip", "vea"]


def test_official_shards_hold_fp32(tiny_t2v: Path) -> None:
    index = json.loads((tiny_t2v / "diffusion_pytorch_model.safetensors.index.json").read_text())
    found = {}
    for file in set(index["weight_map"].values()):
        tensors = load_file(tiny_t2v / file)
        assert all(index["weight_map"][name] == file for name in tensors)
        found |= tensors
    assert {t.dtype for t in found.values()} == {torch.float32}
    assert found["blocks.3.modulation"].shape == (1, 6, 128)
    assert float(found["blocks.3.modulation"].std()) == pytest.approx(128**-0.5, rel=0.15)
    assert float(found["blocks.3.self_attn.norm_q.weight"].mean()) == pytest.approx(1, abs=0.02)
