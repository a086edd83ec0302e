from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shared_offload.config import (
    Options,
    Parallel,
    Settings,
    clip_file,
    dit_path,
    load_settings,
    t5_file,
    tokenizer_folder,
    vae_file,
)
from shared_offload.config.document import SECTIONS, document
from shared_offload.config.known import ALIASES, ARCHITECTURE_KEYS, CONSTANTS, IGNORED, REFUSED
from shared_offload.errors import CheckpointError, ConfigError, InputError, OffloadError, Problems

DOCS = Path(__file__).parent.parent / "docs" / "configuration.md"

# A LightX2V file as its users have them: old names, explicit off values, kernel choices.
LIGHTX2V: dict[str, Any] = {
    "infer_steps": 40,
    "target_video_length": 81,
    "target_height": 480,
    "target_width": 832,
    "text_len": 512,
    "self_attn_1_type": "flash_attn3",
    "cross_attn_1_type": "flash_attn3",
    "cross_attn_2_type": "flash_attn3",
    "sample_guide_scale": 5,
    "sample_shift": 5,
    "enable_cfg": True,
    "cpu_offload": True,
    "offload_granularity": "phase",
    "t5_cpu_offload": False,
    "dit_quantized": True,
    "dit_quant_scheme": "fp8-q8f",
    "clip_quant_scheme": "Default",
    "rope_type": "flashinfer_rope",
    "feature_caching": "NoCaching",
    "lora_configs": None,
    "use_tae": False,
    "lazy_load": False,
    "patch_size": [1, 2, 2],
    "parallel": {"seq_p_size": 4, "seq_p_attn_type": "ulysses-4090", "cfg_p_size": 2},
}


def make(json_: dict[str, Any] | None = None, **flags: Any) -> Settings:
    return Settings.from_json_and_flags(json_ or {}, {"model_path": "/m", **flags})


def errors(json_: dict[str, Any], **flags: Any) -> dict[str, OffloadError]:
    """All errors by key."""
    with pytest.raises(OffloadError) as caught:
        make(json_, **flags)
    found = caught.value.errors if isinstance(caught.value, Problems) else (caught.value,)
    assert all(isinstance(e, ConfigError) and e.exit_code == 2 for e in found)
    by_key = {str(e.facts["key"]): e for e in found}
    assert len(by_key) == len(found), [str(e) for e in found]
    return by_key


def test_a_lightx2v_file_works_as_it_is() -> None:
    s = make(LIGHTX2V, task="i2v")
    assert (s.size, s.num_frames, s.infer_steps, s.sample_shift) == ((480, 832), 81, 40, 5.0)
    assert s.parallel == Parallel(seq_p_size=4, cfg_p_size=2)
    assert s.parallel.world_size == 8
    assert (s.t5_cpu_offload, s.vae_cpu_offload, s.branches) == (False, True, 2)
    assert s.clip_quant_scheme is None
    assert s.architecture_claims == {"text_len": 512}
    assert any("ulysses-4090" in note for note in s.notes)
    assert any("rope_type" in note for note in s.notes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"task": "t2v"}, {"infer_steps": 50, "sample_shift": 5.0, "num_frames": 81}),
        ({"task": "i2v"}, {"infer_steps": 40, "sample_shift": 3.0}),
        ({"task": "i2v", "size": [832, 480]}, {"sample_shift": 3.0}),
        ({"task": "i2v", "size": [720, 1280]}, {"sample_shift": 5.0}),
        (
            {"task": "i2v", "model_cls": "wan2.1_distill"},
            {
                "infer_steps": 4,
                "sample_shift": 5.0,
                "denoising_step_list": (1000, 750, 500, 250),
                "distilled": True,
                "branches": 1,
            },
        ),
        (
            {"scheduler_type": "WanStepDistillScheduler", "denoising_step_list": [900, 400]},
            {"infer_steps": 2, "distilled": True},
        ),
        ({"cpu_offload": True}, {"t5_cpu_offload": True, "clip_cpu_offload": True}),
        ({"dtype": "FP16"}, {"compute_dtype": "F16"}),
        ({"parallel": False}, {"parallel": Parallel()}),
    ],
)
def test_defaults_follow_the_task(given: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = make(given)
    assert {name: getattr(settings, name) for name in expected} == expected


def test_flags_win_over_json_over_defaults() -> None:
    settings = make({"seed": 1, "size": [480, 832], "fps": 24}, seed=2, target_shape=[64, 96])
    assert (settings.seed, settings.size, settings.fps) == (2, (64, 96), 24.0)


def test_spellings_that_contradict() -> None:
    found = errors(
        {"num_frames": 81, "target_video_length": 77, "size": [480, 832], "target_height": 480}
        | {"target_width": 480}
    )
    assert found["num_frames"].facts["found"] == [81, 77]
    assert found["size"].facts["found"] == [[480, 832], [480, 480]]
    same = {"num_frames": 77, "target_video_length": 77, "target_height": 64, "target_width": 96}
    assert make(same | {"size": [64, 96]}).size == (64, 96)
    assert set(errors({"target_height": 480})) == {"target_height"}


def test_unknown_names_come_with_the_nearest() -> None:
    found = errors({"infer_step": 4, "parallel": {"seq_p_sise": 2}, "qqqq": 1, "_note": "mine"})
    nearest = {key: error.facts["nearest"] for key, error in found.items()}
    assert nearest == {"infer_step": "infer_steps", "parallel.seq_p_sise": "seq_p_size"} | {
        "qqqq": None
    }


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_refused_features_pass_when_off_and_say_what_to_do_when_on(key: str) -> None:
    refused = REFUSED[key]
    for off in refused.off:
        make({key: off}, task="i2v")
    error = errors({key: "something else"}, task="i2v")[key]
    assert error.facts["found"] == "something else"
    assert error.hint == refused.advice


def test_parallel_features_that_are_not_here() -> None:
    make({"parallel": {"tensor_p_size": 1, "seq_p_quant_scheme": None, "seq_p_fp8_comm": False}})
    found = errors(
        {
            "parallel": {
                "tensor_p_size": 2,
                "seq_p_quant_scheme": "fp8",
                "seq_p_attn_type": "ring",
                "cfg_p_size": 3,
            }
        }
    )
    names = {"tensor_p_size", "seq_p_quant_scheme", "seq_p_attn_type", "cfg_p_size"}
    assert set(found) == {f"parallel.{name}" for name in names}
    assert "ulysses" in found["parallel.seq_p_attn_type"].hint


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"model_cls": "wan2.1_vace"}, "model_cls"),
        ({"task": "flf2v"}, "task"),
        ({"seed": -1}, "seed"),
        ({"cpu_offload": "true"}, "cpu_offload"),
        ({"infer_steps": 40.0}, "infer_steps"),
        ({"infer_steps": True}, "infer_steps"),
        ({"size": [480]}, "size"),
        ({"size": [8, 832]}, "size"),
        ({"fps": 0}, "fps"),
        ({"fps": float("nan")}, "fps"),
        ({"resident_blocks": -1}, "resident_blocks"),
        ({"resident_blocks": "all"}, "resident_blocks"),
        ({"offload_granularity": "layer"}, "offload_granularity"),
        ({"shared_cpu_weight_scope": "node"}, "shared_cpu_weight_scope"),
        ({"shared_cpu_weight_backend": "posix"}, "shared_cpu_weight_backend"),
        ({"shared_cpu_weight_register_chunk_mb": 0}, "shared_cpu_weight_register_chunk_mb"),
        ({"parallel": 8}, "parallel"),
        ({"parallel": {"seq_p_size": 0}}, "parallel.seq_p_size"),
        ({"num_frames": 80}, "num_frames"),
        ({"size": [480, 830]}, "size"),
        ({"shared_cpu_weights": True}, "shared_cpu_weights"),
        ({"parallel": {"cfg_p_size": 2}}, "parallel"),
        ({"dit_quantized": True}, "dit_quant_scheme"),
        ({"dit_quantized": True, "dit_quant_scheme": "fp8"}, "dit_quant_scheme"),
        ({"dit_quantized": True, "dit_quant_scheme": "int8-vllm"}, "dit_quant_scheme"),
        ({"dit_quantized": True, "dit_quant_scheme": "fp8-pertensor"}, "dit_quant_scheme"),
        ({"dit_quantized": True, "dit_quant_scheme": "gguf-Q8_0"}, "dit_quant_scheme"),
        ({"dit_quant_scheme": "fp8-vllm"}, "dit_quant_scheme"),
        ({"t5_quantized": True, "t5_quant_scheme": "int8"}, "t5_quant_scheme"),
        ({"noise_device": "cuda", "device": "cpu"}, "noise_device"),
        ({"model_cls": "wan2.1_distill", "enable_cfg": True}, "enable_cfg"),
        ({"model_cls": "wan2.1_distill", "infer_steps": 8}, "infer_steps"),
        ({"model_cls": "wan2.1_distill", "denoising_step_list": []}, "denoising_step_list"),
        ({"model_cls": "wan2.1_distill", "denoising_step_list": [250, 500]}, "denoising_step_list"),
        ({"model_cls": "wan2.1_distill", "scheduler_type": "WanScheduler"}, "scheduler_type"),
        ({"patch_size": [2, 2, 2]}, "patch_size"),
        (
            {"cpu_offload": True, "offload_granularity": "model", "resident_blocks": 3},
            "resident_blocks",
        ),
    ],
)
def test_values_that_cannot_work(given: dict[str, Any], key: str) -> None:
    (error,) = errors(given).values()
    assert error.facts["key"] == key
    assert error.expected or error.hint


def test_all_problems_are_told_at_once_and_each_once() -> None:
    found = errors(
        {
            "task": "flf2v",
            "model_cls": "wan2.1_distill",
            "denoising_step_list": "none",
            "cpu_offload": "yes",
            "shared_cpu_weights": True,  # its rule compares cpu_offload, which is told already
            "t5_lazy_load": True,
            "numm_frames": 81,
            "noise_device": "cuda",
            "device": "cpu",
        }
    )
    assert set(found) == {
        "task",
        "denoising_step_list",
        "cpu_offload",
        "t5_lazy_load",
        "numm_frames",
        "noise_device",
    }


def test_i2v_frames_are_corrected_as_lightx2v_does_and_said() -> None:
    for given, made in ((80, 81), (82, 81), (84, 85), (81, 81)):
        settings = make({"num_frames": given}, task="i2v")
        assert settings.num_frames == made
        assert any(str(given) in note for note in settings.notes) == (given != made)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"sample_guide_scale": 6}, "sample_guide_scale"),
        ({"negative_prompt": "blur"}, "negative_prompt"),
        ({"denoising_step_list": [1000, 500]}, "denoising_step_list"),
        ({"image_path": "x.png"}, "image_path"),
        ({"dit_quantized_ckpt": "x"}, "dit_quantized_ckpt"),
        ({"resident_blocks": 3}, "resident_blocks"),
        ({"cross_attn_1_type": "flash_attn3", "cross_attn_2_type": "torch_sdpa"}, "cross_attn_2"),
        ({"use_compile": True}, "use_compile"),
        ({"use_image_encoder": False}, ""),
    ],
)
def test_what_has_no_effect_is_said(given: dict[str, Any], word: str) -> None:
    notes = make(given).notes
    assert [word in note for note in notes] == ([True] if word else [])
    assert make().notes == ()


def test_settings_are_frozen_and_closed() -> None:
    settings = make()
    with pytest.raises(ValidationError):
        settings.seed = 1
    with pytest.raises(ValidationError):
        Settings(model_path=Path("/m"), sead=1)


def test_summary_tells_the_request_and_what_differs() -> None:
    given = {"prompt": "a cat", "seed": 3, "fps": 24, "cpu_offload": True, "unload_modules": False}
    summary = make(given).summary()
    json.dumps(summary)
    assert summary.items() >= {"prompt": "a cat", "seed": 3, "infer_steps": 50}.items()
    assert summary["fps"] == 24
    assert summary["cpu_offload"] is True
    assert "unload_modules" not in summary
    assert "load_threads" not in summary


# The command line and the file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "first.png").write_bytes(b"")
    return tmp_path


def command(folder: Path, *more: str, json_: str | None = None) -> Settings:
    words = ["--task", "i2v", "--model_path", str(folder / "model"), *more]
    if json_ is not None:
        (folder / "c.json").write_text(json_)
        words += ["--config_json", str(folder / "c.json")]
    return load_settings(words)


def test_command_line(folder: Path) -> None:
    settings = command(
        folder,
        *("--prompt", "a cat, -5 degrees", "--negative_prompt", "", "--seed", "7"),
        *("--image_path", str(folder / "first.png"), "--save_result_path", "out.mp4"),
        *("--shared_cpu_weight_scope", "host", "--trace", "t.json", "--warmup"),
        *("--last_frame_path", "", "--support_tasks", "t2v", "i2v", "--target_shape", "64", "96"),
        json_='{"seed": 1, "shared_cpu_weight_scope": "numa", "infer_steps": 8}',
    )
    assert (settings.seed, settings.infer_steps, settings.size) == (7, 8, (64, 96))
    assert settings.shared_cpu_weight_scope == "host"
    assert (settings.save_result_path, settings.trace) == (Path("out.mp4"), Path("t.json"))
    assert settings.notes == ("without effect here: --warmup",)


def test_request_and_options_are_told_together(folder: Path) -> None:
    with pytest.raises(Problems) as caught:
        load_settings(
            [
                *("--task", "i2v", "--model_path", "nowhere", "--image_path", "no.png"),
                *("--use_prompt_enhancer", "--return_result_tensor"),
                *("--last_frame_path", "x.png", "--seed", "-1"),
            ]
        )
    kinds = [(type(e), e.facts.get("key")) for e in caught.value.errors]
    assert kinds == [
        (ConfigError, "--use_prompt_enhancer"),
        (ConfigError, "--return_result_tensor"),
        (ConfigError, "--last_frame_path"),
        (ConfigError, "seed"),
        (ConfigError, "model_path"),
        (InputError, None),
    ]
    assert str(Path.cwd() / "nowhere") in str(caught.value)
    with pytest.raises(ConfigError) as missing:
        command(folder)
    assert missing.value.facts["key"] == "image_path"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--infer_stepz", "3"], "unknown flag --infer_stepz"),
        (["--sede", "3"], "--seed"),
        (["--infer_steps", "3"], "--config_json"),
        (["--seed", "x"], "invalid int"),
        (["cat"], "quote the prompt"),
        (["--config_json", "no.json"], "No such file"),
        (["--config_json", "/"], "cannot be read"),
    ],
)
def test_flags_that_cannot_be(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(words)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ('{\n  "seed": 1,\n}', {"line": 3, "column": 1}),
        ('{"seed": 1, "seed": 2}', {"key": "seed"}),
        ('{"parallel": {"seq_p_size": 1, "seq_p_size": 2}}', {"key": "seq_p_size"}),
        ('{"fps": NaN}', {}),
        ("[1]", {}),
        ("", {"line": 1}),
    ],
)
def test_files_that_are_no_settings(folder: Path, text: str, facts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        command(folder, json_=text)
    assert caught.value.facts["path"] == str(folder / "c.json")
    assert caught.value.facts.items() >= facts.items()


def test_other_encodings(folder: Path) -> None:
    picture = ("--image_path", str(folder / "first.png"))
    assert command(folder, *picture, json_='\ufeff{"_a": 1, "_a": 2, "seed": 5}').seed == 5
    (folder / "c.json").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ConfigError, match="UTF-8"):
        load_settings(["--config_json", str(folder / "c.json")])


# Where files lie


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_encoders_are_searched_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder / "model"
    t5, vae = "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth"
    touch(root / t5, root / "original" / t5, root / "fp8" / vae, root / "other.pth")
    settings = make(model_path=str(root))
    assert t5_file(settings) == root / "original" / t5
    assert vae_file(settings) == root / "fp8" / vae
    assert vae_file(make({"vae_name": "other.pth"}, model_path=str(root))) == root / "other.pth"
    fp8 = {"clip_quantized": True, "clip_quant_scheme": "fp8", "clip_quantized_ckpt": "model/c.pth"}
    monkeypatch.chdir(folder)
    with pytest.raises(CheckpointError) as caught:
        clip_file(make(fp8))
    assert caught.value.facts["tried"] == [str(root / "c.pth")]
    touch(root / "c.pth")
    assert clip_file(make(fp8)) == root / "c.pth"
    with pytest.raises(CheckpointError) as caught:
        tokenizer_folder(settings)
    assert caught.value.facts["tried"] == [str(root / "google" / "umt5-xxl")]


def test_dit_is_searched(folder: Path) -> None:
    root = folder / "model"
    fp8 = {"dit_quantized": True, "dit_quant_scheme": "fp8-vllm"}
    distilled = {"model_cls": "wan2.1_distill"}

    def path(**json_: Any) -> Path:
        return dit_path(make(json_, model_path=str(root)))

    with pytest.raises(CheckpointError) as caught:
        path(**fp8)
    assert caught.value.facts["tried"] == [str(root / "fp8"), str(root)]
    touch(root / "diffusion_pytorch_model.safetensors")
    assert path() == path(**fp8) == root
    touch(root / "fp8" / "block_0.safetensors", root / "distill_fp8" / "block_0.safetensors")
    assert path(**fp8) == root / "fp8"
    assert path(**fp8, **distilled) == root / "distill_fp8"
    assert path(**distilled) == root
    touch(root / "wan_fp8.safetensors")
    assert path(**fp8) == root
    assert path(dit_original_ckpt=str(root / "wan_fp8.safetensors")) == root / "wan_fp8.safetensors"


# The docs


def test_docs_are_what_the_options_say(tmp_path: Path) -> None:
    assert DOCS.read_text(encoding="utf-8") == document(), "run: python -m shared_offload.config"
    subprocess.run(
        [sys.executable, "-m", "shared_offload.config", str(tmp_path / "c.md")], check=True
    )
    assert (tmp_path / "c.md").read_bytes() == DOCS.read_bytes()


def test_docs_name_everything() -> None:
    text = document()
    names = {*Options.model_fields, *Parallel.model_fields, *ALIASES, *ARCHITECTURE_KEYS}
    for name in names | set(CONSTANTS) | IGNORED | set(REFUSED):
        assert f"`{name}`" in text
    for _, first in SECTIONS:
        assert first in Options.model_fields
    for field in (*Options.model_fields.values(), *Parallel.model_fields.values()):
        assert field.description


def test_no_name_has_two_meanings() -> None:
    tables = [set(Options.model_fields), set(ALIASES), ARCHITECTURE_KEYS, CONSTANTS, IGNORED]
    names = [name for table in (*tables, REFUSED) for name in table]
    assert len(names) == len(set(names))
