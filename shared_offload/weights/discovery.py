"""Which files make up a checkpoint.

Invariant: a file is used because the index names it, because it is a block file of the block
layout, or because it is the single DiT file. Any other safetensors file in the folder is an error:
merging a stray LoRA into a model silently is worse than stopping.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared_offload.errors import CheckpointError
from shared_offload.weights.files import (
    ARIA2,
    bounded_names,
    impostor_error,
    unfinished_error,
    unreadable,
)

INDEX_SUFFIX = ".safetensors.index.json"
NON_BLOCK_FILE = "non_block.safetensors"
SINGLE_FILE = "diffusion_pytorch_model.safetensors"
_SUFFIX = ".safetensors"
_MAX_INDEX_NBYTES = 16 << 20
_BLOCK_FILE = re.compile(r"block_(\d+)\.safetensors")
_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$|_part\d+\.safetensors$")
_BLOCK_TENSOR = re.compile(r"blocks\.(\d+)\.")
# What download tools leave beside or instead of a file that is not complete.
_UNFINISHED = (ARIA2, ".part", ".partial", ".incomplete", ".crdownload", ".download", ".tmp")


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files of a checkpoint that exist, those that should, and what is wrong with the set.

    `index` maps tensor names as on disk to files, present or not; it is empty without an index.
    """

    root: Path
    files: tuple[Path, ...]
    absent: tuple[Path, ...]
    index: Mapping[str, Path]
    problems: tuple[CheckpointError, ...]

    def home(self, name: str) -> Path:
        """The file that should hold tensor `name` (as on disk)."""
        if self.index:
            return self.index.get(name, self.root)
        if self.root.is_file():
            return self.root
        if any(_BLOCK_FILE.fullmatch(file.name) for file in self.files + self.absent):
            block = _BLOCK_TENSOR.match(name)
            return self.root / (f"block_{block[1]}{_SUFFIX}" if block else NON_BLOCK_FILE)
        return self.files[0] if self.files else self.root


def find_files(path: Path, num_blocks: int) -> FileSet:
    """The files of the checkpoint at `path`: a folder, a safetensors file or an index.

    Raises CheckpointError where nothing can be said about the set; other problems are in it.
    """
    if path.is_file():
        return _from_file(path)
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint {path} does not exist",
            expected="a folder of safetensors files, or one such file",
            hint="correct the path, or download the model",
            path=str(path),
        )
    names, indices = _listing(path)
    subfolder = path / "transformer"
    if not names and not indices and subfolder.is_dir():
        path, (names, indices) = subfolder, _listing(subfolder)
    if len(indices) > 1:
        raise CheckpointError(
            f"{path} holds several indices: {bounded_names(indices)}",
            expected="one",
            hint="give the path of the index to use instead of the folder",
            path=str(path),
            found=indices,
        )
    if indices:
        return _indexed(path, path / indices[0], names)
    if any(_BLOCK_FILE.fullmatch(name) for name in names) or NON_BLOCK_FILE in names:
        wanted = [f"block_{i}{_SUFFIX}" for i in range(num_blocks)] + [NON_BLOCK_FILE]
        return _file_set(path, wanted, names, {})
    return _single(path, names)


def _listing(folder: Path) -> tuple[list[str], list[str]]:
    try:
        names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    except OSError as error:
        raise unreadable(folder, error) from error
    weights = [name for name in names if name.endswith(_SUFFIX)]
    return weights, [name for name in names if name.endswith(INDEX_SUFFIX)]


def _from_file(path: Path) -> FileSet:
    if path.name.endswith(INDEX_SUFFIX):
        return _indexed(path.parent, path, [])
    if path.suffix != _SUFFIX:
        raise CheckpointError(
            f"{path} is no safetensors file",
            expected="the DiT as .safetensors",
            hint="convert it first, or give the folder of the official release",
            path=str(path),
        )
    return FileSet(path, (path,), (), {}, tuple(_unfinished([path])))


def _single(folder: Path, names: list[str]) -> FileSet:
    if len(names) == 1 and not _SHARD.search(names[0]):
        return _file_set(folder, names, names, {})
    if SINGLE_FILE in names:
        return _file_set(folder, [SINGLE_FILE], names, {})
    if not names:
        what, hint = "holds no safetensors file", "give the folder of the DiT's files"
    elif any(map(_SHARD.search, names)):
        what = f"holds parts of a checkpoint but no index: {bounded_names(names)}"
        hint = f"download {SINGLE_FILE}.index.json too"
    else:
        what = f"holds several safetensors files: {bounded_names(names)}"
        hint = "give the path of the DiT's file instead of the folder"
    raise CheckpointError(
        f"{folder} {what}",
        expected="one DiT file, files with an index, or block files with non_block.safetensors",
        hint=hint,
        path=str(folder),
        found=names,
    )


def _indexed(folder: Path, index_path: Path, names: list[str]) -> FileSet:
    weight_map = _read_index(index_path)
    wanted = list(dict.fromkeys(weight_map.values()))
    index = {name: folder / file for name, file in weight_map.items()}
    return _file_set(folder, wanted, names or wanted, index)


def _read_index(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_INDEX_NBYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if impostor := impostor_error(path, data[:512]):
        raise impostor
    try:
        if len(data) > _MAX_INDEX_NBYTES:
            raise ValueError(f"it is larger than {_MAX_INDEX_NBYTES} bytes")
        return _weight_map(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no index: {error}",
            expected='{"weight_map": {tensor: file, ...}}',
            hint="download the index again",
            path=str(path),
        ) from error


def _weight_map(raw: object) -> dict[str, str]:
    found = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(found, dict) or not found:
        raise ValueError("it has no weight_map")
    weight_map: dict[str, str] = {}
    for name, file in found.items():
        plain = isinstance(file, str) and file == Path(file).name and file.isprintable()
        if not plain or not file.endswith(_SUFFIX) or not name.isprintable():
            raise ValueError(f"{name!a} is in {file!a}, which is no file name of this folder")
        weight_map[name] = file
    return weight_map


def _file_set(
    folder: Path, wanted: list[str], names: list[str], index: Mapping[str, Path]
) -> FileSet:
    files = [name for name in wanted if (folder / name).is_file()]
    absent = [name for name in wanted if name not in files]
    problems = _unfinished(folder / name for name in files)
    problems += [_missing_file(folder, name) for name in absent]
    stray = [name for name in names if name not in wanted]
    if stray:
        rule = "only files that the index names" if index else f"only {bounded_names(wanted, 2)}"
        problems.append(
            CheckpointError(
                f"{folder} holds safetensors files that belong to no part of the checkpoint: "
                f"{bounded_names(stray)}",
                expected=rule,
                hint="move them out of the folder (a LoRA or a second model is never merged in)",
                path=str(folder / stray[0]),
                found=stray,
            )
        )
    paths = [tuple(folder / name for name in group) for group in (files, absent)]
    return FileSet(folder, paths[0], paths[1], index, tuple(problems))


def _missing_file(folder: Path, name: str) -> CheckpointError:
    left = [name + suffix for suffix in _UNFINISHED if (folder / (name + suffix)).exists()]
    hint = f"{left[0]} is an unfinished download; continue it" if left else "download it"
    return CheckpointError(
        f"{folder / name} is missing",
        expected="every file of the checkpoint",
        hint=hint,
        path=str(folder / name),
        name=name,
    )


def _unfinished(paths: Iterable[Path]) -> list[CheckpointError]:
    return [error for error in map(unfinished_error, paths) if error is not None]
