"""`Settings`: one frozen, validated description of a run, built from JSON and flags.

No Settings exists that breaks a rule of this package, and everything wrong with what was written is
raised together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from shared_offload.config.known import HINTS
from shared_offload.config.merge import Merged, merge
from shared_offload.config.options import DISTILLED_SCHEDULER, Options
from shared_offload.config.rules import check, remarks
from shared_offload.errors import ConfigError, raise_all

# Codes of safetensors, which checkpoints and layouts use.
_CODES = {"BF16": "BF16", "FP16": "F16", "FP32": "F32"}
# Told in every summary; other options only where they differ from the default.
_ALWAYS_TOLD = (
    "model_cls task model_path prompt negative_prompt image_path seed size num_frames fps "
    "infer_steps sample_shift enable_cfg sample_guide_scale dtype"
)


class Settings(Options):
    """Everything a run needs. Make one with `load_settings` or `from_json_and_flags`."""

    architecture_claims: dict[str, Any] = Field(
        default={}, description="Architecture keys of the JSON, to compare with config.json."
    )
    notes: tuple[str, ...] = Field(
        default=(), description="What was corrected or has no effect, in sentences to show."
    )

    @classmethod
    def from_json_and_flags(cls, json: Mapping[str, Any], flags: Mapping[str, Any]) -> Self:
        """Flags over JSON over defaults. Raises ConfigError, or Problems with all of them."""
        settings, errors = build(cls, json, flags)
        raise_all(errors)
        return settings

    @property
    def distilled(self) -> bool:
        """Few Euler steps without guidance."""
        return self.scheduler_type == DISTILLED_SCHEDULER

    @property
    def branches(self) -> int:
        """Model passes per step."""
        return 2 if self.enable_cfg else 1

    @property
    def compute_dtype(self) -> str:
        """`dtype` as a safetensors code: BF16, F16 or F32."""
        return _CODES[self.dtype]

    def summary(self) -> dict[str, Any]:
        """The request and whatever differs from the defaults, as JSON values."""
        mine = self.model_dump(mode="json", exclude={"notes", "architecture_claims"})
        same = ("model_cls", "task", "model_path")
        plain = type(self).from_json_and_flags({}, {k: mine[k] for k in same})
        defaults = plain.model_dump(mode="json")
        told = _ALWAYS_TOLD.split()
        return {k: v for k, v in mine.items() if k in told or v != defaults[k]}


S = TypeVar("S", bound=Settings)


def build(
    cls: type[S], file: Mapping[str, Any], flags: Mapping[str, Any]
) -> tuple[S, list[ConfigError]]:
    """The settings and all errors. With errors, wrong values are replaced by defaults."""
    task = flags.get("task", file.get("task", "t2v"))
    merged = merge(flags, task=task, prefix="--").over(merge(file, task=task))
    _correct_frames(merged, task)
    options, errors = _validate(merged)
    wrong = {str(error.facts.get("key")).split(".")[0] for error in errors}
    errors += [e for e in check(options) if wrong.isdisjoint(_keys(e))]
    notes = merged.notes + remarks(options)
    if merged.ignored:
        notes.append(f"without effect here: {', '.join(sorted(merged.ignored))}")
    values = {name: getattr(options, name) for name in options.model_fields_set}
    settings = cls(**values, architecture_claims=merged.claims, notes=tuple(notes))
    return settings, merged.errors + errors


def _keys(error: ConfigError) -> list[str]:
    keys = error.facts["keys"]
    return keys if isinstance(keys, list) else []


def _correct_frames(merged: Merged, task: object) -> None:
    """LightX2V's rule for image tasks: F becomes F // 4 * 4 + 1 where F is not 4n+1."""
    frames = merged.values.get("num_frames")
    if task == "i2v" and type(frames) is int and frames > 0 and frames % 4 != 1:
        fixed = frames // 4 * 4 + 1
        merged.values["num_frames"] = fixed
        merged.notes.append(f"num_frames {frames} is not of the form 4n+1; {fixed} are made")


def _validate(merged: Merged) -> tuple[Options, list[ConfigError]]:
    """Types and ranges. Strict: "true" is no bool and 81.0 no int, but 5 is a number."""
    values = dict(merged.values)
    errors: list[ConfigError] = []
    while True:
        try:
            text = json.dumps(values, default=str)
            return Options.model_validate_json(text, strict=True), errors
        except ValidationError as error:
            by_key: dict[str, list[ErrorDetails]] = {}
            for detail in error.errors():
                if detail["type"] == "default_factory_not_called":
                    continue  # a default that follows a wrong value
                by_key.setdefault(_path(detail), []).append(detail)
            errors += [_to_error(merged, key, details) for key, details in by_key.items()]
            # The rest is checked without the wrong values, to tell all problems at once.
            for key in by_key:
                values.pop(key.split(".")[0], None)
            if "model_path" in by_key:
                values["model_path"] = "."


def _to_error(merged: Merged, key: str, details: list[ErrorDetails]) -> ConfigError:
    if details[0]["type"] == "missing" and len(details[0]["loc"]) == 1:
        return ConfigError(f"{key} is missing", hint="give --model_path FOLDER", key=key)
    value = details[0]["input"] if "." in key else merged.values[key]
    if details[0]["type"] in ("missing", "extra_forbidden") and key == "lora_configs":
        details = [{**d, "msg": "objects with a path, and a strength"} for d in details]
    return ConfigError(
        f"{merged.spelled.get(key, key)} is {_shown(value)}",
        expected=" or ".join(dict.fromkeys(map(_expected, details))),
        hint=HINTS.get(key, ""),
        key=key,
        found=value,
    )


def _path(detail: ErrorDetails) -> str:
    """The option, with a dot for a member of `parallel`; positions in lists do not matter."""
    top, *rest = map(str, detail["loc"])
    return f"{top}.{rest[0]}" if top == "parallel" and rest else top


def _shown(value: object) -> str:
    return json.dumps(value, default=str)


def _expected(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Input should be ")
    return message[:1].lower() + message[1:]
