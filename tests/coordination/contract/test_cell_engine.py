"""The engine in one cell of bytes does what every engine has to do, over the simplest of back ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
from tests.cells import MemoryCell

from rallypoint.coordination.cell.engine import CellCoordination
from rallypoint.coordination.engine import Coordination
from rallypoint.coordination.model import Put
from rallypoint.testing.coordination_contract import MOST_PUTS, CoordinationContract, do


@contextlib.contextmanager
def clients_of(backend: MemoryCell) -> Iterator[Callable[[], CellCoordination]]:
    with contextlib.ExitStack() as clients:

        def connect() -> CellCoordination:
            client = CellCoordination(backend)
            clients.callback(client.close)
            client.connect(time.monotonic() + 10)
            return client

        yield connect


class TestCellEngine(CoordinationContract):
    least_ttl_s = 1.0  # nobody gives back what a busy machine takes of it, as a server does
    can_compact = True

    @pytest.fixture
    def connect(self) -> Iterator[Callable[[], Coordination]]:
        with clients_of(MemoryCell()) as connect:
            yield connect

    def compact(self, client: Coordination) -> None:
        for _ in range(6):
            do(client, *(Put(f"filler/{number}", b"") for number in range(MOST_PUTS)))
