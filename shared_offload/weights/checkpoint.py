"""A checkpoint as a table of tensors: which there are, and at which byte of which file.

Invariant: a `Checkpoint` has exactly the tensors that its architecture implies, under Wan's names
whatever the format on disk, with shapes and dtypes that can be loaded, in files that hold all
their bytes. Everything else has been reported, all problems together, before a payload is read
(but for the scales of an FP8 checkpoint, which are a thousandth of it).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from shared_offload.errors import CheckpointError, raise_all
from shared_offload.weights import checks
from shared_offload.weights.architecture import Architecture
from shared_offload.weights.discovery import FileSet, find_files
from shared_offload.weights.files import FileStamp, bounded_names
from shared_offload.weights.layout import FP8, SCALE, BlockLayout, build_layout
from shared_offload.weights.names import from_diffusers, is_diffusers, to_diffusers
from shared_offload.weights.safetensors_header import Header, TensorEntry, read_header
from shared_offload.weights.scales import scale_problems

__all__ = ["Checkpoint", "Merge", "TensorEntry", "block_name", "open_checkpoint"]

Kind = Literal["official", "fp8", "diffusers"]


class Merge(Protocol):
    """What is added to one tensor while it is read (`lora.py`)."""

    def __call__(
        self, first: int, src: memoryview, src_dtype: str, dst: memoryview, dst_dtype: str
    ) -> None:
        """Write the elements from `first` on, merged, from `src` to `dst`. Called from threads."""

    def identity(self) -> object:
        """JSON values that differ where the sum does."""

    def files(self) -> tuple[Path, ...]:
        """The files it is read from."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The index of a checkpoint. `entries` are by Wan's full names; no file is held open.

    Whoever reads a tensor that `merges` names applies its merge; `reader.Piece` carries it.
    """

    arch: Architecture
    entries: Mapping[str, TensorEntry]
    quantised: bool
    stamps: Mapping[Path, FileStamp]
    kind: Kind
    merges: Mapping[str, Merge] = dataclasses.field(default_factory=dict)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.stamps)

    def layout(self, compute_dtype: str) -> BlockLayout:
        """The layout of the blocks; `compute_dtype` is a safetensors code."""
        prefix = block_name(0, "")
        source = {
            name.removeprefix(prefix): entry.dtype
            for name, entry in self.entries.items()
            if name.startswith(prefix)
        }
        return build_layout(self.arch, source, compute_dtype)

    def fingerprint(self) -> str:
        """Of the index: equal for two processes of a host that see the same files in the same
        state, under whatever paths: containers mount one folder in different places.
        """
        files = {path: (stamp.device, stamp.inode) for path, stamp in self.stamps.items()}
        index = [
            (e.name, e.dtype, e.shape, files[e.path], e.offset)
            for e in sorted(self.entries.values(), key=lambda entry: entry.name)
        ]
        stamps = sorted(dataclasses.astuple(stamp) for stamp in self.stamps.values())
        merges = sorted((name, merge.identity()) for name, merge in self.merges.items())
        text = json.dumps([dataclasses.asdict(self.arch), index, stamps, merges], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def unchanged(self) -> bool:
        """The files are still those that were indexed."""
        try:
            return all(FileStamp.of(p.stat()) == stamp for p, stamp in self.stamps.items())
        except OSError:
            return False


def block_name(block: int, relative: str) -> str:
    """The full name of a tensor of a block."""
    return f"blocks.{block}.{relative}"


def open_checkpoint(path: Path, arch: Architecture, *, quantised: bool, task: str) -> Checkpoint:
    """Index the checkpoint at `path`: a folder, one safetensors file, or an index.

    `quantised` is what the settings say. Reads headers, and the scales of an FP8 checkpoint.
    Raises CheckpointError, or Problems with everything that was found.
    """
    problems = checks.task_problems(arch, task, path)
    try:
        found = find_files(path, arch.num_layers)
    except CheckpointError as error:
        raise_all([*problems, error])
        raise
    problems += found.problems
    headers = _read_headers(found, problems)
    entries, diffusers, merge_problems = _merge(found, headers)
    if foreign := checks.foreign_problems(entries.values()):
        raise_all([*problems, *foreign])
    problems += merge_problems
    problems += checks.quantisation_problems(entries, quantised=quantised, path=path)
    problems += _content_problems(path, arch, entries, _told(found, headers, diffusers))
    stamps = {header.path: header.stamp for header in headers.values()}
    whole = {header.path for header in headers.values() if not header.problems}
    problems += scale_problems(_readable_scales(arch, entries, whole), stamps)
    raise_all(problems)
    kind: Kind = "diffusers" if diffusers else "fp8" if quantised else "official"
    return Checkpoint(arch, entries, quantised, stamps, kind)


def _readable_scales(
    arch: Architecture, entries: Mapping[str, TensorEntry], whole: Container[Path]
) -> list[TensorEntry]:
    """Scales of the right shape (so no larger than expected) in files that are not damaged."""
    shapes = {(arch.dim, 1), (arch.ffn_dim, 1)}
    scales = (entry for name, entry in entries.items() if name.endswith(SCALE))
    return [entry for entry in scales if entry.shape in shapes and entry.path in whole]


def _read_headers(found: FileSet, problems: list[CheckpointError]) -> dict[Path, Header]:
    headers: dict[Path, Header] = {}
    for file in found.files:
        try:
            headers[file] = read_header(file)
        except CheckpointError as error:
            problems.append(error)
        else:
            problems += headers[file].problems
    return headers


def _merge(
    found: FileSet, headers: Mapping[Path, Header]
) -> tuple[dict[str, TensorEntry], bool, list[CheckpointError]]:
    """All tensors under Wan's names, whether they had diffusers' ones, and doubles among them."""
    entries: dict[str, TensorEntry] = {}
    doubles: dict[str, list[TensorEntry]] = {}
    diffusers = is_diffusers([*found.index, *(n for h in headers.values() for n in h.entries)])
    for header in headers.values():
        for entry in header.entries.values():
            name = (from_diffusers(entry.name) if diffusers else None) or entry.name
            renamed = dataclasses.replace(entry, name=name)
            if name in entries:
                doubles.setdefault(name, [entries[name]]).append(renamed)
            entries[name] = renamed
    problems = _index_problems(found, headers)
    if doubles:
        name, places = next(iter(doubles.items()))
        files = [str(entry.path) for entry in places]
        problems.append(
            CheckpointError(
                f"{len(doubles)} tensors are defined twice, {name} in {' and '.join(files)}: "
                f"{bounded_names(doubles)}",
                expected="each tensor in one file",
                hint="remove the file that does not belong to the checkpoint",
                path=files[-1],
                name=name,
                names=list(doubles),
                files=files,
            )
        )
    return entries, diffusers, problems


def _index_problems(found: FileSet, headers: Mapping[Path, Header]) -> list[CheckpointError]:
    """Tensors that are not in the file that the index names, and those it does not name."""
    index = found.index
    lacking = [n for n, file in index.items() if file in headers and n not in headers[file].entries]
    unlisted = [n for h in headers.values() for n in h.entries if index and n not in index]
    facts = (
        (lacking, "names tensors that their files lack"),
        (unlisted, "does not name tensors that the files hold"),
    )
    return [
        CheckpointError(
            f"the index of {found.root} {what}: {bounded_names(names)}",
            expected="an index and files of one checkpoint",
            hint="download the index and all files from the same place",
            path=str(index.get(names[0], found.root)),
            name=names[0],
            names=names,
        )
        for names, what in facts
        if names
    ]


def _told(found: FileSet, headers: Mapping[Path, Header], diffusers: bool) -> Callable[[str], bool]:
    """Whether a missing tensor follows from a problem of its file, or of the index."""
    broken = {*found.absent, *(file for file in found.files if file not in headers)}

    def told(name: str) -> bool:
        on_disk = (to_diffusers(name) if diffusers else None) or name
        return on_disk in found.index or found.home(on_disk) in broken

    return told


def _content_problems(
    path: Path,
    arch: Architecture,
    entries: Mapping[str, TensorEntry],
    told: Callable[[str], bool],
) -> list[CheckpointError]:
    """Names, shapes and dtypes against the architecture that the tensors show."""
    fp8 = any(entry.dtype == FP8 for entry in entries.values())
    actual, problems = checks.actual_architecture(entries, arch, path)
    expected = checks.expected_shapes(actual, quantised=fp8)
    problems += checks.name_problems(entries, expected, told, path)
    problems += checks.shape_problems(entries, expected)
    return problems + checks.dtype_problems(entries, quantised=fp8)
