"""What only the file system can tell about a request, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shared_offload.config.options import Options
from shared_offload.errors import ConfigError, InputError, OffloadError


def check_request(options: Options) -> list[OffloadError]:
    """All that is wrong with the folder and the picture; relative paths are from the cwd."""
    errors: list[OffloadError] = []
    folder = options.model_path.absolute()
    if fault := _fault(folder, Path.is_dir, "a folder"):
        errors.append(
            ConfigError(
                f"model_path {folder} {fault}",
                expected="a checkpoint folder",
                hint=_from_cwd(options.model_path, "--model_path"),
                key="model_path",
                found=str(folder),
            )
        )
    if options.task == "i2v":
        errors += _picture(options.image_path)
    return errors


def _picture(path: Path | None) -> list[OffloadError]:
    if path is None:
        return [
            ConfigError(
                "task i2v has no image_path", hint="give --image_path FILE", key="image_path"
            )
        ]
    fault = _fault(path.absolute(), Path.is_file, "a file")
    if not fault:
        return []
    return [
        InputError(
            f"image_path {path.absolute()} {fault}",
            expected="a picture",
            hint=_from_cwd(path, "--image_path"),
            path=str(path.absolute()),
        )
    ]


def _fault(path: Path, test: Callable[[Path], bool], kind: str) -> str:
    """Why this is not what it should be; empty for a path that is."""
    try:
        if test(path):
            return ""
        return f"is not {kind}" if path.exists() else "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _from_cwd(path: Path, flag: str) -> str:
    if path.is_absolute():
        return f"check {flag}"
    return f"{path} was taken from the working directory {Path.cwd()}; check {flag}"
