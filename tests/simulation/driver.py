"""One agent's thread to the coordination store: the real rendezvous driver and its way to a session, watched by the oracle."""

from __future__ import annotations

from tests.simulation.client import Client, ReplicatedClient
from tests.simulation.world import Violation

from rallypoint.coordination.engine import Coordination, CoordinationError
from rallypoint.protocol import session
from rallypoint.protocol.session import Patience, Tenure
from rallypoint.rendezvous import driver, place
from rallypoint.rendezvous.dynamic import REFUSAL_TIMEOUT_S
from rallypoint.rendezvous.joining import Terms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.simulation.agent import Agent

__all__ = ["STORE_TIMEOUT_S", "Driver", "Place"]

STORE_TIMEOUT_S = 30.0


class Place(place.Place):
    """Where the store is, which is somebody else's part."""

    _goes_on = True

    def __init__(self, agent: Agent) -> None:
        super().__init__("store", STORE_TIMEOUT_S, agent.time, agent.setup.host_timeout_s)
        self._agent = agent

    def _new_engine(self) -> Client:
        return (ReplicatedClient if self._agent.setup.is_replicated else Client)(self._agent)

    def _open(self, engine: Client, deadline: float) -> None:
        engine.connect(deadline)

    def close(self, close_timeout_s: float) -> None:
        pass


class Driver(driver.Driver):
    """As in the product; what it hears is looked at before the agent does."""

    def __init__(self, agent: Agent) -> None:
        setup = agent.setup
        host_timeout_s = setup.host_timeout_s
        store_timeout_s = max(Terms(setup.ttl_s, setup.fence_s).patience_s(STORE_TIMEOUT_S), host_timeout_s)
        patience = Patience(setup.ttl_s, store_timeout_s, max(REFUSAL_TIMEOUT_S, host_timeout_s), host_timeout_s > 0)
        super().__init__(agent.open_session, patience, agent.licence, clock=agent.time, wait=agent.thread.wait)
        self._agent, self._world = agent, agent.world
        self._bell.on_set = lambda: self._world.after(0.0, agent.thread.look)
        self._out.on_set = lambda: self._world.after(0.0, agent.listen)
        self._fenced.on_set = lambda: self._world.after(0.0, agent.feel_fence)

    def _hear(self, one: session.Word) -> None:
        match one:
            case session.Seated(seat, generation):
                self._agent.oracle.seated(self._agent, seat, generation)
            case session.Fenced():
                self._world.tally["fences"] += 1
            case session.Lost(error):
                if not isinstance(error, CoordinationError):
                    raise Violation(f"the driver of {self._agent.name} broke down: {error!r}") from error
                self._world.tally["stores given up"] += 1
        super()._hear(one)

    def _end_session(self, tenure: Tenure, why: str) -> bool:
        self._world.note(self._agent.name, "session over", why)
        return super()._end_session(tenure, why)

    def _come_back(self, engine: Coordination, tenure: Tenure) -> bool:
        self._world.tally["leases lost"] += 1
        self._agent.oracle.lost_its_lease(self._agent, engine.held_lease)
        is_back = super()._come_back(engine, tenure)
        self._world.tally["nodes back within their fence"] += is_back and tenure.participant.seat is not None
        return is_back
