"""A node's line to its store, which mends itself: it dials, greets, notices a break, and dials again.

How it is dialled is in `dialling`. Once a store has welcomed us it is the only one: whoever else answers there is not it, and
that is the end.
"""

from __future__ import annotations

import math
import select
from collections.abc import Callable

from rallypoint.base.text import host_port
from rallypoint.coordination.embedded.dialling import Dialler, Link, LinkBroken, dial
from rallypoint.coordination.embedded.frames import FrameError
from rallypoint.coordination.embedded.handshake import ClientHandshake, HandshakeRefused
from rallypoint.coordination.engine import RefusedError, StoreGoneError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.coordination.embedded.dialling import Dial
    from rallypoint.net.listening import Address

__all__ = ["Line", "dial"]

SETTLED_S = 1.0  # a connection that held so long is dialled again at once
SHORT_LIVES = 3  # and one that did not, so many times in a row


class Line:
    """`poll` is for waiting. `openings` counts how often the line was opened: whoever asked something before must ask again."""

    def __init__(self, host: str, port: int, make_handshake: Callable[[], ClientHandshake], dial: Dial, now: float) -> None:
        self.name = host_port(host, port)
        self.poll = select.epoll()
        self.openings = 0
        self.incarnation = ""
        self.token = ""  # of the session that the latest welcome began
        self.unreachable_since: float | None = now
        self.dialler = Dialler(host, port, make_handshake, dial, self.poll)
        self._link: Link | None = None  # while it is open
        self._opened_at = 0.0
        self._short_lives = 0
        self._local_address = ""

    @property
    def is_open(self) -> bool:
        return self.unreachable_since is None

    @property
    def trouble(self) -> str:
        return "" if self.is_open else self.dialler.trouble

    @property
    def refused_since(self) -> float | None:
        return self.dialler.refused_since

    def wake_at(self) -> float:
        """When to `pump` although nothing comes."""
        return math.inf if self.is_open else self.dialler.wake_at()

    @property
    def home(self) -> Address | None:
        """Where the store was found."""
        return self.dialler.home

    def local_address(self) -> str:
        """As of the latest welcome."""
        return self._local_address

    def wait(self, wait_s: float) -> None:
        self.poll.poll(max(0.0, wait_s))

    # --- at work -----------------------------------------------------------------------------------------------------------

    def send(self, body: bytes) -> None:
        """Only while it is open. It goes out with the next `flush` or `pump`."""
        assert self._link is not None
        self._link.send(body)

    def flush(self, now: float) -> None:
        try:
            if self._link is not None:
                self._link.flush()
                self._link.watch(self.poll)
        except LinkBroken as broken:
            self._break(broken, now)

    def pump(self, now: float) -> list[bytes]:
        """Do what can be done now; what has come. Raises RefusedError or StoreGoneError when there is no more hope."""
        try:
            return self._dialled(now) if self._link is None else self._received(self._link, now)
        except FrameError as error:
            self._end_if_hopeless(f"what answers there is not a rallypoint store that this node can talk to ({error})")
            self._break(LinkBroken(str(error)), now)
        except HandshakeRefused as refused:
            self._end_if_hopeless(str(refused))
            self._hang_up()
            raise StoreGoneError(f"the store at {self.name} has ended, and another answers there: {refused}") from None
        return []

    def break_off(self, reason: str, now: float) -> None:
        """It is of no use any more; dial again."""
        self._break(LinkBroken(reason), now)

    def close(self) -> None:
        self._hang_up()
        self.dialler.close()
        self.poll.close()

    def _received(self, link: Link, now: float) -> list[bytes]:
        try:
            bodies = link.pump()
            link.watch(self.poll)
        except LinkBroken as broken:
            self._break(broken, now)
            return self._dialled(now)
        return bodies

    def _dialled(self, now: float) -> list[bytes]:
        found = self.dialler.pump(now)
        if found is None:
            return []
        self._link, bodies = found
        self._note_welcome(self._link, now)
        return bodies

    def _note_welcome(self, link: Link, now: float) -> None:
        assert link.welcome is not None
        if self.incarnation not in ("", link.welcome.incarnation):
            raise HandshakeRefused("it was restarted, and has forgotten the job")
        self.incarnation, self.token = link.welcome.incarnation, link.welcome.session
        self._local_address = link.local_address()
        self.unreachable_since = None
        self.openings += 1
        self._opened_at = now

    # --- breaks ------------------------------------------------------------------------------------------------------------

    def _break(self, broken: LinkBroken, now: float) -> None:
        self._hang_up()
        if self.is_open:
            self.unreachable_since = now
            self._short_lives = 0 if now - self._opened_at >= SETTLED_S else self._short_lives + 1
            self.dialler.start_anew(broken, max(0, self._short_lives - SHORT_LIVES), now)

    def _end_if_hopeless(self, reason: str) -> None:
        """Until somebody has welcomed us a refusal is final: it is the answer to who we are."""
        if not self.openings:
            self._hang_up()
            raise RefusedError(f"the store at {self.name} refuses this node: {reason}") from None

    def _hang_up(self) -> None:
        self.dialler.hang_up_all()
        if self._link is not None:
            self._link.close(self.poll)
            self._link = None
