"""Rallypoint's rendezvous for torchrun: ``torchrun --rdzv-backend rallypoint``, or ``rallypoint-etcd``.

The package's entry points of the group ``torchrun.handlers`` lead here; torchrun follows them when it is asked for such a back
end. Its agent knows nothing but the plain handler: it asks for the next rendezvous, and again and again how many nodes wait. So
what rallypoint knows besides is said in those words. A generation that is over, by whatever cause, is told as one waiting node,
and the agent meets the others anew. An agent that comes back while its generation runs has lost workers, and all others are told.
An agent that shuts down is done if nothing has gone wrong, else the job has failed.

Errors and results are of torch's classes. They are looked up where the program has loaded them; nothing is imported from torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rallypoint.base import defaults, environment
from rallypoint.base.environment import imported_torch
from rallypoint.errors import JobFailedError, RallypointError, RendezvousError, RendezvousGracefulExitError
from rallypoint.protocol import agent_machine
from rallypoint.protocol.verdict import NodeReport
from rallypoint.rendezvous import handler as own_names
from rallypoint.rendezvous import registry
from rallypoint.rendezvous.coordinated import CoordinatedHandler, Introduction
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousParameters

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["TorchrunHandler", "get_creator"]

TORCH_NAMES = "torch.distributed.elastic.rendezvous"
ROLE = "torchrun"  # under which these nodes agree on a job: an agent of rallyrun would wait for things that they do not say
UNCOUNTED = 1_000_000  # restarts: torchrun's agents count them, each its own


def get_creator() -> Callable[[Any], TorchrunHandler]:
    """What an entry point has to name: a function that gives the creator of handlers."""
    return _create


def _create(params: Any) -> TorchrunHandler:
    """From torch's parameters, which have the fields of ours, to the handler of that name."""
    ours = RendezvousParameters(
        params.backend, params.endpoint, params.run_id, params.min_nodes, params.max_nodes, params.local_addr, **params.config
    )
    handler = registry.get_rendezvous_handler(ours)
    if isinstance(handler, CoordinatedHandler):
        handler.introduce(Introduction(ROLE, 1, UNCOUNTED, ROLE, _shutdown_timeout_s()))
    return TorchrunHandler(handler, imported_torch(TORCH_NAMES) or own_names)


def _shutdown_timeout_s() -> float:
    """How long torchrun gives its workers to stop, for which the others then wait."""
    try:
        return float(environment.own.get(defaults.ENV_SHUTDOWN_TIMEOUT, defaults.SHUTDOWN_TIMEOUT_S))
    except ValueError:
        return defaults.SHUTDOWN_TIMEOUT_S


class TorchrunHandler(RendezvousHandler):
    """A handler of ours as torch's agent uses it; `names` is the module with the classes that its caller expects."""

    def __init__(self, handler: RendezvousHandler, names: Any) -> None:
        self._handler = handler
        self._names = names
        self._runs = False
        self._over: agent_machine.Regroup | agent_machine.Fenced | agent_machine.JobEnded | None = None
        self._handled_before = sys.exc_info()[1]
        names.RendezvousHandler.register(TorchrunHandler)  # for those who ask isinstance

    def get_backend(self) -> str:
        return self._handler.get_backend()

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    @property
    def use_agent_store(self) -> bool:
        return self._handler.use_agent_store

    def next_rendezvous(self) -> Any:
        """Our place in the next generation. What has stopped the workers of the last one, the others hear from us."""
        names = self._names
        with self._errors_translated():
            self._end_generation()
            info = self._handler.next_rendezvous()
        self._runs = True
        where = names.RendezvousStoreInfo(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port)
        return names.RendezvousInfo(info.store, info.rank, info.world_size, where)

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """1 when the agent has to come back: for a new generation, or to hear that the job has failed.

        The end of a job that nobody failed in is no reason: workers that still run may finish.
        """
        self._observe()
        match self._over:
            case None:
                return self._handler.num_nodes_waiting()
            case agent_machine.JobEnded(how, _):
                return int(how == "failed")
        return 1

    def shutdown(self) -> bool:
        """The launcher shuts down while its error is on the way up, or, when there is none, after all workers have succeeded."""
        error = sys.exc_info()[1]
        if not isinstance(self._handler, CoordinatedHandler) or not self._runs:
            return self._handler.shutdown()
        if error is not None and error is not self._handled_before:
            self._handler.leave(_first_line(error), ends_job=True)  # its agent rules on its own restarts, and has given up
        else:
            self._handler.report_done()
            self._handler.leave()
        return True

    def _observe(self) -> None:
        """Hear what has become of the generation in which our workers run."""
        if self._runs and self._over is None and isinstance(self._handler, CoordinatedHandler):
            self._over = self._handler.observe()

    def _end_generation(self) -> None:
        self._observe()
        if isinstance(self._over, agent_machine.JobEnded):
            raise self._names.RendezvousClosedError(f"the job has ended: {self._over.why}")
        if self._runs and self._over is None and isinstance(self._handler, CoordinatedHandler):
            self._handler.report_failure(NodeReport(stopped=1))  # it is our own doing; torch's agent does not say which worker
        self._runs, self._over = False, None

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        """Errors of ours become those of the same name."""
        try:
            yield
        except (RendezvousGracefulExitError, JobFailedError) as error:  # torchrun cannot end well before its workers ran
            raise self._names.RendezvousClosedError(str(error)) from error
        except (RendezvousError, RallypointError) as error:
            raise getattr(self._names, type(error).__name__, self._names.RendezvousError)(str(error)) from error


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip("=- ")]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
