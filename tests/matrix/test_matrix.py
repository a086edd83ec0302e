"""Every way to hold the blocks gives the latents of the resident run, bit for bit.

{resident, block, phase, model} x {rank, rank-numa, host, numa} x {BF16, FP8} x {t2v, i2v} x
{1, 2 ranks}, and checkpoints of other formats through shared arenas. Combinations that make no
sense are refused by name. One process pair runs all cases of a number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared_offload.config import Settings
from shared_offload.errors import ConfigError
from shared_offload.report.progress import Progress
from shared_offload.synth.folder import make_checkpoint
from shared_offload.weights.architecture import read_architecture
from shared_offload.weights.cast import buffer_view, fill_tensors
from shared_offload.weights.checkpoint import Checkpoint, open_checkpoint
from shared_offload.weights.lora import LoraFile, with_loras
from shared_offload.weights.reader import block_pieces
from tests.reference import diffusers_dit
from tests.reference.processes import Run

pytestmark = pytest.mark.slow
DRIVER = Path(__file__).with_name("driver.py")
ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "assets/first_frame.jpg"
SECONDS = 240.0
TASKS = ("t2v", "i2v")
WEIGHTS = {"bf16": {}, "fp8": {"dit_quantized": True, "dit_quant_scheme": "fp8-vllm"}}
SHARED = {"shared_cpu_weights": True}
PLACES: dict[str, dict[str, Any]] = {
    "rank": {},
    "rank-numa": {"cpu_offload_numa": True},
    "host": {**SHARED, "shared_cpu_weight_scope": "host"},
    "numa": {**SHARED, "shared_cpu_weight_scope": "numa"},
}
GRANULARITIES = ("block", "phase", "model")
ROWS = [(g, p) for g in GRANULARITIES for p in PLACES if p != "rank-numa" or g == "block"]


def offload(granularity: str, place: str) -> dict[str, Any]:
    return {"cpu_offload": True, "offload_granularity": granularity, **PLACES[place]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {task: tmp_path_factory.mktemp("tiny") / task for task in TASKS}
    for task, folder in made.items():
        make_checkpoint(folder, "tiny", task, progress=Progress(enabled=False))
    return made


def official_tensors(folder: Path) -> dict[str, torch.Tensor]:
    shards = sorted(folder.glob("diffusion_pytorch_model*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


@pytest.fixture(scope="module")
def others(folders, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The t2v model in other formats, by name: options that use them."""
    root = tmp_path_factory.mktemp("others")
    tensors = official_tensors(folders["t2v"])
    (root / "bf16").mkdir()
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(half, root / "bf16/diffusion_pytorch_model.safetensors")
    (root / "diffusers").mkdir()
    renamed = {diffusers_dit.rename(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, root / "diffusers/diffusion_pytorch_model.safetensors")
    generator = torch.Generator().manual_seed(3)
    lora = {}
    for name, tensor in tensors.items():
        if name.startswith("blocks.") and name.endswith(".weight") and tensor.ndim == 2:
            module = f"diffusion_model.{name.removesuffix('.weight')}"
            down, up = (torch.randn(4, n, generator=generator) / 50 for n in tensor.shape[::-1])
            lora |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up.T.contiguous()}
    save_file(lora, root / "lora.safetensors")
    return {
        "bf16 file": {"dit_original_ckpt": str(root / "bf16")},
        "diffusers": {"dit_original_ckpt": str(root / "diffusers")},
        "lora": {"lora_configs": [{"path": str(root / "lora.safetensors"), "strength": 0.5}]},
    }


@pytest.fixture(scope="module")
def cases(folders, others) -> dict[str, dict[str, Any]]:
    small = {
        "size": [32, 48],
        "num_frames": 5,
        "infer_steps": 2,
        "enable_cfg": True,
        "device": "cpu",
        "prompt": "a train goes over a bridge",
        "negative_prompt": "blurry",
        "seed": 7,
    }
    made = {}
    for task in TASKS:
        request = {**small, "task": task, "model_path": str(folders[task])}
        request |= {"image_path": str(PICTURE)} if task == "i2v" else {}
        for weights, options in WEIGHTS.items():
            made[f"{task} {weights} resident"] = {**request, **options}
            for row in ROWS:
                name = f"{task} {weights} {' '.join(row)}"
                made[name] = {**request, **options, **offload(*row)}
    plain = made["t2v bf16 resident"]
    for name, options in others.items():
        made[f"{name} resident"] = {**plain, **options}
        for granularity in ("block", "phase"):
            made[f"{name} {granularity} host"] = {
                **plain,
                **options,
                **offload(granularity, "host"),
            }
    return made


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def made(request, cases, tmp_path_factory) -> Iterator[list[dict[str, Any]]]:
    """What each rank has to say of each case."""
    folder = tmp_path_factory.mktemp("matrix")
    job = folder / "job.json"
    job.write_text(json.dumps({"folder": str(folder), "cases": cases}))
    run = Run(DRIVER, [str(job)], folder, request.param, False)
    try:
        assert run.end(SECONDS) == [0] * request.param, run.stderr()
        yield [torch.load(folder / f"made{rank}.pt") for rank in range(request.param)]
    finally:
        run.stop()


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("task", TASKS)
def test_latents_are_those_of_the_resident_run(made, task, weights, row) -> None:
    name, (_, place) = f"{task} {weights} {' '.join(row)}", row
    resident = made[0][f"{task} {weights} resident"]
    assert resident["arenas"] == []
    everyone = list(range(len(made)))
    for rank in made:
        found = rank[name]
        assert torch.equal(found["latents"], resident["latents"])
        assert {arena["scope"] for arena in found["arenas"]} == {place}
        sharers = [everyone] if place in ("host", "numa") else [[r] for r in everyone]
        assert [list(arena["ranks"]) for arena in found["arenas"]] == sharers


def test_weights_matter(made) -> None:
    """So that equal latents mean something."""
    names = ("t2v bf16 resident", "t2v fp8 resident", "i2v bf16 resident", "lora resident")
    latents = [made[0][name]["latents"] for name in (*names, "bf16 file resident")]
    for index, one in enumerate(latents):
        assert not any(torch.equal(one, other) for other in latents[:index])
    same = made[0]["diffusers resident"]["latents"]
    assert torch.equal(same, made[0]["t2v bf16 resident"]["latents"])


@pytest.mark.parametrize("granularity", ["block", "phase"])
@pytest.mark.parametrize("kind", ["bf16 file", "diffusers", "lora"])
def test_other_formats_are_shared(made, kind, granularity) -> None:
    resident = made[0][f"{kind} resident"]["latents"]
    for rank in made:
        assert torch.equal(rank[f"{kind} {granularity} host"]["latents"], resident)


def expected_bytes(checkpoint: Checkpoint) -> tuple[int, str]:
    """Size and hash of what an arena must hold, read by this process alone."""
    layout = checkpoint.layout("BF16")
    arena = torch.zeros(layout.arena_nbytes, dtype=torch.uint8)
    fill_tensors(block_pieces(checkpoint, layout), buffer_view(arena), threads=1)
    return layout.arena_nbytes, hashlib.sha256(buffer_view(arena)).hexdigest()


def test_merged_weights_are_shared_as_one_copy(made, folders, others) -> None:
    """Every rank sees the merged bytes, and together they hold the pages of one arena."""
    arch = read_architecture(folders["t2v"])
    plain = open_checkpoint(folders["t2v"], arch, quantised=False, task="t2v")
    (lora,) = others["lora"]["lora_configs"]
    loras = [LoraFile(Path(lora["path"]), lora["strength"])]
    nbytes, digest = expected_bytes(with_loras(plain, loras).checkpoint)
    assert digest != expected_bytes(plain)[1]
    found = [rank["lora block host"] for rank in made]
    assert [rank["digest"] for rank in found] == [digest] * len(made)
    for rank in found:
        assert nbytes <= rank["pages"]["Size"] < nbytes + (2 << 20)
        assert rank["pages"]["Rss"] >= nbytes
    assert sum(rank["pages"]["Pss"] for rank in found) < 1.02 * nbytes + (1 << 20)


def test_private_weights_are_a_copy_each(made) -> None:
    """The same measure where it must give another answer."""
    found = [rank["t2v bf16 block rank"] for rank in made]
    nbytes = sum(arena["nbytes"] for arena in found[0]["arenas"])
    assert len(found[0]["arenas"]) == len(made)
    assert sum(rank["pages"]["Pss"] for rank in found) >= 0.99 * nbytes


@pytest.mark.parametrize("granularity", ["phase", "model"])
def test_numa_local_copies_are_for_blocks(cases, granularity) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_json_and_flags(
            {**cases["t2v fp8 resident"], **offload(granularity, "rank-numa")}, {}
        )
    assert caught.value.facts["keys"] == ["cpu_offload_numa", "offload_granularity"]
