"""From an unquantised checkpoint to LightX2V's FP8 files.

Tensors keep Wan's full names in every layout. The 2-D weights of the blocks become FP8 with an fp32
`NAME_scale` of one value per row; everything else is cast to one dtype. The result appears under
its own name only when it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from shared_offload.errors import CheckpointError, OutputError
from shared_offload.weights.architecture import (
    CONFIG_NAME,
    Architecture,
    block_shapes,
    is_quantised,
    non_block_shapes,
    read_architecture,
    write_config,
)
from shared_offload.weights.checkpoint import Checkpoint, block_name, open_checkpoint
from shared_offload.weights.discovery import NON_BLOCK_FILE, SINGLE_FILE
from shared_offload.weights.files import OpenFiles
from shared_offload.weights.fp8 import quantise_weight
from shared_offload.weights.layout import FP8, SCALE
from shared_offload.weights.lora import LoraFile, with_loras
from shared_offload.weights.threads import usable_threads
from shared_offload.weights.views import TORCH_DTYPES
from shared_offload.weights.writer import (
    PARTIAL,
    SafetensorsWriter,
    TensorTable,
    file_nbytes,
    require_disk_space,
    row_chunks,
    run_all,
    write_index,
)

FileLayout = Literal["block", "chunk", "single"]
NonLinearDtype = Literal["BF16", "FP32"]
Files = Mapping[str, TensorTable]  # file name -> its tensors
RowSource = Callable[[str, int, int], Tensor]  # (tensor name, first row, end row) -> rows

LAYOUTS: tuple[FileLayout, ...] = ("block", "chunk", "single")
NON_LINEAR_DTYPES: Mapping[NonLinearDtype, str] = {"BF16": "BF16", "FP32": "F32"}
CHUNK_TENSORS = 100  # per file of the "chunk" layout
MAX_THREADS = 16


def fp8_files(arch: Architecture, layout: FileLayout, non_linear_dtype: NonLinearDtype) -> Files:
    """Names of the files of an FP8 checkpoint, and what each holds."""
    rest = NON_LINEAR_DTYPES[non_linear_dtype]
    files: dict[str, TensorTable] = {
        f"block_{block}.safetensors": _block_table(arch, block, rest)
        for block in range(arch.num_layers)
    }
    files[NON_BLOCK_FILE] = {name: (rest, s) for name, s in non_block_shapes(arch).items()}
    if layout == "block":
        return files
    tensors = [item for table in files.values() for item in table.items()]
    if layout == "single":
        return {SINGLE_FILE: dict(tensors)}
    stem = SINGLE_FILE.removesuffix(".safetensors")
    return {
        f"{stem}_part{start // CHUNK_TENSORS}.safetensors": dict(
            tensors[start : start + CHUNK_TENSORS]
        )
        for start in range(0, len(tensors), CHUNK_TENSORS)
    }


def write_files(
    folder: Path, files: Files, rows: RowSource, threads: int, on_bytes: Callable[[int], None]
) -> None:
    """Write all files, and an index where there are several; all of them or none.

    `rows` is called from several threads and gives a tensor's rows in any float dtype; a tensor
    that the table wants in FP8 is quantised here, and its scale filled with it.
    """
    with ExitStack() as stack:
        writers = [
            stack.enter_context(SafetensorsWriter(folder / name, table))
            for name, table in files.items()
        ]
        homes = {name: writer for writer in writers for name in writer.tensors}
        jobs = (
            partial(_store, homes, name, rows, first, end)
            for writer in writers
            for name, (_, shape) in writer.tensors.items()
            if not name.endswith(SCALE)
            for first, end in row_chunks(shape)
        )
        run_all(jobs, threads, on_bytes)
    if len(files) > 1:
        weight_map = {name: file for file, table in files.items() for name in table}
        write_index(folder, weight_map, sum(map(file_nbytes, files.values())))


class Part(Protocol):
    """A conversion of the DiT, or of an encoder."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that `write_into` makes."""

    def write_into(self, folder: Path, threads: int, on_bytes: Callable[[int], None]) -> None:
        """Write its files into a folder."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion that is planned and not yet started."""

    checkpoint: Checkpoint
    files: Files
    notes: tuple[str, ...] = ()
    """A line about each LoRA."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files that `write` makes."""
        return sum(map(file_nbytes, self.files.values()))

    def write(self, out: Path, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Make folder `out` of this conversion alone; see `write_folder`."""
        write_folder(out, [self], on_bytes)

    def write_into(self, folder: Path, threads: int, on_bytes: Callable[[int], None]) -> None:
        """Write config.json and the FP8 files. Memory: a few chunks of 16 MiB per thread."""
        write_config(self.checkpoint.arch, folder / CONFIG_NAME)
        with OpenFiles(self.checkpoint.stamps) as opened:
            rows = partial(_read_rows, self.checkpoint, opened)
            write_files(folder, self.files, rows, threads, on_bytes)


def write_folder(
    out: Path, parts: Sequence[Part], on_bytes: Callable[[int], None] = lambda _: None
) -> None:
    """Make folder `out`, which must not exist or be empty, with all of the parts or not at all.

    Raises PreflightError where the disk is too small, before anything is written, OutputError
    for a folder that cannot be written and CheckpointError for a source that cannot be read.
    """
    with _new_folder(out, sum(part.nbytes for part in parts)) as folder:
        for part in parts:
            part.write_into(folder, usable_threads(MAX_THREADS), on_bytes)


def plan_conversion(
    source_folder: Path,
    layout: FileLayout = "block",
    non_linear_dtype: NonLinearDtype = "BF16",
    *,
    loras: Sequence[LoraFile] = (),
    allow_unmatched: bool = False,
) -> Conversion:
    """Read the headers of the source and of LoRAs to merge into it, and lay out the result.

    Raises CheckpointError or Problems, also those of `with_loras`.
    """
    arch = read_architecture(source_folder)
    checkpoint = open_checkpoint(source_folder, arch, quantised=False, task=arch.model_type)
    merged, notes = with_loras(checkpoint, loras, allow_unmatched=allow_unmatched)
    return Conversion(merged, fp8_files(arch, layout, non_linear_dtype), notes)


def convert_to_fp8(
    source_folder: Path,
    out: Path,
    layout: FileLayout = "block",
    non_linear_dtype: NonLinearDtype = "BF16",
    on_progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the FP8 form of an official or diffusers checkpoint to the new folder `out`.

    `on_progress` gets the bytes of each piece written. Errors are those of `plan_conversion` and
    `Conversion.write`.
    """
    plan_conversion(source_folder, layout, non_linear_dtype).write(out, on_progress)


def _block_table(arch: Architecture, block: int, rest: str) -> TensorTable:
    table = {}
    for relative, shape in block_shapes(arch).items():
        name = block_name(block, relative)
        if is_quantised(relative, shape):
            table[name] = (FP8, shape)
            table[name + SCALE] = ("F32", (shape[0], 1))
        else:
            table[name] = (rest, shape)
    return table


def _read_rows(
    checkpoint: Checkpoint, opened: OpenFiles, name: str, first: int, end: int
) -> Tensor:
    """Rows of a tensor: as they are on disk, or in fp32 where a LoRA is merged into them."""
    entry, merge = checkpoint.entries[name], checkpoint.merges.get(name)
    row_nbytes = entry.nbytes // entry.shape[0]
    data = torch.empty((end - first) * row_nbytes, dtype=torch.uint8)
    opened.read_into(entry.path, entry.offset + first * row_nbytes, data.numpy().data)
    shape = (end - first, *entry.shape[1:])
    if merge is None:
        return data.view(TORCH_DTYPES[entry.dtype]).view(shape)
    merged = torch.empty(shape, dtype=torch.float32)
    start = first * merged[0].numel()
    merge(
        start, data.numpy().data, entry.dtype, merged.view(-1).view(torch.uint8).numpy().data, "F32"
    )
    return merged


def _store(
    homes: Mapping[str, SafetensorsWriter], name: str, rows: RowSource, first: int, end: int
) -> int:
    """Write rows of a tensor, and of its scale, which may be at home in another file."""
    writer = homes[name]
    dtype, _ = writer.tensors[name]
    values = rows(name, first, end)
    if dtype != FP8:
        return writer.put(name, values.to(TORCH_DTYPES[dtype]), first)
    codes, scales = quantise_weight(values.float())
    if not bool(scales.isfinite().all()):
        raise CheckpointError(
            f"{name} has values that are not finite between rows {first} and {end}",
            hint="the source is damaged; download it again",
            name=name,
        )
    scale = name + SCALE
    return writer.put(name, codes, first) + homes[scale].put(scale, scales, first)


@contextmanager
def _new_folder(out: Path, needed_nbytes: int) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when the block ends well, and is removed if not."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise OutputError(
            f"{out} exists", expected="a new or an empty folder", hint="remove it", path=str(out)
        )
    require_disk_space(out, needed_nbytes)
    folder = out.with_name(out.name + PARTIAL)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise OutputError(
            f"{folder} exists: another conversion runs, or one was killed",
            hint="if none runs, remove that folder",
            path=str(folder),
        ) from error
    except OSError as error:
        raise OutputError(
            f"cannot make {folder}: {error.strerror}", hint="check --out", path=str(folder)
        ) from error
    try:
        yield folder
        folder.replace(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
