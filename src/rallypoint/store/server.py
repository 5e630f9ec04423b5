"""The embedded store's server, for the agent that hosts it: a thread that is started, waited for and stopped."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from rallypoint import outbox
from rallypoint.core.keyspace import Keyspace
from rallypoint.store.handshake import ServerHandshake, Welcome
from rallypoint.store.listening import address_of
from rallypoint.store.service import StoreService
from rallypoint.store.serving import ServingLoop

__all__ = ["CoordinationServer"]

INCARNATION_BYTES = 8
LOOK_AGAIN_S = 0.25


class CoordinationServer:
    """Serves the store of one job on sockets that listen already, which it owns from now on."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        run_id: str,
        secret: bytes | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        take_in_worker: Callable[[socket.socket, str], None] | None = None,
    ) -> None:
        """`take_in_worker` gets the connections of those who speak torch's TCPStore protocol; without it they are refused."""
        self.incarnation = os.urandom(INCARNATION_BYTES).hex()
        self.addresses = [address_of(sock) for sock in sockets]
        for sock in sockets:
            sock.setblocking(False)

        service = StoreService(Keyspace())

        def make_handshake(welcome: Welcome) -> ServerHandshake:
            return ServerHandshake(run_id, secret, welcome, service.token_of)

        self._clock = clock
        self._fewer = threading.Condition()
        self._loop = ServingLoop(sockets, service, make_handshake, self.incarnation, clock, self._notify, take_in_worker)
        self._thread = threading.Thread(target=self._run, name="rallypoint-store", daemon=True)
        self._farewell: str | None = None
        self._is_closed = False

    def start(self) -> None:
        self._thread.start()

    def wait_until_alone(self, deadline: float, except_for: int = 1) -> bool:
        """Wait, until `deadline` at the latest, until at most `except_for` clients are left; whether that is so.

        A node whose lease has ended is lost, even if its connection does not show it yet.
        """
        with self._fewer:
            while self._loop.living_count() > except_for:
                left_s = deadline - self._clock()
                if left_s <= 0:
                    return False
                self._fewer.wait(min(left_s, LOOK_AGAIN_S))  # nobody notifies of a lease that runs out
        return True

    def stop(self, linger_s: float = 0.0, reason: str = "its host has ended") -> None:
        """End the server once everybody has gone, or `linger_s` from now; who is left then is told the `reason`."""
        if self._farewell is not None:
            return
        self.wait_until_alone(self._clock() + linger_s, except_for=0)
        self._farewell = reason
        if self._thread.ident is None:
            self._close()
        else:
            self._wake()
            self._thread.join()
            outbox.settle()

    def _run(self) -> None:
        try:
            while self._farewell is None:
                self._loop.turn()
            self._loop.say_farewell(self._farewell)
        finally:
            self._close()

    def _wake(self) -> None:
        with self._fewer:
            if not self._is_closed:
                self._loop.wake()

    def _close(self) -> None:
        with self._fewer:
            self._is_closed = True
            self._loop.close()

    def _notify(self) -> None:
        with self._fewer:
            self._fewer.notify_all()
