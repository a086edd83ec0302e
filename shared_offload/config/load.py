"""Where settings come from: a command line and a JSON file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shared_offload.config.merge import unknown
from shared_offload.config.options import Options
from shared_offload.config.request import check_request
from shared_offload.config.settings import Settings, build
from shared_offload.errors import ConfigError, OffloadError, raise_all

# Flags that set an option of the same name.
OPTION_FLAGS = (
    "model_cls",
    "task",
    "model_path",
    "prompt",
    "negative_prompt",
    "image_path",
    "seed",
    "save_result_path",
    "num_frames",
    "shared_cpu_weight_scope",
    "trace",
)
# LightX2V's other flags, with argparse's way to read them; known.py says what becomes of each.
OTHER_FLAGS: dict[str, dict[str, Any]] = {
    "target_shape": {"nargs": "*", "type": int, "help": "Height and width, as `size`."},
    "last_frame_path": {"help": "Not supported; may be empty."},
    "support_tasks": {"nargs": "*", "help": "Accepted for t2v and i2v; changes nothing."},
    "aspect_ratio": {"help": "Accepted; changes nothing."},
    "warmup": {"action": "store_true", "help": "Accepted; changes nothing."},
    "return_result_tensor": {"action": "store_true", "help": "Not supported: see Pipeline."},
    "use_prompt_enhancer": {"action": "store_true", "help": "Not supported."},
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"see {self.prog} --help", key="argv")


def make_parser() -> argparse.ArgumentParser:
    """All flags; one that is not given leaves no trace in the result."""
    parser = _Parser(
        prog="python -m shared_offload.infer",
        description="Wan 2.1: a video from a prompt, and a picture for --task i2v.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config_json", metavar="FILE", help="JSON with options; flags win.")
    for name in OPTION_FLAGS:
        field = Options.model_fields[name]
        number = int if field.annotation is int else str
        text = (field.description or "").replace("%", "%%")
        parser.add_argument(f"--{name}", type=number, metavar=name.upper(), help=text)
    for name, how in OTHER_FLAGS.items():
        parser.add_argument(f"--{name}", **how)
    return parser


def parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    """Flags that were given, by name. Unknown ones raise ConfigError with the nearest."""
    known, rest = make_parser().parse_known_args(list(argv))
    names = ["config_json", *OPTION_FLAGS, *OTHER_FLAGS]
    errors: list[ConfigError] = []
    for word in rest:
        if word.startswith("--"):
            errors.append(_unknown_flag(word.split("=")[0], names))
    if rest and not errors:
        errors.append(
            ConfigError(f"unexpected words: {' '.join(rest)}", hint="quote the prompt", key="argv")
        )
    raise_all(errors)
    return vars(known)


def _unknown_flag(word: str, names: list[str]) -> ConfigError:
    if word[2:] in Options.model_fields:
        return ConfigError(
            f"{word} is no flag", hint=f"write {word[2:]} in the file of --config_json", key=word
        )
    return unknown(word, names, "--")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; duplicate keys, NaN and other content are errors."""
    where = path.absolute()
    facts: dict[str, Any] = {"key": "config_json", "path": str(where)}
    try:
        text = where.read_bytes().decode("utf-8-sig")
    except OSError as error:
        hint = "" if path.is_absolute() else f"{path} was taken from the working directory"
        raise ConfigError(
            f"config_json {where} cannot be read: {error.strerror}", hint=hint, **facts
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 (byte {error.start})", **facts) from error
    repeated: list[str] = []

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs if not name.startswith("_")]
        repeated.extend(name for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(pairs)

    try:
        content = json.loads(text, object_pairs_hook=no_repeats, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}, line {error.lineno}, column {error.colno}: {error.msg}",
            hint="JSON has no comments and no comma after the last entry",
            line=error.lineno,
            column=error.colno,
            **facts,
        ) from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}", **facts) from error
    raise_all(
        ConfigError(f"{where} has key {name} twice", **{**facts, "key": name}) for name in repeated
    )
    if not isinstance(content, dict):
        raise ConfigError(f"{where} holds a {type(content).__name__}", expected="{...}", **facts)
    return content


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def load_settings(given: Sequence[str] | Mapping[str, Any] | None = None) -> Settings:
    """Settings of a command line (default: this process's), or of flags by name.

    A command line is a whole request: its folder and picture must exist. Flags by name may leave
    the request to a later call. All problems are raised together.
    """
    whole = not isinstance(given, Mapping)
    if isinstance(given, Mapping):
        flags = dict(given)
    else:
        flags = parse_flags(sys.argv[1:] if given is None else given)
    path = flags.pop("config_json", None)
    settings, found = build(Settings, read_json(Path(path)) if path else {}, flags)
    errors: list[OffloadError] = list(found)
    if whole:
        wrong = {error.facts.get("key") for error in found}
        errors += [e for e in check_request(settings) if e.facts.get("key") not in wrong]
    raise_all(errors)
    return settings
