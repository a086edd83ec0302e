"""Wan's .pth files (T5, CLIP, VAE): a flat dict of tensors written by torch.save.

Invariant: no code from a file is ever run (weights_only), and whatever the bytes are, the result
is a dict of named tensors or a CheckpointError.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch

from shared_offload.errors import CheckpointError, OutputError
from shared_offload.weights.files import (
    bounded_names,
    read_head,
    unfinished_error,
    unreadable,
)
from shared_offload.weights.writer import PARTIAL

_LEGACY_MAGIC = b"\x80"  # a pickle: torch.save before 1.6
_ZIP_MAGIC = b"PK\x03\x04"


def load_pth(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .pth file, on the CPU.

    They are mapped from the file, copy on write: pages are read when they are first used, so peak
    memory is what is touched. The file must not be changed while they live. Raises CheckpointError.
    """
    mapped = check_pth(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n", 1)[0]
        raise _damaged(path, f"it holds more than tensors: {reason}", "only tensors") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # a damaged pickle raises nearly anything, IndexError for one
        reason = str(error).split("\n", 1)[0]
        raise _damaged(path, reason, "a file written by torch.save") from error
    return _tensors(path, content)


def check_pth(path: Path) -> bool:
    """Whether a file can be mapped; CheckpointError if it is not whole, or is something else.

    Reads its two ends and takes no time, so that a file of half a download is told before anything
    is loaded.
    """
    head = read_head(path)
    if unfinished := unfinished_error(path):
        raise unfinished
    archive = head.startswith(_ZIP_MAGIC)
    if not archive and not head.startswith(_LEGACY_MAGIC):
        raise _damaged(path, f"its first bytes are {head[:8]!r}", "a file written by torch.save")
    if archive and not zipfile.is_zipfile(path):
        size = path.stat().st_size
        raise _damaged(path, f"it has {size} bytes and no end: it is truncated", "a whole archive")
    return archive


def save_pth(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a .pth file; it has its own name only when it is complete. Raises OutputError."""
    unfinished = path.with_name(path.name + PARTIAL)
    try:
        torch.save(dict(tensors), unfinished)
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        raise OutputError(
            f"cannot write {path}: {error}",
            hint="check the folder's permissions and the free space of its disk",
            path=str(path),
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _tensors(path: Path, content: object) -> dict[str, torch.Tensor]:
    if not isinstance(content, dict) or not content:
        found = "an empty dict" if content == {} else type(content).__name__
        raise _damaged(path, f"it holds {found}", "a dict of named tensors")
    other = [str(k) for k, v in content.items() if not isinstance(v, torch.Tensor)]
    other += [repr(key) for key in content if not isinstance(key, str)]
    if other:
        what = f"{len(other)} of its {len(content)} entries are no named tensors"
        raise CheckpointError(
            f"{path}: {what}: {bounded_names(other)}",
            expected="a flat dict of named tensors, as in Wan's release",
            hint="use Wan's own .pth files, not a training checkpoint",
            path=str(path),
            name=other[0],
            names=other,
        )
    return dict(content)


def _damaged(path: Path, what: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be loaded: {what}",
        expected=expected,
        hint="download the file again and compare its size and checksum",
        path=str(path),
        found=what,
    )
