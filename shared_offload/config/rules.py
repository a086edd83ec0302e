"""Which options contradict each other. Pure: no file is looked at (see `request.py` for those).

Each rule names all the options that it compared, so that one wrong value is told once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from shared_offload.config.known import ENCODER_SCHEMES, FP8_ROW_SCHEMES, OTHER_FORMATS
from shared_offload.config.options import DISTILLED_SCHEDULER, SIZE_480P, Options
from shared_offload.errors import ConfigError

SIZE_STEP = 16  # VAE stride 8 times patch 2


def check(options: Options) -> list[ConfigError]:
    """All contradictions. Facts of each: key, keys, found."""
    rules = (_video, _sampling, _quantised, _lora, _offload, _lazy, _numa_copies, _ranks)
    return [error for rule in rules for error in rule(options)]


def _error(
    what: str, keys: str, found: object, *, expected: str = "", hint: str = ""
) -> ConfigError:
    names = keys.split()
    return ConfigError(what, expected=expected, hint=hint, key=names[0], keys=names, found=found)


def _video(o: Options) -> Iterator[ConfigError]:
    if o.num_frames % 4 != 1:
        low = (o.num_frames - 1) // 4 * 4 + 1
        yield _error(
            f"num_frames is {o.num_frames}",
            "num_frames task",
            o.num_frames,
            expected="a number of the form 4n+1",
            hint=f"use {max(low, 1)} or {low + 4}",
        )
    if o.task == "t2v" and any(side % SIZE_STEP for side in o.size):
        near = [max(round(side / SIZE_STEP), 1) * SIZE_STEP for side in o.size]
        yield _error(
            f"size is {list(o.size)}",
            "size task",
            list(o.size),
            expected=f"multiples of {SIZE_STEP}",
            hint=f"use {near}, or {list(SIZE_480P)}, which Wan was trained with",
        )


def _sampling(o: Options) -> Iterator[ConfigError]:
    steps = list(o.denoising_step_list)
    if o.scheduler_type == DISTILLED_SCHEDULER:
        keys = "denoising_step_list infer_steps scheduler_type model_cls"
        if not steps or any(b >= a for a, b in pairwise(steps)):
            yield _error(
                f"denoising_step_list is {steps}",
                keys,
                steps,
                expected="falling timesteps for a distilled model, such as [1000, 750, 500, 250]",
            )
        elif len(steps) != o.infer_steps:
            yield _error(
                f"infer_steps ({o.infer_steps}) is not the length of denoising_step_list {steps}",
                "infer_steps denoising_step_list",
                o.infer_steps,
                hint="remove infer_steps",
            )
        if o.enable_cfg:
            yield _error(
                "enable_cfg is true for a distilled model",
                "enable_cfg scheduler_type model_cls",
                True,
                expected="false: distilled models have their guidance built in",
                hint="set enable_cfg to false",
            )
    elif o.model_cls == "wan2.1_distill":
        yield _error(
            f"scheduler_type is {o.scheduler_type} for model_cls wan2.1_distill",
            "scheduler_type model_cls",
            o.scheduler_type,
            expected=DISTILLED_SCHEDULER,
            hint="remove scheduler_type",
        )
    if o.noise_device == "cuda" and o.device == "cpu":
        yield _error(
            "noise_device is cuda, but device is cpu",
            "noise_device device",
            "cuda",
            hint="use noise_device cpu",
        )


def _quantised(o: Options) -> Iterator[ConfigError]:
    for part, accepted in (
        ("dit", FP8_ROW_SCHEMES),
        ("t5", ENCODER_SCHEMES),
        ("clip", ENCODER_SCHEMES),
    ):
        flag, key = f"{part}_quantized", f"{part}_quant_scheme"
        quantised, scheme = getattr(o, flag), getattr(o, key)
        if quantised and scheme not in accepted:
            convert = f"convert the {part.upper()} to FP8 with one scale per row, then use "
            yield _error(
                f"{key} is {scheme!r}" if scheme else f"{flag} is true without {key}",
                f"{key} {flag}",
                scheme,
                expected=f"one of {', '.join(accepted)}",
                hint=f"{convert if scheme else 'use '}fp8-vllm",
            )
        elif scheme and not quantised:
            yield _error(
                f"{key} is {scheme!r}, but {flag} is false",
                f"{key} {flag}",
                scheme,
                hint=f"set {flag} to true, or remove {key}",
            )


def _offload(o: Options) -> Iterator[ConfigError]:
    if o.shared_cpu_weights and not o.cpu_offload:
        yield _error(
            "shared_cpu_weights is true, but cpu_offload is false",
            "shared_cpu_weights cpu_offload",
            True,
            hint="set cpu_offload to true: only weights in host memory can be shared there",
        )
    if o.weight_server == "require" and (o.lazy_load or not o.shared_cpu_weights):
        yield _error(
            f"weight_server is require, but "
            f"{'lazy_load is true' if o.lazy_load else 'shared_cpu_weights is false'}",
            "weight_server shared_cpu_weights lazy_load",
            "require",
            hint="set shared_cpu_weights to true and lazy_load to false: a server lends whole, "
            "shared copies only",
        )
    if o.resident_blocks != 0 and o.cpu_offload and o.offload_granularity == "model":
        yield _error(
            f"resident_blocks is {o.resident_blocks!r} with offload_granularity model",
            "resident_blocks offload_granularity cpu_offload",
            o.resident_blocks,
            expected="0: the whole model is on the GPU while it denoises",
            hint="use granularity block or phase to keep some blocks resident",
        )


def _lazy(o: Options) -> Iterator[ConfigError]:
    if not o.lazy_load:
        return
    if not o.cpu_offload:
        yield _error(
            "lazy_load is true, but cpu_offload is false",
            "lazy_load cpu_offload",
            True,
            hint="set cpu_offload to true: blocks pass through host memory to the GPU",
        )
    elif o.offload_granularity == "model":
        yield _error(
            "lazy_load is true with offload_granularity model",
            "lazy_load offload_granularity",
            True,
            expected="block or phase: model holds all blocks on the GPU while it denoises",
            hint="use block; resident_blocks keeps as many on the GPU as fit",
        )
    if o.lora_configs:
        yield _error(
            "lazy_load is true with lora_configs: files are read at every step as they are",
            "lazy_load lora_configs",
            [str(lora.path) for lora in o.lora_configs],
            hint="merge while converting: shared-offload convert --model_path FOLDER --out NEW "
            "--lora PATH:STRENGTH, then use NEW without lora_configs",
        )


def _lora(o: Options) -> Iterator[ConfigError]:
    if o.lora_configs and o.dit_quantized:
        yield _error(
            "lora_configs with dit_quantized true: a LoRA cannot be merged into FP8 weights",
            "lora_configs dit_quantized",
            [str(lora.path) for lora in o.lora_configs],
            expected="unquantised weights",
            hint="merge while converting: shared-offload convert --model_path FOLDER --out NEW "
            "--lora PATH:STRENGTH, then use NEW as dit_quantized_ckpt without lora_configs",
        )


def _numa_copies(o: Options) -> Iterator[ConfigError]:
    if not o.cpu_offload_numa:
        return
    other = next((s for s in OTHER_FORMATS if s in (o.dit_quant_scheme or "").lower()), "")
    conflicts = (
        ("cpu_offload", not o.cpu_offload, "set cpu_offload to true: there is no copy otherwise"),
        (
            "offload_granularity",
            o.offload_granularity != "block",
            'use "block", or one copy per node: shared_cpu_weights with scope "numa"',
        ),
        (
            "shared_cpu_weights",
            o.shared_cpu_weights,
            'set cpu_offload_numa to false; shared_cpu_weight_scope "numa" places the shared copy',
        ),
        ("lazy_load", o.lazy_load, "set cpu_offload_numa to false: lazy_load keeps no copy"),
        ("lora_configs", bool(o.lora_configs), "merge the LoRA into the checkpoint beforehand"),
        ("dit_quant_scheme", bool(other), "convert to FP8 with one scale per row: fp8-vllm"),
    )
    for key, conflict, hint in conflicts:
        if conflict:
            value = getattr(o, key)
            shown = value if isinstance(value, str | bool) else [str(v.path) for v in value]
            yield _error(
                f"cpu_offload_numa is true with {key} {shown!r}",
                f"cpu_offload_numa {key}",
                shown,
                hint=hint,
            )


def _ranks(o: Options) -> Iterator[ConfigError]:
    if o.parallel.cfg_p_size == 2 and not o.enable_cfg:
        yield _error(
            "parallel.cfg_p_size is 2, but enable_cfg is false",
            "parallel enable_cfg",
            2,
            expected="two branches for two halves of the ranks",
            hint="set enable_cfg to true, or cfg_p_size to 1 and seq_p_size twice as large",
        )


def remarks(o: Options) -> list[str]:
    """What was given and has no effect, in sentences; not errors."""
    given = o.model_fields_set
    return [text for key, useless, text in _remarks(o) if key in given and useless]


def _remarks(o: Options) -> Iterator[tuple[str, bool, str]]:
    distilled = o.scheduler_type == DISTILLED_SCHEDULER
    no_cfg = not o.enable_cfg and not distilled
    yield "sample_guide_scale", no_cfg, "sample_guide_scale has no effect: enable_cfg is false"
    yield (
        "negative_prompt",
        bool(o.negative_prompt) and not o.enable_cfg,
        "negative_prompt has no effect: enable_cfg is false",
    )
    yield (
        "denoising_step_list",
        bool(o.denoising_step_list) and not distilled,
        "denoising_step_list has no effect: it belongs to wan2.1_distill",
    )
    yield "image_path", o.task == "t2v", "image_path has no effect: task is t2v"
    yield (
        "dit_original_ckpt",
        o.dit_quantized,
        "dit_original_ckpt has no effect: dit_quantized is true",
    )
    yield (
        "lora_allow_unmatched",
        o.lora_allow_unmatched and not o.lora_configs,
        "lora_allow_unmatched has no effect: there are no lora_configs",
    )
    for part in ("dit", "t5", "clip"):
        key, flag = f"{part}_quantized_ckpt", f"{part}_quantized"
        yield key, not getattr(o, flag), f"{key} has no effect: {flag} is false"
    yield (
        "resident_blocks",
        o.resident_blocks != 0 and not o.cpu_offload,
        "resident_blocks has no effect: without cpu_offload all blocks are resident",
    )
    for key in ("num_disk_workers", "lazy_load_ring_gib"):
        yield key, not o.lazy_load, f"{key} has no effect: lazy_load is false"
    yield (
        "cross_attn_2_type",
        o.cross_attn_2_type != o.cross_attn_1_type,
        f"cross_attn_2_type has no effect: {o.cross_attn_1_type} runs all cross-attention",
    )
