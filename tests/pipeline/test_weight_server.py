"""Videos with the blocks of a weight server, started as the command that people start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared_offload import cli
from shared_offload.cli.serve_weights import make_order
from shared_offload.config import Settings
from shared_offload.errors import ArenaError, CheckpointError, ConfigError
from shared_offload.pipeline.arena_blocks import open_blocks
from shared_offload.pipeline.generate import Pipeline, Video
from shared_offload.pipeline.inventory import index_dit
from shared_offload.ranks.facts import RankFacts
from shared_offload.ranks.group import Ranks
from shared_offload.report.progress import Progress
from shared_offload.server import client
from shared_offload.weights.architecture import (
    Architecture,
    block_shapes,
    non_block_shapes,
    write_config,
)

SHARED = {"cpu_offload": True, "shared_cpu_weights": True}
FP8 = {"dit_quantized": True, "dit_quant_scheme": "fp8-vllm"}
COMMAND = [sys.executable, "-m", "shared_offload.cli", "serve-weights"]


class Server:
    """`shared-offload serve-weights` on a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "socket"
        self.process: subprocess.Popen[bytes] | None = None
        self._root = root

    def start(self, model: Path, **options: Any) -> None:
        """With one model, by relative paths. Returns once it is filled."""
        path = self._root / "settings.json"
        path.write_text(json.dumps({**SHARED, **options}))
        relative = os.path.relpath(model, self._root)
        argv = [*COMMAND, "--config_json", path.name, "--model_path", relative]
        argv += ["--socket_folder", str(self.folder)]
        with (self._root / "log").open("ab") as log:
            self.process = subprocess.Popen(argv, stderr=log, cwd=self._root)
        while "serving in" not in self.log():
            assert self.process.poll() is None, self.log()
            time.sleep(0.05)

    def hold(self, model: Path, **options: Any) -> None:
        """One more model, as a second command would."""
        settings = Settings.from_json_and_flags({**SHARED, **options}, {"model_path": str(model)})
        assert client.hold(self.folder, make_order(settings), lambda _: None) is not None

    def log(self) -> str:
        return (self._root / "log").read_text()

    def end(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(10) == 0, self.log()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.end()


class Told(Progress):
    """Keeps what a person would read."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)


@pytest.fixture
def make(studio, server) -> Callable[..., tuple[Video, list[str]]]:
    """A video with the server around, and what was said of weights."""

    def run(task: str = "t2v", **options: Any) -> tuple[Video, list[str]]:
        told = Told()
        settings = studio.settings(
            task, **{**SHARED, "weight_server_folder": str(server.folder), **options}
        )
        with Pipeline(settings, progress=told) as pipeline:
            video = pipeline.generate()
        return video, [line for line in told.notes if line.startswith("weights are loaded")]

    return run


def lenders(video: Video) -> list[str]:
    return [row["lender"] for row in video.metadata["arenas"]]


def test_latents_are_the_same(studio, server, make) -> None:
    model = studio.checkpoints["t2v"]
    server.start(model)
    for options in ({}, FP8, {"offload_granularity": "phase"}):
        server.hold(model, **options)
        alone, said = make(weight_server="off", **options)
        borrowed, nothing = make(weight_server="require", **options)
        assert lenders(alone) == [""] and said == nothing == []
        assert lenders(borrowed) == [f"weight server, pid {server.process.pid}"]
        assert torch.equal(borrowed.latents, alone.latents)
        assert torch.equal(borrowed.frames, alone.frames)
        assert torch.equal(alone.latents, studio.video("t2v", **options).latents)  # resident
    video, said = make(dtype="FP16")  # another dtype is another model
    assert lenders(video) == [""]
    assert len(said) == 1 and "with another dtype, layout or LoRA set" in said[0]
    with pytest.raises(ArenaError) as caught:
        make(dtype="FP16", weight_server="require")
    assert caught.value.facts["key"] == "weight_server"


def test_a_lora_is_part_of_what_is_held(studio, server, make, tmp_path) -> None:
    model, file = studio.checkpoints["t2v"], tmp_path / "lora.safetensors"
    name = "diffusion_model.blocks.0.self_attn.q"
    pair = {"lora_A": torch.randn(4, 128), "lora_B": torch.randn(128, 4)}
    save_file({f"{name}.{part}.weight": tensor for part, tensor in pair.items()}, file)
    server.start(model, lora_configs=[{"path": str(file), "strength": 0.5}])
    latents = []
    for strength in (0.5, 0.6):
        options = {"lora_configs": [{"path": str(file), "strength": strength}]}
        alone, _ = make(weight_server="off", **options)
        video, said = make(**options)
        assert bool(lenders(video)[0]) is (strength == 0.5) is (said == [])
        assert torch.equal(video.latents, alone.latents)
        latents.append(video.latents)
    plain, said = make()
    assert len(said) == 1 and not lenders(plain)[0]
    latents.append(plain.latents)
    assert not any(torch.equal(a, b) for a, b in pairwise([*latents, latents[0]]))


def test_settings_that_no_run_would_use(studio, capsys, tmp_path) -> None:
    path = tmp_path / "settings.json"
    for wrong in ({"shared_cpu_weights": False}, {"lazy_load": True}):
        path.write_text(json.dumps({**SHARED, **wrong}))
        model = str(studio.checkpoints["t2v"])
        argv = ["serve-weights", "--config_json", str(path), "--model_path", model]
        assert cli.main([*argv, "--socket_folder", str(tmp_path / "so")]) == 2
        assert next(iter(wrong)) in capsys.readouterr().err
    with pytest.raises(ConfigError) as caught:
        studio.settings("t2v", weight_server="require", cpu_offload=True)
    assert caught.value.facts["key"] == "weight_server"


def edit(file: Path) -> None:
    """A later version with the size and time of the earlier one."""
    stat = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-4096, 2)
        opened.write(bytes(4096))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replace(file: Path) -> None:
    tensors = {name: tensor * 2 for name, tensor in load_file(file).items()}
    save_file(tensors, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def test_a_checkpoint_that_changed_never_matches(studio, server, make, tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(studio.checkpoints["t2v"], folder)
    shard = sorted(folder.glob("diffusion_pytorch_model*.safetensors"))[-1]
    server.start(folder)
    latents = []
    for change in (None, edit, replace):
        if change:
            change(shard)
            video, said = make(model_path=str(folder))
            assert lenders(video) == [""] and len(said) == 1, change
            assert "as it was before it changed on disk" in said[0] or change is edit, said
        server.hold(folder)
        video, said = make(model_path=str(folder), weight_server="require")
        assert lenders(video)[0] and said == []
        latents.append(video.latents)
        alone, _ = make(model_path=str(folder), weight_server="off")
        assert torch.equal(video.latents, alone.latents)
    assert not any(torch.equal(a, b) for a, b in pairwise(latents))
    truncate(shard)
    with pytest.raises(CheckpointError) as caught:
        make(model_path=str(folder))
    assert caught.value.facts["path"] == str(shard)
    with pytest.raises(CheckpointError):
        client.hold(server.folder, {"model_path": str(folder), **SHARED}, lambda _: None)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A DiT of 330 MB, without what else a model has."""
    (folder := tmp_path / "large").mkdir()
    arch = Architecture(
        model_type="t2v",
        dim=1024,
        ffn_dim=4096,
        freq_dim=256,
        in_dim=16,
        out_dim=16,
        num_heads=8,
        num_layers=8,
        text_len=512,
        eps=1e-6,
    )
    shapes = non_block_shapes(arch)
    for block in range(arch.num_layers):
        shapes |= {f"blocks.{block}.{k}": shape for k, shape in block_shapes(arch).items()}
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    write_config(arch, folder / "config.json")
    return folder


def test_a_warm_start_is_faster_than_a_cold_one(studio, server, large) -> None:
    """From an indexed checkpoint to blocks that can be streamed, the files in the page cache."""
    ranks = Ranks.start(RankFacts(), torch.device("cpu"))
    opened = iter(range(100))

    def start(weight_server: str) -> float:
        settings = studio.settings(
            "t2v",
            **SHARED,
            model_path=str(large),
            load_threads=2,
            weight_server=weight_server,
            weight_server_folder=str(server.folder),
        )
        checkpoint = index_dit(settings).checkpoint
        begun = time.monotonic()
        blocks = open_blocks(
            settings,
            checkpoint,
            ranks,
            Progress(enabled=False),
            name=f"dit {next(opened)}",
        )
        seconds = time.monotonic() - begun
        blocks.source.close()
        blocks.arena.close()
        return seconds

    server.start(large)
    cold = min(start("off") for _ in range(3))
    warm = min(start("require") for _ in range(3))
    assert warm < cold / 3, f"warm {warm:.3f} s, cold {cold:.3f} s"
