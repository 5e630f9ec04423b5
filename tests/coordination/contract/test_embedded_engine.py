"""The embedded engine, over real sockets, does what every engine has to do; with a secret and without."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.embedded.server import CoordinationServer
from rallypoint.net.endpoint import open_listeners
from rallypoint.testing.coordination_contract import CoordinationContract


@contextlib.contextmanager
def clients_of_a_new_store(secret: bytes | None) -> Iterator[Callable[[], EmbeddedCoordination]]:
    sockets = open_listeners("127.0.0.1", 0, is_host=True, wildcard_allowed=False)
    assert sockets is not None
    server = CoordinationServer(sockets, "job", secret)
    server.start()
    with contextlib.ExitStack() as clients:
        clients.callback(server.stop)

        def connect() -> EmbeddedCoordination:
            client = EmbeddedCoordination(*server.addresses[0], "job", secret)
            clients.callback(client.close)
            client.connect(time.monotonic() + 10)
            return client

        yield connect


class TestEmbeddedEngine(CoordinationContract):
    can_compact = True

    @pytest.fixture
    def connect(self) -> Iterator[Callable[[], EmbeddedCoordination]]:
        with clients_of_a_new_store(secret=None) as connect:
            yield connect


class TestEmbeddedEngineWithSecret(CoordinationContract):
    can_compact = True

    @pytest.fixture
    def connect(self) -> Iterator[Callable[[], EmbeddedCoordination]]:
        with clients_of_a_new_store(secret=b"a job's secret") as connect:
            yield connect
