"""A file that appears and a request that comes: with the kernel's own events, and what the health endpoint would hand over."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from rallypoint.agent import notices
from rallypoint.agent.notices import Door, FileWatch
from rallypoint.errors import UsageError
from rallypoint.net.http import Request


def is_told(watch: FileWatch, timeout_s: float = 10.0) -> bool:
    poll = select.poll()
    poll.register(watch.fileno() or -1, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


@pytest.mark.parametrize("how", ["made", "moved", "link"])
def test_the_kernel_tells_of_a_file_that_appears(tmp_path: Path, how: str) -> None:
    path, other = tmp_path / "notice", tmp_path / "other"
    watch = FileWatch(str(path))
    try:
        assert watch.next_look_at() is None
        assert not watch.has_appeared()
        other.touch()
        assert is_told(watch)
        assert not watch.has_appeared()
        if how == "made":
            path.touch()
        elif how == "moved":
            other.rename(path)
        else:
            path.symlink_to("nowhere")
        assert is_told(watch)
        assert watch.has_appeared()
    finally:
        watch.close()


def test_where_other_machines_write_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_is_shared", lambda _: True)
    watch = FileWatch(str(tmp_path / "notice"))
    assert watch.fileno() is None
    assert watch.next_look_at() is not None
    assert not watch.has_appeared()
    (tmp_path / "notice").touch()
    assert watch.has_appeared()
    watch.close()


def test_a_file_that_cannot_appear_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="drain_file: there is no folder"):
        FileWatch(str(tmp_path / "none" / "notice"))
    (tmp_path / "notice").touch()
    with pytest.raises(UsageError, match=r"drain_file .* is there already; it gives notice when it appears, so remove it first"):
        FileWatch(str(tmp_path / "notice"))


@pytest.mark.parametrize(
    ("method", "token", "left_s", "status"),
    [("POST", "right", 30.0, 202), ("POST", "right", None, 409), ("POST", "wrong", 30.0, 401), ("POST", "", 30.0, 401),
     ("GET", "right", 30.0, 405), ("GET", "wrong", 30.0, 401)],
)  # fmt: skip
def test_only_who_has_the_token_gives_notice(method: str, token: str, left_s: float | None, status: int) -> None:
    given: list[str] = []

    def give(why: str) -> float | None:
        given.append(why)
        return left_s

    door = Door(give, "right")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    assert door.answer(Request(method, notices.PATH, "", headers, b"", False)).status == status
    assert bool(given) == (status in (202, 409))
    assert "Authorization: Bearer right' http://127.0.0.1:80/drain" in door.how_to_ask("127.0.0.1", 80)
    assert len(Door(give).token) == 32
