"""Files whose content is obeyed: nobody else can have written them, nor choose where they are written (m5)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.base import own_files
from rallypoint.base.own_files import NOBODY, open_folder, open_own, replace_own, write_whole

ALICE = 1234


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    replace_own(str(made), lambda fd: write_whole(fd, b"ours"))
    return made


def read(path: Path) -> bytes:
    fd = open_own(str(path))
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


def owned_by(user: int) -> Callable[[Path], None]:
    def give(path: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, user, -1)

    return give


def replace_by_link(path: Path) -> None:
    path.rename(f"{path}.real")
    path.symlink_to(f"{path}.real")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.chmod(0o620), "others could have written it: its mode is 620"),
        (lambda path: path.chmod(0o602), "others could have written it: its mode is 602"),
        (owned_by(ALICE), f"others could have written it: it belongs to user {ALICE}"),
        (owned_by(NOBODY), f"others could have written it: it belongs to user {NOBODY}"),
        (replace_by_link, "Too many levels of symbolic links"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "others could have written it: it is no plain file"),
        (lambda path: (path.unlink(), path.mkdir()), "others could have written it: it is no plain file"),
        (Path.unlink, "No such file"),
    ],
    ids=["of the group", "of all", "of another user", "of nobody", "link", "pipe", "folder", "missing"],
)
def test_what_others_could_have_written_is_not_read(spoil: Callable[[Path], object], why: str, path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    assert read(path) == b"ours"
    spoil(path)
    with pytest.raises(OSError, match=why):
        read(path)
    assert set(os.listdir("/proc/self/fd")) == before


def test_where_root_is_nobody_its_files_are_its_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file server; who makes a file there sees whom it belongs to."""
    owned_by(NOBODY)(path)
    status = os.fstat

    def squashed(fd: int) -> os.stat_result:
        found = status(fd)
        return os.stat_result((*found[:4], NOBODY, *found[5:])) if stat.S_ISREG(found.st_mode) else found

    monkeypatch.setattr(own_files.os, "fstat", squashed)
    assert read(path) == b"ours"
    assert {one.name for one in path.parent.iterdir()} == {"file", "tmp"}


def test_what_is_written_is_for_us_alone_and_goes_through_no_link(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    path.unlink()
    path.symlink_to(victim)
    old = os.umask(0)
    try:
        replace_own(str(path), lambda fd: write_whole(fd, b"new"))
    finally:
        os.umask(old)
    assert victim.read_text() == "untouched"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert read(path) == b"new"


def test_a_write_that_fails_leaves_what_was_there(path: Path) -> None:
    def fail(fd: int) -> None:
        os.write(fd, b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_own(str(path), fail)
    assert read(path) == b"ours"
    assert {one.name for one in path.parent.iterdir()} == {"file", "tmp"}


@pytest.mark.skipif(os.geteuid() != 0, reason="it matters for root alone")
def test_root_keeps_out_of_folders_of_other_users(tmp_path: Path) -> None:
    os.close(open_folder(str(tmp_path)))
    os.chown(tmp_path, ALICE, -1)
    os.close(open_folder(str(tmp_path)))  # who has no account here can swap nothing
    os.chown(tmp_path, 1, -1)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(PermissionError, match="it belongs to daemon, who could make root write elsewhere"):
        open_folder(str(tmp_path))
    assert set(os.listdir("/proc/self/fd")) == before
