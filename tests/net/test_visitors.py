"""From where workers may come: as far as it is known from where their agents came."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from rallypoint.net import visitors
from rallypoint.net.visitors import Visitors

HERE, OTHER_WAY = "10.0.0.1", "10.1.0.1"


class Call:
    """A connection from one address to another; from this machine's own user, from elsewhere, or it has gone."""

    def __init__(self, there: str, here: str = HERE, user: int | None = None) -> None:
        self._here, self._there, self.user = here, there, user

    def getsockname(self) -> tuple[str, int]:
        return self._here, 1

    def getpeername(self) -> tuple[str, int]:
        if not self._there:
            raise OSError(107, "not connected")
        return self._there, 2


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``known(call, …)``: where these are the nodes of the job."""
    monkeypatch.setattr(visitors, "user_of", lambda call: call.user)

    def visit(*calls: Any) -> Visitors:
        found = Visitors()
        for call in calls:
            found.add(call)
        return found

    return visit


def test_workers_come_from_where_their_agents_came(known: Any) -> None:
    job = known(Call("10.0.0.2"), Call("10.0.0.3"), Call(HERE))
    assert not job.objection(Call("10.0.0.2"))
    assert not job.objection(Call("10.0.0.3"))
    assert "worker_store_from=any lets everybody in" in job.objection(Call("10.0.0.4"))


def test_who_is_on_this_machine_is_never_turned_away(known: Any) -> None:
    """Its processes may use any of its addresses."""
    job = known(Call("10.0.0.2"))
    assert not job.objection(Call(HERE))
    assert not job.objection(Call("127.0.0.1", "127.0.0.1"))
    assert not job.objection(Call("10.9.9.9", user=7))


@pytest.mark.parametrize(
    "calls",
    [
        (),
        (Call(HERE), Call("10.9.9.9", user=0)),
        (Call("10.0.0.2"), Call("10.1.0.3", OTHER_WAY)),
        (Call("10.1.0.3", OTHER_WAY),),
        (Call("fd00::2", "fd00::1"),),
    ],
    ids=["nobody came", "all are here", "one came another way", "all came another way", "by the other family"],
)
def test_where_not_all_is_known_nobody_is_turned_away(known: Any, calls: tuple[Any, ...]) -> None:
    """A node that went to another of our addresses may have another one of its own on the way to this one."""
    assert not known(*calls).objection(Call("10.0.0.4"))


def test_who_has_gone_tells_nothing(known: Any) -> None:
    job = known(Call(""), Call("10.0.0.2"))
    with contextlib.suppress(OSError):
        assert job.objection(Call(""))
    assert job.objection(Call("10.0.0.4"))


def test_where_the_kernel_does_not_tell_nobody_is_turned_away(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(_: Any) -> int:
        raise NotImplementedError

    monkeypatch.setattr(visitors, "user_of", tell)
    assert not known(Call("10.0.0.2")).objection(Call("10.0.0.4"))


def test_too_many_addresses_are_none(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors, "MOST_ADDRESSES", 2)
    assert not known(*(Call(f"10.0.0.{index}") for index in range(2, 9))).objection(Call("10.0.0.99"))
