"""A node's line to its store, which mends itself: it dials, greets, notices a break, and dials again.

The first time every address of the store's name is tried, and the name is looked up anew each time, until somebody welcomes us.
From then on there is one store at one address: whoever else answers there is not it, and that is the end.
"""

from __future__ import annotations

import errno
import math
import random
import select
import socket
from collections.abc import Callable

from rallypoint.store.coordination import RefusedError, StoreGoneError
from rallypoint.store.frames import FrameError
from rallypoint.store.handshake import ClientHandshake, HandshakeRefused
from rallypoint.store.link import Link, LinkBroken, dial
from rallypoint.store.listening import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.store.listening import Address

    Dial = Callable[[Address], socket.socket]

__all__ = ["Line", "dial"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
CONNECT_S = 3.0
HANDSHAKE_S = 6.0  # a little more than the store allows
SETTLED_S = 1.0  # a connection that held so long is dialled again at once
SHORT_LIVES = 3  # and one that did not, so many times in a row


class Line:
    """`poll` is for waiting. `openings` counts how often the line was opened: whoever asked something before must ask again."""

    def __init__(self, host: str, port: int, make_handshake: Callable[[], ClientHandshake], dial: Dial, now: float) -> None:
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.poll = select.epoll()
        self.openings = 0
        self.incarnation = ""
        self.token = ""  # of the session that the latest welcome began
        self.trouble = "no answer yet"
        self.unreachable_since: float | None = now
        self.refused_since: float | None = None
        self._host, self._port = host, port
        self._make_handshake = make_handshake
        self._dial = dial
        self._link: Link | None = None
        self._link_events = 0
        self._addresses: list[Address] = []  # those still to be tried
        self._home: Address | None = None
        self._dialled: Address | None = None
        self._dial_at = 0.0
        self._opened_at = 0.0
        self._failures = 0
        self._short_lives = 0
        self._local_address = ""

    @property
    def is_open(self) -> bool:
        return self.unreachable_since is None

    def wake_at(self) -> float:
        """When to `pump` although nothing comes."""
        if self._link is None:
            return self._dial_at
        return math.inf if self.is_open else self._patient_until(self._link)

    @property
    def home(self) -> Address | None:
        """Where the store was found."""
        return self._home

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
                self._update_poll(self._link)
        except LinkBroken as broken:
            self._break(broken, now)

    def pump(self, now: float) -> list[bytes]:
        """Do what can be done now; what has come. Raises RefusedError or StoreGoneError when there is no more hope."""
        if self._link is None and now >= self._dial_at:
            self._begin(now)
        if self._link is None:
            return []
        try:
            bodies = self._link.pump()
            self._note_progress(self._link, now)
            self._update_poll(self._link)
        except LinkBroken as broken:
            self._break(broken, now)
        except FrameError as error:
            self._end_if_hopeless(f"what answers there is not a rallypoint store that this node can talk to ({error})")
            self._break(LinkBroken(str(error)), now)
        except HandshakeRefused as refused:
            self._end_if_hopeless(str(refused))
            self._hang_up()
            raise StoreGoneError(f"the store at {self.name} has ended, and another answers there: {refused}") from None
        else:
            return bodies
        if now >= self._dial_at:
            self._begin(now)
        return []

    def break_off(self, reason: str, now: float) -> None:
        """It is of no use any more; dial again."""
        self._break(LinkBroken(reason), now)

    def close(self) -> None:
        self._hang_up()
        self.poll.close()

    # --- dialling ----------------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        try:
            self._addresses = self._addresses or ([self._home] if self._home is not None else resolve(self._host, self._port))
            self._dialled = self._addresses.pop(0)
            self._link = Link(self._dial(self._dialled), self._make_handshake(), now)
        except OSError as error:  # the name is not known, or the network not there: both may come
            self._break(LinkBroken((error.strerror or str(error)).lower(), error.errno or 0), now)
        else:
            self._link_events = self._link.wanted_events
            self.poll.register(self._link.fd, self._link_events)

    def _note_progress(self, link: Link, now: float) -> None:
        if link.is_connected:
            self.refused_since = None
        if not self.is_open and link.welcome is not None:
            self._note_welcome(link, now)
        elif not self.is_open and now >= self._patient_until(link):
            stage = "answer" if link.is_connected else "connection"
            raise LinkBroken(f"no {stage} within {self._patient_until(link) - link.begun_at:g} s")

    def _note_welcome(self, link: Link, now: float) -> None:
        assert link.welcome is not None
        if self.incarnation not in ("", link.welcome.incarnation):
            raise HandshakeRefused("it was restarted, and has forgotten the job")
        self.incarnation, self.token = link.welcome.incarnation, link.welcome.session
        self._home = self._dialled
        self._local_address = link.local_address()
        self.unreachable_since = None
        self.trouble = ""
        self.openings += 1
        self._opened_at = now

    def _update_poll(self, link: Link) -> None:
        if link.wanted_events != self._link_events:
            self._link_events = link.wanted_events
            self.poll.modify(link.fd, self._link_events)

    @staticmethod
    def _patient_until(link: Link) -> float:
        return link.begun_at + (HANDSHAKE_S if link.is_connected else CONNECT_S)

    # --- breaks ------------------------------------------------------------------------------------------------------------

    def _break(self, broken: LinkBroken, now: float) -> None:
        self._hang_up()
        self.trouble = str(broken)
        self.refused_since = (self.refused_since or now) if broken.number == errno.ECONNREFUSED else None
        if self.is_open:
            self.unreachable_since = now
            self._short_lives = 0 if now - self._opened_at >= SETTLED_S else self._short_lives + 1
            self._failures = max(0, self._short_lives - SHORT_LIVES)
        if self._addresses:
            self._dial_at = now  # the next one
            return
        self._failures += 1
        self._dial_at = now + self._pause_s()

    def _pause_s(self) -> float:
        """Longer each time, and never the same for two nodes, so that those cut off together do not come back together."""
        if self._failures == 1 and self._home is not None:
            return 0.0
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10)) * random.uniform(0.5, 1.0)

    def _end_if_hopeless(self, reason: str) -> None:
        """Until somebody has welcomed us a refusal is final: it is the answer to who we are."""
        if not self.openings:
            self._hang_up()
            raise RefusedError(f"the store at {self.name} refuses this node: {reason}") from None

    def _hang_up(self) -> None:
        if self._link is not None:
            self.poll.unregister(self._link.fd)
            self._link.close()
            self._link = None
