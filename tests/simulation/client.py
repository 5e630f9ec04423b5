"""One agent's way to the store: the real client, with its line and its dialler, over the simulated network.

Only the link is our own: it carries the bodies as they are, without frames, seals and the proofs of the handshake. What is asked
of a replicated store is asked in the same words, since its own client has threads; the longer fence is as it has it.
"""

from __future__ import annotations

import errno

from tests.simulation.network import HELLO, Connection
from tests.simulation.threads import Poll

from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.embedded.dialling import LinkBroken
from rallypoint.coordination.embedded.handshake import Welcome
from rallypoint.coordination.model import EndLease, Outcome, Transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.network import Testimony

__all__ = ["Client", "ReplicatedClient"]


class Link:
    """Stands for `dialling.Link`: one attempt to be connected with the store."""

    def __init__(self, agent: Agent, begun_at: float) -> None:
        self._agent, self._world, self._engine = agent, agent.world, agent.engine
        self.begun_at = begun_at
        self.is_connected = False
        self.welcome: Welcome | None = None
        self.secret: bytes | None = None
        self.readable = False
        self._connection: Connection | None = None
        self._bodies: list[bytes] = []
        self._output: list[bytes] = []
        self._broken: LinkBroken | None = None
        self._is_polled = self._is_closed = False
        if self._engine.answers_dial(agent.link) != "silent":
            self._world.after(2 * agent.link.latency_s(self._world), self._be_answered)

    # What the network does.

    @property
    def name(self) -> str:
        return self._agent.name

    def _be_answered(self) -> None:
        answer = "silent" if self._is_closed else self._engine.answers_dial(self._agent.link)
        if answer == "refused":
            self.be_broken("connection refused", errno.ECONNREFUSED)
        elif answer == "open":
            self.is_connected = True
            self._connection = Connection(self._world, self._agent.link, self, self._engine)
            self._connection.send_up(HELLO)
            self._wake()

    def be_broken(self, why: str, number: int = 0) -> None:
        self._broken = LinkBroken(why, number)
        self._let_go()
        self._wake()

    def receive(self, message: bytes | Welcome) -> None:
        if isinstance(message, Welcome):
            self.welcome = message
            self._agent.connection = self._connection
        else:
            self._bodies.append(message)
        self._wake()

    def _wake(self) -> None:
        self.readable = True
        self._agent.thread.look()

    def _let_go(self) -> None:
        if self._connection is not None and self._agent.connection is self._connection:
            self._agent.connection = None

    # What the client does.

    def watch(self, poll: Poll) -> None:
        if not self._is_polled:
            self._is_polled = True
            poll.register(self)

    def local_address(self) -> str:
        return self._agent.record.address

    def send(self, body: bytes) -> None:
        self._output.append(body)

    def flush(self) -> None:
        output, self._output = self._output, []
        for body in output:
            if self._broken is not None:
                raise self._broken
            self._connection.send_up(body)

    def pump(self) -> list[bytes]:
        if self._output:
            self.flush()
        if self._broken is not None and not self._bodies:
            raise self._broken
        self.readable = self._broken is not None
        bodies, self._bodies = self._bodies, []
        return bodies

    def close(self, poll: Poll) -> None:
        self._is_closed = True
        if self._is_polled:
            poll.unregister(self)
        self._let_go()
        if self._connection is not None:
            self._connection.close()


class Client(EmbeddedCoordination):
    """As in the product; the oracle sees what it asks."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        super().__init__("10.0.0.0", 29400, "job", None, clock=agent.time, poll=lambda: Poll(agent.thread))

    def _begin_link(self, address: object, now: float) -> Link:
        return Link(self._agent, now)

    def transact(self, transaction: Transaction, deadline: float) -> Outcome:
        self._agent.note_transaction(transaction, self._told_through())
        return super().transact(transaction, deadline)

    def _told_through(self) -> int:
        """Up to which revision this node has been told all that nodes say; what a leader may be expected to know."""
        watch = self._watches._watches.get("up/")
        return watch.next_revision - 1 if watch is not None else -1

    def on_break(self) -> None:
        super().on_break()
        world, trouble = self._agent.world, self._line.trouble
        world.note(self._agent.name, "connection broke", trouble)
        world.tally["breaks"] += 1
        world.tally["connections given up"] += trouble.startswith("no answer for")

    def testimony(self, will: Transaction | None = None) -> Testimony | None:
        """All that our warden needs is the number of the lease, and whose it is."""
        return None if super().testimony(will) is None else (("vouch", (self.identity(), self.held_lease)),)

    @property
    def held_lease(self) -> int:
        return self._lease.number if self._lease is not None else 0


class ReplicatedClient(Client):
    """Where the fence is longer than a lease, what that was good for counts after its end too; and wardens write themselves."""

    def valid_until(self) -> float:
        if self._lease is None:
            return super().valid_until()
        return self._lease.renewed_until() + self._agent.setup.fence_s - self._lease.ttl_s

    def may_return_until(self) -> float:
        return super().may_return_until() if self._lease is None else self.valid_until()

    def testimony(self, will: Transaction | None = None) -> Testimony | None:
        if super().testimony(will) is None:
            return None
        wills = [] if will is None else [will]
        return tuple(("do", one) for one in (*wills, Transaction((), (EndLease(self.held_lease),))))
