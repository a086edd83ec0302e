from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file, save_file

from shared_offload.errors import CheckpointError, Problems, from_json
from shared_offload.weights.checkpoint import open_checkpoint
from shared_offload.weights.names import to_diffusers
from shared_offload.weights.verify import content_fingerprint

INDEX = "diffusion_pytorch_model.safetensors.index.json"
SINGLE = "diffusion_pytorch_model.safetensors"
SHARD_2 = "diffusion_pytorch_model-00002-of-00003.safetensors"


def problems(path: Path, arch, *, quantised: bool = False, task: str | None = None):
    """The errors of opening; each says where and what to do, and survives a process border."""
    with pytest.raises((CheckpointError, Problems)) as caught:
        open_checkpoint(path, arch, quantised=quantised, task=task or arch.model_type)
    found = list(getattr(caught.value, "errors", (caught.value,)))
    for error in found:
        assert isinstance(error, CheckpointError) and error.hint and error.facts["path"]
        assert from_json(error.to_json()).facts == json.loads(json.dumps(error.facts))
    return found


def edit(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("model_type", ["t2v", "i2v"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("files", ["single", "shards"])
def test_official(
    tmp_path, small_arch, random_tensors, write_checkpoint, model_type, dtype, files
) -> None:
    arch = small_arch(model_type)
    tensors = random_tensors(arch, dtype)
    folder = write_checkpoint(tmp_path / "wan", tensors, files)
    checkpoint = open_checkpoint(folder, arch, quantised=False, task=model_type)
    assert checkpoint.kind == "official" and set(checkpoint.entries) == set(tensors)
    assert sorted(checkpoint.files) == sorted(folder.glob("*.safetensors"))
    for name, entry in checkpoint.entries.items():  # the bytes that safetensors wrote
        raw = entry.path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
        assert raw == tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("rest", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("files", ["single", "blocks", "blocks+index", "chunks"])
def test_fp8(
    tmp_path, small_arch, random_tensors, to_fp8, write_checkpoint, files, scales, rest
) -> None:
    arch = small_arch("i2v")
    tensors = to_fp8(random_tensors(arch), scales, rest)
    folder = write_checkpoint(tmp_path / "wan", tensors, files)
    checkpoint = open_checkpoint(folder, arch, quantised=True, task="i2v")
    assert checkpoint.kind == "fp8" and set(checkpoint.entries) == set(tensors)
    assert sum(name.endswith("_scale") for name in tensors) == 12 * arch.num_layers


def test_paths_that_mean_the_same_checkpoint(
    tmp_path, small_arch, random_tensors, write_checkpoint
) -> None:
    arch = small_arch("i2v")
    tensors = random_tensors(arch)
    theirs = convert_wan_transformer_to_diffusers(dict(tensors))
    single = write_checkpoint(tmp_path / "single", tensors, "single")
    shards = write_checkpoint(tmp_path / "shards", tensors, "shards")
    pipeline = tmp_path / "pipeline"
    write_checkpoint(pipeline / "transformer", theirs, "shards")
    paths = [single, single / SINGLE, shards, shards / INDEX, pipeline, pipeline / "transformer"]
    opened = [open_checkpoint(p, arch, quantised=False, task="i2v") for p in paths]
    assert [c.kind for c in opened] == ["official"] * 4 + ["diffusers"] * 2
    assert len({content_fingerprint(c, threads=2) for c in opened}) == 1
    assert len({c.layout("BF16").fingerprint() for c in opened}) == 1
    assert len({c.fingerprint() for c in opened}) == 3  # three sets of files


def test_fingerprints_see_a_changed_byte(
    tmp_path, small_arch, random_tensors, write_checkpoint
) -> None:
    folder = write_checkpoint(tmp_path / "wan", random_tensors(small_arch()), "single")
    first = open_checkpoint(folder, small_arch(), quantised=False, task="t2v")
    seen: list[int] = []
    before = content_fingerprint(first, on_bytes=seen.append)
    assert sum(seen) == sum(e.nbytes for e in first.entries.values())
    data = bytearray((folder / SINGLE).read_bytes())
    data[-5] ^= 1
    (folder / SINGLE).write_bytes(data)
    os.utime(folder / SINGLE, ns=(0, first.stamps[folder / SINGLE].mtime_ns + 1))
    second = open_checkpoint(folder, small_arch(), quantised=False, task="t2v")
    assert content_fingerprint(second) != before
    assert second.fingerprint() != first.fingerprint()
    with pytest.raises(CheckpointError, match="changed while"):
        content_fingerprint(first)


def test_what_is_another_checkpoint(tmp_path, small_arch, random_tensors, write_checkpoint) -> None:
    folder = write_checkpoint(tmp_path / "wan", random_tensors(small_arch()), "single")
    file = folder / SINGLE

    def look(folder=folder):
        return open_checkpoint(folder, small_arch(), quantised=False, task="t2v")

    first = look()
    (tmp_path / "mounted").symlink_to(folder)  # the same files by another path
    assert look(tmp_path / "mounted").fingerprint() == first.fingerprint()
    assert first.unchanged()
    stat, data = file.stat(), bytearray(file.read_bytes())
    data[-5] ^= 1
    with file.open("r+b") as written:  # edited in place, with size and mtime as before
        written.write(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    edited = look()
    copy = tmp_path / "copy"
    copy.write_bytes(data)
    os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    copy.replace(file)  # another file of the same name, bytes and mtime
    assert not edited.unchanged()
    assert len({c.fingerprint() for c in (first, edited, look())}) == 3


def test_missing_and_unexpected_tensors(
    tmp_path, small_arch, random_tensors, write_checkpoint
) -> None:
    tensors = random_tensors(small_arch(num_layers=4))
    for name in [n for n in tensors if n.startswith("blocks.1.")] + ["head.head.bias"]:
        del tensors[name]
    tensors["blocks.0.extra.weight"] = torch.zeros(2)
    folder = write_checkpoint(tmp_path / "wan", tensors, "single")
    missing, unexpected = problems(folder, small_arch(num_layers=3))
    assert missing.facts["kind"] == "missing" and len(missing.facts["names"]) == 28
    assert "lacks 28 tensors: head.head.bias, blocks.1.*" in missing.what
    assert len(unexpected.facts["names"]) == 28
    assert {"blocks.0.extra.weight", "blocks.3.norm3.bias"} < set(unexpected.facts["names"])
    assert "blocks.3.*" in unexpected.what and len(unexpected.what) < 400


def test_doubly_defined_tensors(tmp_path, small_arch, random_tensors, write_checkpoint) -> None:
    folder = write_checkpoint(tmp_path / "wan", random_tensors(small_arch()), "shards")
    edit(folder / SHARD_2, lambda t: t.update({"head.modulation": torch.zeros(1, 2, 64)}))
    (double,) = problems(folder, small_arch())
    assert double.facts["names"] == ["head.modulation"]
    assert len(set(double.facts["files"])) == 2 and str(folder / SHARD_2) in double.facts["files"]


def test_wrong_shapes_and_dtypes(tmp_path, small_arch, random_tensors, write_checkpoint) -> None:
    tensors = random_tensors(small_arch())
    tensors["blocks.2.ffn.0.weight"] = torch.zeros(64, 96)
    tensors["head.head.weight"] = tensors["head.head.weight"].double()
    folder = write_checkpoint(tmp_path / "wan", tensors, "single")
    shape, dtype = problems(folder, small_arch())
    assert shape.facts["names"] == ["blocks.2.ffn.0.weight"]
    assert (shape.facts["found"], shape.facts["wanted"]) == ([64, 96], [96, 64])
    assert dtype.facts["names"] == ["head.head.weight"] and dtype.facts["found"] == "F64"


def test_another_config(tmp_path, small_arch, random_tensors, write_checkpoint) -> None:
    folder = write_checkpoint(tmp_path / "wan", random_tensors(small_arch()), "single")
    (error,) = problems(folder, small_arch(dim=128, num_heads=16))
    assert len(error.facts["names"]) > 60 and len(error.what) < 500


def test_blocks_that_differ(tmp_path, small_arch, random_tensors, write_checkpoint) -> None:
    tensors = random_tensors(small_arch())
    tensors["blocks.2.self_attn.k.bias"] = tensors["blocks.2.self_attn.k.bias"].half()
    (error,) = problems(write_checkpoint(tmp_path / "w", tensors, "single"), small_arch())
    assert error.facts["names"] == ["blocks.0.self_attn.k.bias", "blocks.2.self_attn.k.bias"]
    assert error.facts["found"] == ["F32", "F16"]


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_truncated_shard(tmp_path, small_arch, random_tensors, write_checkpoint, keep) -> None:
    folder = write_checkpoint(tmp_path / "wan", random_tensors(small_arch()), "shards")
    whole = (folder / SHARD_2).read_bytes()
    (folder / SHARD_2).write_bytes(whole[:keep])
    (error,) = problems(folder, small_arch())  # and not: all of its tensors are missing
    assert error.facts["path"] == str(folder / SHARD_2)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git-LFS"),
        (b"<!doctype html><title>404</title>", "HTML"),
    ],
)
@pytest.mark.parametrize("file", ["block_1.safetensors", INDEX])
def test_impostors(
    tmp_path, small_arch, random_tensors, write_checkpoint, content, found, file
) -> None:
    folder = write_checkpoint(tmp_path / "wan", random_tensors(small_arch()), "blocks+index")
    (folder / file).write_bytes(content)
    (error,) = problems(folder, small_arch())
    assert error.facts["path"] == str(folder / file) and found in error.facts["found"]


@pytest.mark.parametrize("files", ["shards", "chunks", "blocks", "blocks+index"])
def test_missing_file(tmp_path, small_arch, random_tensors, write_checkpoint, files) -> None:
    folder = write_checkpoint(tmp_path / "wan", random_tensors(small_arch()), files)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    first.unlink()
    second.rename(f"{second}.part")
    errors = problems(folder, small_arch())
    assert {e.facts["path"] for e in errors} == {str(first), str(second)}
    assert any("continue it" in e.hint for e in errors)


def test_stray_file(tmp_path, small_arch, random_tensors, write_checkpoint) -> None:
    for files in ("single", "shards", "blocks"):
        folder = write_checkpoint(tmp_path / files, random_tensors(small_arch()), files)
        save_file({"x": torch.zeros(1)}, folder / "my_lora.safetensors")
        save_file({"x": torch.zeros(1)}, folder / "block_7.safetensors")
        (folder / "._junk.safetensors").write_bytes(b"left by another system")
        if files == "single":
            (folder / "block_7.safetensors").unlink()
        (error,) = problems(folder, small_arch())
        strays = {"my_lora.safetensors"} | ({"block_7.safetensors"} if files != "single" else set())
        assert set(error.facts["found"]) == strays


def test_folders_that_cannot_be_understood(
    tmp_path, small_arch, random_tensors, write_checkpoint
) -> None:
    arch, tensors = small_arch(), random_tensors(small_arch())
    (tmp_path / "empty").mkdir()
    shards = write_checkpoint(tmp_path / "shards", tensors, "shards")
    (shards / INDEX).unlink()
    two = write_checkpoint(tmp_path / "two", tensors, "single")
    (two / SINGLE).rename(two / "a.safetensors")
    save_file({"x": torch.zeros(1)}, two / "b.safetensors")
    indices = write_checkpoint(tmp_path / "indices", tensors, "shards")
    (indices / "other.safetensors.index.json").write_text("{}")
    (tmp_path / "model.pth").write_bytes(b"PK")
    for name in ("empty", "shards", "two", "indices", "model.pth", "absent"):
        (error,) = problems(tmp_path / name, arch)
        assert error.facts["path"] == str(tmp_path / name)
    assert INDEX in problems(shards, arch)[0].hint
    assert open_checkpoint(two / "a.safetensors", arch, quantised=False, task="t2v")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "[" * 90_000,
     '{"weight_map": {"a": "../../etc/x.safetensors"}}', '{"weight_map": {"a": "x.bin"}}'],
)  # fmt: skip
def test_bad_index(tmp_path, small_arch, random_tensors, write_checkpoint, text) -> None:
    folder = write_checkpoint(tmp_path / "wan", random_tensors(small_arch()), "shards")
    (folder / INDEX).write_text(text)
    (error,) = problems(folder, small_arch())
    assert error.facts["path"] == str(folder / INDEX)


def test_index_of_another_checkpoint(
    tmp_path, small_arch, random_tensors, write_checkpoint
) -> None:
    folder = write_checkpoint(tmp_path / "wan", random_tensors(small_arch()), "shards")
    raw = json.loads((folder / INDEX).read_text())
    del raw["weight_map"]["head.modulation"]
    raw["weight_map"]["head.head.bias"] = SHARD_2
    (folder / INDEX).write_text(json.dumps(raw))
    edit(folder / SHARD_2, lambda t: t.pop("head.head.bias", None))
    names = [e.facts["names"] for e in problems(folder, small_arch())]
    assert ["head.head.bias"] in names and ["head.modulation"] in names


def test_task(tmp_path, small_arch, random_tensors, write_checkpoint) -> None:
    for model_type, other in (("t2v", "i2v"), ("i2v", "t2v")):
        arch = small_arch(model_type)
        folder = write_checkpoint(tmp_path / model_type, random_tensors(arch), "single")
        (error,) = problems(folder, arch, task=other)
        assert (error.facts["found"], error.facts["task"]) == (model_type, other)
        (error,) = problems(folder, small_arch(other))  # config.json of the other kind
        assert error.facts["found"] == model_type


def test_quantisation(tmp_path, small_arch, random_tensors, to_fp8, write_checkpoint) -> None:
    plain = random_tensors(small_arch())
    fp8 = to_fp8(plain, torch.float32, torch.bfloat16)
    folder = write_checkpoint(
        tmp_path / "bf16", {k: v.bfloat16() for k, v in plain.items()}, "single"
    )
    (error,) = problems(folder, small_arch(), quantised=True)
    assert error.facts["found"] == "BF16" and "dit_quantized" in error.hint
    (error,) = problems(write_checkpoint(tmp_path / "fp8", fp8, "blocks"), small_arch())
    assert error.facts["found"] == "F8_E4M3" and "dit_quantized" in error.hint
    del fp8["blocks.1.ffn.2.weight_scale"]
    fp8["blocks.0.ffn.2.weight"] = plain["blocks.0.ffn.2.weight"]
    lack, dtype = problems(
        write_checkpoint(tmp_path / "mixed", fp8, "single"), small_arch(), quantised=True
    )
    assert lack.facts["names"] == ["blocks.1.ffn.2.weight_scale"]
    assert dtype.facts["names"] == ["blocks.0.ffn.2.weight"] and dtype.facts["found"] == "F32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.0, -0.0, -1e-3, float("inf"), float("-inf"), float("nan")])
def test_scales(
    tmp_path, small_arch, random_tensors, to_fp8, write_checkpoint, dtype, value
) -> None:
    tensors = to_fp8(random_tensors(small_arch()), dtype, torch.float32)
    name = "blocks.2.cross_attn.o.weight_scale"
    tensors[name] = tensors[name].clone()
    tensors[name][[7, 60]] = value
    folder = write_checkpoint(tmp_path / "fp8", tensors, "blocks")
    (error,) = problems(folder, small_arch(), quantised=True)
    assert (error.facts["name"], error.facts["row"], error.facts["rows"]) == (name, 7, 2)
    assert struct.pack("<f", float(error.facts["found"])) == struct.pack(
        "<f", torch.tensor(value, dtype=dtype).item()
    )
    assert error.facts["path"].endswith("block_2.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "found"),
    [
        ("blocks.0.ffn.0.weight", torch.zeros(96, 64, dtype=torch.int8), "INT8"),
        ("blocks.0.ffn.0.input_scale", torch.ones(1), "pertensor"),
        ("blocks.0.ffn.0.weight", torch.zeros(96, 32, dtype=torch.uint8), "nvfp4"),
        ("blocks.0.ffn.0.weight_global_scale", torch.ones(1), "nvfp4"),
        ("diffusion_model.blocks.0.ffn.0.lora_A.weight", torch.zeros(4, 64), "LoRA"),
        ("model.diffusion_model.blocks.0.ffn.0.weight", torch.zeros(4, 64), "ComfyUI"),
    ],
)
def test_formats_of_others(
    tmp_path, small_arch, random_tensors, to_fp8, write_checkpoint, name, tensor, found
) -> None:
    tensors = to_fp8(random_tensors(small_arch()), torch.float32, torch.float32)
    folder = write_checkpoint(tmp_path / "x", tensors | {name: tensor}, "single")
    (error,) = problems(folder, small_arch(), quantised=True)
    assert error.facts["name"] == name and found in error.facts["found"]


def test_everything_is_told_at_once(
    tmp_path, small_arch, random_tensors, to_fp8, write_checkpoint
) -> None:
    tensors = to_fp8(random_tensors(small_arch()), torch.float32, torch.float32)
    folder = write_checkpoint(tmp_path / "wan", tensors, "blocks")
    (folder / "block_1.safetensors").write_bytes(b"<html>")
    (folder / "stray.safetensors").write_bytes(b"")
    edit(folder / "block_2.safetensors", lambda t: t["blocks.2.ffn.0.weight_scale"].zero_())
    edit(folder / "block_0.safetensors", lambda t: t.pop("blocks.0.modulation"))
    with (folder / "non_block.safetensors").open("r+b") as file:
        file.truncate((folder / "non_block.safetensors").stat().st_size - 1)
    (folder / "non_block.safetensors.aria2").touch()
    errors = problems(folder, small_arch(), quantised=False, task="i2v")
    told = "\n".join(map(str, errors))
    parts = ["the task is i2v", "stray.safetensors", "HTML", "aria2", "truncated", "row 0"]
    parts += ["lacks 1 tensor: blocks.0.modulation", "the settings say not quantised"]
    for part in parts:
        assert part in told
    assert len(errors) == 8


def test_fp8_under_diffusers_names(
    tmp_path, small_arch, random_tensors, to_fp8, write_checkpoint
) -> None:
    arch = small_arch("i2v")
    tensors = to_fp8(random_tensors(arch), torch.float32, torch.bfloat16)
    renamed = {str(to_diffusers(name)): tensor for name, tensor in tensors.items()}
    folder = write_checkpoint(tmp_path / "wan", renamed, "shards")
    checkpoint = open_checkpoint(folder, arch, quantised=True, task="i2v")
    assert checkpoint.kind == "diffusers" and set(checkpoint.entries) == set(tensors)
    (folder / SHARD_2).unlink()  # its tensors are not said to be missing, under either name
    (error,) = problems(folder, arch, quantised=True)
    assert error.facts["path"] == str(folder / SHARD_2)


def test_random_damage_gives_a_checkpoint_or_problems(
    tmp_path, small_arch, random_tensors, to_fp8, write_checkpoint
) -> None:
    arch = small_arch(num_layers=1)
    tensors = to_fp8(random_tensors(arch), torch.float32, torch.float32)
    folder = write_checkpoint(tmp_path / "wan", tensors, "blocks+index")
    wholes = {path: path.read_bytes() for path in folder.iterdir()}
    rng = random.Random(7)
    outcomes = {"opened": 0, "refused": 0}
    for _ in range(300):
        path = rng.choice(list(wholes))
        data = bytearray(wholes[path])
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(min(len(data), 4000))
            replacement = rng.choice([b"9", b"blocks.0", b"{", b"I8", b"\x00", bytes(8)])
            data[place : place + rng.choice([0, 1, len(replacement)])] = replacement
        path.write_bytes(data)
        try:
            open_checkpoint(folder, arch, quantised=True, task="t2v")
            outcomes["opened"] += 1
        except (CheckpointError, Problems) as error:
            from_json(error.to_json())
            outcomes["refused"] += 1
        path.write_bytes(wholes[path])
    assert outcomes["refused"] > 200, outcomes
    assert open_checkpoint(folder, arch, quantised=True, task="t2v")
