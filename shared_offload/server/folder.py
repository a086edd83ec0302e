"""The folder of a weight server's socket: one per user, entered by nobody else.

Invariant: the folder is a directory of this user with mode 0700, not a link, and everything in it
is reached through the descriptor that was verified, so nothing can be swapped afterwards. A server
holds a lock on the folder as long as it lives; the kernel takes the lock back however it ends, so a
socket without a lock is a leftover and is replaced.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import time
from pathlib import Path
from types import TracebackType

from shared_offload.errors import ArenaError
from shared_offload.ranks.facts import runtime_folder

NAME = "shared_offload"
SOCKET = "weights.sock"
BACKLOG = 1024
RETRY_SECONDS = 0.02


def candidates() -> list[Path]:
    """Where a server of this user may listen, the preferred place first.

    The second also for programs without XDG_RUNTIME_DIR (containers, services), so that both kinds
    find each other.
    """
    runtime = runtime_folder()
    fallback = Path("/tmp") / f"{NAME}-{os.geteuid()}"
    return [fallback] if runtime is None else [runtime / NAME, fallback]


class Folder:
    """The verified folder, held open. A context manager. Made by `find` or `make`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def find(cls, path: Path) -> Folder | None:
        """None when it does not exist; ArenaError when it is not this user's alone."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unusable(path, error.strerror or str(error)) from error
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077:
            return cls(path, descriptor)
        os.close(descriptor)
        raise _unusable(
            path, f"it belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
        )

    @classmethod
    def make(cls, path: Path) -> Folder:
        """As `find`, and made when it does not exist."""
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise _unusable(path, error.strerror or str(error)) from error
        folder = cls.find(path)
        if folder is None:
            raise _unusable(path, "it was removed as soon as it was made")
        return folder

    @property
    def _socket(self) -> str:
        # Through the descriptor: verified, and short (a socket's address has 108 bytes at most).
        return f"/proc/self/fd/{self._descriptor}/{SOCKET}"

    def lock(self) -> bool:
        """Become the folder's one server until `close`; False when there is one."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def listen(self) -> socket.socket:
        """A listening socket in place of whatever an earlier server left. Needs the lock."""
        new = Path(f"{self._socket}.new")
        new.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(new))
            new.chmod(0o600)
            listener.listen(BACKLOG)
            new.replace(self._socket)  # whoever sees it is answered
        except BaseException:
            listener.close()
            raise
        return listener

    def connect(self, seconds: float) -> socket.socket | None:
        """A connection to the folder's server; None without a socket; ArenaError if it is dead."""
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(seconds)
        try:
            self._connect(peer, seconds)
            if peer_uid(peer) == os.geteuid():
                return peer
            problem = f"it is answered by uid {peer_uid(peer)}"
        except FileNotFoundError:
            peer.close()
            return None
        except OSError as error:
            problem = str(error.strerror or error).lower()
        peer.close()
        raise ArenaError(
            f"nobody answers at the weight server's socket in {self.path}: {problem}",
            hint="the server was killed or hangs; start `shared-offload serve-weights` again",
            path=str(self.path),
        )

    def _connect(self, peer: socket.socket, seconds: float) -> None:
        """A Unix socket refuses at once while the queue of its listener is full."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return peer.connect(self._socket)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_SECONDS)

    def clear(self) -> None:
        """Take the socket away. Needs the lock."""
        Path(self._socket).unlink(missing_ok=True)

    def close(self) -> None:
        """Give the lock back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end when it connected, by the kernel's word."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    _, uid, _ = struct.unpack("iII", raw)
    return int(uid)


def _unusable(path: Path, why: str) -> ArenaError:
    return ArenaError(
        f"{path} cannot hold the weight server's socket: {why}",
        expected="a folder of this user with mode 700, not a link",
        hint="chmod 700 or remove it, or set weight_server_folder",
        path=str(path),
    )
