"""Names in LoRA files: which tensor of the model each belongs to, and what it does there.

Invariant: a key has one meaning or none. All styles are read alike: a suffix says the role, the
rest names a module in Wan's names, diffusers' or kohya's (dots as underscores), behind any prefixes
that trainers put before it. Torch-free.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared_offload.errors import CheckpointError
from shared_offload.weights.names import from_diffusers, to_diffusers

Role = Literal["down", "up", "alpha", "add"]

# Suffix -> its role, and the member of the module that it changes.
_SUFFIXES: Mapping[str, tuple[Role, str]] = {
    ".lora_down.weight": ("down", "weight"),
    ".lora_up.weight": ("up", "weight"),
    ".lora_A.weight": ("down", "weight"),
    ".lora_B.weight": ("up", "weight"),
    ".lora_A.default.weight": ("down", "weight"),
    ".lora_B.default.weight": ("up", "weight"),
    ".lora.down.weight": ("down", "weight"),
    ".lora.up.weight": ("up", "weight"),
    "_lora.down.weight": ("down", "weight"),
    "_lora.up.weight": ("up", "weight"),
    ".lora_linear_layer.down.weight": ("down", "weight"),
    ".lora_linear_layer.up.weight": ("up", "weight"),
    ".lora_A": ("down", "weight"),
    ".lora_B": ("up", "weight"),
    ".alpha": ("alpha", "weight"),
    ".diff": ("add", "weight"),
    ".diff_b": ("add", "bias"),
    ".diff_m": ("add", "modulation"),
}
_PREFIXES = ("base_model.", "model.", "diffusion_model.", "transformer.", "unet.")
_UNDERSCORED = "lora_unet_"  # before a module's name with underscores for dots
_PEFT_PREFIX = "base_model.model."

ADAPTER_CONFIG = "adapter_config.json"  # beside what peft saves
ADAPTER_FILES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
_DIFFUSERS_NOTE = "lora_adapter_metadata"  # in the header of what diffusers saves


@dataclass(frozen=True, slots=True)
class Key:
    """A key that was understood: the module as written, the model's tensor, the role."""

    module: str
    target: str
    role: Role


class KeyTable:
    """The keys that fit a model with tensors of these (Wan's) names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._underscored: dict[str, str] = {}
        for name in self._names:
            for spelled in (name, to_diffusers(name)):
                if spelled is not None:
                    module, _, member = spelled.rpartition(".")
                    self._underscored[f"{module.replace('.', '_')}.{member}"] = name

    def read(self, key: str) -> Key | None:
        """What a key of a LoRA file means here; None for one that means nothing."""
        for suffix, (role, member) in _SUFFIXES.items():
            module = key.removesuffix(suffix)
            if module != key and (target := self._find(module, member)) is not None:
                return Key(module, target, role)
        return None

    def _find(self, module: str, member: str) -> str | None:
        name = f"{module}.{member}"
        for candidate in (name, from_diffusers(name)):
            if candidate in self._names:
                return candidate
        if module.startswith(_UNDERSCORED):
            return self._underscored.get(name.removeprefix(_UNDERSCORED))
        rest = next((module.removeprefix(p) for p in _PREFIXES if module.startswith(p)), None)
        return None if rest is None else self._find(rest, member)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What peft or diffusers say of alpha beside the tensors; keys in the file itself win."""

    alpha: float | None = None
    patterns: Mapping[str, float] | None = None
    root_of_rank: bool = False
    prefix: str = ""

    def factor(self, module: str, rank: int) -> float:
        """What the product of a pair is multiplied with; 1 where nothing is said."""
        alpha = self.alpha
        name = module.removeprefix(self.prefix)
        for pattern, own in (self.patterns or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):  # peft's own rule
                alpha = own
                break
        if not alpha:
            return 1.0
        return alpha / (math.sqrt(rank) if self.root_of_rank else rank)


def read_adapter_config(file: Path, notes: Mapping[str, object]) -> AdapterConfig:
    """From the notes in the header (diffusers) or the JSON beside the file (peft)."""
    beside = file.with_name(ADAPTER_CONFIG)
    written = notes.get(_DIFFUSERS_NOTE)
    try:
        if isinstance(written, str):
            flat = _object(json.loads(written))
            prefix = "transformer."
            return _config({k.removeprefix(prefix): v for k, v in flat.items()}, prefix)
        if file.name == ADAPTER_FILES[0] and beside.is_file():
            return _config(_object(json.loads(beside.read_bytes())), _PEFT_PREFIX)
    except (OSError, ValueError, TypeError, re.error) as error:
        where = file if isinstance(written, str) else beside
        raise CheckpointError(
            f"{where}: the LoRA's description cannot be read: {error}",
            expected="the JSON that peft or diffusers wrote",
            hint="download it again",
            path=str(where),
        ) from error
    return AdapterConfig()


def _object(raw: object) -> dict[str, object]:
    if not isinstance(raw, dict):
        raise TypeError(f"it holds a {type(raw).__name__}")
    return raw


def _config(raw: Mapping[str, object], prefix: str) -> AdapterConfig:
    patterns = {k: _number(v) for k, v in _object(raw.get("alpha_pattern") or {}).items()}
    for pattern in patterns:
        re.compile(pattern)
    alpha = raw.get("lora_alpha")
    return AdapterConfig(
        alpha=None if alpha is None else _number(alpha),
        patterns=patterns,
        root_of_rank=bool(raw.get("use_rslora")),
        prefix=prefix,
    )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"alpha is {value!r}")
    return float(value)
