"""Files of weights as bytes: what they really are, whether they changed, and reads that are whole.

Invariant: a read fills its destination or raises a CheckpointError with path and offset. A file
that changes between the moment its header was read and the end of the last read is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from shared_offload.errors import CheckpointError

# What is found under a name that ends in .safetensors or .pth, by its first bytes.
_IMPOSTORS: tuple[tuple[tuple[bytes, ...], str, str], ...] = (
    (
        (b"version https://git-lfs", b"version https://hawser"),
        "a Git-LFS pointer, not the file itself",
        "fetch it with `git lfs pull`, or with `hf download`",
    ),
    (
        (b"<!doctype", b"<html", b"<?xml", b"<head", b"<!--"),
        "an HTML or XML page, not weights",
        "the download was answered by a web page: log in or correct the address, download again",
    ),
    ((b"gguf",), "a GGUF file", "GGUF is not supported; use the safetensors files of the model"),
)
_HEAD_NBYTES = 512
ARIA2 = ".aria2"


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells a file from a later version of itself, or from one that took its name."""

    size: int
    mtime_ns: int
    device: int
    inode: int
    ctime_ns: int = field(compare=False)
    """Differs after every write, whatever mtime says; but also after chmod or a new hard link."""

    @classmethod
    def of(cls, stat: os.stat_result) -> FileStamp:
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_dev, stat.st_ino, stat.st_ctime_ns)


def impostor_error(path: Path, head: bytes) -> CheckpointError | None:
    """The error for a file that is empty, a pointer or a web page, judged by its first bytes."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head:
        what, hint = "empty", "download it again; the disk may have been full"
    elif not head.strip(b"\0") and len(head) >= _HEAD_NBYTES:
        what, hint = "zeros at its start, so not yet downloaded", "finish or repeat the download"
    else:
        for marks, what, hint in _IMPOSTORS:  # noqa: B007 - both are used after the loop
            if start.startswith(marks):
                break
        else:
            return None
    return CheckpointError(
        f"{path} is {what}", expected="a file of weights", hint=hint, path=str(path), found=what
    )


def unfinished_error(path: Path) -> CheckpointError | None:
    """The error for a file that aria2 has not yet fetched all of, whatever its size says."""
    note = path.with_name(path.name + ARIA2)  # kept until everything has arrived
    if not note.exists():
        return None
    return CheckpointError(
        f"{path} is still being downloaded: {note.name} exists",
        hint="let aria2 finish, then start again",
        path=str(path),
    )


def read_head(path: Path) -> bytes:
    """The first bytes of a file. Raises CheckpointError, that of `impostor_error` included."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_NBYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    if impostor := impostor_error(path, head):
        raise impostor
    return head


def unreadable(path: Path, error: OSError, offset: int | None = None) -> CheckpointError:
    """The error for what the operating system said about a file."""
    where = "" if offset is None else f" at byte {offset}"
    return CheckpointError(
        f"cannot read {path}{where}: {error.strerror or error}",
        hint="check that the file exists, its permissions and the disk it is on",
        path=str(path),
        errno=error.errno,
        offset=offset,
    )


class OpenFiles:
    """Files opened for reading together, compared with their stamps on entry and on exit.

    A stamp of None takes the file as it is on entry. Reads may come from any thread.
    """

    def __init__(self, stamps: Mapping[Path, FileStamp | None]) -> None:
        self._stamps = dict(stamps)
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> OpenFiles:
        try:
            for path in self._stamps:
                self._open(path)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.check(self._descriptors)
        finally:
            self.close()

    def check(self, paths: Iterable[Path]) -> None:
        """Raise if one of these files has changed since its stamp was taken."""
        for path in paths:
            self._check(path, self._descriptors[path])

    def read_into(self, path: Path, offset: int, dest: memoryview) -> None:
        """Fill `dest` with the file's bytes from `offset` on."""
        descriptor, done = self._descriptors[path], 0
        while done < len(dest):
            try:
                count = os.preadv(descriptor, [dest[done:]], offset + done)
            except OSError as error:
                raise unreadable(path, error, offset + done) from error
            if count == 0:
                raise CheckpointError(
                    f"{path} ends at byte {offset + done}",
                    expected=f"{len(dest)} bytes from byte {offset} on",
                    hint="the file was cut while it was read; download it again",
                    path=str(path),
                    offset=offset + done,
                )
            done += count

    def _open(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(path, error) from error
        self._descriptors[path] = descriptor
        if self._stamps[path] is None:
            self._stamps[path] = FileStamp.of(os.fstat(descriptor))
        self._check(path, descriptor)

    def _check(self, path: Path, descriptor: int) -> None:
        stamp, now = self._stamps[path], FileStamp.of(os.fstat(descriptor))
        if stamp is not None and now != stamp:
            raise CheckpointError(
                f"{path} changed while it was in use: {now.size} bytes, modified {now.mtime_ns} "
                f"ns, inode {now.inode}",
                expected=f"{stamp.size} bytes, modified {stamp.mtime_ns} ns, inode {stamp.inode} "
                "as when its header was read",
                hint="let the download or copy finish, then start again",
                path=str(path),
                found=[now.size, now.mtime_ns],
            )

    def close(self) -> None:
        """Close the files without comparing them once more."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def bounded_names(names: Iterable[str], limit: int = 6) -> str:
    """A list of names for a person: the first few, and how many more there are."""
    listed = list(names)
    text = ", ".join(listed[:limit])
    return f"{text} and {len(listed) - limit} more" if len(listed) > limit else text
