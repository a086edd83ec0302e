"""LightX2V's names that are no options here: what each means for a run that carries it.

`IGNORED` changes nothing in the video and may have any value. `REFUSED` would change what a run
does, so it is accepted at its off value only. Architecture keys belong to the checkpoint: they are
collected and compared with its config.json.
"""

from __future__ import annotations

from dataclasses import dataclass


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


# Another spelling of an option.
ALIASES = {"target_video_length": "num_frames", "vae_weight_dtype": "vae_dtype"}
SIZE_ALIASES = ("target_height", "target_width")

ARCHITECTURE_KEYS = _names(
    "dim eps ffn_dim freq_dim in_dim image_dim model_type num_heads num_layers out_dim text_dim "
    "text_len"
)
# Wan's constants: not in config.json, so a file that states others is wrong here.
CONSTANTS: dict[str, object] = {
    "patch_size": [1, 2, 2],
    "vae_stride": [4, 8, 8],
    "qk_norm": True,
    "cross_attn_norm": True,
    "window_size": [-1, -1],
}

FP8_ROW_SCHEMES = (
    "fp8-vllm",
    "fp8-sgl",
    "fp8-q8f",
    "fp8-triton",
    "fp8-torchao",
    "fp8-musa",
    "fp8-intel-xpu",
)
ENCODER_SCHEMES = ("fp8", *FP8_ROW_SCHEMES)
# Formats that LightX2V's NUMA-local copies do not hold either; told with cpu_offload_numa.
OTHER_FORMATS = ("nvfp4", "gguf", "marlin", "fp8-pertensor")
NO_SCHEME = (None, "", "Default")

IGNORED = _names(
    # Kernels of LightX2V; ours compute the same within rounding.
    "rope_type rope_chunk rope_chunk_size rotary_chunk rotary_chunk_size rms_norm_type "
    "layer_norm_type modulate_type clip_attn_type use_compile",
    # Memory housekeeping that is not needed here.
    "clean_cuda_cache empty_cache_min_free_gib empty_cache_min_reclaimable_gib load_from_rank0 "
    "use_stream_vae warmup t5_offload_granularity",
    # Details of features that are off, or refused by their own key below.
    "tae_path need_scaled cfg_scale teacache_thresh "
    "use_ret_steps coefficients residual_diff_threshold downsample_factor magcache_thresh "
    "magcache_K magcache_retention_ratio magcache_ratios magcache_calibration resolution_rate "
    "changing_resolution_steps resolution bucket_shape fixed_area fixed_shape sub_servers",
    # Does nothing for Wan 2.1 in LightX2V either.
    "aspect_ratio",
)
PARALLEL_IGNORED = _names(
    "seq_p_head_parallel seq_p_tensor_fusion seq_p_prepost_backend seq_p_a2a_backend tp_load_mode"
)
# Other transports of LightX2V for the same exchange.
ULYSSES_NAMES = ("ulysses-4090", "fast_ulysses")


@dataclass(frozen=True, slots=True)
class Refused:
    """A feature that is not here: the values that leave it off, and what to do instead."""

    off: tuple[object, ...]
    advice: str
    task: str = ""  # refused for this task only; elsewhere it changes nothing


_OFF = (False, None)
_NONE: tuple[object, ...] = (None, "", [], {}, False)
REFUSED: dict[str, Refused] = {
    "feature_caching": Refused(
        ("NoCaching", None), 'set "NoCaching"; every step is computed in full here'
    ),
    "changing_resolution": Refused(_OFF, "remove it; all steps run at the size asked for"),
    "resize_mode": Refused(
        _NONE, "remove it and crop the picture beforehand; size gives the area of the video"
    ),
    "use_tae": Refused(_OFF, "set it to false; the full VAE decodes"),
    "use_lightvae": Refused(_OFF, "set it to false and vae_path to the full Wan2.1_VAE.pth"),
    "use_image_encoder": Refused(
        (True, None), "remove it; the i2v models of Wan 2.1 need CLIP", task="i2v"
    ),
    "use_31_block": Refused(
        (True, None), "remove it; Wan 2.1 was trained on the features of CLIP's 31st block"
    ),
    "t5_lazy_load": Refused(_OFF, "set it to false; unload_modules frees T5 after use"),
    "lora_dynamic_apply": Refused(
        _OFF, "set it to false; lora_configs are merged once, which costs nothing in a step"
    ),
    "enable_dynamic_cfg": Refused(
        _OFF, "set it to false; models with a guidance embedding are not supported"
    ),
    "distill_method": Refused(
        ("dmd2", None), 'only step-distilled models run, with model_cls "wan2.1_distill"'
    ),
    "mm_config": Refused(_NONE, "use dit_quantized and dit_quant_scheme instead"),
    "offload_ratio": Refused(
        (1, 1.0, None), "set it to 1, and resident_blocks to the blocks that stay"
    ),
    "enable_reuse": Refused(_OFF, "set it to false"),
    "video_frame_interpolation": Refused(_NONE, "remove it and interpolate the finished file"),
    "video_super_resolution": Refused(_NONE, "remove it and scale the finished file"),
    "disagg_mode": Refused(_NONE, "remove it; one run holds all stages"),
    "dummy_model": Refused(_OFF, "make random weights with: shared-offload synth"),
    "use_prompt_enhancer": Refused(_OFF, "leave it out and give the longer prompt yourself"),
    "return_result_tensor": Refused(
        _OFF, "leave it out: a command saves a file; frames come from Pipeline.generate() in Python"
    ),
    "last_frame_path": Refused(_NONE, "leave it out; first-and-last-frame video is not supported"),
    "support_tasks": Refused(
        (*_NONE, ["t2v"], ["i2v"], ["t2v", "i2v"], ["i2v", "t2v"]),
        "leave it out; every request may carry the fields of t2v and i2v",
    ),
}
# Any key with "contiguous" in its name: LightX2V has had several for its offload buffers.
CONTIGUOUS = Refused(_OFF, "remove it; every unit is one contiguous copy here")
PARALLEL_REFUSED: dict[str, Refused] = {
    "tensor_p_size": Refused((1, None), "set it to 1 and raise seq_p_size"),
    "seq_p_quant_scheme": Refused(
        (*_NONE, "none"), "remove it; exchanges keep the precision of the model"
    ),
    "seq_p_fp8_comm": Refused(_OFF, "set it to false; exchanges keep the precision of the model"),
    "seq_p_fp4_comm": Refused(_OFF, "set it to false; exchanges keep the precision of the model"),
}
# What to do about a value that an option does not have.
HINTS = {
    "model_cls": "VACE, self-forcing, mean-flow and other variants are not supported",
    "task": "video from first and last frame (flf2v) and other tasks are not supported",
    "parallel.seq_p_attn_type": 'use "ulysses"; it computes what ring computes',
    "shared_cpu_weight_backend": 'use "sysv"; it works wherever shm limits allow',
}
