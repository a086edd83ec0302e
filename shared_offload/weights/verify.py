"""A hash of all bytes of a checkpoint, for runs that want to know that nothing changed on the way.

Invariant: it depends on names, dtypes, shapes and bytes of the tensors only, so a checkpoint has
one fingerprint however its tensors are spread over files.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from shared_offload.weights.checkpoint import Checkpoint
from shared_offload.weights.files import OpenFiles
from shared_offload.weights.safetensors_header import TensorEntry

_READ_NBYTES = 4 << 20


def content_fingerprint(
    checkpoint: Checkpoint,
    *,
    threads: int = 4,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> str:
    """SHA-256 over the checkpoint's tensors as they are on disk; reads every byte.

    `on_bytes` is told of bytes as they are hashed, from any thread. Peak memory is 4 MiB a thread.
    Raises CheckpointError for a file that cannot be read or has changed since it was indexed.
    """
    total = hashlib.sha256()
    with OpenFiles(checkpoint.stamps) as files, ThreadPoolExecutor(threads) as pool:
        work = _Hasher(files, on_bytes, threading.Event())
        entries = sorted(checkpoint.entries.values(), key=lambda e: (str(e.path), e.offset))
        futures = {pool.submit(work.digest, entry): entry.name for entry in entries}
        try:
            digests = {futures[future]: future.result() for future in as_completed(futures)}
        finally:
            work.halt.set()
    for name in sorted(digests):
        entry = checkpoint.entries[name]
        total.update(repr((name, entry.dtype, entry.shape)).encode())
        total.update(digests[name])
    return total.hexdigest()


@dataclass(frozen=True, slots=True)
class _Hasher:
    files: OpenFiles
    on_bytes: Callable[[int], None]
    halt: threading.Event

    def digest(self, entry: TensorEntry) -> bytes:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(_READ_NBYTES, entry.nbytes)))
        for start in range(0, entry.nbytes, _READ_NBYTES):
            if self.halt.is_set():
                break
            part = buffer[: min(_READ_NBYTES, entry.nbytes - start)]
            self.files.read_into(entry.path, entry.offset + start, part)
            digest.update(part)
            self.on_bytes(len(part))
        return digest.digest()
