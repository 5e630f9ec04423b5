"""A few nodes on a stage: every step of the protocol is done by hand, so that a test can say exactly what happens when.

There is no network: what a node asks is answered when the test lets it, and what it is told waits until the test passes it on.
"""

from __future__ import annotations

from rallypoint.coordination.keyspace import Keyspace
from rallypoint.coordination.model import Event, Outcome, Put, Read, Request, Snapshot, Transaction
from rallypoint.protocol import job_records as job
from rallypoint.protocol import session
from rallypoint.protocol.generation import Policy
from rallypoint.protocol.leader import STATUS_INTERVAL_S
from rallypoint.protocol.participant import Former, Joining, Participant
from rallypoint.protocol.restarts import RestartPolicy
from rallypoint.protocol.verdict import NodeReport, WorkerFailure

__all__ = ["Stage"]

Answer = Outcome | Snapshot | None
STEPS = 1000


class Stage:
    """The nodes of one job by their names, their store, and the time, which is the same for all of them."""

    def __init__(self, policy: Policy, restarts: RestartPolicy | None = None, settings: dict[str, object] | None = None) -> None:
        self.policy, self.restarts = policy, restarts or RestartPolicy(3)
        self.settings = settings or {"protocol": 1}
        self.store = Keyspace()
        self.now = 100.0
        self.nodes: dict[str, Participant] = {}
        self.leases: dict[str, int] = {}
        self.mail: dict[str, list[Event]] = {}  # what each has not been told yet
        self.deaf: set[str] = set()  # who is told nothing
        self.mute: set[str] = set()  # who asks nothing
        self._watches: dict[str, set[str]] = {}

    # Nodes come and go.

    def join(
        self,
        *names: str,
        is_ready: bool = True,
        former: Former | None = None,
        memory: job.Memory | None = None,
        looks_every_s: float = STATUS_INTERVAL_S,
        **about: object,
    ) -> None:
        for name in names:
            lease = self.leases[name] = self.store.grant(1e9, self.now)
            stable, _, _ = name.partition("#")
            record = job.NodeRecord(**{
                "name": stable, "address": f"{stable}.example", "port": 0, "role": "default", "workers": 2,
                "ready_after": job.NOT_READY, **about,
            })  # fmt: skip
            joining = Joining(name, lease, record, self.settings, self._mismatch, self.policy, self.restarts, former, memory)
            self.nodes[name] = Participant(joining.replace(status_interval_s=looks_every_s))
            self.mail[name], self._watches[name] = [], set()
            if is_ready:
                self.nodes[name].ready(self.now, 1000 + len(self.nodes))

    @staticmethod
    def _mismatch(ours: dict[str, object], theirs: dict[str, object]) -> str | None:
        return None if ours == theirs else f"{ours} is not {theirs}"

    def lose(self, name: str, cause: str = "expired") -> None:
        """The lease of that node ends; it does nothing any more."""
        self.mute.add(name)
        self.deaf.add(name)
        self.store._end(self.leases[name], cause)
        self._deliver()

    def come_back(self, name: str) -> None:
        """Its lease had ended, but not its fence."""
        lease = self.leases[name] = self.store.grant(1e9, self.now)
        self._watches[name].clear()
        self.nodes[name].come_back(lease)

    # Single steps.

    def serve(self, name: str, request: Request | None = None) -> tuple[Request, Answer]:
        """The store does what that node asks next; the answer is on its way."""
        request = request or self.nodes[name].next_request(self.now)
        assert request is not None, f"{name} has nothing to ask"
        answer: Answer = None
        if isinstance(request, Transaction):
            answer = self.store.transact(request)
        elif isinstance(request, Read):
            answer = self.store.read(request.prefix)
        else:
            self._watches[name].add(request.prefix)
            self.mail[name] += self.store.changes(request.prefix, request.from_revision)
        self._deliver()
        return request, answer

    def ask(self, name: str, request: Request | None = None) -> Request:
        """The same, and the answer arrives."""
        request, answer = self.serve(name, request)
        self.nodes[name].replied(request, answer, self.now)
        return request

    def put(self, key: str, value: bytes) -> None:
        """Written by somebody who is no node of the job."""
        self.store.transact(Transaction((), (Put(key, value),)))
        self._deliver()
        self.settle()

    def tell(self, name: str) -> None:
        """What has happened arrives at that node."""
        mail, self.mail[name] = self.mail[name], []
        for event in mail:
            self.nodes[name].see(event, self.now)

    def _deliver(self) -> None:
        for event in self.store.take_changes():
            for name, prefixes in self._watches.items():
                if any(event.key.startswith(prefix) for prefix in prefixes):
                    self.mail[name].append(event)

    # Many steps.

    def settle(self) -> None:
        """Everybody asks and is told until there is nothing left; a leader of many does not wait here."""
        for _ in range(STEPS):
            steps = [self._step(name) for name in self.nodes]
            if not any(steps):
                return
        raise AssertionError("they do not come to rest")

    def _step(self, name: str) -> bool:
        has_mail = name not in self.deaf and bool(self.mail[name])
        if has_mail:
            self.tell(name)
        node = self.nodes[name]
        if name in self.mute or (request := node.next_request(self.now)) is None:
            return has_mail
        self.ask(name, request)
        return True

    def pass_time(self, seconds: float) -> None:
        """Let time go by in small steps, with everybody acting as soon as it is due."""
        end = self.now + seconds
        self.settle()
        while (at := self._next_wake()) is not None and at <= end:
            self.now = max(self.now, at)
            self.settle()
        self.now = end
        self.settle()

    def _next_wake(self) -> float | None:
        times = [node.wake_at() for name, node in self.nodes.items() if name not in self.mute]
        return min((time for time in times if time is not None and time > self.now), default=None)

    # What there is to see.

    def news(self, name: str) -> list[session.News]:
        return [one for one in self.nodes[name].take_news() if not isinstance(one, session.Progress)]

    def kinds(self, name: str) -> list[str]:
        return [type(one).__name__ for one in self.news(name)]

    def seats(self) -> dict[str, int]:
        """The group ranks of whoever has a seat."""
        return {name: node.seat.group_rank for name, node in self.nodes.items() if node.seat is not None}

    def generation(self) -> job.Generation:
        (item,) = self.store.read(job.GENERATION).items
        return job.decode(job.Generation, item.value)

    def value(self, key: str) -> bytes | None:
        return next((item.value for item in self.store.read(key).items if item.key == key), None)

    def leader(self) -> str:
        return next(name for name, node in self.nodes.items() if node.leader is not None and name not in self.mute)

    # What nodes do.

    def ready(self, *names: str) -> None:
        for name in names:
            self.nodes[name].ready(self.now, 2000)

    def fail(self, name: str, message: str = "ValueError: bad luck", exitcode: int = 1) -> None:
        failure = WorkerFailure(0, 0, "default", name, 7, exitcode, message, 0.0)
        self.nodes[name].failed(NodeReport(name, 0, (failure,)))
