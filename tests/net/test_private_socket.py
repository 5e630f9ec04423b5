"""A Unix socket that only its owner can talk to: made, replaced, refused and removed."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.errors import UsageError
from rallypoint.net.private_socket import PrivateSocket, is_from_owner, peer_of


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(str(path))
    return sock


def leave_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_the_owner_may_open_it_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        place = PrivateSocket(str(tmp_path / "s"), "TEST")
    finally:
        assert os.umask(before) == umask
    with place.listener:
        status = os.lstat(tmp_path / "s")
        assert stat.S_ISSOCK(status.st_mode)
        assert stat.S_IMODE(status.st_mode) & ~0o600 == 0
        place.remove()
    assert os.listdir(tmp_path) == ["tmp"]


def test_the_file_is_never_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first moment at which it can be connected to, its mode is right already, and under its own name it listens."""
    modes = []
    listen, rename = socket.socket.listen, os.rename

    def look(sock: socket.socket, backlog: int) -> None:
        modes.extend(stat.S_IMODE(path.lstat().st_mode) for path in tmp_path.glob(".rallypoint-*"))
        listen(sock, backlog)

    def look_and_rename(*args: str, **kwargs: int) -> None:
        assert not (tmp_path / "s").exists()
        connect(next(tmp_path.glob(".rallypoint-*"))).close()
        rename(*args, **kwargs)

    monkeypatch.setattr(socket.socket, "listen", look)
    monkeypatch.setattr(os, "rename", look_and_rename)
    place = PrivateSocket(str(tmp_path / "s"), "TEST")
    assert modes == [0o600]
    place.remove()
    place.listener.close()


def test_a_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    leave_stale(tmp_path / "s")
    place = PrivateSocket(str(tmp_path / "s"), "TEST")
    with place.listener, connect(tmp_path / "s"):
        place.remove()


def test_a_socket_in_use_is_refused_with_its_process(tmp_path: Path) -> None:
    first = PrivateSocket(str(tmp_path / "s"), "TEST")
    with first.listener:
        with pytest.raises(UsageError, match=f"TEST: process {os.getpid()} listens at '{tmp_path}/s' already"):
            PrivateSocket(str(tmp_path / "s"), "TEST")
        connect(tmp_path / "s").close()  # it still works
        first.remove()


def make_file(path: Path) -> None:
    path.write_text("precious")


def make_link(path: Path) -> None:
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("make", [make_file, make_link, Path.mkdir, os.mkfifo])
def test_what_is_no_socket_is_left_alone(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "s")
    before = (tmp_path / "s").lstat()
    with pytest.raises(UsageError, match=f"TEST: '{tmp_path}/s' exists, and is no socket"):
        PrivateSocket(str(tmp_path / "s"), "TEST")
    assert (tmp_path / "s").lstat().st_ino == before.st_ino
    assert sorted(os.listdir(tmp_path)) == ["s", "tmp"]


def test_a_path_of_the_longest_length_works_and_a_longer_one_is_refused(tmp_path: Path) -> None:
    longest = f"{tmp_path}/{'x' * 107}"[:107]
    place = PrivateSocket(longest, "TEST")
    with place.listener, connect(Path(longest)):
        place.remove()
    with pytest.raises(UsageError, match=r"TEST: a path of a socket has at most 107 bytes, and '.*' has more"):
        PrivateSocket(f"{longest}x", "TEST")
    with pytest.raises(UsageError, match="at most 107 bytes"):  # bytes, not characters
        PrivateSocket("é" * 54, "TEST")


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be listened at: No such file or directory"):
        PrivateSocket(str(tmp_path / "nowhere" / "s"), "TEST")


def test_a_relative_path_is_of_the_folder_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = PrivateSocket("s", "TEST")
    monkeypatch.chdir("/")
    with place.listener:
        place.remove()
    assert not (tmp_path / "s").exists()


def test_what_has_taken_its_place_is_not_removed(tmp_path: Path) -> None:
    place = PrivateSocket(str(tmp_path / "s"), "TEST")
    with place.listener:
        os.unlink(tmp_path / "s")
        make_file(tmp_path / "s")
        place.remove()
    assert (tmp_path / "s").read_text() == "precious"


def test_the_peer_is_known(tmp_path: Path) -> None:
    place = PrivateSocket(str(tmp_path / "s"), "TEST")
    with place.listener, connect(tmp_path / "s") as client, place.listener.accept()[0] as accepted:
        assert peer_of(client) == peer_of(accepted) == (os.getpid(), os.geteuid())
        assert is_from_owner(accepted)
        place.remove()


CONNECT = "import socket, sys, os; os.setuid(65534); socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


@pytest.mark.root
def test_another_user_cannot_connect(open_folder: Path) -> None:
    """Neither through the file's mode, nor, should somebody have opened that, past the server."""
    place = PrivateSocket(str(open_folder / "s"), "TEST")
    with place.listener:
        command = [sys.executable, "-S", "-c", CONNECT, str(open_folder / "s")]
        assert "PermissionError" in subprocess.run(command, capture_output=True, text=True).stderr
        (open_folder / "s").chmod(0o777)
        assert subprocess.run(command, capture_output=True, text=True).returncode == 0
        with place.listener.accept()[0] as accepted:
            assert not is_from_owner(accepted)
        place.remove()
