"""From what people write (JSON keys and flags, LightX2V's or ours) to one value per option.

Nothing is dropped silently: each key ends as an option's value, a claim about the architecture, a
note, or an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared_offload.config.known import (
    ALIASES,
    ARCHITECTURE_KEYS,
    CONSTANTS,
    CONTIGUOUS,
    IGNORED,
    NO_SCHEME,
    PARALLEL_IGNORED,
    PARALLEL_REFUSED,
    REFUSED,
    SIZE_ALIASES,
    ULYSSES_NAMES,
    Refused,
)
from shared_offload.config.options import Options, Parallel
from shared_offload.errors import ConfigError

_OPTIONS = frozenset(Options.model_fields)
_OPTIONAL = frozenset(
    n for n, f in Options.model_fields.items() if f.default is None or f.default_factory
)
_ALL_NAMES = sorted(
    {*_OPTIONS, *ALIASES, *SIZE_ALIASES, "target_shape", *ARCHITECTURE_KEYS, *CONSTANTS, *IGNORED}
    | set(REFUSED)
)


@dataclass
class Merged:
    """One source, or several laid over each other, in the names of the options."""

    values: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)  # option -> the name that was written
    claims: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[ConfigError] = field(default_factory=list)

    def put(self, option: str, written: str, value: object) -> None:
        """Take a value; two spellings of one option in one source must agree."""
        if option in self.values and self.values[option] != value:
            first, old = self.spelled[option], self.values[option]
            self.errors.append(
                ConfigError(
                    f"{first} ({old}) and {written} ({value}) are the same option",
                    expected="one value",
                    hint=f"remove {first if first in ALIASES else written}",
                    key=option,
                    found=[old, value],
                )
            )
            return
        self.values[option] = value
        self.spelled[option] = written

    def over(self, lower: Merged) -> Merged:
        """This source laid over a lower one: its values win, everything else adds up."""
        return Merged(
            values=lower.values | self.values,
            spelled=lower.spelled | self.spelled,
            claims=lower.claims | self.claims,
            ignored=lower.ignored + self.ignored,
            notes=lower.notes + self.notes,
            errors=lower.errors + self.errors,
        )


def merge(source: Mapping[str, Any], *, task: object, prefix: str = "") -> Merged:
    """Sort the keys of one source; `prefix` is how they are written ("--" for flags)."""
    merged = Merged()
    for key, value in source.items():
        if key.startswith("_") or key in SIZE_ALIASES or key == "target_shape":
            continue
        if not _sorted_out(merged, key, prefix + key, value, task):
            merged.errors.append(unknown(prefix + key, _ALL_NAMES, prefix))
    _size(merged, source, prefix)
    if source.get("cpu_offload_numa") is True:
        _tell_with_numa(merged)
    return merged


def _sorted_out(merged: Merged, key: str, written: str, value: object, task: object) -> bool:
    """Put one key where it belongs; False for a name that nobody knows."""
    if key in REFUSED:
        if REFUSED[key].task in ("", task):
            _refuse(merged, REFUSED[key], written, value)
    elif "contiguous" in key:
        _refuse(merged, CONTIGUOUS, written, value)
    elif key in IGNORED:
        merged.ignored.append(written)
    elif key in ARCHITECTURE_KEYS:
        merged.claims[key] = value
    elif key in CONSTANTS:
        _constant(merged, key, value)
    elif key == "parallel" and isinstance(value, Mapping):
        merged.put(key, written, _parallel(merged, value))
    elif (option := ALIASES.get(key, key)) in _OPTIONS:
        _option(merged, option, written, value)
    else:
        return False
    return True


def _option(merged: Merged, option: str, written: str, value: object) -> None:
    """Ways to say "nothing" become the option's default; the rest is for the validation."""
    nothing = NO_SCHEME if option.endswith("quant_scheme") else ("", None)
    if option in _OPTIONAL and value in nothing:
        return
    if option == "parallel" and (value is False or value is None):
        value = {}
    if option == "lora_configs":
        value = _loras(merged, written, value)
    merged.put(option, written, value)


def _loras(merged: Merged, written: str, value: object) -> object:
    """Without comments, and without the `alpha` that LightX2V documents and never reads."""
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        return value  # for the validation
    merged.ignored += [f"{written}.alpha" for entry in value if "alpha" in entry]
    return [
        {k: v for k, v in entry.items() if k != "alpha" and not k.startswith("_")}
        for entry in value
    ]


def _size(merged: Merged, source: Mapping[str, Any], prefix: str) -> None:
    """`target_height` with `target_width`, and `target_shape`, are spellings of `size`."""
    height, width = (source.get(name) for name in SIZE_ALIASES)
    if (height is None) != (width is None):
        given, absent = SIZE_ALIASES if width is None else SIZE_ALIASES[::-1]
        merged.errors.append(
            ConfigError(
                f"{given} is given without {absent}",
                expected="both",
                hint="or write size: [height, width]",
                key=given,
                found=source[given],
            )
        )
    elif height is not None:
        merged.put("size", " and ".join(SIZE_ALIASES), [height, width])
    if source.get("target_shape"):
        merged.put("size", prefix + "target_shape", list(source["target_shape"]))


def _refuse(merged: Merged, refused: Refused, written: str, value: object) -> None:
    if value in refused.off:
        return
    merged.errors.append(
        ConfigError(
            f"{written} is {value!r}, and that is not supported",
            hint=refused.advice,
            key=written,
            found=value,
        )
    )


def _tell_with_numa(merged: Merged) -> None:
    """Refusals of what excludes NUMA-local copies as well name both settings."""
    for index, error in enumerate(merged.errors):
        key = str(error.facts["key"])
        if "contiguous" in key or key == "parallel.tensor_p_size":
            merged.errors[index] = ConfigError(
                f"cpu_offload_numa is true, and {error.what}",
                hint=error.hint,
                key=key,
                keys=["cpu_offload_numa", key],
                found=error.facts.get("found"),
            )


def _constant(merged: Merged, key: str, value: object) -> None:
    if value != CONSTANTS[key]:
        merged.errors.append(
            ConfigError(
                f"{key} is {value!r}",
                expected=f"{CONSTANTS[key]!r}, which every Wan 2.1 model has",
                hint="remove it",
                key=key,
                found=value,
            )
        )


def _parallel(merged: Merged, source: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in source.items():
        written = f"parallel.{key}"
        if key.startswith("_"):
            continue
        if key in PARALLEL_REFUSED:
            _refuse(merged, PARALLEL_REFUSED[key], written, value)
        elif key in PARALLEL_IGNORED:
            merged.ignored.append(written)
        elif key == "seq_p_attn_type" and value in ULYSSES_NAMES:
            merged.notes.append(f'{written} "{value}" runs as "ulysses", with the same result')
            values[key] = "ulysses"
        elif key in Parallel.model_fields:
            values[key] = value
        else:
            names = [*Parallel.model_fields, *PARALLEL_REFUSED, *PARALLEL_IGNORED]
            merged.errors.append(unknown(written, names, "parallel."))
    return values


def unknown(written: str, names: Iterable[str], prefix: str = "") -> ConfigError:
    """The error for a name that nobody knows, with the nearest one that is known."""
    near = difflib.get_close_matches(written.removeprefix(prefix), names, n=1)
    return ConfigError(
        f"unknown {'flag' if prefix == '--' else 'key'} {written}",
        hint=f"did you mean {prefix}{near[0]}?" if near else "docs/configuration.md lists all",
        key=written,
        nearest=near[0] if near else None,
    )
