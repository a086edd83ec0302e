"""The checkpoint folder that a measurement reads: the user's, or one of random weights."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shared_offload.report.progress import Progress
from shared_offload.synth.folder import make_checkpoint
from shared_offload.synth.parts import PartName
from shared_offload.synth.sizes import Size, Task


def add_folder_flag(parser: argparse.ArgumentParser) -> None:
    """The option that names a folder."""
    parser.add_argument(
        "--model_path",
        type=Path,
        metavar="FOLDER",
        help="checkpoint folder (default: random weights in a temporary one)",
    )


def video_parts(task: Task, dit: PartName) -> list[PartName]:
    """All that a video is made with."""
    parts: list[PartName] = [dit, "t5", "vae", "tokenizer"]
    return [*parts, "clip"] if task == "i2v" else parts


@contextmanager
def model_folder(
    given: Path | None, size: Size, task: Task, parts: Sequence[PartName]
) -> Iterator[Path]:
    """`given`, or a new folder of random weights that lives as long as the block runs."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="shared_offload-bench-") as folder:
        make_checkpoint(
            Path(folder) / "model",
            size,
            task,
            parts=parts,
            threads=len(os.sched_getaffinity(0)),
            progress=Progress(),
        )
        yield Path(folder) / "model"
