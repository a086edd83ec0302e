"""Every file in configs/ loads, and says what its name promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared_offload.config import Settings, read_json

ROOT = Path(__file__).parent.parent / "configs"
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.json"))


def load(file: str) -> Settings:
    flags = {
        "model_path": "model",
        "task": "t2v" if "t2v" in file else "i2v",
        "model_cls": "wan2.1_distill" if "distill" in file else "wan2.1",
    }
    return Settings.from_json_and_flags(read_json(ROOT / file), flags)


def test_there_are_configs() -> None:
    assert "offload/block/wan_block_shared.json" in FILES


@pytest.mark.parametrize("file", FILES)
def test_file_loads_without_remarks(file: str) -> None:
    settings = load(file)
    assert settings.notes == ()
    assert settings.shared_cpu_weights == ("shared" in file or "demo" in file)
    assert settings.distilled == ("distill" in file)


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_the_shared_configs_are_the_guide_s(task: str) -> None:
    name = {"i2v": "wan_block_shared.json", "t2v": "wan_block_shared_t2v.json"}[task]
    settings = load(f"offload/block/{name}")
    assert settings.task == task
    assert (settings.infer_steps, settings.num_frames, settings.size) == (40, 81, (480, 832))
    assert (settings.dtype, settings.dit_quant_scheme) == ("BF16", "fp8-vllm")
    assert (settings.parallel.seq_p_size, settings.parallel.world_size) == (8, 8)
    assert (settings.shared_cpu_weight_scope, settings.offload_granularity) == ("numa", "block")
    assert settings.shared_cpu_weight_strict_numa
    assert settings.shared_cpu_weight_register_chunk_mb == 128
    assert settings.seed == 42


@pytest.mark.parametrize("file", [file for file in FILES if "demo" in file])
def test_demo_is_small_enough_for_a_laptop(file: str) -> None:
    settings = load(file)
    assert settings.size[0] * settings.size[1] <= 96 * 96
    assert settings.num_frames <= 17
    assert settings.infer_steps <= 10
    assert settings.dit_quantized
