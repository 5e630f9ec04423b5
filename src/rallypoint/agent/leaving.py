"""How a local agent is told that its node has to leave, and when it does; and signals that it only passes on.

Notice is a signal, a file that appears, or a request to the health endpoint; another node's notice comes from the job. What
follows (`agent.draining`) is loaded where this node may have notice, or when another has: else this is a few empty fields.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from rallypoint.agent.capabilities import hold_on
from rallypoint.agent.peers import PlainPeers
from rallypoint.agent.worker_monitor import WorkerMonitor
from rallypoint.agent.workers import WorkerSpec
from rallypoint.base import defaults, report
from rallypoint.base.records import Value
from rallypoint.base.signals import inbox
from rallypoint.base.text import signal_names
from rallypoint.errors import PreemptedError
from rallypoint.processes import warden_client
from rallypoint.processes.context import PContext
from rallypoint.protocol import agent_machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.agent.draining import Draining
    from rallypoint.agent.notices import Door, FileWatch
    from rallypoint.base.senders import Sender

__all__ = ["NO_DRAIN", "DrainFlags", "Leaving"]

NO_SIGNALS: frozenset[signal.Signals] = frozenset()


class DrainFlags(Value):
    """As `LaunchConfig` has them."""

    signals_to_forward: str = ""
    grace_s: float | None = None
    signals: str = ""
    file: str | None = None
    forward: str = ""


NO_DRAIN = DrainFlags()


class Leaving:
    """Of one agent; `is_running` says whether its workers run, which may be asked from any thread."""

    def __init__(
        self,
        flags: DrainFlags,
        spec: WorkerSpec,
        peers: PlainPeers,
        monitor: WorkerMonitor,
        read_context: Callable[[], PContext | None],
        is_running: Callable[[], bool],
    ) -> None:
        self._flags = flags
        self._peers, self._monitor, self._workers = peers, monitor, spec.local_world_size
        self._read_context, self._is_running = read_context, is_running
        self._passed_on = _signals(flags.signals_to_forward)
        self._notices = _signals(flags.signals) | (NO_SIGNALS if flags.grace_s is None else {signal.SIGTERM})
        self._drain: Draining | None = None
        self._file: FileWatch | None = None
        self._lock = threading.Lock()
        self._untold: tuple[str, Sender] | None = None  # who has given notice by which signal, which was not told yet

    # --- the run -----------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Be ready for notice, our own where that is asked for. UsageError: that file cannot give any."""
        if self._flags.file:
            from rallypoint.agent.notices import FileWatch

            self._file = FileWatch(self._flags.file)
        if self._flags.grace_s is not None:
            self._draining()
        if self._notices or self._passed_on:
            inbox.sift = self._sift
        # Schedulers signal every process of a job alike; a worker that knows nothing of it would die of it.
        warden_client.have_ignored(self._notices - {signal.SIGTERM})
        self._peers.job.on_drain(lambda news: self._draining().hear(news))

    def close(self) -> None:
        inbox.stop_sifting()
        warden_client.have_ignored(())
        self._peers.job.on_drain(lambda _: None)
        if self._file is not None:
            self._file.close()
        if self._drain is not None:
            self._drain.close()

    def signals(self) -> str:
        """Those that have to be received for this, by their names."""
        return ",".join(one.name for one in (*self._notices, *self._passed_on))

    def make_door(self, token: str) -> Door | None:
        """Where notice can be given over HTTP, with this token if there is one already."""
        if self._flags.grace_s is None:
            return None
        from rallypoint.agent.notices import Door

        return Door(self.give_notice, token)

    def begin(self, generation: int, envs: dict[int, dict[str, str]]) -> None:
        """These workers are about to be started."""
        if self._drain is None:
            return
        self._drain.begin(generation)
        if bell := self._drain.place():
            for env in envs.values():
                env[defaults.ENV_DRAIN] = bell

    def _draining(self) -> Draining:
        """From any thread."""
        with self._lock:
            if self._drain is None:
                from rallypoint.agent.draining import Draining

                flags = self._flags
                names = signal_names(flags.forward)
                self._drain = Draining(self._peers.job, self._monitor.page_fd, self._workers, flags.grace_s, names)
                self._drain.begin(self._peers.job.generation())
            return self._drain

    # --- notice ------------------------------------------------------------------------------------------------------------

    def give_notice(self, why: str) -> float | None:
        """How long workers have to save, from now on; None where none run that could. From any thread."""
        if self._drain is None or not self._is_running():
            return None
        return self._drain.give_notice(why)

    def _sift(self, number: signal.Signals) -> signal.Signals | None:
        """What is left of a signal: nothing of one that is only passed on, or that gives notice while workers can save."""
        if number in self._passed_on:
            hold_on(self._read_context()).pass_on(number)
            return None
        if number not in self._notices:
            return number
        if self.give_notice(f"{number.name} was received") is None:
            return signal.SIGTERM
        self._untold = None if inbox.sender is None else (number.name, inbox.sender)
        return None

    # --- for the agent's loop ----------------------------------------------------------------------------------------------

    def fds(self) -> list[int | None]:
        """Readable when there may be something to look at."""
        return [one.fileno() for one in (self._drain, self._file) if one is not None]

    def next_looks_at(self) -> list[float]:
        looks = [one.next_look_at() for one in (self._drain, self._file) if one is not None]
        return [at for at in looks if at is not None]

    def look(self) -> None:
        """A file may have appeared, or all have saved. Where it is time to leave, that is raised."""
        self._tell_sender()
        if self._file is not None and self._file.has_appeared():
            self._file.close()
            self._file = None
            self.give_notice(f"{self._flags.file} has appeared")
        if self._drain is None:
            return
        from rallypoint.protocol import draining

        match self._drain.look(self._read_context(), self._peers.act_as_one):
            case draining.Go(why):
                inbox.count_stop()
                raise PreemptedError(why)
            case draining.GoAtOnce(why):
                inbox.count_stop()
                raise PreemptedError(why, all_saved=False)

    def _tell_sender(self) -> None:
        """Workers and other nodes know of the notice by now."""
        told, self._untold = self._untold, None
        if told is not None:
            from rallypoint.base.senders import describe

            if who := describe(*told):
                report.info(who)

    def see(self, seen: agent_machine.Observation) -> agent_machine.Observation:
        """What an observation of the workers and the job means while a node has to leave."""
        if self._drain is None:
            return seen
        if seen == agent_machine.Succeeded() and self._drain.have_ended_to_save():
            return agent_machine.PeersWaiting(0)  # their work is not done: they were told to save, and have
        if self._drain.is_leaving and isinstance(seen, agent_machine.Regroup | agent_machine.Failed | agent_machine.Fenced):
            self.look()  # all may have saved by now
            inbox.count_stop()
            raise PreemptedError("the generation has ended before all workers had saved", all_saved=False)
        return seen


def _signals(names: str) -> frozenset[signal.Signals]:
    return frozenset(signal.Signals[name] for name in signal_names(names).split(",") if name)
