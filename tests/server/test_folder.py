"""The socket's folder: whose it must be, and who has it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shared_offload.errors import ArenaError
from shared_offload.ranks.facts import runtime_folder
from shared_offload.server import client
from shared_offload.server import folder as module
from shared_offload.server.folder import Folder


def test_it_is_made_private(tmp_path: Path) -> None:
    os.umask(before := os.umask(0))
    os.umask(0)
    try:
        with Folder.make(tmp_path / "so") as folder:
            assert folder.lock()
            with folder.listen():
                assert stat.S_IMODE((tmp_path / "so").stat().st_mode) == 0o700
                assert stat.S_IMODE((tmp_path / "so" / module.SOCKET).stat().st_mode) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("kind", ["open", "link", "file", "stranger", "orphan"])
def test_what_cannot_be_trusted_is_refused(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "so", tmp_path / "other"
    if kind == "open":
        path.mkdir(mode=0o755)
    elif kind == "link":
        other.mkdir(mode=0o700)
        path.symlink_to(other)
    elif kind == "file":
        path.write_text("")
    elif kind == "stranger":
        if os.geteuid():
            pytest.skip("needs root, to give a folder away")
        path.mkdir(mode=0o700)
        os.chown(path, 65534, 65534)
    else:
        path = tmp_path / "missing" / "so"
    with pytest.raises(ArenaError) as caught:
        Folder.make(path)
    assert caught.value.facts["path"] == str(path)
    if kind == "orphan":
        assert Folder.find(path) is None
    else:
        with pytest.raises(ArenaError):
            Folder.find(path)


def test_a_swapped_folder_is_not_followed(tmp_path: Path) -> None:
    with Folder.make(tmp_path / "so") as folder:
        (tmp_path / "so").rename(tmp_path / "moved")
        (tmp_path / "so").mkdir()
        with folder.listen():
            assert (tmp_path / "moved" / module.SOCKET).is_socket()
            assert list((tmp_path / "so").iterdir()) == []


def test_one_has_the_lock(tmp_path: Path) -> None:
    with Folder.make(tmp_path) as first, Folder.make(tmp_path) as second:
        assert first.lock() and not second.lock()
        first.close()
        assert second.lock()


def test_a_path_longer_than_an_address(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 200)
    with Folder.make(deep) as folder, folder.listen(), Folder.make(deep) as other:
        peer = other.connect(1)
        assert peer is not None
        peer.close()


def test_a_dead_socket_is_not_a_missing_one(tmp_path: Path) -> None:
    with Folder.make(tmp_path) as folder:
        assert folder.connect(1) is None
        folder.listen().close()
        with pytest.raises(ArenaError, match="nobody answers"):
            folder.connect(1)
        with folder.listen():
            pass
        folder.clear()
        assert folder.connect(1) is None


def test_a_dead_server_does_not_hide_a_live_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / name for name in ("missing", "dead", "live")]
    monkeypatch.setattr(client, "candidates", lambda: places)
    assert client.send(None, {}) is None
    with Folder.make(places[1]) as dead, Folder.make(places[2]) as live:
        dead.listen().close()
        with pytest.raises(ArenaError, match="nobody answers") as caught:
            client.send(None, {})
        assert caught.value.facts["path"] == str(places[1])
        with live.listen() as listener:
            connection = client.send(None, {"op": "ask"})
            assert connection is not None
            with connection, listener.accept()[0] as accepted:
                assert accepted.recv(100) == b'{"v": 1, "op": "ask"}\n'


def test_a_server_of_another_user_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Folder.make(tmp_path) as folder, folder.listen():
        monkeypatch.setattr(module, "peer_uid", lambda _: os.geteuid() + 1)
        with pytest.raises(ArenaError, match=f"answered by uid {os.geteuid() + 1}"):
            folder.connect(1)


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fallback = Path(f"/tmp/shared_offload-{os.geteuid()}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert module.candidates() == [tmp_path / "shared_offload", fallback]
    for useless in ("", "relative", str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", useless)
        assert module.candidates() == [fallback]
    if not os.geteuid():
        os.chown(tmp_path, 65534, 65534)  # as after `su`
        assert runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) is None
