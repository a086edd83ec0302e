"""Where processes that share arenas leave notes for each other. The seam under the bootstrap.

A note is a JSON object under a key. Nothing here blocks: a reader polls, and looks after its peers
in between (vigil.py). `StoreBoard` is the board of a run (torchrun's store), `FolderBoard` that of
processes that share a folder, `LocalBoard` that of a lone process. Torch-free.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from shared_offload.errors import RankError

Note = dict[str, Any]


class Board(Protocol):
    """Notes by key."""

    def publish(self, key: str, note: Note) -> None:
        """Write, over what was there."""
        ...

    def publish_first(self, key: str, note: Note) -> Note:
        """Write unless the key is taken; what stands there now. Atomic among all processes."""
        ...

    def read(self, key: str) -> Note | None:
        """What stands there, now; None for nothing."""
        ...


class LocalBoard:
    """The board of one process."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}

    def publish(self, key: str, note: Note) -> None:
        """Write, over what was there."""
        self._notes[key] = json.dumps(note)

    def publish_first(self, key: str, note: Note) -> Note:
        """Write unless the key is taken; what stands there now."""
        return _parse(self._notes.setdefault(key, json.dumps(note)))

    def read(self, key: str) -> Note | None:
        """What stands there, now; None for nothing."""
        text = self._notes.get(key)
        return None if text is None else _parse(text)


class FolderBoard:
    """One file per note. Works as soon as the folder exists, with no server behind it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def publish(self, key: str, note: Note) -> None:
        """Write, over what was there."""
        self._write(note).replace(self._path(key))

    def publish_first(self, key: str, note: Note) -> Note:
        """Write unless the key is taken; what stands there now."""
        draft, path = self._write(note), self._path(key)
        try:
            path.hardlink_to(draft)
        except FileExistsError:
            return _parse(path.read_text())
        finally:
            draft.unlink()
        return note

    def read(self, key: str) -> Note | None:
        """What stands there, now; None for nothing."""
        try:
            return _parse(self._path(key).read_text())
        except FileNotFoundError:
            return None

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    def _write(self, note: Note) -> Path:
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=".draft-")
        with os.fdopen(handle, "w") as file:
            json.dump(note, file)
        return Path(name)


class Store(Protocol):
    """The part of torch.distributed.Store that a board needs."""

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def set(self, key: str, value: str, /) -> None: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class StoreBoard:
    """Notes in a run's store. RankError when the store no longer answers."""

    def __init__(self, store: Store, prefix: str = "arena") -> None:
        self._store = store
        self._prefix = prefix

    def publish(self, key: str, note: Note) -> None:
        """Write, over what was there."""
        try:
            self._store.set(f"{self._prefix}/{key}", json.dumps(note))
        except RuntimeError as error:
            raise _gone(error) from error

    def publish_first(self, key: str, note: Note) -> Note:
        """Write unless the key is taken; what stands there now."""
        try:
            text = self._store.compare_set(f"{self._prefix}/{key}", "", json.dumps(note))
        except RuntimeError as error:
            raise _gone(error) from error
        return _parse(text)

    def read(self, key: str) -> Note | None:
        """What stands there, now; None for nothing."""
        name = f"{self._prefix}/{key}"
        try:
            return _parse(self._store.get(name)) if self._store.check([name]) else None
        except RuntimeError as error:
            raise _gone(error) from error


def _parse(text: str | bytes) -> Note:
    note: Note = json.loads(text)
    return note


def _gone(error: RuntimeError) -> RankError:
    return RankError(
        f"the run's store no longer answers: {next(iter(str(error).splitlines()), 'no reason')}",
        expected="the launcher, or rank 0, which hosts it, to live",
        hint="look at the first host: the launcher there ended, or the network between the hosts",
    )
