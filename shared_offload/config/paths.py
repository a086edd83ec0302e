"""Where each part of a checkpoint lies. Relative paths are taken from the working directory.

An option that names a file or folder wins; otherwise `model_path` is searched in LightX2V's order.
A missing file is an error that shows every absolute path that was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from shared_offload.config.options import Options
from shared_offload.errors import CheckpointError

FileKey = Literal[
    "t5_original_ckpt",
    "t5_quantized_ckpt",
    "clip_original_ckpt",
    "clip_quantized_ckpt",
    "vae_path",
]
FILE_NAMES: dict[FileKey, str] = {
    "t5_original_ckpt": "models_t5_umt5-xxl-enc-bf16.pth",
    "t5_quantized_ckpt": "models_t5_umt5-xxl-enc-fp8.pth",
    "clip_original_ckpt": "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
    "clip_quantized_ckpt": "models_clip_open-clip-xlm-roberta-large-vit-huge-14-fp8.pth",
    "vae_path": "Wan2.1_VAE.pth",
}
# LightX2V also looks into the int8 folders; nothing in them can be used here.
SUBFOLDERS = ("distill_fp8", "distill_models", "fp8", "original", "")
TOKENIZER = "google/umt5-xxl"
OFFICIAL_DIT = "diffusion_pytorch_model"


def find_file(options: Options, key: FileKey) -> Path:
    """The absolute path of one of the .pth files; CheckpointError with all paths tried."""
    named: Path | None = getattr(options, key)
    name = FILE_NAMES[key]
    if key == "vae_path" and options.vae_name:
        name = options.vae_name
    if named is not None:
        return _first(key, [named], "file")
    return _first(key, [options.model_path / sub / name for sub in SUBFOLDERS], "file")


def t5_file(options: Options) -> Path:
    """The T5 weights that the settings ask for."""
    return find_file(options, "t5_quantized_ckpt" if options.t5_quantized else "t5_original_ckpt")


def clip_file(options: Options) -> Path:
    """The CLIP weights that the settings ask for (i2v)."""
    quantised = options.clip_quantized
    return find_file(options, "clip_quantized_ckpt" if quantised else "clip_original_ckpt")


def vae_file(options: Options) -> Path:
    """The VAE weights."""
    return find_file(options, "vae_path")


def tokenizer_folder(options: Options) -> Path:
    """The folder of T5's tokenizer."""
    folder = options.t5_tokenizer_path or options.model_path / TOKENIZER
    return _first("t5_tokenizer_path", [folder], "folder")


def dit_path(options: Options) -> Path:
    """The folder or file of the DiT that the settings ask for.

    Without a path in the settings, the first of these that holds .safetensors files. FP8:
    `model_path` if it holds others than the official unquantised ones, then distill_fp8/ (for
    wan2.1_distill), fp8/, `model_path`. Unquantised: distill_models/ (for wan2.1_distill),
    `model_path`, original/, transformer/.
    """
    root = options.model_path
    key = "dit_quantized_ckpt" if options.dit_quantized else "dit_original_ckpt"
    named: Path | None = getattr(options, key)
    if named is not None:
        return _first(key, [named], "file or folder")
    distilled = options.model_cls == "wan2.1_distill"
    if options.dit_quantized:
        if any(not f.name.startswith(OFFICIAL_DIT) for f in root.glob("*.safetensors")):
            return root.absolute()
        folders = [root / "distill_fp8"] if distilled else []
        folders += [root / "fp8", root]
    else:
        folders = [root / "distill_models"] if distilled else []
        folders += [root, root / "original", root / "transformer"]
    return _first(key, folders, "folder with .safetensors files")


def _holds_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


_TESTS: dict[str, Callable[[Path], bool]] = {
    "file": Path.is_file,
    "folder": Path.is_dir,
    "file or folder": Path.exists,
    "folder with .safetensors files": _holds_weights,
}


def _first(key: str, candidates: Iterable[Path], kind: str) -> Path:
    tried = [candidate.absolute() for candidate in candidates]
    for path in tried:
        # A folder that may not be entered, or a name too long, is as good as missing.
        with suppress(OSError):
            if _TESTS[kind](path):
                return path
    listing = ", ".join(map(str, tried))
    raise CheckpointError(
        f"no {kind} for {key}; tried {listing}",
        hint=f"set {key} in the JSON; relative paths are taken from {Path.cwd()}",
        path=str(tried[0]),
        name=key,
        tried=[str(path) for path in tried],
    )
