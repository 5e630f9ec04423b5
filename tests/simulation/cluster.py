"""A whole cluster from one seed: it is put together, let run, broken, healed, and must come to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from unittest.mock import patch

from tests.simulation.agent import Agent
from tests.simulation.engine import Engine
from tests.simulation.faults import Faults
from tests.simulation.network import Link
from tests.simulation.notices import Notices
from tests.simulation.oracle import Oracle
from tests.simulation.planted import planted
from tests.simulation.setup import Setup
from tests.simulation.threads import virtual_kernel
from tests.simulation.world import TRACED, Violation, World

from rallypoint.protocol import job_records as job
from rallypoint.protocol import leader

__all__ = ["Cluster", "Failure", "simulate"]

END_S = 140.0  # how long after the last fault everybody must have come to an end
STORE_LOSS_S = 12.0
SILENT_STORE_LOSS_S = 45.0
SHOWN = 60
LEAST_FAULTS = 10
LEAST_S = 60


class Failure(Exception):
    """A seed that breaks a rule, with everything that it takes to see why."""

    def __init__(self, seed: int, what: str, at: float, trace: list[str], bug: str) -> None:
        self.seed, self.what = seed, what
        planted = f" --bug {bug}" if bug else ""
        super().__init__(
            "\n".join(
                [
                    f"seed {seed} at {at:.6f} s: {what}",
                    *trace,
                    f"reproduce: python -m tests.simulation --seeds {seed}:{seed + 1} --trace{planted}",
                ]
            )
        )

    def __reduce__(self):
        return _rebuild, (self.seed, self.what, str(self))


def _rebuild(seed: int, what: str, text: str) -> Failure:
    failure = Failure(seed, what, 0.0, [], "")
    failure.args = (text,)
    return failure


class Cluster:
    """The agents of one job, and the store that they meet in."""

    def __init__(self, seed: int | str) -> None:
        self.world = World(seed)
        self.setup = Setup(self.world)
        self.setup.draw_limits(seed)
        self.oracle = Oracle(self.world, self.setup)
        self.stores = 0
        self._open_store()
        self.agents = self.oracle.agents
        self._started = 0
        self._expected = 0  # agents that will be started
        self._indexes: dict[str, int] = {}
        for index in range(self.setup.nodes):
            self._expected += 1
            self.world.after(self.world.between(0.0, 1.5), self._start, index, f"node{index}", None)
        self.faults = Faults(self)
        self.notices = Notices(self, seed)
        self.oracle.on_change = self.notices.changed
        self.oracle.notice = self.faults.notice
        self.oracle.on_end, self.oracle.on_store_death = self._look_whether_over, self._store_died
        self.world.at(self.setup.heal_at, self.faults.heal)

    def _open_store(self) -> None:
        """The first, or one that knows nothing in the place of one that is gone."""
        setup, world = self.setup, self.world
        self.stores += 1
        name = f"store {self.stores}"
        self.engine = Engine(world, setup.clock(world), setup.is_replicated, setup.turn_s, self.oracle, name)
        self.oracle.store_began(name)

    # Starting agents.

    def _start(
        self, index: int, name: str, record: job.NodeRecord | None, is_stranger: bool = False, is_sick: bool = False
    ) -> None:
        self._expected -= 1
        if self.oracle.closed is not None:  # whoever starts jobs starts no agents for one that is over
            self._look_whether_over()
            return
        world, setup = self.world, self.setup
        is_host = index == 0 and not setup.is_replicated
        link = Link(5e-5 if is_host else world.log_between(1e-4, 0.05), is_local=is_host)
        record = record or setup.record(world, name, index)
        self._started += 1
        self._indexes[name] = index
        world.note(name, "is started", self._started)
        clock = setup.clock(world)
        agent = Agent(world, self.engine, self.oracle, setup, record, link, clock, self._started, is_stranger, is_sick)
        agent.driver.on_drain = partial(self.notices.hear, agent)
        self.agents.append(agent)

    def start_again(self, agent: Agent, delay_s: float) -> None:
        """Whoever starts the agents starts it anew, under its name; not always."""
        if agent.is_host or not self.world.chance(0.85):
            return
        name = agent.record.name
        self._expected += 1
        self.world.after(delay_s, self._start, self._indexes[name], name, agent.record)

    def start_host_again(self, delay_s: float) -> None:
        """Whoever starts the agents starts the one at the endpoint anew, by the same command."""
        self._expected += 1
        self.world.after(delay_s, self._start_host_again)

    def _start_host_again(self) -> None:
        if self.oracle.closed is None:
            self.world.tally["hosts back"] += 1
            self.engine.is_silent = False  # its machine is there, and knows nothing of old connections
            self._open_store()
            for agent in self.agents:
                agent.engine = self.engine
        host = next(agent for agent in self.agents if agent.is_host)
        self._start(0, host.record.name, host.record)

    def start_new(self, is_stranger: bool, is_sick: bool = False) -> None:
        index = len(self._indexes)
        self._expected += 1
        self._start(index, f"node{index}", None, is_stranger, is_sick)

    # Running.

    def _look_whether_over(self) -> None:
        self.world.is_over = not self._expected and not any(agent.is_alive for agent in self.agents)

    def run(self) -> Counter[str]:
        try:
            with virtual_kernel(self.world):
                self.world.run(self.setup.heal_at + END_S)
        finally:
            for agent in self.agents:
                agent.thread.kill()
        waiting = [f"{one.name} ({type(one.state).__name__})" for one in self.agents if one.is_alive]
        if waiting:
            raise Violation(f"{', '.join(waiting)} did not come to an end; the leader waits: {self._leaders_wait()}")
        self.engine.keyspace.check()
        self._count()
        return self.world.tally

    def _store_died(self) -> None:
        """Everybody must notice that, and end; unless there is another one by then."""
        limit_s = (SILENT_STORE_LOSS_S if self.engine.is_silent else STORE_LOSS_S) + self.setup.host_timeout_s
        self.world.after(limit_s, self._look_who_is_late, self.engine, self.world.now, limit_s)

    def _look_who_is_late(self, engine: Engine, died_at: float, limit_s: float) -> None:
        if engine is not self.engine:
            return
        living = [one for one in self.agents if one.is_alive]
        late = [one.name for one in living if self.world.now > max(died_at, one.well_since()) + self._loss_s(one, limit_s)]
        if late:
            raise Violation(f"the store has been gone for {limit_s} s, and {', '.join(late)} have not ended")
        if living or self._expected:
            self.world.after(1.0, self._look_who_is_late, engine, died_at, limit_s)

    def _loss_s(self, agent: Agent, limit_s: float) -> float:
        """Who has not found the store yet takes its host for one that comes late."""
        return limit_s if agent.sessions else limit_s + self.setup.policy.join_timeout_s

    def _leaders_wait(self) -> str:
        participants = [one.participant for one in self.agents if one.is_alive]
        return "; ".join(one.leader.wait.why for one in participants if one is not None and one.leader is not None) or "none"

    def _count(self) -> None:
        tally = self.world.tally
        tally["jobs"] += 1
        tally["agents"] += len(self.agents)
        tally["virtual seconds"] += int(self.world.now)
        tally["jobs on a replicated store" if self.setup.is_replicated else "jobs on an embedded store"] += 1
        if self.oracle.closed is None:
            tally["jobs without an end of their own"] += 1


@contextmanager
def _quick_decoding() -> Iterator[None]:
    """All nodes decode the same few records, which cannot be changed; so each is decoded once."""
    decode = job.decode
    job.decode = lru_cache(maxsize=256)(decode)
    try:
        yield
    finally:
        job.decode = decode


def simulate(seed: int, bug: str = "", is_traced: bool = False) -> Counter[str]:
    """Run one seed; `Failure` if anything is wrong in it, with all of its trace if `is_traced`.

    A job that ends early is followed by another one, until it was enough: of time, and of faults.
    """
    tally: Counter[str] = Counter(seeds=1)
    with planted(bug), _quick_decoding():
        while tally["faults"] < LEAST_FAULTS or tally["virtual seconds"] < LEAST_S:
            cluster = Cluster(f"{seed}.{tally['jobs']}")
            with patch.object(leader, "SEATS_PER_TRANSACTION", cluster.setup.seats_at_once):
                tally.update(_simulate(cluster, seed, bug, is_traced))
    return tally


def _simulate(cluster: Cluster, seed: int, bug: str, is_traced: bool) -> Counter[str]:
    try:
        return cluster.run()
    except Failure:
        raise
    except (Exception, Violation) as error:  # a rule was broken, or the code under test broke down: either is what we look for
        what = str(error) if isinstance(error, Violation) else repr(error)
        raise Failure(seed, what, cluster.world.now, trace_lines(cluster.world, TRACED if is_traced else SHOWN), bug) from error


def trace_lines(world: World, most: int) -> list[str]:
    return [f"  {at:11.6f}  {who:<10} {what} {detail}" for at, who, what, detail in list(world.trace)[-most:]]
