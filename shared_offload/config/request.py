"""What only the file system can tell about a request, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from shared_offload.config.options import Options
from shared_offload.errors import ConfigError, InputError, OffloadError


def check_request(options: Options) -> list[OffloadError]:
    """All that is wrong with the folder and the picture; relative paths are from the cwd."""
    errors: list[OffloadError] = []
    folder = options.model_path.absolute()
    if not folder.is_dir():
        errors.append(
            ConfigError(
                f"model_path {folder} is {'no folder' if folder.exists() else 'missing'}",
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
    if path.absolute().is_file():
        return []
    return [
        InputError(
            f"image_path {path.absolute()} is {'no file' if path.exists() else 'missing'}",
            expected="a picture",
            hint=_from_cwd(path, "--image_path"),
            path=str(path.absolute()),
        )
    ]


def _from_cwd(path: Path, flag: str) -> str:
    if path.is_absolute():
        return f"check {flag}"
    return f"{path} was taken from the working directory {Path.cwd()}; check {flag}"
