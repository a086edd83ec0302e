"""What the headers of a checkpoint are compared with: config.json, the task and the settings.

Each check returns the problems that it finds; one problem stands for all tensors of its kind and
keeps their names in `names`. Invariant: a problem is told once. A tensor of a file that cannot be
read is not missing too; an i2v model under a t2v config is one error and not a hundred names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from pathlib import Path

from shared_offload.errors import CheckpointError
from shared_offload.weights.architecture import (
    MASK_CHANNELS,
    Architecture,
    block_shapes,
    is_quantised,
    non_block_shapes,
)
from shared_offload.weights.files import bounded_names
from shared_offload.weights.layout import FP8, SCALE
from shared_offload.weights.safetensors_header import TensorEntry

Entries = Mapping[str, TensorEntry]

FLOATS = ("F32", "BF16", "F16")
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_IMAGE = re.compile(r"img_emb\.|blocks\.\d+\.cross_attn\.(?:k_img|v_img|norm_k_img)\.")
_LINEAR = re.compile(r"blocks\.\d+\.(?:self_attn|cross_attn|ffn)\..+\.weight")
_CONVERT = "convert the official checkpoint to FP8 with `shared-offload convert`"

# Formats that are not ours, told by one tensor; the first that fits is the message.
_FOREIGN: tuple[tuple[Callable[[TensorEntry], object], str, str], ...] = (
    (
        lambda e: re.search(r"\.(?:lora_[AB]|lora_down|lora_up|diff|diff_b)(?:\.|$)", e.name),
        "a LoRA",
        "a LoRA is no checkpoint; merge it into the model when converting",
    ),
    (
        lambda e: e.name.startswith("model.diffusion_model.") or e.name.endswith("scale_weight"),
        "a ComfyUI checkpoint",
        "use the official files; " + _CONVERT,
    ),
    (lambda e: e.name.endswith(".input_scale"), "per-tensor FP8 (fp8-pertensor)", _CONVERT),
    (
        lambda e: (
            e.name.endswith((".weight_global_scale", ".weight_scale_2"))
            or e.dtype in ("U8", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0")
        ),
        "a micro-scaling format (nvfp4 or mxfp)",
        _CONVERT,
    ),
    (lambda e: e.dtype == "I8", "INT8", _CONVERT),
)


def task_problems(arch: Architecture, task: str, path: Path) -> list[CheckpointError]:
    """A model for one task, asked to do another."""
    if arch.model_type == task:
        return []
    return [
        CheckpointError(
            f"{path} is a {arch.model_type} model, the task is {task}",
            expected=f"a {task} checkpoint",
            hint=f"give --task {arch.model_type}, or the folder of a {task} model",
            path=str(path),
            found=arch.model_type,
            task=task,
        )
    ]


def foreign_problems(entries: Iterable[TensorEntry]) -> list[CheckpointError]:
    """Content in a format that is not supported; nothing else needs checking then."""
    known = list(entries)
    for matches, what, hint in _FOREIGN:
        names = [entry for entry in known if matches(entry)]
        if names:
            return [
                CheckpointError(
                    f"{names[0].path} holds {what}: tensor {names[0].name}",
                    expected="official Wan weights, or FP8 with one scale per output row",
                    hint=hint,
                    path=str(names[0].path),
                    name=names[0].name,
                    found=what,
                )
            ]
    return []


def actual_architecture(
    entries: Entries, arch: Architecture, path: Path
) -> tuple[Architecture, list[CheckpointError]]:
    """`arch` with the model type that the tensors have, and the error if that is another one."""
    if not any(".cross_attn.k." in name for name in entries):
        return arch, []
    image = next((name for name in entries if _IMAGE.match(name)), "")
    if bool(image) == (arch.model_type == "i2v"):
        return arch, []
    why = f"they have {image}" if image else "they have no image tensors (img_emb, k_img, v_img)"
    found = "i2v" if image else "t2v"
    error = CheckpointError(
        f"the files of {path} are a {found} model ({why}), config.json says {arch.model_type}",
        expected="config.json and weights of one model",
        hint="download the config.json and the safetensors files from the same place",
        path=str(path),
        name=image,
        found=found,
    )
    in_dim = arch.out_dim * 2 + MASK_CHANNELS if image else arch.out_dim
    return dataclasses.replace(arch, model_type=found, in_dim=in_dim), [error]  # type: ignore[arg-type]


def expected_shapes(arch: Architecture, *, quantised: bool) -> dict[str, tuple[int, ...]]:
    """Full names and shapes of a checkpoint, with the scales of an FP8 one."""
    block = block_shapes(arch)
    if quantised:
        fp8 = [(name, shape) for name, shape in block.items() if is_quantised(name, shape)]
        block |= {name + SCALE: (shape[0], 1) for name, shape in fp8}
    shapes = non_block_shapes(arch)
    for index in range(arch.num_layers):
        shapes |= {f"blocks.{index}.{name}": shape for name, shape in block.items()}
    return shapes


def quantisation_problems(
    entries: Entries, *, quantised: bool, path: Path
) -> list[CheckpointError]:
    """FP8 weights where none are configured, and the reverse."""
    linear = [entry for name, entry in entries.items() if _LINEAR.fullmatch(name)]
    fp8 = [entry for entry in linear if entry.dtype == FP8]
    if not linear or bool(fp8) == quantised:
        return []
    entry = (fp8 or linear)[0]
    found, wanted = ("FP8", "not quantised") if fp8 else (entry.dtype, "FP8")
    hint = 'set "dit_quantized": true and "dit_quant_scheme": "fp8-vllm"'
    if not fp8:
        hint = 'set "dit_quantized": false, or "dit_quantized_ckpt" to the folder of FP8 files'
    return [
        CheckpointError(
            f"the weights of {path} are {found} ({entry.name}), the settings say {wanted}",
            expected=f"a checkpoint that is {wanted}",
            hint=hint,
            path=str(entry.path),
            name=entry.name,
            found=entry.dtype,
        )
    ]


def name_problems(
    entries: Entries,
    expected: Collection[str],
    ignore: Callable[[str], bool],
    path: Path,
) -> list[CheckpointError]:
    """Missing and unexpected tensors; `ignore` says which missing ones have been told already."""
    missing = [name for name in expected if name not in entries and not ignore(name)]
    unexpected = [name for name in entries if name not in expected]
    problems = []
    if missing:
        problems.append(
            CheckpointError(
                f"{path} lacks {_count(missing)}: {_grouped(missing, expected)}",
                expected="all tensors that config.json implies",
                hint="download the missing files again; num_layers of config.json must fit",
                path=str(path),
                name=missing[0],
                names=missing,
                kind="missing",
            )
        )
    if unexpected:
        problems.append(
            CheckpointError(
                f"{path} has {_count(unexpected, 'unexpected ')}: {_grouped(unexpected, expected)}",
                expected="only tensors that config.json implies",
                hint="only Wan 2.1 t2v and i2v models are supported; check config.json",
                path=str(entries[unexpected[0]].path),
                name=unexpected[0],
                names=unexpected,
                kind="unexpected",
            )
        )
    return problems


def shape_problems(
    entries: Entries, expected: Mapping[str, tuple[int, ...]]
) -> list[CheckpointError]:
    """Shapes that differ from what config.json implies."""
    wrong = [e for name, e in entries.items() if expected.get(name, e.shape) != e.shape]
    if not wrong:
        return []
    scale = wrong[0].name.endswith(SCALE)
    hint = "config.json belongs to another model; download both from the same place"
    first = wrong[0]
    return [
        CheckpointError(
            f"wrong shape of {_count(wrong)}: {first.name} in {first.path} is "
            f"{list(first.shape)}" + _others(wrong),
            expected=f"{list(expected[first.name])} by config.json",
            hint="only one scale per output row is supported; " + _CONVERT if scale else hint,
            path=str(first.path),
            name=first.name,
            names=[entry.name for entry in wrong],
            found=list(first.shape),
            wanted=list(expected[first.name]),
        )
    ]


def dtype_problems(entries: Entries, *, quantised: bool) -> list[CheckpointError]:
    """Dtypes that cannot be loaded, and blocks whose dtypes differ from those of the first."""
    wrong = [e for e in entries.values() if e.dtype not in _allowed(e, quantised=quantised)]
    if wrong:
        first = wrong[0]
        return [
            CheckpointError(
                f"wrong dtype of {_count(wrong)}: {first.name} in {first.path} is "
                f"{first.dtype}" + _others(wrong),
                expected=" or ".join(_allowed(first, quantised=quantised)),
                hint="official files are F32, BF16 or F16; " + _CONVERT,
                path=str(first.path),
                name=first.name,
                names=[entry.name for entry in wrong],
                found=first.dtype,
            )
        ]
    return _block_problems(entries)


def _allowed(entry: TensorEntry, *, quantised: bool) -> tuple[str, ...]:
    match = _BLOCK.fullmatch(entry.name)
    if not quantised or match is None or entry.name.endswith(SCALE):
        return FLOATS
    return (FP8,) if is_quantised(match[2], entry.shape) else FLOATS


def _block_problems(entries: Entries) -> list[CheckpointError]:
    first: dict[str, TensorEntry] = {}
    for entry in entries.values():
        match = _BLOCK.fullmatch(entry.name)
        if match is None:
            continue
        other = first.setdefault(match[2], entry)
        if other.dtype != entry.dtype:
            return [
                CheckpointError(
                    f"blocks differ: {other.name} is {other.dtype}, {entry.name} is {entry.dtype}",
                    expected="the same dtypes in all blocks",
                    hint="files of two conversions are mixed; convert or download all again",
                    path=str(entry.path),
                    name=entry.name,
                    names=[other.name, entry.name],
                    found=[other.dtype, entry.dtype],
                )
            ]
    return []


def _count(tensors: Sized, kind: str = "") -> str:
    return f"{len(tensors)} {kind}tensor{'s' if len(tensors) > 1 else ''}"


def _others(wrong: list[TensorEntry]) -> str:
    rest = [entry.name for entry in wrong[1:]]
    return f"; also {bounded_names(rest)}" if rest else ""


def _grouped(names: list[str], expected: Collection[str]) -> str:
    """Names for a person: a block all of whose tensors are listed becomes one item."""
    per_block = sum(name.startswith("blocks.0.") for name in expected)
    blocks: dict[str, list[str]] = {}
    for name in names:
        match = _BLOCK.fullmatch(name)
        blocks.setdefault(match[1] if match else "", []).append(name)
    items: list[str] = []
    for block, members in blocks.items():
        whole = block and len(members) >= per_block
        items += [f"blocks.{block}.*"] if whole else members
    return bounded_names(items)
