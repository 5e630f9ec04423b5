"""What must always hold in the cluster, looked at whenever something happens that could break it.

It sees everything at once: the store as it is, and which workers really run, whatever anybody believes.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.world import NEVER, Violation, World

from rallypoint.coordination.keyspace import Keyspace
from rallypoint.coordination.model import Event, Item, Put
from rallypoint.protocol import job_records as job
from rallypoint.protocol import session
from rallypoint.protocol.restarts import CAUSES, Purse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.setup import Setup

__all__ = ["Era", "Oracle"]

KEYS_PER_NODE = 7
KEYS_OF_A_JOB = 26


class Era:
    """What one store has seen: from when it was opened until it was lost with its host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = 0
        self.generations: dict[int, job.Generation] = {}
        self.seats: dict[int, dict[str, job.Seat]] = {}
        self.signals: dict[int, job.Signal] = {}
        self.signal_at: dict[int, float] = {}
        self.succeeded: set[tuple[int, str]] = set()
        self.dones: dict[tuple[int, str], int] = {}  # and the revision at which the store learned it
        self.present: set[str] = set()
        self.leader: Item | None = None  # as it was when what is looked at was written; the store shows several changes at once
        self.failed: set[tuple[int, str]] = set()  # where a worker has failed, and in which generation
        self.leaving: set[tuple[int, str]] = set()  # who had told, while it was there, that it has notice to leave
        self.memories: dict[str, job.Memory] = {}
        self.knows = False  # whether a generation was formed here that goes on from one before it
        self.lost_at = NEVER


class Oracle:
    """The checks, and what they need to remember."""

    def __init__(self, world: World, setup: Setup) -> None:
        self.world, self.setup = world, setup
        self.agents: list[Agent] = []
        self.nodes: dict[str, Agent] = {}
        self.eras: dict[str, Era] = {}
        self.closed: job.Closed | None = None
        # Who wants to know what happens.
        self.notice: Callable[[str], None] = lambda scene: None
        self.on_change: Callable[[Event], None] = lambda event: None
        self.on_end: Callable[[], None] = lambda: None
        self.on_store_death: Callable[[], None] = lambda: None

    def store_began(self, name: str) -> None:
        """One that knows nothing."""
        self.era = self.eras[name] = Era(name)

    def era_of(self, agent: Agent) -> Era:
        """In which that agent lives, which may not have noticed yet that it is over."""
        return self.eras[agent.driver._store]

    @property
    def number(self) -> int:
        return self.era.number

    # What the store shows.

    def changed(self, changes: list[Event], keyspace: Keyspace) -> None:
        for event in changes:
            key, item = event.key, event.item
            self.on_change(event)
            if key == job.LEADER:
                self.era.leader = item
            if item is None:
                if key.startswith("up/nodes/"):
                    self.era.present.discard(key[9:])
                    self.notice("gone")
                    self.world.note("store", "node gone", (key[9:], event.cause))
                    self.world.tally[f"nodes {event.cause}"] += 1
            elif key == job.GENERATION:
                self._formed(item, keyspace)
                self.notice("generation")
            elif key == job.CLOSED:
                self._closed(item)
            elif key == job.LEADER:
                self.world.note("store", "leader", item.value)
                self.world.tally["leaders"] += 1
                self.notice("leader")
            elif key.startswith("down/signal/"):
                self._signalled(item)
                self.notice("signal")
            elif key.startswith("up/done/"):
                self.world.note("store", "done", key[8:])
                number, _, node_id = key[8:].partition("/")
                self.era.dones.setdefault((int(number), node_id), event.revision)
                self.notice("done")
            elif key.startswith("up/drain/"):
                self._drains(key, job.decode(job.NodeDrain, item.value))
            elif key.startswith(job.MEMORIES):
                self._remembered(key, job.decode(job.Memory, item.value))
            elif key.startswith("up/left/"):
                self.era.present.discard(key.rpartition("/")[2])
            elif key.startswith("down/expelled/"):
                self.world.note("store", "expels", key[14:])
                self.world.tally["nodes expelled"] += 1
                self.notice("expelled")
            elif key.startswith("down/refused/"):
                self._refused(key.rpartition("/")[2])
            elif key.startswith("seats/"):
                self.notice("seats")
            elif key.startswith("up/nodes/"):
                self.era.present.add(key[9:])
                self.notice("ready")

    def _formed(self, item: Item, keyspace: Keyspace) -> None:
        generation = job.decode(job.Generation, item.value)
        number = generation.number
        self.world.note("store", "generation", (number, generation.attempt, generation.nodes, generation.why))
        self.world.tally["generations"] += 1
        newest = max([0, *(memory.number for memory in self.era.memories.values())])
        if number != max(self.era.number, newest) + 1:
            raise Violation(f"after generation {self.era.number}, and {newest} as is remembered, generation {number} was written")
        if self.closed is not None:
            raise Violation(f"generation {number} was formed after the job had ended")
        if self.era.number and self.era.number not in self.era.signals:
            raise Violation(f"generation {number} was formed although {self.era.number} was never told to stop")
        if self.era.leader is None or self.era.leader.create_revision != generation.attempt:
            raise Violation(f"generation {number} was formed in term {generation.attempt}, which is over")
        items = keyspace.read(job.seats_of_attempt(number, generation.attempt)).items
        seats = {item.key.rpartition("/")[2]: job.decode(job.Seat, item.value) for item in items}
        self._check_seats(generation, seats)
        self._check_purse(generation, seats)
        self._check_ranks_are_kept(seats)
        self._check_ranks_remembered(seats, newest)
        again = [one for one in seats if self.nodes[one].last_number >= number]
        if again:
            raise Violation(f"generation {number} was formed with {again}, of whom one had a seat in a later one, or in this")
        if newest > self.era.number:
            self.era.knows = True
            self.world.tally["generations that go on from another store's"] += 1
        elif not self.era.number and len(self.eras) > 1:
            self.world.tally["jobs begun anew, as nobody remembered in time"] += 1
        self.era.memories.clear()
        busy = [one for one in seats if self.nodes[one].is_alive and self.nodes[one].workers and self.nodes[one].node_id == one]
        if busy:
            raise Violation(f"generation {number} has {busy} as members, whose workers run")
        self.era.number = number
        self.era.generations[number], self.era.seats[number] = generation, seats
        self._check_keyspace(keyspace)

    def _check_seats(self, generation: job.Generation, seats: dict[str, job.Seat]) -> None:
        policy, count = self.setup.policy, len(seats)
        if count != generation.nodes:
            raise Violation(f"generation {generation.number} says {generation.nodes} nodes, but has {count} seats")
        if not policy.min_nodes <= count <= policy.max_nodes or count % policy.node_unit:
            raise Violation(f"a generation of {count} nodes, where {policy} allows none")
        order = sorted(seats.items(), key=lambda pair: pair[1].group_rank)
        first_rank, in_role = 0, dict.fromkeys(self.setup.roles, 0)
        for rank, (node_id, seat) in enumerate(order):
            if self.nodes[node_id].is_stranger:
                raise Violation(f"{node_id} has a seat, and other settings than the job")
            record = self.nodes[node_id].record
            expected = (rank, count, first_rank, generation.world_size, in_role[record.role], record.name)
            found = (seat.group_rank, seat.group_world_size, seat.first_rank, seat.world_size, seat.first_role_rank, seat.name)
            if found != expected or (seat.generation, seat.attempt) != (generation.number, generation.attempt):
                raise Violation(f"{node_id} has {seat}, but {expected} is what fits generation {generation.number}")
            first_rank += record.workers
            in_role[record.role] += record.workers
        sizes = all(seat.role_world_size == in_role[self.nodes[node_id].record.role] for node_id, seat in seats.items())
        if first_rank != generation.world_size or not sizes:
            raise Violation(f"generation {generation.number}: ranks do not add up to {generation.world_size}")
        if self.nodes[order[0][0]].record.address != generation.master_addr:
            raise Violation(f"generation {generation.number}: {generation.master_addr} is not the address of rank 0")

    def _check_purse(self, generation: job.Generation, seats: dict[str, job.Seat]) -> None:
        new, restarts = generation.purse, self.setup.restarts
        old = self.era.generations[self.era.number].purse if self.era.number else Purse()
        newest = max(self.era.memories.values(), key=lambda memory: memory.number, default=None)
        if newest is not None and newest.number > self.era.number:
            old = old.most(newest.purse)
            if not self.era.number and new.losses != old.losses + 1:
                raise Violation(f"the host was lost, and that was not counted once: {old}, then {new}")
        counts = ("failures", "losses", "departures", "joins", "preemptions")
        if any(getattr(new, name) < getattr(old, name) for name in counts):
            raise Violation(f"what was spent became less: {old}, then {new}")
        explained = ("failures", "losses", "departures", "preemptions")
        is_paid = any(getattr(new, name) > getattr(old, name) for name in explained)
        if self.era.number and self.era.signals[self.era.number].kind == "failure" and not is_paid:
            raise Violation(f"a failure ended generation {self.era.number}, and nobody paid for it: {old}, then {new}")
        era = self.era
        silent = [node_id for node_id in seats if (era.number, node_id) in era.failed]
        if silent and not is_paid:
            raise Violation(f"workers of {silent} failed in generation {era.number}, and nobody paid for it: {old}, then {new}")
        paid = len(new.recent_ages_s) if restarts.window_s else new.failures
        if paid > restarts.max_restarts:
            raise Violation(f"{paid} failures were paid, of {restarts.max_restarts} restarts")
        self._check_limits(new)
        self._check_preemptions(old, new)
        self.world.tally["restarts"] += new.failures - old.failures

    def _check_limits(self, new: Purse) -> None:
        restarts, most = self.setup.restarts, self.setup.restarts.max_membership_changes
        if most is not None and new.losses + new.departures + new.joins > most:
            raise Violation(f"{new}, where {most} membership changes are allowed")
        for _, counter, limit in CAUSES:
            own = getattr(restarts, limit)
            if counter not in ("failures", "hangs") and own is not None and getattr(new, counter) > own:
                raise Violation(f"{new}, where {limit} is {own}")

    def _check_preemptions(self, old: Purse, new: Purse) -> None:
        """Who had notice is charged to no other budget, and nobody else to that one."""
        era, number = self.era, self.era.number
        gone = [one for one in era.seats.get(number, ()) if one not in era.present and (number, one) not in era.dones]
        charged = new.losses + new.departures > old.losses + old.departures
        if number and gone and all((number, one) in era.leaving for one in gone) and charged:
            raise Violation(f"only {gone}, who had notice, are gone, but it was charged otherwise: {old}, then {new}")
        if new.preemptions > old.preemptions and number not in {told_in for told_in, _ in era.leaving}:
            raise Violation(f"nobody had notice in generation {number}, and a preemption was paid: {old}, then {new}")
        self.world.tally["preemptions"] += new.preemptions - old.preemptions

    def _drains(self, key: str, told: job.NodeDrain) -> None:
        _, _, number, node_id = key.split("/")
        if told.is_leaving and node_id in self.era.present:
            self.era.leaving.add((int(number), node_id))

    def _check_ranks_are_kept(self, seats: dict[str, job.Seat]) -> None:
        before = self.era.seats.get(self.era.number, {})
        if self.setup.hints == "explicit":
            return
        for node_id, seat in seats.items():
            old = before.get(node_id)
            if old is not None and old.group_rank < len(seats) and seat.group_rank != old.group_rank:
                raise Violation(f"{node_id} had rank {old.group_rank} and got {seat.group_rank} of {len(seats)}")

    def _check_ranks_remembered(self, seats: dict[str, job.Seat], newest: int) -> None:
        if newest <= self.era.number or self.setup.hints == "explicit" or self.era.number:
            return
        for node_id, memory in self.era.memories.items():
            rank = memory.group_rank
            is_kept = node_id not in seats or not 0 <= rank < len(seats) or seats[node_id].group_rank == rank
            if memory.number == newest and not is_kept:
                raise Violation(f"{node_id} had rank {rank} in the last store, and got {seats[node_id].group_rank}")

    def _remembered(self, key: str, memory: job.Memory) -> None:
        """Only what was so is remembered, and only what the store does not know."""
        self.world.note("store", "is told of", memory)
        self.world.tally["memories"] += 1
        self.era.memories[key.rpartition("/")[2]] = memory
        real = [era.generations[memory.number] for era in self.eras.values() if memory.number in era.generations]
        if not any(self._counts(one.purse) == self._counts(memory.purse) and one.nodes == memory.nodes for one in real):
            raise Violation(f"{key} tells of {memory}, and {real} were formed")

    @staticmethod
    def _counts(purse: Purse) -> tuple[int, ...]:
        return purse.failures, purse.losses, purse.departures, purse.joins, purse.preemptions

    def _check_keyspace(self, keyspace: Keyspace) -> None:
        keyspace.check()
        if len(keyspace) > KEYS_OF_A_JOB + KEYS_PER_NODE * len(self.agents):
            raise Violation(f"the store holds {len(keyspace)} keys: {keyspace._keys}")

    def _signalled(self, item: Item) -> None:
        number = int(item.key.rpartition("/")[2])
        signal = job.decode(job.Signal, item.value)
        self.world.note("store", "signal", (number, signal.kind, signal.why))
        self.world.tally[f"ended by {signal.kind}"] += number == self.era.number
        if number == self.era.number and number in self.era.signals:
            raise Violation(f"generation {number} was told {self.era.signals[number]}, and then {signal}")
        self.era.signals.setdefault(number, signal)
        self.era.signal_at.setdefault(number, self.world.now)

    def _closed(self, item: Item) -> None:
        closed = job.decode(job.Closed, item.value)
        self.world.note("store", "closed", (closed.kind, closed.why))
        if self.closed is not None:
            raise Violation(f"the job had ended as {self.closed}, and then as {closed}")
        self.closed = closed
        self.world.tally[f"jobs {closed.kind}"] += 1
        if closed.kind == "failed" and " joined; " in closed.why and self.era.signals[self.era.number].kind == "join":
            raise Violation(f"a joiner ended the job: {closed.why}")
        if closed.kind == "failed" and " left after notice; " in closed.why and "max_preemptions" not in closed.why:
            raise Violation(f"a preemption ended the job: {closed.why}")
        if closed.kind == "finished":
            era = self.era
            idle = [node_id for node_id in era.seats[era.number] if (era.number, node_id) not in era.succeeded]
            if idle:
                raise Violation(f"the job has finished, but the workers of {idle} in generation {era.number} have not")

    def _refused(self, node_id: str) -> None:
        """Somebody else holds its rank; now and then that one has died, and its lease has not ended yet."""
        rank = self.nodes[node_id].record.rank_hint
        living = [one for one in self.agents if one.is_alive and one.record.rank_hint == rank and one is not self.nodes[node_id]]
        self.world.note("store", "refuses", node_id)
        self.world.tally["second holders refused" if living else "second holders refused for the sake of a dead one"] += 1

    def store_died(self) -> None:
        self.world.tally["stores lost"] += 1
        self.era.lost_at = self.world.now
        self.on_store_death()

    # What agents do.

    def joins(self, agent: Agent) -> None:
        self.nodes[agent.node_id] = agent

    def seated(self, agent: Agent, seat: job.Seat, generation: job.Generation) -> None:
        self.world.note(agent.name, "has a seat", (seat.generation, seat.group_rank))
        self.notice("seat")
        era = self.era_of(agent)
        if era.generations.get(seat.generation) != generation or era.seats[seat.generation].get(agent.node_id) != seat:
            raise Violation(f"{agent.name} took {seat} of {generation}, which is not what was formed")
        agent.last_number = seat.generation

    def takes_seat(self, agent: Agent, seat: job.Seat) -> None:
        """No workers are started for a generation that their agent was told to be over."""
        agent.workers_in = agent.driver._store
        for word in agent.driver.peek():
            if isinstance(word, session.Fenced) or (isinstance(word, session.Regroup) and word.generation == seat.generation):
                raise Violation(f"{agent.name} takes its seat in generation {seat.generation}, but was told: {word}")

    def writes(self, agent: Agent, store: str) -> None:
        if agent.driver._store != store:
            raise Violation(f"{agent.name} writes into {store}, which it takes for {agent.driver._store}")

    def signal_sent(self, agent: Agent, put: Put, is_own: bool, told: int) -> None:
        """A member that is done, as far as the leader was told, is no loss, and lets nobody join any more; nor does it matter
        if one that is done departs, which that one writes itself.
        """
        number = int(put.key.rpartition("/")[2])
        kind = job.decode(job.Signal, put.value).kind
        era = self.era_of(agent)
        seats = era.seats.get(number, {})
        done = [one for one in seats if (number, one) in era.dones and (is_own or era.dones[number, one] <= told)]
        if kind == "join" and done:
            raise Violation(f"{agent.name} ends generation {number} for a joiner, knowing that {done} are done")
        gone = [agent.node_id] if is_own else [one for one in seats if one not in era.present]
        # Where nobody is gone, a leader was deposed while the one it missed came back: the store refuses its signal.
        if kind in ("loss", "departure", "sick") and number == era.number and gone and set(gone) <= set(done):
            raise Violation(f"{agent.name} ends generation {number} for a loss, but whoever is gone was done")

    def lost_its_lease(self, agent: Agent, lease: int) -> None:
        """Nobody takes a lease for ended that the store still has."""
        if agent.engine.incarnation == agent.driver._store and agent.engine.keyspace.has_lease(lease):
            raise Violation(f"{agent.name} takes its lease {lease} for ended, which lives")

    def workers_start(self, agent: Agent, generation: int) -> None:
        self.world.tally["worker groups"] += 1
        self.notice("started")
        era = self.eras[agent.workers_in]
        for other in self.agents:
            if not other.workers or other is agent or (other.workers, other.workers_in) == (generation, agent.workers_in):
                continue
            if other.workers_in != agent.workers_in and self._may_overlap(era, self.eras[other.workers_in]):
                self.world.tally["workers beside those of a store that nobody remembered in time"] += 1
                continue
            raise Violation(
                f"{agent.name} starts workers of generation {generation} in {agent.workers_in}"
                f" while those of {other.workers} in {other.workers_in} may run at {other.name}"
            )

    def _may_overlap(self, era: Era, other: Era) -> bool:
        """Where nobody who remembers has come in time, for a fence at most; a store that knows keeps them apart."""
        order = list(self.eras.values())
        knows, fence_s = max(era, other, key=order.index).knows, self.setup.fence_s * 1.02 + 0.5
        return not knows and self.world.now < min(era.lost_at, other.lost_at) + fence_s

    def workers_succeeded(self, agent: Agent, generation: int) -> None:
        self.eras[agent.workers_in].succeeded.add((generation, agent.node_id))

    def worker_failed(self, agent: Agent, generation: int) -> None:
        self.world.tally["worker failures"] += 1
        self.eras[agent.workers_in].failed.add((generation, agent.node_id))

    def ended(self, agent: Agent) -> None:
        kind = {True: "succeeded", False: "failed", None: "killed"}[agent.succeeded]
        self.world.tally[f"agents {kind}"] += 1
        self.on_end()
