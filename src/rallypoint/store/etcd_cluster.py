"""What all connections of one client know about the cluster: which endpoint serves, who we are there, and which cluster it is."""

from __future__ import annotations

import random
import threading
import time

from rallypoint.store.bell import Bell
from rallypoint.store.etcd_access import EtcdAccess, tls_context
from rallypoint.store.etcd_errors import Failure
from rallypoint.store.etcd_http import HttpConnection
from rallypoint.store.etcd_words import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rallypoint.store.etcd_words import Fields

    Clock = Callable[[], float]

__all__ = ["EtcdCluster"]


class EtcdCluster:
    """Used by all threads of one client. `home` is the endpoint that serves it; the first is drawn, so that clients spread."""

    def __init__(self, access: EtcdAccess, clock: Clock = time.monotonic) -> None:
        if not access.endpoints:
            raise ValueError("an etcd cluster needs at least one endpoint")
        self.access = access
        self.clock = clock
        self.names = access.names()
        self.home = random.randrange(len(access.endpoints))
        self.id = 0  # of the cluster; 0 until it has answered
        self.local_address = ""
        self.token: str | None = None  # stands for user and password; "" where the cluster asks for none
        self.on_move: Callable[[], None] = lambda: None  # called, from any thread, when the home is another one
        self._lock = threading.Lock()
        self._suspects: set[int] = set()  # endpoints that were of no use when they were asked last
        self._tls = tls_context(access)

    def order(self) -> list[int]:
        """All endpoints, in the order in which to try them: the home first, and those that were of no use last."""
        count, suspects = len(self.names), frozenset(self._suspects)
        return sorted(range(count), key=lambda index: (index in suspects, (index - self.home) % count))

    def open(self, index: int, deadline: float, interrupt: Bell | None) -> HttpConnection:
        """A new connection to one endpoint."""
        return HttpConnection(self.access.endpoints[index], self._tls, deadline, interrupt, self.clock)

    def adopt(self, index: int) -> None:
        """This endpoint has served us, after those before it in the order did not."""
        with self._lock:
            self._suspects.discard(index)
            has_moved, self.home = self.home != index, index
        if has_moved:
            self.on_move()

    def suspect(self, index: int) -> None:
        """This endpoint was of no use."""
        with self._lock:
            self._suspects.add(index)

    def forget_token(self, token: str | None) -> None:
        """It was refused; whoever needs one asks for another."""
        with self._lock:
            if self.token == token:
                self.token = None

    def check_id(self, answer: Fields) -> None:
        """There is one cluster, the one that has answered first."""
        header = answer.get("header")
        found = number(header, "cluster_id") if type(header) is dict else 0
        with self._lock:
            self.id = self.id or found
        if found not in (0, self.id):
            raise Failure("another etcd cluster answers there", is_final=True, is_other_cluster=True)
