"""What torch's dynamic rendezvous is made from: a back end, which is one cell of bytes with a version, and its settings.

Names, defaults and refusals are torch's, so that back ends and programs written for it fit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta

from rallypoint import defaults
from rallypoint.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar

__all__ = ["RendezvousBackend", "RendezvousSettings", "RendezvousTimeout"]

HEARTBEAT_TIMEOUT_S = 5


class RendezvousBackend(ABC):
    """Where a job keeps the state of its rendezvous: all of it at once, and changed only by who has seen the latest."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of this kind of back end."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Any] | None:
        """The state and its token, None if there is none.

        Raises RendezvousConnectionError if the back end cannot be reached, RendezvousStateError if what is there is corrupt.
        """

    @abstractmethod
    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Write the state if the one that is there still has `token`, or, without a token, if there is none.

        Gives the state and the token that are there now, and whether they are ours.
        """


class RendezvousTimeout:
    """How long things may take; each must be longer than nothing."""

    _DEFAULT_TIMEOUTS: ClassVar[dict[str, timedelta]] = {
        "join": timedelta(seconds=defaults.JOIN_TIMEOUT_S),
        "last_call": timedelta(seconds=defaults.LAST_CALL_TIMEOUT_S),
        "close": timedelta(seconds=defaults.CLOSE_TIMEOUT_S),
        "heartbeat": timedelta(seconds=HEARTBEAT_TIMEOUT_S),
    }

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self._join = self._checked("join", join)
        self._last_call = self._checked("last_call", last_call)
        self._close = self._checked("close", close)
        self._heartbeat = self._checked("heartbeat", heartbeat)

    @property
    def join(self) -> timedelta:
        """How long a node waits to be let in."""
        return self._join

    @property
    def last_call(self) -> timedelta:
        """How long more nodes are waited for, once the least number is here."""
        return self._last_call

    @property
    def close(self) -> timedelta:
        """How long the end may take."""
        return self._close

    @property
    def heartbeat(self) -> timedelta:
        """How long a sign of life may take; the time of each call is the back end's own affair here."""
        return self._heartbeat

    def _checked(self, name: str, timeout: timedelta | None) -> timedelta:
        if timeout is None:
            return self._DEFAULT_TIMEOUTS[name]
        if timeout <= timedelta(0):
            raise ValueError(f"The {name} timeout ({timeout}) must be positive.")
        return timeout


class RendezvousSettings(Value):
    """What a handler was told. The lease of a node is `keep_alive_interval` times `keep_alive_max_attempt`."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int
