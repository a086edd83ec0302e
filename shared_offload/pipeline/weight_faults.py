"""What can be wrong with the weights for a module that a library built.

Each check maps the names it objects to, to what was found there ("" where nothing was). One error
is made for each kind of fault, so that a wrong file gives a few lines and not hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from shared_offload.errors import CheckpointError
from shared_offload.weights.files import bounded_names
from shared_offload.weights.fp8 import FP8_DTYPE

SCALE_SUFFIX = "_scale"  # after the name of an FP8 weight
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Tensors = Mapping[str, Tensor]
Check = Callable[[Tensors, Tensors, Tensors], dict[str, str]]


def faults(own: Tensors, plain: Tensors, scales: Tensors, path: Path) -> list[CheckpointError]:
    """All faults of a file's tensors against the module's own state dict.

    `scales` are the tensors whose names end in SCALE_SUFFIX, `plain` the others. The facts of each
    error: path, kind, names.
    """
    errors = []
    for kind, (check, expected) in CHECKS.items():
        names = check(own, plain, scales)
        if names:
            errors.append(
                CheckpointError(
                    f"{path.name}: {len(names)} tensors {kind}: {_listing(names)}",
                    expected=expected,
                    path=str(path),
                    kind=kind,
                    names=sorted(names),
                )
            )
    return errors


def _missing(own: Tensors, plain: Tensors, _: Tensors) -> dict[str, str]:
    return {name: "" for name in own if name not in plain}


def _unexpected(own: Tensors, plain: Tensors, scales: Tensors) -> dict[str, str]:
    loose = [name for name in scales if name.removesuffix(SCALE_SUFFIX) not in plain]
    return dict.fromkeys([*(name for name in plain if name not in own), *loose], "")


def _wrong_shape(own: Tensors, plain: Tensors, scales: Tensors) -> dict[str, str]:
    weights = {
        name: f"{list(tensor.shape)} instead of {list(own[name].shape)}"
        for name, tensor in plain.items()
        if name in own and tensor.shape != own[name].shape
    }
    return weights | {
        name: f"{list(scale.shape)} for a weight {list(weight.shape)}"
        for name, scale, weight in _pairs(plain, scales)
        if scale.shape != (weight.shape[0], 1)
    }


def _wrong_dtype(own: Tensors, plain: Tensors, scales: Tensors) -> dict[str, str]:
    kept = {name: tensor for name, tensor in plain.items() if name in own}
    return {
        name: str(tensor.dtype)
        for name, tensor in {**kept, **scales}.items()
        if tensor.dtype not in FLOATS
        and (tensor.dtype != FP8_DTYPE or tensor.ndim != 2 or name in scales)
    }


def _half_quantised(own: Tensors, plain: Tensors, scales: Tensors) -> dict[str, str]:
    return {
        name: str(tensor.dtype)
        for name, tensor in plain.items()
        if name in own and (tensor.dtype == FP8_DTYPE) != (name + SCALE_SUFFIX in scales)
    }


def _useless_scale(_: Tensors, plain: Tensors, scales: Tensors) -> dict[str, str]:
    return {
        name: f"{scale.float().min():g} to {scale.float().max():g}"
        for name, scale, _weight in _pairs(plain, scales)
        if scale.dtype in FLOATS and not bool((torch.isfinite(scale) & (scale > 0)).all())
    }


def _pairs(plain: Tensors, scales: Tensors) -> list[tuple[str, Tensor, Tensor]]:
    """(name of the scale, scale, its weight) of each scale that has a weight."""
    weights = {name: plain.get(name.removesuffix(SCALE_SUFFIX)) for name in scales}
    return [(n, scales[n], weight) for n, weight in weights.items() if weight is not None]


def _listing(names: Mapping[str, str]) -> str:
    shown = [f"{name} ({found})" if found else name for name, found in sorted(names.items())]
    return bounded_names(shown)


CHECKS: dict[str, tuple[Check, str]] = {  # kind of fault -> its check, and what is right
    "are missing": (_missing, "every weight of the model"),
    "are unexpected": (_unexpected, "the weights of the model and nothing else"),
    "have a wrong shape": (_wrong_shape, "the shapes that the first tensors of the file imply"),
    "have a wrong dtype": (
        _wrong_dtype,
        "float32, bfloat16 or float16, or float8_e4m3fn for 2-D weights",
    ),
    "have a scale or are FP8, but not both": (
        _half_quantised,
        "a scale for each FP8 weight and for no other",
    ),
    "are not usable as scales": (_useless_scale, "finite numbers above 0"),
}
