"""One key of an etcd cluster as a cell of bytes with a version, through the v3 API, without a thread of its own."""

from __future__ import annotations

import threading
import time
from math import ceil

from rallypoint.coordination.engine import CoordinationError, RefusedError
from rallypoint.coordination.etcd.access import EtcdAccess
from rallypoint.coordination.etcd.codec import Malformed, Words, number
from rallypoint.coordination.etcd.errors import EtcdError
from rallypoint.coordination.etcd.gateway import Caller
from rallypoint.coordination.etcd.talk import EtcdCluster
from rallypoint.coordination.model import Compare, Get, Item, Outcome, Put, Transaction

__all__ = ["EtcdCell"]

TXN, GRANT = "/v3/kv/txn", "/v3/lease/grant"


class EtcdCell:
    """The key `name` under `prefix`, which is gone when nobody has written it for `ttl_s`, or for half of that."""

    def __init__(self, access: EtcdAccess, prefix: str, name: str, ttl_s: float) -> None:
        self._words = Words(f"{prefix}/")
        self._cluster = EtcdCluster(access)
        self._caller = Caller(self._cluster)
        self._key, self._ttl_s = name, ttl_s
        self._timeout_s = access.read_timeout_s
        self._lease, self._lease_from = 0, 0.0
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    def close(self) -> None:
        """End the connection; the next call opens another."""
        self._caller.hang_up()

    def get(self) -> Item | None:
        return self._ask(Transaction((), (Get(self._key),))).items[0]

    def put(self, value: bytes, mod_revision: int) -> tuple[bool, Item | None]:
        """Write it if it was last changed at that revision, 0 if there is none; whether that was so, and what is there now."""
        with self._lock:
            lease = self._current_lease()
        unchanged = Compare(self._key, "mod", mod_revision)
        outcome = self._ask(Transaction((unchanged,), (Put(self._key, value, lease), Get(self._key)), (Get(self._key),)))
        return outcome.succeeded, outcome.items[0]

    def _current_lease(self) -> int:
        """One for all that is written within half of its time."""
        now = time.monotonic()
        if not self._lease or now >= self._lease_from + self._ttl_s / 2:
            answer = self._call(GRANT, {"TTL": str(ceil(self._ttl_s))}, is_repeatable=True)
            self._lease, self._lease_from = number(answer, "ID"), now
        return self._lease

    def _ask(self, transaction: Transaction) -> Outcome:
        changes_nothing = all(isinstance(operation, Get) for operation in transaction.then)
        with self._lock:
            answer = self._call(TXN, self._words.transaction(transaction), is_repeatable=changes_nothing)
        return self._words.outcome(answer)

    def _call(self, path: str, question: dict[str, object], *, is_repeatable: bool) -> dict[str, object]:
        """A lease that etcd has forgotten is asked for anew the next time."""
        try:
            return self._caller.call(path, question, time.monotonic() + self._timeout_s, is_repeatable=is_repeatable).fields
        except EtcdError as error:
            self._lease = 0 if error.is_lease_gone else self._lease
            raise RefusedError(f"etcd refuses the request: {error}") from error
        except Malformed as error:
            raise CoordinationError(f"etcd gives {error}") from error
