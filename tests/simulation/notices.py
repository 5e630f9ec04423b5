"""Nodes that have notice to leave, in one of twenty runs: their workers and those of all others answer late, and in any order.

Chance here has a source of its own, so that all other runs are as they were; those of seeds that tests name are among them.
"""

from __future__ import annotations

from random import Random

from tests.simulation.world import Violation

from rallypoint.coordination.model import Event
from rallypoint.protocol import agent_machine, session
from rallypoint.protocol import job_records as job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.cluster import Cluster

__all__ = ["Notices"]

SHARE = 0.05
SOURCE = 16
MOST = 4
TOGETHER_S = 2.0


class Notices:
    """Gives them, answers for workers, and checks that all save at one step that nobody has passed."""

    def __init__(self, cluster: Cluster, seed: int | str) -> None:
        self.cluster, self.world, self.random = cluster, cluster.world, Random(f"{SOURCE} notices {seed}")
        self.told: dict[tuple[int, str], job.NodeDrain] = {}  # as a node has last said it, whether or not it has arrived
        self.rulings: dict[tuple[str, int], job.Ruling] = {}
        self.noticed: dict[str, int] = {}  # in which generation an agent was told to leave
        if self.random.random() < SHARE:
            for _ in range(self.random.randint(1, MOST)):
                at = self.random.uniform(1.0, cluster.setup.heal_at)
                for _ in range(self.random.choice((1, 1, 2, 9))):  # sometimes many are told at once
                    self.world.at(at + self.random.uniform(0.0, TOGETHER_S), self._give)

    # What is done.

    def _give(self) -> None:
        runs = [one for one in self.cluster.agents if self._runs(one) and one.name not in self.noticed]
        if not runs:
            return
        agent, left_s = self.random.choice(runs), self.random.uniform(0.5, 20.0)
        assert agent.seat is not None
        generation = self.noticed[agent.name] = agent.seat.generation
        self.world.tally["notices"] += 1
        self.world.note(agent.name, "has notice to leave", generation)
        notice = job.Notice("notice", agent.name, left_s)
        agent.driver.tell(lambda participant: participant.noticed(generation, notice))
        self.world.after(left_s, self._leave, agent)

    def _leave(self, agent: Agent) -> None:
        if agent.is_alive and not agent.is_leaving:
            agent.terminate()

    def _runs(self, agent: Agent) -> bool:
        return agent.is_alive and not agent.is_leaving and isinstance(agent.state, agent_machine.Running)

    def hear(self, agent: Agent, news: session.Noticed | session.Ruled) -> None:
        """In the thread of the driver: workers are told, and answer in their own time."""
        if isinstance(news, session.Noticed):
            self.world.after(self.random.uniform(0.01, 1.0), self._answer, agent, news.generation, self.random.randrange(100))
            return
        if news.ruling.is_complete:
            self.world.tally["nodes that have all saved"] += 1
            if self.noticed.get(agent.name) == news.generation:
                self.world.after(0.0, self._leave, agent)
        elif news.ruling.step != job.NO_STEP:
            self.world.after(self.random.uniform(0.0, 3.0), self._answer, agent, news.generation, None)

    def _answer(self, agent: Agent, generation: int, step: int | None) -> None:
        """Up to which step workers have asked; or that they have saved."""
        if not self._runs(agent) or agent.seat is None or agent.seat.generation != generation:
            return
        key = generation, agent.node_id
        is_leaving = self.noticed.get(agent.name) == generation
        told = self.told.get(key, job.NodeDrain(is_leaving, agent.is_host, 0 if step is None else step))
        told = self.told[key] = told.replace(is_leaving=is_leaving, has_saved=step is None)
        agent.driver.tell(lambda participant: participant.drains(generation, told))

    # What must hold.

    def changed(self, event: Event) -> None:
        if event.item is None or not event.key.endswith("/ruling"):
            return
        number, ruling = int(event.key.split("/")[2]), job.decode(job.Ruling, event.item.value)
        self.world.note("store", "ruling", (number, ruling))
        oracle = self.cluster.oracle
        before = self.rulings.get((oracle.era.name, number), job.Ruling(job.NO_STEP, False))
        if (before.step not in (job.NO_STEP, ruling.step)) or (before.is_complete and not ruling.is_complete):
            raise Violation(f"in generation {number} it was ruled {before}, and then {ruling}")
        busy = [one for one in oracle.era.seats[number] if (number, one) not in oracle.era.dones]
        told = [self.told.get((number, one)) for one in busy]
        if ruling.step != job.NO_STEP and any(one is None or one.step >= ruling.step for one in told):
            raise Violation(f"in generation {number} all are to save at {ruling.step}, of which was told {told}")
        if ruling.is_complete and not all(one is not None and one.has_saved for one in told):
            raise Violation(f"in generation {number} all have saved, of which was told {told}")
        self.rulings[oracle.era.name, number] = ruling
        self.world.tally["rulings"] += 1
