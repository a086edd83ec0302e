"""docs/configuration.md, made from the options themselves: `python -m shared_offload.config`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shared_offload.config.known import (
    ALIASES,
    ARCHITECTURE_KEYS,
    CONSTANTS,
    ENCODER_SCHEMES,
    FP8_ROW_SCHEMES,
    IGNORED,
    PARALLEL_IGNORED,
    PARALLEL_REFUSED,
    REFUSED,
    ULYSSES_NAMES,
    Refused,
)
from shared_offload.config.load import OPTION_FLAGS, OTHER_FLAGS
from shared_offload.config.options import Lora, Options, Parallel
from shared_offload.config.paths import FILE_NAMES, SUBFOLDERS, TOKENIZER, dit_path

# Title of each section and the option it begins with.
SECTIONS = (
    ("The request", "model_cls"),
    ("The video", "size"),
    ("Sampling", "scheduler_type"),
    ("Checkpoint files", "dit_original_ckpt"),
    ("Compute", "device"),
    ("Offload", "cpu_offload"),
    ("Ranks", "parallel"),
)
INTRODUCTION = """\
# Configuration

Made by `python -m shared_offload.config` from `shared_offload/config/`; do not edit.

Options come from flags and from the JSON file of `--config_json`: flags win over the file, the file
wins over the defaults. Names are LightX2V's, so its files work as they are. Keys that begin with
`_` are comments. A key that is unknown, given twice, or contradicts another is an error, and all
errors are told together, before anything is loaded. Relative paths are taken from the working
directory. Empty or `null` means not given, where there is nothing better to mean.

What each way to hold the weights costs, and which to take: [choosing.md](choosing.md).
"""


def document() -> str:
    """The whole text of docs/configuration.md."""
    parts = [INTRODUCTION, *_sections(), _parallel(), _flags(), _files(), _names(), _refused()]
    return "\n".join(parts)


def write(path: Path) -> None:
    """Write the text to a file."""
    path.write_text(document(), encoding="utf-8")


def _sections() -> Iterator[str]:
    starts = {first: title for title, first in SECTIONS}
    for name, field in Options.model_fields.items():
        if name in starts:
            yield f"## {starts[name]}\n\n| key | values | default | meaning |\n|---|---|---|---|"
        last = name == "allow_shared_gpu" or _next(name) in starts
        yield _row(name, field) + ("\n" if last else "")


def _next(name: str) -> str | None:
    names = list(Options.model_fields)
    position = names.index(name) + 1
    return names[position] if position < len(names) else None


def _row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {_values(field)} | {_default(field)} | {field.description} |"


def _values(field: FieldInfo) -> str:
    schema_limits = [_limit(item) for item in field.metadata]
    return ", ".join([_type(field.annotation), *filter(None, schema_limits)])


def _limit(item: object) -> str:
    symbols = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [f"{sign} {getattr(item, n)}" for n, sign in symbols.items() if hasattr(item, n)]
    return ", ".join(found)


def _type(annotation: Any) -> str:  # noqa: ANN401 - any annotation
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "object, see below"
    names = {int: "integer", float: "number", bool: "true, false", str: "text", Path: "path"}
    if annotation in names:
        return names[annotation]
    inner = [a for a in get_args(annotation) if a not in (type(None), Ellipsis)]
    if get_origin(annotation) is tuple:
        return "list of objects" if inner[0] is Lora else "list of integers"
    return " or ".join(_type(getattr(a, "__origin__", a) if _annotated(a) else a) for a in inner)


def _annotated(annotation: object) -> bool:
    return hasattr(annotation, "__metadata__")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.json_schema_extra, dict):
        return str(field.json_schema_extra["default_words"])
    if isinstance(field.default, BaseModel):
        return "one rank"
    return f"`{json.dumps(field.default)}`"


def _parallel() -> str:
    rows = "\n".join(_row(name, field) for name, field in Parallel.model_fields.items())
    return f"### `parallel`\n\n| key | values | default | meaning |\n|---|---|---|---|\n{rows}\n"


def _flags() -> str:
    own = ", ".join(f"`--{name}`" for name in OPTION_FLAGS)
    other = "\n".join(f"- `--{name}`: {how['help']}" for name, how in OTHER_FLAGS.items())
    return (
        f"## Flags\n\n`--config_json FILE`, and one for each of these options: {own}.\n\n"
        f"LightX2V's other flags:\n\n{other}\n"
    )


def _files() -> str:
    rows = "\n".join(f"| `{key}` | `{name}` |" for key, name in FILE_NAMES.items())
    folders = ", ".join(f"`{sub}/`" if sub else "`model_path` itself" for sub in SUBFOLDERS)
    dit = " ".join((dit_path.__doc__ or "").split("\n\n", 1)[1].split())
    return (
        "## Where files are searched\n\n"
        f"An option that names a path wins. Otherwise, in `model_path`: {folders}.\n\n"
        f"| option | file |\n|---|---|\n{rows}\n| `t5_tokenizer_path` | `{TOKENIZER}/`, in "
        f"`model_path` only |\n\nThe DiT. {dit}\n"
    )


def _names() -> str:
    aliases = "\n".join(f"- `{alias}` is `{name}`" for alias, name in ALIASES.items())
    constants = ", ".join(f"`{key}` {json.dumps(value)}" for key, value in CONSTANTS.items())
    return (
        "## Other names\n\n"
        f"{aliases}\n"
        "- `target_height` with `target_width`, or `--target_shape H W`, is `size`\n"
        f"- `parallel.seq_p_attn_type` {_list(ULYSSES_NAMES)} run as `ulysses`\n"
        f"- `dit_quant_scheme`: {_list(FP8_ROW_SCHEMES)}; for T5 and CLIP also "
        f"`{ENCODER_SCHEMES[0]}`. Other formats (int8, one scale per tensor, 128-blocks, NVFP4, "
        "MXFP, GGUF) are errors: convert to FP8 with one scale per row.\n"
        f"- {_list(sorted(ARCHITECTURE_KEYS))} belong to the checkpoint: its config.json decides, "
        "and a JSON that contradicts it is an error\n"
        f"- constants of Wan 2.1, accepted with these values only: {constants}\n"
        "- accepted and without effect, which the run says: "
        f"{_list(sorted(IGNORED))}, and in `parallel` {_list(sorted(PARALLEL_IGNORED))}\n"
    )


def _list(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _refused() -> str:
    dotted = {f"parallel.{key}": refused for key, refused in PARALLEL_REFUSED.items()}
    rows = "\n".join(_refused_row(key, r) for key, r in sorted((REFUSED | dotted).items()))
    return (
        "## LightX2V's features that are not here\n\nAccepted when off, otherwise an error.\n\n"
        f"| key | off | instead |\n|---|---|---|\n{rows}\n"
    )


def _refused_row(key: str, refused: Refused) -> str:
    off = ", ".join(f"`{json.dumps(value)}`" for value in refused.off if value is not None)
    return f"| `{key}` | {off} | {refused.advice} |"
