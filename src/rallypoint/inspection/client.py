"""Asking jobs how they are, and telling them what to do: through an agent of this machine, or at their store, wherever it is."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from errno import ECONNRESET

from rallypoint.base import defaults, environment
from rallypoint.base.json_text import from_json, to_json
from rallypoint.base.text import Run, joined, runs, who_of
from rallypoint.errors import RallypointError, UsageError
from rallypoint.inspection import asking
from rallypoint.inspection.desk import SUFFIX, is_private, runtime_folders
from rallypoint.inspection.stack_relay import PATIENCE_S as STACKS_PATIENCE_S
from rallypoint.inspection.stack_relay import Others, ask_others, read_others
from rallypoint.inspection.stack_view import StacksView, missing, stacks_view
from rallypoint.inspection.stacks import dump_workers
from rallypoint.inspection.view import FORMAT, JobKey, JobView, NodeView, keys_of, read_job, read_node, to_document
from rallypoint.net.private_socket import peer_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    from rallypoint.coordination.embedded.client import EmbeddedCoordination
    from rallypoint.coordination.embedded.handshake import Secret
    from rallypoint.coordination.embedded.tls import Tls
    from rallypoint.coordination.engine import Coordination
    from rallypoint.coordination.etcd.engine import EtcdCoordination
    from rallypoint.inspection.log_ends import LogEnd, LogWish

    T = TypeVar("T")

__all__ = ["Agent", "LocalJob", "RemoteJob", "connect", "find_job", "jobs_at", "list_agents"]

EMBEDDED_BACKENDS = (defaults.BACKEND_ELASTIC, defaults.BACKEND_CLI, defaults.BACKEND_PLUGIN)
_KNOWN = ", ".join((*EMBEDDED_BACKENDS, *defaults.ETCD_BACKENDS))
ASKED_AT_ONCE = 256
LISTED = 16
CONNECT_S = 1.0
ANSWER_S = 10.0
ANSWER_BYTES = 1 << 30
PATIENCE_S = 3.0
REACHED_WITHIN_S = 10.0
REFUSED_FOR_S = 2.0  # after which nobody listens there


class Agent:
    """An agent of this machine that has answered, and where it answers; `pid` is its process as the kernel knows it here."""

    def __init__(self, path: str, node: NodeView, pid: int = 0) -> None:
        self.path = path
        self.node = node
        self.pid = pid


def list_agents(paths: Sequence[str] | None = None, patience_s: float = ANSWER_S) -> tuple[list[Agent], list[str]]:
    """The agents of this user that run here, or answer at these sockets, and a line for each that could not be understood.

    All are asked before the first answer is waited for: some that are stopped take no longer than one.
    """
    agents, troubles = [], []
    left = _sockets() if paths is None else list(paths)
    while left:
        some, left = left[:ASKED_AT_ONCE], left[ASKED_AT_ONCE:]
        with ExitStack() as lines:
            asked = [(path, _try(_Line, lines, path, {"ask": "node"})) for path in some]
            deadline = time.monotonic() + patience_s
            for path, line in asked:
                found = _try(line.read_node, deadline) if isinstance(line, _Line) else line
                if isinstance(found, NodeView):
                    agents.append(Agent(path, found, line.pid if isinstance(line, _Line) else 0))
                elif not isinstance(found, _NobodyThereError):
                    troubles.append(f"{os.path.basename(path).partition('-')[0]}: {found}")
    return sorted(agents, key=lambda agent: (agent.node.job, agent.node.node_rank or 0, agent.node.pid)), troubles


def find_job(agents: Sequence[Agent], name: str, troubles: Sequence[str] = ()) -> LocalJob:
    """The one job that is meant: by its id, the beginning of it, a process id, or nothing where there is one.

    UsageError: there is none, or more than one; those who could not be understood, the `troubles`, may be what is missing.
    """
    jobs: dict[JobKey, list[Agent]] = {}
    for agent, key in zip(agents, keys_of([agent.node for agent in agents]), strict=True):
        jobs.setdefault(key, []).append(agent)
    meant = [key for key in jobs if key[0] == name] or [key for key in jobs if key[0].startswith(name)]
    if not meant and name.isdecimal():
        meant = [key for key, found in jobs.items() if any(agent.node.pid == int(name) for agent in found)]
    if len(meant) == 1:
        return LocalJob(jobs[meant[0]])
    unasked = f"process {'; process '.join(troubles)}" if troubles else ""
    if not jobs and unasked:
        raise UsageError(f"whoever is here could not be asked: {unasked}")
    if not jobs:
        raise UsageError("no job of this user runs on this machine")
    raise UsageError(_which(jobs, meant, name) + (f" (and {unasked})" if unasked else ""))


def _which(jobs: Mapping[JobKey, Sequence[Agent]], meant: Sequence[JobKey], name: str) -> str:
    """What to choose from. Of those with one name, each is told by the process of a launcher."""
    if len({key[0] for key in meant}) == 1 and name:
        pids = ", ".join(str(jobs[key][0].node.pid) for key in meant[:LISTED])
        return f"{len(meant)} jobs have the ID {meant[0][0]!r}; name one by the process ID of its launcher: {pids}"
    listed = ", ".join(sorted({key[0] for key in (meant or jobs)})[:LISTED])
    if not name:
        return f"{len(jobs)} jobs run on this machine; name one of them: {listed}"
    begins = f"{len(meant)} jobs begin" if meant else "no job of this user on this machine begins"
    return f"{begins} with {name!r}: {listed}" if meant else f"{begins} with {name!r}; there are: {listed}"


class LocalJob:
    """A job of which agents are on this machine."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        self.agents = list(agents)
        self.name = self.agents[0].node.job

    def status(self, patience_s: float = PATIENCE_S) -> JobView:
        """All nodes of the job; where its store does not answer, those of this machine, with a word about that."""
        trouble = ""
        for agent in self.agents:
            try:
                found = _ask(agent.path, {"ask": "job", "patience_s": patience_s}, ANSWER_S + patience_s)
                return read_job(found.get("job"))
            except ValueError as error:
                trouble = f"process {agent.node.pid}: its answer cannot be understood: {error}"
            except _UnansweredError as error:
                trouble = f"process {agent.node.pid}: {error}"
            except RallypointError as error:
                trouble = str(error)
        return JobView(self.name, tuple(agent.node for agent in self.agents), (), f"only nodes of this machine: {trouble}")

    def stacks(self, ranks: Sequence[Run] | None = None, patience_s: float = STACKS_PATIENCE_S) -> StacksView:
        """Where its workers stand, or those of these ranks: of this machine, and of all other nodes through the job's store.

        UsageError: it has no such rank. RallypointError: it has no workers.
        """
        nodes = [agent.node for agent in self.agents]
        here = runs(worker.rank for node in nodes for worker in node.workers)
        others, trouble = Others(), ""
        if any(node.store for node in nodes) and (ranks is None or missing(ranks, here)):
            others, trouble = self._stacks_of_others(nodes, ranks, patience_s)
        if not others.silent and not trouble:
            is_doing = f": it is {nodes[0].phase}{f', {nodes[0].why}' if nodes[0].why else ''}"
            _check_ranks(self.name, ranks, joined([*here, *others.ranks]), is_doing)
        return stacks_view([*dump_workers(nodes, ranks), *others.workers], others.silent, trouble)

    def _stacks_of_others(self, nodes: Sequence[NodeView], ranks: Sequence[Run] | None, patience_s: float) -> tuple[Others, str]:
        """And what hinders it."""
        asked = {"ask": "stacks", "ranks": ranks, "here": [[node.hostname, node.pid] for node in nodes], "patience_s": patience_s}
        trouble = ""
        for agent in self.agents:
            try:
                return read_others(_ask(agent.path, {**asked, "by": _who()}, ANSWER_S + PATIENCE_S + patience_s)), ""
            except (ValueError, RallypointError) as error:
                trouble = f"only nodes of this machine: process {agent.node.pid}: {error}"
        return Others(), trouble

    def stop(self) -> str:
        """What the job says to that, as with all that it is told; RallypointError: why it does not."""
        return self._tell("stop")

    def restart(self) -> str:
        return self._tell("restart")

    def drain(self, node: str, is_forced: bool = False, at_once: bool = False) -> str:
        return self._tell("drain", node=node, force=is_forced, now=at_once)

    def send_logs(self, node_id: str, detail: str) -> str:
        """Have a node send its logs, as `log_relay` describes."""
        return self._tell("logs", node=node_id, detail=detail)

    def log_end(self, node_id: str, wish: LogWish) -> LogEnd:
        """What a worker of a node elsewhere has written last; RallypointError: why it cannot be had."""
        from rallypoint.inspection.log_ends import read_log_end

        found = self._ask_any("log_end", node=node_id, wish=to_document(wish))
        try:
            return read_log_end(found.get("log_end"))
        except ValueError as error:
            raise RallypointError(f"its answer cannot be understood: {error}") from None

    def _tell(self, what: str, **more: object) -> str:
        return str(self._ask_any(what, **more).get("done", ""))

    def _ask_any(self, what: str, **more: object) -> dict[str, Any]:
        """What the first agent says that can be reached and has something to say."""
        trouble: RallypointError | None = None
        for agent in self.agents:
            try:
                return _ask(agent.path, {"ask": what, "by": _who(), **more}, ANSWER_S + PATIENCE_S)
            except _UnansweredError as error:
                trouble = trouble or RallypointError(f"process {agent.node.pid}: {error}")
            except RallypointError as error:
                trouble = error
        raise trouble or UsageError("there is nobody to tell")


def _check_ranks(job: str, ranks: Sequence[Run] | None, known: Sequence[Run], is_doing: str = "") -> None:
    """RallypointError: it has no workers; UsageError: none with these ranks."""
    if not known:
        raise RallypointError(f"no worker of {job} runs{is_doing}")
    if ranks is not None and (unknown := missing(ranks, known)):
        raise UsageError(f"{job} has no {who_of(unknown)}; there are {who_of(known)}")


class RemoteJob:
    """A job whose store can be reached from here."""

    def __init__(self, name: str, engine: Coordination) -> None:
        self.name = name
        self._engine = engine
        self.agents: list[Agent] = []

    def __enter__(self) -> RemoteJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._engine.close()

    def stacks(self, ranks: Sequence[Run] | None = None, patience_s: float = STACKS_PATIENCE_S) -> StacksView:
        found = ask_others(self._engine, _who(), (), ranks, PATIENCE_S, patience_s)
        if not found.silent:
            _check_ranks(self.name, ranks, found.ranks)
        return stacks_view(found.workers, found.silent)

    def status(self, patience_s: float = PATIENCE_S) -> JobView:
        found = self.look(patience_s)
        if not found.nodes and not found.silent:
            raise RallypointError(f"{self.name} has no nodes there now")
        return found

    def look(self, patience_s: float = PATIENCE_S) -> JobView:
        """The same; without any nodes where it has none."""
        return asking.survey(self._engine, _who(), patience_s).replace(job=self.name)

    def stop(self) -> str:
        return asking.stop(self._engine, _who())

    def restart(self) -> str:
        return asking.restart(self._engine, _who())

    def drain(self, node: str, is_forced: bool = False, at_once: bool = False) -> str:
        return asking.drain(self._engine, node, _who(), PATIENCE_S, is_forced=is_forced, at_once=at_once)


def jobs_at(endpoint: str, backend: str, settings: Mapping[str, Any]) -> list[JobView]:
    """The jobs whose nodes meet there, each with all of its nodes: one in an embedded store, in etcd all that have any."""
    found = []
    for name in _names_at(endpoint, backend, settings):
        with connect(endpoint, name, backend, settings) as job:
            found.append(job.look())
    return [job for job in found if job.nodes or job.silent]


def _names_at(endpoint: str, backend: str, settings: Mapping[str, Any]) -> list[str]:
    _check_backend(backend)
    deadline = time.monotonic() + REACHED_WITHIN_S
    if backend in defaults.ETCD_BACKENDS:
        from rallypoint.coordination.etcd.listing import jobs_in
        from rallypoint.rendezvous.etcd import read_etcd_settings

        cluster = read_etcd_settings(settings, environment.own)
        return jobs_in(cluster.access(endpoint), f"{cluster.prefix}/", deadline)
    from rallypoint.coordination.embedded.inquiring import job_at

    secret, tls = _keys_of(settings)
    return [job_at(*_place_of(endpoint), secret, deadline, tls)]


def _check_backend(backend: str) -> None:
    if backend not in (*EMBEDDED_BACKENDS, *defaults.ETCD_BACKENDS):
        raise UsageError(f"--backend {backend!r} has no store that could be asked; those of {_KNOWN} have")


def _place_of(endpoint: str) -> tuple[str, int]:
    from rallypoint.net.endpoint import parse_rendezvous_endpoint

    return parse_rendezvous_endpoint(endpoint, defaults.ELASTIC_PORT)


def _keys_of(settings: Mapping[str, Any]) -> tuple[Secret, Tls | None]:
    from rallypoint.rendezvous.secrets import secret_of, tls_of
    from rallypoint.rendezvous.settings import read_settings

    read = read_settings(settings, environment.own)
    return secret_of(read), tls_of(read)


def connect(endpoint: str, job: str, backend: str, settings: Mapping[str, Any]) -> RemoteJob:
    """The job of this id whose nodes meet there; the settings are those of ``--rdzv-conf``. Errors say why it is not reached."""
    _check_backend(backend)
    deadline = time.monotonic() + REACHED_WITHIN_S
    engine = _etcd(endpoint, job, settings) if backend in defaults.ETCD_BACKENDS else _embedded(endpoint, job, settings)
    try:
        _reach(engine, deadline)
    except BaseException:  # raised again; nothing of it stays
        engine.close()
        raise
    return RemoteJob(job, engine)


def _etcd(endpoint: str, job: str, settings: Mapping[str, Any]) -> EtcdCoordination:
    from rallypoint.coordination.etcd.engine import EtcdCoordination
    from rallypoint.rendezvous.etcd import read_etcd_settings

    cluster = read_etcd_settings(settings, environment.own)
    return EtcdCoordination(cluster.access(endpoint), f"{cluster.prefix}/{job}/", fence_s=cluster.fence_s)


def _embedded(endpoint: str, job: str, settings: Mapping[str, Any]) -> EmbeddedCoordination:
    from rallypoint.coordination.embedded.client import EmbeddedCoordination

    secret, tls = _keys_of(settings)
    return EmbeddedCoordination(*_place_of(endpoint), job, secret, tls=tls)


def _reach(engine: EtcdCoordination | EmbeddedCoordination, deadline: float) -> None:
    """Where all refuse to be connected to, for long enough, nobody is there; a cluster of etcd may be starting."""
    from rallypoint.coordination.engine import UnreachableError

    try:
        engine.connect(min(deadline, time.monotonic() + REFUSED_FOR_S))
    except UnreachableError as error:
        if engine.connection().refused_since is not None:
            raise RallypointError(f"{error}; no job meets there now") from error
        engine.connect(deadline)


class _UnansweredError(RallypointError):
    """An agent did not answer, or nothing that can be read; the message says so of "it"."""


class _NobodyThereError(_UnansweredError):
    """The socket was left behind by an agent that is gone."""


def _sockets() -> list[str]:
    paths = []
    for folder in runtime_folders():
        if is_private(folder):
            paths += [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(SUFFIX)]
    return paths


def _try(call: Callable[..., T], *arguments: object) -> T | RallypointError:
    try:
        return call(*arguments)
    except RallypointError as error:
        return error


def _ask(path: str, question: dict[str, object], timeout_s: float) -> dict[str, Any]:
    """The answer of the agent at a socket; RallypointError: it has none, or says why not."""
    with ExitStack() as lines:
        return _Line(lines, path, question).read(time.monotonic() + timeout_s)


class _Line:
    """A question to the agent at a socket, which was sent; `lines` closes it."""

    def __init__(self, lines: ExitStack, path: str, question: dict[str, object]) -> None:
        self._sock = lines.enter_context(socket.socket(socket.AF_UNIX))
        self._sock.settimeout(CONNECT_S)
        try:
            self._sock.connect(path)
            self._sock.sendall(to_json({"format": FORMAT, **question}).encode() + b"\n")
        except (ConnectionRefusedError, FileNotFoundError):
            _remove(path)
            raise _NobodyThereError("it is gone") from None
        except TimeoutError:
            raise _UnansweredError("it takes no questions; is it stopped?") from None
        except OSError as error:
            raise _UnansweredError(f"it cannot be reached: {error.strerror or error}") from error
        self.pid = peer_of(self._sock)[0]
        self._asked_at = time.monotonic()

    def read(self, deadline: float) -> dict[str, Any]:
        try:
            found = self._read(deadline)
        except TimeoutError:
            within_s = deadline - self._asked_at
            raise _UnansweredError(f"it does not answer within {within_s:.0f} s; is it stopped?") from None
        except OSError as error:
            raise _UnansweredError(f"it has ended: {error.strerror or error}") from error
        except ValueError as error:
            raise _UnansweredError(f"its answer is none of an agent: {error}") from error
        if error_text := found.get("error"):
            raise RallypointError(str(error_text))
        return found

    def read_node(self, deadline: float) -> NodeView:
        try:
            return read_node(self.read(deadline).get("node"))
        except ValueError as error:
            raise _UnansweredError(f"its answer cannot be understood: {error}") from error

    def _read(self, deadline: float) -> dict[str, Any]:
        pieces: list[bytes] = []
        size = 0
        while not (pieces and pieces[-1].endswith(b"\n")):
            self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
            pieces.append(self._sock.recv(1 << 20))
            size += len(pieces[-1])
            if not pieces[-1]:
                raise ConnectionResetError(ECONNRESET, "it closed the connection")
            if size > ANSWER_BYTES:
                raise ValueError(f"it is longer than {ANSWER_BYTES} bytes")
        found = from_json(b"".join(pieces))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
        return found


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def _who() -> str:
    """Who asks, for the lines that say so."""
    import getpass

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"user {os.getuid()}"
    return f"{user} on {os.uname().nodename}"
