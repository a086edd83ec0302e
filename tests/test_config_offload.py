"""LoRA and NUMA-local copies in the settings: how they are written, and what excludes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared_offload.config import Settings
from shared_offload.errors import ConfigError, OffloadError, Problems

NUMA = {"cpu_offload": True, "cpu_offload_numa": True}
LORA = {"lora_configs": [{"path": "x.safetensors"}]}
FP8 = {"dit_quantized": True, "dit_quant_scheme": "fp8-vllm"}


def make(**options: Any) -> Settings:
    return Settings.from_json_and_flags({"model_path": "/m", **options}, {})


def told(**options: Any) -> list[ConfigError]:
    with pytest.raises(OffloadError) as caught:
        make(**options)
    error = caught.value
    return list(error.errors) if isinstance(error, Problems) else [error]


# -- LoRA ------------------------------------------------------------------------------------------


def test_lora_configs_as_lightx2v_writes_them() -> None:
    settings = make(
        lora_configs=[
            {"path": "a.safetensors", "strength": 0.5, "alpha": 8, "_": "a comment"},
            {"path": "/b"},
        ],
        lora_dynamic_apply=False,
    )
    found = [(lora.path, lora.strength) for lora in settings.lora_configs]
    assert found == [(Path("a.safetensors"), 0.5), (Path("/b"), 1.0)]
    assert settings.notes == ("without effect here: lora_configs.alpha",)
    for nothing in (None, [], "", False):
        assert make(lora_configs=nothing).lora_configs == ()


@pytest.mark.parametrize(
    "wrong",
    [
        "a.safetensors",
        {"path": "a"},
        ["a"],
        [{"strength": 1}],
        [{"path": "a", "strength": "1"}],
        [{"path": "a", "weight": 1}],
        [{"path": 3}],
    ],
)
def test_lora_configs_that_cannot_be(wrong: object) -> None:
    (error,) = told(lora_configs=wrong)
    assert error.facts["key"] == "lora_configs"


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (FP8, ["lora_configs", "dit_quantized"]),
        ({"cpu_offload": True, "lazy_load": True}, ["lazy_load", "lora_configs"]),
    ],
)
def test_lora_needs_weights_that_can_be_merged(options: dict[str, Any], keys: list[str]) -> None:
    (error,) = told(**LORA, **options)
    assert error.facts["keys"] == keys
    assert all(key in error.what for key in keys)
    assert "shared-offload convert" in error.hint
    assert "--lora" in error.hint
    make(**options)
    make(**LORA)


def test_lora_is_not_applied_at_each_step() -> None:
    (error,) = told(**LORA, lora_dynamic_apply=True)
    assert error.facts["key"] == "lora_dynamic_apply"


# -- NUMA-local copies -----------------------------------------------------------------------------


def test_copies_on_their_node_are_off_by_default() -> None:
    assert make().cpu_offload_numa is False
    for more in ({}, FP8, {"parallel": {"seq_p_size": 4}}, {"offload_contiguous": False}):
        assert make(**NUMA, **more).cpu_offload_numa


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({"cpu_offload": False}, "cpu_offload"),
        ({"offload_granularity": "phase"}, "offload_granularity"),
        ({"offload_granularity": "model"}, "offload_granularity"),
        ({"lazy_load": True}, "lazy_load"),
        ({"shared_cpu_weights": True}, "shared_cpu_weights"),
        (LORA, "lora_configs"),
        ({"parallel": {"tensor_p_size": 2}}, "parallel.tensor_p_size"),
        ({"offload_contiguous": True}, "offload_contiguous"),
        ({"cpu_offload_contiguous_buffer": True}, "cpu_offload_contiguous_buffer"),
        *(
            ({"dit_quantized": True, "dit_quant_scheme": scheme}, "dit_quant_scheme")
            for scheme in ("nvfp4", "gguf-Q8_0", "int4-g128-marlin", "fp8-pertensor")
        ),
    ],
)
def test_what_excludes_copies_on_their_node(options: dict[str, Any], other: str) -> None:
    errors = told(**{**NUMA, **options})
    (error,) = [e for e in errors if "cpu_offload_numa" in e.facts.get("keys", ())]
    assert error.facts["keys"] == ["cpu_offload_numa", other]
    assert "cpu_offload_numa" in error.what
    assert other in error.what
    assert error.hint
