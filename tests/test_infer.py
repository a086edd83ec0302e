"""`python -m shared_offload.infer` as a process: videos, bad input of every kind, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared_offload.config import load_settings
from shared_offload.pipeline.generate import Pipeline
from shared_offload.report.progress import Progress
from shared_offload.synth.folder import make_checkpoint
from tests.reference.options import FP8, SHARED

ROOT = Path(__file__).parent.parent
DRIVER = Path(__file__).with_name("infer_driver.py")
PICTURE = ROOT / "assets/first_frame.jpg"  # 832 x 480
SMALL = {"infer_steps": 2, "num_frames": 5, "size": [32, 32], "device": "cpu"}
SHARD = "diffusion_pytorch_model-0000{}-of-00002.safetensors"
INDEX = "diffusion_pytorch_model.safetensors.index.json"
T5 = "models_t5_umt5-xxl-enc-bf16.pth"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folders = {task: tmp_path_factory.mktemp("tiny") / task for task in ("t2v", "i2v")}
    for task, folder in folders.items():
        make_checkpoint(folder, "tiny", task, progress=Progress(enabled=False))
    return folders


@dataclass
class Result:
    code: int
    stdout: str
    stderr: str

    def errors(self) -> list[str]:
        """The kinds of errors told, in order."""
        return re.findall(r"^(?:\d+\. )?(\w+Error): ", self.stderr, re.MULTILINE)

    def is_told(self, code: int, *kinds: str, hints: int | None = None) -> Result:
        """It failed with these errors, each once and with a hint, and no Python trace."""
        assert self.errors() == list(kinds), self.stderr
        assert self.code == code, self.stderr
        assert "Traceback" not in self.stderr
        assert 'File "' not in self.stderr
        expected = len(kinds) if hints is None else hints
        assert self.stderr.count("\nhint: ") == expected, self.stderr
        assert self.stdout == ""
        return self


@pytest.fixture(scope="module")
def driver() -> Iterator[subprocess.Popen]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, DRIVER], cwd=ROOT, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def infer(driver, tmp_path) -> Callable[..., Result]:
    """Run the command in `tmp_path/run`, with the JSON (or text) as its --config_json."""

    def run(*argv: object, config: dict | str) -> Result:
        files = {name: str(tmp_path / name) for name in ("stdout", "stderr")}
        words = [str(word) for word in argv]
        words += ["--config_json", str(write_config(tmp_path, config))]
        (tmp_path / "run").mkdir(exist_ok=True)
        job = {"argv": words, "cwd": str(tmp_path / "run"), **files}
        driver.stdin.write(json.dumps(job) + "\n")
        driver.stdin.flush()
        code = int(driver.stdout.readline())
        return Result(code, *(Path(files[name]).read_text() for name in ("stdout", "stderr")))

    return run


def write_config(folder: Path, config: dict | str) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def request(task: str, folder: Path, **more: object) -> list[object]:
    """Flags of a request that is right but for what a test does to it."""
    picture = {"image_path": PICTURE} if task == "i2v" else {}
    flags = {"task": task, "model_path": folder, "save_result_path": "out.mp4", **picture, **more}
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


# -- videos ----------------------------------------------------------------------------------------


def mean_rgb(frame: av.VideoFrame) -> np.ndarray:
    """The mean colour by the inverse of BT.709 in limited range, which is linear."""
    rows = frame.to_ndarray(format="yuv420p").astype(np.float64)
    luma, chroma = rows[: frame.height], rows[frame.height :]
    y = (luma.mean() - 16) / 219
    cb, cr = ((plane.mean() - 128) / 224 for plane in np.split(chroma, 2))
    r, b = y + 1.5748 * cr, y + 1.8556 * cb
    return 255 * np.array([r, (y - 0.2126 * r - 0.0722 * b) / 0.7152, b])


@pytest.mark.slow
@pytest.mark.parametrize(("task", "size"), [("t2v", (64, 64)), ("i2v", (48, 80))])
def test_the_demo_makes_a_video(checkpoints, tmp_path, task, size) -> None:
    target = tmp_path / "new folder/out.mp4"
    config = ROOT / f"configs/demo_{task}.json"
    argv = ["--model_cls", "wan2.1", "--config_json", config, "--prompt", "a red circle"]
    argv += request(task, checkpoints[task], save_result_path=target, seed=42)
    argv = [str(word) for word in argv]
    command = [sys.executable, "-m", "shared_offload.infer", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert str(target) in done.stderr
    assert sorted(path.name for path in target.parent.iterdir()) == ["out.mp4", "out.mp4.json"]
    with Pipeline(load_settings(argv)) as pipeline:
        frames = pipeline.generate(save_result_path=tmp_path / "again.mp4").frames
    assert frames.shape == (17, *size, 3)
    with av.open(str(target)) as container:
        stream = container.streams.video[0]
        assert (stream.average_rate, stream.width, stream.height) == (16, size[1], size[0])
        decoded = [mean_rgb(frame) for frame in container.decode(video=0)]
    assert len(decoded) == 17
    np.testing.assert_allclose(decoded, frames.double().mean((1, 2)), rtol=0, atol=2)
    assert frames.float().std() > 10  # levels: not one flat colour


def test_distilled_in_four_steps(infer, checkpoints, tmp_path) -> None:
    steps = {"denoising_step_list": [1000, 750, 500, 250], "infer_steps": 4}
    argv = [*request("i2v", checkpoints["i2v"]), "--model_cls", "wan2.1_distill"]
    done = infer(*argv, config={**SMALL, **FP8, **SHARED, **steps, "sample_guide_scale": 5})
    assert done.code == 0, done.stderr
    assert "denoise: 4 steps" in done.stderr
    said = json.loads((tmp_path / "run/out.mp4.json").read_text())
    assert (said["infer_steps"], said["enable_cfg"]) == (4, False)
    assert said["streaming"]["steps"] == 4


# -- bad checkpoints -------------------------------------------------------------------------------


class Copy:
    """A checkpoint folder to damage; what is not touched shares its bytes with the original."""

    def __init__(self, original: Path, folder: Path) -> None:
        self.folder = folder
        for path in original.rglob("*"):
            target = folder / path.relative_to(original)
            if path.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, target)

    def write(self, name: str, content: bytes) -> None:
        (self.folder / name).unlink(missing_ok=True)
        (self.folder / name).write_bytes(content)

    def json(self, name: str, **changes: object) -> None:
        content = json.loads((self.folder / name).read_text())
        self.write(name, json.dumps({**content, **changes}).encode())

    def tensors(self, name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        """Change the tensors of a file, and what the index beside it says of this file."""
        path = self.folder / name
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file(tensors, path)
        index = path.with_name(INDEX).relative_to(self.folder)
        homes = json.loads((self.folder / index).read_text())["weight_map"]
        others = {tensor: home for tensor, home in homes.items() if home != path.name}
        self.json(str(index), weight_map={**dict.fromkeys(tensors, path.name), **others})


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, make: Callable[[], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: make()})


def scale(value: float) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors["blocks.3.ffn.2.weight_scale"].__setitem__(5, value)


LAST, FIRST = SHARD.format(2), SHARD.format(1)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4000000\n"
HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"
BLOCK = "fp8/block_3.safetensors"
HALF, SOME = 2_000_000, 100_000

# kind: settings, damage, words that the message must have
DAMAGES: dict[str, tuple[dict, Callable[[Copy], Any], tuple[str, ...]]] = {
    "missing": (
        {},
        lambda c: c.tensors(LAST, drop("blocks.7.ffn.0.bias")),
        ("blocks.7.ffn.0.bias", "missing"),
    ),
    "unexpected": (
        FP8,
        lambda c: c.tensors(BLOCK, put("blocks.3.extra.weight", lambda: torch.zeros(2, 2))),
        ("blocks.3.extra.weight", "unexpected"),
    ),
    "twice": (
        {},
        lambda c: c.tensors(LAST, put("patch_embedding.bias", lambda: torch.zeros(128))),
        ("patch_embedding.bias", FIRST, LAST),
    ),
    "shape": ({}, lambda c: c.json("config.json", ffn_dim=640), ("ffn.0", "640", "512")),
    "dtype": (
        {},
        lambda c: c.tensors(FIRST, put("head.head.bias", lambda: torch.zeros(64).double())),
        ("head.head.bias", "F64"),
    ),
    "truncated": (
        {},
        lambda c: c.write(FIRST, (c.folder / FIRST).read_bytes()[:HALF]),
        (FIRST, str(HALF)),
    ),
    "half-downloaded": ({}, lambda c: c.write(f"{LAST}.aria2", b"\0"), (LAST, "aria2")),
    "a shard is missing": ({}, lambda c: (c.folder / LAST).unlink(), (LAST, "missing")),
    "git lfs": ({}, lambda c: c.write(LAST, LFS), (LAST, "LFS")),
    "html": (FP8, lambda c: c.write("fp8/non_block.safetensors", HTML), ("non_block", "HTML")),
    "stray": (
        {},
        lambda c: save_file({"a": torch.zeros(1)}, c.folder / "lora.safetensors"),
        ("lora.safetensors",),
    ),
    "not FP8": ({**FP8, "dit_quantized_ckpt": "."}, lambda _: None, ("FP8", "F32")),
    "FP8": ({"dit_original_ckpt": "fp8"}, lambda _: None, ("FP8", "dit_quantized")),
    "scale 0": (FP8, lambda c: c.tensors(BLOCK, scale(0.0)), ("blocks.3.ffn.2.weight_scale",)),
    "scale -1": (FP8, lambda c: c.tensors(BLOCK, scale(-1.0)), ("blocks.3.ffn.2.weight_scale",)),
    "scale nan": (
        FP8,
        lambda c: c.tensors(BLOCK, scale(float("nan"))),
        ("blocks.3.ffn.2.weight_scale",),
    ),
    "no config": ({}, lambda c: (c.folder / "config.json").unlink(), ("config.json",)),
    "html .pth": ({}, lambda c: c.write(T5, HTML), (T5, "HTML")),
    "lfs .pth": ({}, lambda c: c.write("Wan2.1_VAE.pth", LFS), ("Wan2.1_VAE.pth", "LFS")),
    "half a .pth": (
        {},
        lambda c: c.write(T5, (c.folder / T5).read_bytes()[:SOME]),
        (T5, "truncated", str(SOME)),
    ),
    "half-downloaded .pth": (
        {},
        lambda c: c.write("Wan2.1_VAE.pth.aria2", b"\0"),
        ("Wan2.1_VAE.pth", "aria2"),
    ),
    "no .pth": ({}, lambda c: (c.folder / T5).unlink(), (T5,)),
    "lfs tokenizer": (
        {},
        lambda c: c.write("google/umt5-xxl/tokenizer.json", LFS),
        ("tokenizer.json", "LFS"),
    ),
    "no tokenizer.json": (
        {},
        lambda c: (c.folder / "google/umt5-xxl/tokenizer.json").unlink(),
        ("tokenizer.json", "umt5-xxl"),
    ),
    "no tokenizer": ({}, lambda c: (c.folder / "google").rename(c.folder / "x"), ("umt5-xxl",)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_bad_checkpoint_is_told(infer, checkpoints, tmp_path, kind) -> None:
    options, damage, words = DAMAGES[kind]
    copy = Copy(checkpoints["t2v"], tmp_path / "model")
    damage(copy)
    paths = {k: str(copy.folder / v) for k, v in options.items() if k.endswith("_ckpt")}
    done = infer(*request("t2v", copy.folder), config={**SMALL, **options, **paths})
    done.is_told(1, "CheckpointError")
    assert all(word in done.stderr for word in words), done.stderr
    assert len(done.stderr) < 1000
    assert list((tmp_path / "run").iterdir()) == []
    assert "attention:" not in done.stderr  # printed when loading begins


@pytest.mark.parametrize(("model", "task"), [("t2v", "i2v"), ("i2v", "t2v")])
def test_a_checkpoint_of_the_other_task(infer, checkpoints, model, task) -> None:
    clip = next(checkpoints["i2v"].glob("models_clip*"))
    config = {**SMALL, **({"clip_original_ckpt": str(clip)} if task == "i2v" else {})}
    done = infer(*request(task, checkpoints[model]), config=config).is_told(1, "CheckpointError")
    assert f"--task {model}" in done.stderr


def test_all_that_is_wrong_with_the_files_is_told_at_once(infer, checkpoints, tmp_path) -> None:
    copy = Copy(checkpoints["t2v"], tmp_path / "model")
    copy.tensors(LAST, drop("blocks.7.ffn.0.bias"))
    copy.write(f"{FIRST}.aria2", b"")
    (copy.folder / "Wan2.1_VAE.pth").unlink()
    config = {**SMALL, "num_layers": 40}
    done = infer(*request("t2v", copy.folder), config=config)
    assert sorted(done.errors()) == ["CheckpointError"] * 3 + ["ConfigError"], done.stderr
    assert done.code == 2
    assert done.stderr.startswith("4 problems:\n1. ")


# -- bad settings and requests ---------------------------------------------------------------------


def test_all_that_is_wrong_with_the_settings_is_told_at_once(infer, checkpoints) -> None:
    config = {
        **SMALL,
        "infer_stepz": 3,
        "fps": "fast",
        "num_frames": 6,
        "shared_cpu_weights": True,
        "feature_caching": "Tea",
    }
    argv = request("t2v", checkpoints["t2v"], sed=1)
    flags = infer(*argv, config=config)
    flags.is_told(2, "ConfigError")  # without flags that can be read nothing else can
    assert "--seed" in flags.stderr
    done = infer(*argv[:-2], config=config).is_told(2, *["ConfigError"] * 5, hints=4)
    for word in ("infer_steps", "fps", "4n+1", "cpu_offload", "feature_caching"):
        assert word in done.stderr


def test_a_json_that_contradicts_the_checkpoint(infer, checkpoints) -> None:
    config = {**SMALL, "num_heads": 12, "dim": 128}
    done = infer(*request("t2v", checkpoints["t2v"]), config=config).is_told(2, "ConfigError")
    assert "num_heads is 12 in the settings and 8" in done.stderr


@pytest.mark.parametrize(
    ("flags", "code", "kind", "words"),
    [
        ({"image_path": ""}, 2, "ConfigError", ["--image_path"]),
        ({"image_path": "none.png"}, 2, "InputError", ["run/none.png", "working directory"]),
        ({"image_path": "picture.png"}, 2, "InputError", ["picture.png"]),
        ({"save_result_path": "picture.png/out.mp4"}, 1, "OutputError", ["picture.png"]),
        ({"save_result_path": "out.avi"}, 1, "OutputError", [".mp4"]),
        ({"model_path": "none"}, 2, "ConfigError", ["run/none"]),
    ],
    ids=lambda value: next(iter(value.values())) or "empty" if isinstance(value, dict) else "",
)
def test_a_request_that_cannot_be_met(
    infer, checkpoints, tmp_path, flags, code, kind, words
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/picture.png").write_text("no picture")
    done = infer(*request("i2v", checkpoints["i2v"], **flags), config=SMALL)
    done.is_told(code, kind)
    assert all(word in done.stderr for word in words), done.stderr
    assert "attention:" not in done.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["picture.png"]


@pytest.mark.parametrize("text", ["{", "[]", '{"fps": 16, "fps": 24}'])
def test_a_broken_json(infer, checkpoints, text) -> None:
    done = infer(*request("t2v", checkpoints["t2v"]), config=text)
    assert (done.code, done.errors()) == (2, ["ConfigError"]), done.stderr
    assert "config.json" in done.stderr


# -- signals ---------------------------------------------------------------------------------------


def segments_of(pid: int) -> int:
    """SysV segments that the process made, as the kernel lists them."""
    rows = Path("/proc/sysvipc/shm").read_text().splitlines()
    creator = rows[0].split().index("cpid")
    return sum(row.split()[creator] == str(pid) for row in rows[1:])


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_a_signal_in_the_middle_of_denoising(checkpoints, tmp_path, signum) -> None:
    config = write_config(tmp_path, {**SMALL, **FP8, **SHARED, "infer_steps": 1000})
    folder, stderr = tmp_path / "videos", tmp_path / "stderr"
    argv = request("t2v", checkpoints["t2v"], config_json=config)
    argv += ["--save_result_path", folder / "out.mp4"]
    command = [sys.executable, "-m", "shared_offload.infer", *map(str, argv)]
    with stderr.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60
        while "read T5: " not in stderr.read_text():
            assert time.monotonic() < deadline, stderr.read_text()
            time.sleep(0.05)
        time.sleep(0.5)  # into the steps
        assert segments_of(process.pid) == 1
        process.send_signal(signum)
        code = process.wait(5)
    finally:
        process.kill()
        process.wait()
    text = stderr.read_text()
    assert segments_of(process.pid) == 0
    assert list(folder.iterdir()) == []
    if signum == signal.SIGKILL:
        assert code == -signum
        return
    assert code == 128 + signum, text
    assert re.search(r"^denoise: stopped at \d+ / 1000 steps", text, re.MULTILINE), text
    assert text.splitlines()[-1].endswith("ended by SIGINT")
    assert "Traceback" not in text
