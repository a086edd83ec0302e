"""Every option of a run: its type, its one default, its unit and what its special values mean.

docs/configuration.md is made from this file. A default that depends on other options is computed
from them (`default_factory`), with the words for the docs beside it; fields are therefore in an
order in which each default needs only fields above it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["BF16", "FP16", "FP32"]
Size = tuple[Annotated[int, Field(ge=16)], Annotated[int, Field(ge=16)]]

SCHEDULER = "WanScheduler"
DISTILLED_SCHEDULER = "WanStepDistillScheduler"
STEPS = {"t2v": 50, "i2v": 40}
DISTILLED_STEPS = (1000, 750, 500, 250)
SHIFT = 5.0
SHIFT_I2V_480P = 3.0
SIZE_480P = (480, 832)


def option(
    default: object,
    text: str,
    *,
    computed: Callable[[dict[str, Any]], object] | None = None,
    words: str = "",
    **limits: Any,  # noqa: ANN401 - pydantic's own constraints
) -> Any:  # noqa: ANN401 - a field of any type
    """A documented field; with `computed` the default comes from the fields above, in `words`."""
    extra: dict[str, Any] | None = {"default_words": words} if words else None
    if computed is not None:
        return Field(default_factory=computed, description=text, json_schema_extra=extra, **limits)
    return Field(default=default, description=text, json_schema_extra=extra, **limits)


def default_scheduler(data: dict[str, Any]) -> str:
    """The scheduler that belongs to the model class."""
    return DISTILLED_SCHEDULER if data.get("model_cls") == "wan2.1_distill" else SCHEDULER


def default_step_list(data: dict[str, Any]) -> tuple[int, ...]:
    """The list of the published distilled models; nothing for others."""
    return DISTILLED_STEPS if data.get("scheduler_type") == DISTILLED_SCHEDULER else ()


def default_shift(data: dict[str, Any]) -> float:
    """Wan's recommendation: 3 for i2v at 480p, else 5; distilled models were trained with 5."""
    small = tuple(data.get("size", ())) in (SIZE_480P, SIZE_480P[::-1])
    plain_i2v = data.get("task") == "i2v" and data.get("scheduler_type") == SCHEDULER
    return SHIFT_I2V_480P if plain_i2v and small else SHIFT


def default_steps(data: dict[str, Any]) -> int:
    """One step per entry of the step list, else Wan's number for the task."""
    listed = data.get("denoising_step_list", ())
    return len(listed) or STEPS[data.get("task", "t2v")]


def same_as(name: str, otherwise: object) -> Callable[[dict[str, Any]], object]:
    """A default that follows another field."""
    return lambda data: data.get(name, otherwise)


class Parallel(BaseModel):
    """How ranks share the work."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    seq_p_size: int = option(1, "Ranks that share one sequence (Ulysses); divides the heads.", ge=1)
    cfg_p_size: Literal[1, 2] = option(
        1, "2: half of the ranks take the conditional branch, half the unconditional one."
    )
    seq_p_attn_type: Literal["ulysses"] = option("ulysses", "The way a sequence is shared.")
    vae_parallel: bool = option(True, "The VAE decodes on all ranks; false: on rank 0 alone.")

    @property
    def world_size(self) -> int:
        """The number of ranks that this layout needs."""
        return self.seq_p_size * self.cfg_p_size


class Lora(BaseModel):
    """A LoRA to merge."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    path: Path
    strength: float = 1.0


class Options(BaseModel):
    """The validated values. `Settings` adds how they are read and what follows from them."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    # The request
    model_cls: Literal["wan2.1", "wan2.1_distill"] = option(
        "wan2.1", "Model class; `wan2.1_distill` samples in few Euler steps without guidance."
    )
    task: Literal["t2v", "i2v"] = option("t2v", "Text to video, or image and text to video.")
    model_path: Path = Field(description="Checkpoint folder with config.json, encoders and VAE.")
    prompt: str = option("", "What the video shows.")
    negative_prompt: str = option("", "What it must not show; used with `enable_cfg` only.")
    image_path: Path | None = option(None, "First frame, for i2v.")
    seed: int = option(42, "Seed of the initial noise.", ge=0, lt=2**63)
    save_result_path: Path | None = option(
        None, "Video file (.mp4 or .mov); null: nothing is saved. Its folder is created."
    )
    trace: Path | None = option(
        None, "Chrome/Perfetto trace of copies and compute, a .json file; null: none."
    )

    # The video
    size: Size = option(
        SIZE_480P,
        "[height, width] in pixels. t2v: exactly this, multiples of 16. i2v: the area; the "
        "aspect is the picture's.",
    )
    num_frames: int = option(
        81, "Frames, 4n+1. i2v rounds other numbers as LightX2V does and says so.", ge=1
    )
    fps: float = option(16.0, "Frames per second of the file; may be a fraction.", gt=0, le=1000)

    # Sampling
    scheduler_type: Literal["WanScheduler", "WanStepDistillScheduler"] = option(
        None,
        "UniPC, or the Euler steps of distilled models.",
        computed=default_scheduler,
        words="by `model_cls`",
    )
    denoising_step_list: tuple[Annotated[int, Field(ge=1, le=1000)], ...] = option(
        None,
        "Distilled models: training timesteps to visit, 1000 to 1, falling.",
        computed=default_step_list,
        words=f"`{list(DISTILLED_STEPS)}` for distilled models, else `[]`",
    )
    infer_steps: int = option(
        None,
        "Denoising steps. Distilled models: the length of `denoising_step_list`.",
        computed=default_steps,
        words=f"{STEPS['t2v']} for t2v, {STEPS['i2v']} for i2v, {len(DISTILLED_STEPS)} distilled",
        ge=1,
        le=1000,
    )
    sample_shift: float = option(
        None,
        "Shift of the noise schedule; larger spends more steps on coarse structure.",
        computed=default_shift,
        words=f"{SHIFT}; {SHIFT_I2V_480P} for i2v at {list(SIZE_480P)}, either way round",
        gt=0,
    )
    enable_cfg: bool = option(False, "Classifier-free guidance: two model passes per step.")
    sample_guide_scale: float = option(5.0, "Strength of the guidance; needs `enable_cfg`.", ge=0)
    noise_device: Literal["cpu", "cuda"] = option(
        "cpu",
        "Where the initial noise is drawn. `cpu`: a seed means the same on every GPU; `cuda`: "
        "as Wan and LightX2V do, tied to the GPU model.",
    )

    # Checkpoint files
    dit_original_ckpt: Path | None = option(
        None, "DiT as published: a folder or a file; null: searched in `model_path`."
    )
    dit_quantized: bool = option(False, "Use FP8 block weights (one scale per output row).")
    dit_quant_scheme: str | None = option(
        None, "LightX2V's name of the FP8 kernel; all of its per-row FP8 names run the same here."
    )
    dit_quantized_ckpt: Path | None = option(
        None, "FP8 DiT: a folder or a file; null: searched in `model_path`."
    )
    t5_original_ckpt: Path | None = option(None, "T5 .pth file; null: searched.")
    t5_quantized: bool = option(False, "Use the FP8 T5.")
    t5_quant_scheme: str | None = option(None, "As `dit_quant_scheme`; `fp8` is accepted too.")
    t5_quantized_ckpt: Path | None = option(None, "FP8 T5 .pth file; null: searched.")
    t5_tokenizer_path: Path | None = option(
        None, "Folder of T5's tokenizer; null: `model_path`/google/umt5-xxl."
    )
    clip_original_ckpt: Path | None = option(None, "CLIP .pth file (i2v); null: searched.")
    clip_quantized: bool = option(False, "Use the FP8 CLIP (i2v).")
    clip_quant_scheme: str | None = option(None, "As `t5_quant_scheme`.")
    clip_quantized_ckpt: Path | None = option(None, "FP8 CLIP .pth file; null: searched.")
    vae_path: Path | None = option(None, "VAE .pth file; null: searched.")
    vae_name: str | None = option(
        None, "File name that the search for the VAE uses; null: Wan2.1_VAE.pth."
    )
    lora_configs: tuple[Lora, ...] = option(
        (),
        "LoRAs to merge into the DiT while it loads, each `{path, strength}` (strength 1 unless "
        "given); not into FP8 weights: `shared-offload convert --lora` merges before it quantises.",
    )
    lora_allow_unmatched: bool = option(
        False, "Go on when keys of a LoRA do not belong to this model; they are told."
    )
    verify_weights: bool = option(
        False,
        "Hash the DiT's files before they are loaded (reads them once more), tell the hash, and "
        "share an arena only where the content is equal too.",
    )
    load_threads: int = option(0, "Threads that read block weights; 0: chosen by CPUs.", ge=0)

    # Compute
    device: Literal["auto", "cuda", "cpu"] = option("auto", "`auto`: CUDA where there is any.")
    dtype: Dtype = option("BF16", "Arithmetic of the DiT, and of weights that are not FP8.")
    vae_dtype: Dtype = option(
        "FP32",
        "Arithmetic and weights of the VAE. FP32 is what Wan uses; BF16 (LightX2V's choice) is "
        "off by 0.8 of 255 levels on average, 6 at most; FP16 by 0.1 and 0.8.",
    )
    use_tiling_vae: bool = option(
        False, "The VAE works in overlapping tiles: less GPU memory, more time."
    )
    compile: Literal["auto"] | bool = option(
        "auto",
        "Fused kernels between products and attention: `auto` where they run, `true` or an error, "
        "`false` for plain torch operations.",
    )
    self_attn_1_type: str = option(
        "auto",
        "Kernel of self-attention: `auto` (the fastest exact one), `torch_sdpa`, `flash_attn2`, "
        "`flash_attn3`, `flash_attn4`, or a `sage_attn` kind (not exact).",
    )
    cross_attn_1_type: str = option("auto", "Kernel of cross-attention, names as above.")
    cross_attn_2_type: str = option(
        None,
        "Accepted for LightX2V's files; attention to the image uses `cross_attn_1_type`.",
        computed=same_as("cross_attn_1_type", "auto"),
        words="`cross_attn_1_type`",
    )

    # Offload
    cpu_offload: bool = option(False, "DiT blocks live in host memory and stream to the GPU.")
    offload_granularity: Literal["block", "phase", "model"] = option(
        "block",
        "What one copy moves: a block (two slots), a third of one (less GPU memory), or the whole "
        "model before the first step and out after the last.",
    )
    resident_blocks: Annotated[int, Field(ge=0)] | Literal["auto"] = option(
        0, "Blocks that stay on the GPU; `auto`: as many as fit after the first step."
    )
    lazy_load: bool = option(
        False,
        "DiT blocks stay in their files and are read while denoising, through a ring in host "
        "memory, once for all ranks that share (`shared_cpu_weights`); needs `cpu_offload`.",
    )
    num_disk_workers: int = option(4, "Threads that read for `lazy_load`.", ge=1, le=64)
    lazy_load_ring_gib: Annotated[float, Field(gt=0)] | None = option(
        None,
        "Host memory for the ring of `lazy_load`, in GiB; null: room for 4 units. What there is "
        "beyond that keeps units, which are then read once; all of them where all fit.",
    )
    t5_cpu_offload: bool = option(
        None,
        "T5 leaves the GPU after use.",
        computed=same_as("cpu_offload", False),
        words="`cpu_offload`",
    )
    clip_cpu_offload: bool = option(
        None,
        "CLIP leaves the GPU after use.",
        computed=same_as("cpu_offload", False),
        words="`cpu_offload`",
    )
    vae_cpu_offload: bool = option(
        None,
        "The VAE is on the GPU only while it works.",
        computed=same_as("cpu_offload", False),
        words="`cpu_offload`",
    )
    unload_modules: bool = option(
        False, "Encoders are loaded when used and freed after, host memory too."
    )
    cpu_offload_numa: bool = option(
        False, "Each rank's own host copy is placed on the NUMA node of its GPU, all pages of it."
    )
    shared_cpu_weights: bool = option(
        False, "Ranks share one host copy of the blocks instead of one each; needs `cpu_offload`."
    )
    shared_cpu_weight_scope: Literal["host", "numa", "auto"] = option(
        "auto", "One copy per host or per NUMA node; `auto`: numa where every GPU's node is known."
    )
    shared_cpu_weight_backend: Literal["sysv"] = option("sysv", "SysV shared memory.")
    shared_cpu_weight_strict_numa: bool = option(
        True, "Pages that cannot be placed on their node are an error, not a report."
    )
    shared_cpu_weight_register_chunk_mb: int = option(
        128, "Size of one CUDA host registration, in MiB; cut at unit boundaries.", ge=1, le=65536
    )

    weight_server: Literal["auto", "require", "off"] = option(
        "auto",
        "`auto`: shared weights come from a weight server of this user that holds exactly them, "
        "else they are loaded; `require`: an error instead; `off`: no server is asked.",
    )
    weight_server_folder: Path | None = option(
        None,
        "Folder of the server's socket, mode 700; null: XDG_RUNTIME_DIR/shared_offload, then "
        "/tmp/shared_offload-UID.",
    )

    # Ranks
    parallel: Parallel = option(Parallel(), "How ranks share the work; `false`: one rank.")
    collective_timeout_seconds: float = option(
        600.0,
        "A rank that waits longer than this for another ends the run with an error. Slow disks "
        "need more: followers wait while weights load.",
        gt=0,
    )
    allow_shared_gpu: bool = option(False, "Let several ranks use one GPU (through gloo; slow).")
