"""The event-driven side of a rendezvous: what an agent tells a job of several nodes, and what it hears from it.

Torch's handlers know ``next_rendezvous`` and a number of waiting nodes to be asked for again and again. A handler that
coordinates does more: it learns of a failure when it happens, tells of failures elsewhere, knows the ranks of all workers, and
decides on restarts for the job as a whole. An agent that finds such a handler uses it; any other agent can use it as a plain
one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable

from rallypoint.base.records import Value
from rallypoint.protocol import agent_machine
from rallypoint.protocol.worker_plan import WorkerRanks
from rallypoint.rendezvous.handler import RendezvousInfo, WakingHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.coordination.engine import Coordination
    from rallypoint.protocol.inquiry import Statement
    from rallypoint.protocol.job_records import ClosedKind, NodeDrain
    from rallypoint.protocol.pace import Pace
    from rallypoint.protocol.session import AskedFor, LastWord, Noticed, Ruled
    from rallypoint.protocol.verdict import NodeReport, Verdict

__all__ = ["CoordinatedHandler", "Introduction"]


class Introduction(Value):
    """What the other nodes have to know about the workers of this one; `alike` is what else must be the same on all, `is_watched`
    whether somebody here watches how things stand.
    """

    role: str
    workers: int
    max_restarts: int
    entry_point: str
    shutdown_timeout_s: float
    is_watched: bool = False
    alike: tuple[tuple[str, str | int], ...] = ()


class CoordinatedHandler(WakingHandler):
    """A handler through which the agents of a job act as one. Its `wakeup_fd` is readable when there is something to hear."""

    @abstractmethod
    def introduce(self, introduction: Introduction) -> None:
        """Before the first rendezvous: who we are."""

    @abstractmethod
    def poll_rendezvous(self) -> RendezvousInfo | None:
        """Take part in the next generation; None while it is not formed yet. No worker may run here when this is called first."""

    def standing(self) -> tuple[str, float | None]:
        """How things stand while this node waits, in words, and when it gives up, if it will; from any thread."""
        return "", None

    def tell_fitness(self, unfit: str) -> None:
        """Why this machine must not have a seat now; empty: it may. Without a word, it may."""
        return

    @abstractmethod
    def worker_ranks(self) -> tuple[WorkerRanks, ...]:
        """The ranks of our workers in the generation that was last formed with us."""

    def own_address(self) -> str:
        """Where the other nodes can reach this one, once we have a place among them; empty where that is not known."""
        return ""

    def whereabouts(self, timeout_s: float) -> tuple[str, str, str] | None:
        """The id of our record, our name and our address among the nodes, for which it waits so long; from any thread."""
        return None

    def settings_in_force(self) -> str:
        """The settings of the rendezvous and where each came from, in one line; empty where there are none."""
        return ""

    def generation(self) -> int:
        """The number of the generation that was last formed with us; 0 where generations have none."""
        return 0

    def formed_after(self) -> tuple[str, str] | None:
        """What ended the generation before that one, as a kind and in words; None where that is not known."""
        return None

    def last_word(self, group_rank: int | None) -> LastWord | None:
        """Whether we are the node that tells the world of the job's end; None where that is not known."""
        return None

    def verdict(self) -> Verdict | None:
        """On the failures that ended the job, once it has ended by them."""
        return None

    @abstractmethod
    def restart_count(self) -> int:
        """How many failures the job as a whole has paid for."""

    def last_failure(self) -> str:
        """How the attempts before this one failed, if they did so alike (`protocol.restarts.Purse.streak_of`); else empty."""
        return ""

    @abstractmethod
    def observe(self) -> agent_machine.Regroup | agent_machine.Fenced | agent_machine.JobEnded | None:
        """What has become of the generation in which we run, as far as it is not our own doing; None: it runs."""

    @abstractmethod
    def fence_fd(self) -> int | None:
        """Readable from when our workers must not run any longer until we have another seat."""

    def licence_fd(self) -> int | None:
        """Of the page that says until when our workers may run, for their warden; None: there is no limit."""
        return None

    def on_fence(self, kill: Callable[[], None]) -> None:
        """What is to be called, from any thread, once our workers must not run any longer; it replaces the one before."""
        return

    def on_asked(self, answer: Callable[[AskedFor], None]) -> None:
        """What is to be called, from any thread, when somebody asks this node for something; it returns at once."""
        return

    def on_doubt(self, hear: Callable[[str], None]) -> None:
        """What is to be called, from any thread, with the name of a node that finds the way to us bad; it returns at once."""
        return

    def on_drain(self, hear: Callable[[Noticed | Ruled], None]) -> None:
        """What is to be called, from any thread, when a node has to leave, and when it is known at which step all save for it; it
        returns at once, and `wakeup_fd` is readable after it.
        """
        return

    def give_notice(self, generation: int, why: str, left_s: float) -> None:
        """We have to leave that generation within so many seconds; from any thread."""
        return

    def report_drain(self, generation: int, told: NodeDrain) -> None:
        """What our workers have told since a node has to leave; from any thread."""
        return

    def on_inquiry(self, hear: Callable[[int, bytes], None]) -> None:
        """What is to be called, from any thread, when it is asked or said who hangs; it returns at once, and the agent wakes."""
        return

    def declare(self, generation: int, statement: Statement) -> bool:
        """Let all nodes find out together who hangs; False where they cannot."""
        return False

    def on_pace(self, hear: Callable[[int, bytes], None]) -> None:
        """What is to be called, from any thread, when it is found who is slower than the others; as `on_inquiry`."""
        return

    def tell_pace(self, generation: int, workers: Iterable[Pace]) -> bool:
        """How long our workers take for a step, to be compared with all others; False where nobody does that."""
        return False

    def new_connection(self) -> Coordination | None:
        """Another connection to the job's store, which the caller closes; None where nobody outside can ask the job."""
        return None

    def min_nodes(self) -> int:
        """With fewer, the job does not go on."""
        return 1

    def hosts_store(self) -> bool:
        """Whether the job's store, and so the job, ends with this node."""
        return False

    def store(self) -> str:
        """What tells the job's store from all others; empty before it was reached."""
        return ""

    def was_fenced(self, why: str) -> None:
        """Our workers were killed by their warden: the licence was over. What we were part of goes on without us, or ends."""
        return

    @abstractmethod
    def report_failure(self, report: NodeReport) -> None:
        """Workers of ours have failed: all other nodes stop theirs, and the next generation is up to the job."""

    @abstractmethod
    def report_done(self) -> None:
        """All our workers have succeeded."""

    @abstractmethod
    def depart(self, why: str, signal: int = 0, ends_as: ClosedKind = "host_left") -> None:
        """We are about to leave: the others regroup without us, or the job ends so. Our workers may still be there."""

    @abstractmethod
    def leave(self, failure: str = "", ends_job: bool = False) -> None:
        """We leave, our workers being gone. A `failure` says what is wrong here: the others go on, if they are enough and it does
        not end the job for all.
        """

    @abstractmethod
    def end_error(self) -> Exception | None:
        """What to tell the user of a job that has ended other than well."""
