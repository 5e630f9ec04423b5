"""A job's place in a back end that somebody else has written: one cell of bytes with a version."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress

from rallypoint.coordination.cell.engine import CellCoordination
from rallypoint.coordination.engine import Coordination, CoordinationError
from rallypoint.coordination.model import Transaction
from rallypoint.net.endpoint import get_local_address
from rallypoint.protocol import job_records as job
from rallypoint.protocol.generation import clearing
from rallypoint.rendezvous.place import Place
from rallypoint.rendezvous.torch_stores import torch_distributed
from rallypoint.store.prefix_store import PrefixStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.coordination.cell.cell import Backend

__all__ = ["CellPlace"]

CONNECT_S = 10.0
CLEAR_S = 5.0


class CellPlace(Place):
    """The cell of one job. `store` is what the nodes share beside it; each generation has a part of it."""

    def __init__(self, backend: Backend, backend_name: str, run_id: str, store: Any) -> None:
        super().__init__(f"the back end {backend_name!r}")
        self._backend = backend
        self._run_id = run_id
        self._shared = store

    def connect(
        self, lease_s: float, timeout_s: float, refusal_timeout_s: float, pause: Callable[[float], bool]
    ) -> tuple[Coordination, int] | None:
        """A back end that cannot be reached at first is not waited for: whoever made it has waited."""
        if self._identity:
            return super().connect(lease_s, timeout_s, refusal_timeout_s, pause)
        return self._try_once(lease_s, time.monotonic())

    def open_store(self, generation: job.Generation) -> Any:
        return _part_of(self._shared, f"torch.rendezvous.{self._run_id}.{generation.number}.{generation.attempt}")

    @property
    def is_host(self) -> bool:
        return False

    @property
    def _connect_timeout_s(self) -> float:
        return CONNECT_S

    def _new_engine(self) -> Coordination:
        return CellCoordination(self._backend)

    def _open(self, engine: Coordination, deadline: float) -> None:
        assert isinstance(engine, CellCoordination)
        engine.connect(max(deadline, time.monotonic() + CONNECT_S))
        if not self._identity:
            clear_if_dead(engine)

    def advertised_address(self, engine: Coordination) -> str:
        return get_local_address()

    def close(self, close_timeout_s: float) -> None:
        """The last one to leave takes the job's keys along, unless it was closed for good."""
        if self._identity and self._engine is not None and self._engine.connection().unreachable_since is None:
            engine = self._new_engine()
            with suppress(CoordinationError):  # what is left is cleared when the job begins anew
                clear_if_dead(engine)
            engine.close()


def clear_if_dead(engine: Coordination) -> None:
    """Delete what is left of a job of which no node is alive. One that somebody has closed stays closed, as torch's do."""
    left = engine.read("", time.monotonic() + CLEAR_S)
    closed = next((item for item in left.items if item.key == job.CLOSED), None)
    transaction = clearing(left, math.inf)  # nobody comes back here: the fence is as long as the lease
    if isinstance(transaction, Transaction) and (closed is None or job.decode(job.Closed, closed.value).kind != "closed"):
        engine.transact(transaction, time.monotonic() + CLEAR_S)


def _part_of(store: Any, prefix: str) -> Any:
    """A part of the store, of the same family: torch's own code takes only torch's stores."""
    torch = torch_distributed()
    is_torchs = torch is not None and isinstance(store, torch.Store)
    return torch.PrefixStore(prefix, store) if torch is not None and is_torchs else PrefixStore(prefix, store)
