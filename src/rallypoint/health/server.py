"""The health endpoint: an HTTP server that says whether the agent is alive, whether its workers run, and how it stands.

All answers are made from the status board, which the agent fills as it goes. Nobody asks the agent itself, so the endpoint
answers while nodes regroup and while workers are stopped, and who asks often does not slow the job down. Its port is opened
before anything is started; where that cannot be done, the error says what to do.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rallypoint.base import defaults, environment
from rallypoint.base.json_text import to_json
from rallypoint.base.records import Value
from rallypoint.errors import UsageError
from rallypoint.health import rules as health
from rallypoint.health.status import AgentStatus, StatusBoard
from rallypoint.metrics import MetricData, MetricHandler, _pass_to
from rallypoint.net.endpoint import hold_port
from rallypoint.net.http import Request, Response, is_named_so
from rallypoint.net.http_server import Answer, HttpServer
from rallypoint.net.http_stream import Stream
from rallypoint.net.service_thread import importing
from rallypoint.story.phases import totals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.health.exposition import Exposition

__all__ = [
    "HealthCheckServer", "LatestValue", "PrometheusMetricHandler", "create_healthcheck_server", "open_listeners_or_explain",
    "resolve_health_port",
]  # fmt: skip

SETTING = "--health-port or TORCHELASTIC_HEALTH_CHECK_PORT"
ADDRESS_SETTING = "--health-addr for --health-port"
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)  # all others are of the address
HIGHEST_PORT, PORT_DIGITS = 65_535, 5
LISTENS = "0A"  # the state of a socket, in the kernel's tables
NAMES_LISTED = 3
MOST_NAMES = 1_000  # each is a time series in Prometheus, for every agent
MOST_CHARACTERS = 200
ENDPOINTS = {
    "/healthz": "whether the agent is alive",
    "/readyz": "whether its workers run",
    "/metrics": "numbers for Prometheus",
}
SHOWN = (
    "generation", "group_rank", "group_world_size", "world_size", "ranks", "pids", "restarts", "max_restarts", "failed_workers",
    "hung_workers", "expired_timers", "run_id", "role", "hostname",
)  # fmt: skip
FRESH = (("Cache-Control", "no-store"),)
STRANGE_NAME = "this machine is asked by its address, by its own name, or by the name that --health-addr gives\n"
RESOLVER_SETTINGS = "/etc/resolv.conf"
NO_PROMETHEUS = "metrics need prometheus-client: pip install 'rallypoint[metrics]'\n"


class HealthCheckServer:
    """Answers at /healthz, /readyz and /metrics.

    The `alive_callback` gives the time of the last progress in whole seconds of ``time.time()``; an older one than `timeout`
    seconds is not healthy. With a `board`, which knows what the agent is doing, that decides instead, and `stopping_s` is
    how long it takes at most to stop workers. `listeners` are used if they were opened before; else `start` listens at `address`.
    `pages` are more paths, each with who answers there.
    """

    def __init__(
        self,
        alive_callback: Callable[[], int],
        port: int,
        timeout: int,
        *,
        board: StatusBoard | None = None,
        address: str = "127.0.0.1",
        listeners: Sequence[socket.socket] = (),
        stopping_s: float = health.STOPPING_S,
        metric_handler: PrometheusMetricHandler | None = None,
        pages: Mapping[str, Answer] | None = None,
    ) -> None:
        self._alive_callback = alive_callback
        self._port = port
        self._address = address
        self._names = _own_names() | {address.strip("[]").lower()}
        self._board = board
        self._listeners = list(listeners)
        self._limits = health.Limits(timeout, stopping_s=stopping_s)
        self._metric_handler = metric_handler
        self._pages = pages or {}
        self._exposition: Exposition | None = None
        self._server: HttpServer | None = None

    @property
    def alive_callback(self) -> Callable[[], int]:
        return self._alive_callback

    @property
    def port(self) -> int:
        """The port that it listens at, once it does; before, the one that was asked for."""
        return self._port

    def start(self) -> None:
        """Listen, and answer from now on; UsageError if it cannot listen there."""
        if self._server is not None:
            raise RuntimeError("the health server has been started already")
        listeners, self._listeners = self._listeners or open_listeners_or_explain(self._address, self._port), []
        self._port = listeners[0].getsockname()[1]
        self._server = HttpServer(listeners, self._answer, "health")
        self._server.start()

    def stop(self) -> None:
        """Answer no more, and free the port; twice is once."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
        while self._listeners:
            self._listeners.pop().close()

    # --- answers, on the server's thread -----------------------------------------------------------------------------------

    def _answer(self, request: Request) -> Response | Stream:
        if not is_named_so(request.headers.get("host"), self._names):
            return Response(403, STRANGE_NAME, headers=FRESH)
        if (page := self._pages.get(request.path)) is not None:
            return page(request)
        if request.method == "POST":
            return Response(405, "there is nothing to post here\n", headers=(("Allow", "GET, HEAD"),))
        match request.path:
            case "/healthz" | "/readyz":
                return self._tell_health(request.path)
            case "/metrics":
                return self._tell_metrics(request.headers.get("accept", ""))
            case "/":
                return Response(200, "".join(f"{path}  {what}\n" for path, what in ENDPOINTS.items()), headers=FRESH)
        return Response(404, f"there is only {', '.join(['/', *ENDPOINTS])}\n", headers=FRESH)

    def _tell_health(self, path: str) -> Response:
        judged, details = self._judge()
        is_fine = judged.alive if path == "/healthz" else judged.ready
        document = {"status": "ok" if is_fine else "failing", "why": judged.why, **details}
        return Response(200 if is_fine else 503, to_json(document) + "\n", "application/json", FRESH)

    def _judge(self) -> tuple[health.Health, dict[str, object]]:
        if self._board is None:
            age_s = time.time() - self._alive_callback()
            return health.judge_progress(age_s, self._limits.timeout_s), {"last_progress_s": round(age_s, 3)}
        status, progress_at, now = self._board.status, self._board.read_progress(), time.monotonic()
        return health.judge(status.ledger, status.why, progress_at, self._limits, now), describe(status, progress_at, now)

    def _tell_metrics(self, accept: str) -> Response:
        try:
            exposition = self._exposition = self._exposition or self._load_exposition()
        except ImportError:
            return Response(501, NO_PROMETHEUS, headers=FRESH)
        body, content_type = exposition.render(accept)
        return Response(200, body, content_type, FRESH)

    def _load_exposition(self) -> Exposition:
        """Loaded when somebody asks, since it takes as long as several starts of rallypoint."""
        with importing:
            from rallypoint.health.exposition import Exposition

        return Exposition(self._board, self._limits, self._metric_handler)


def create_healthcheck_server(
    alive_callback: Callable[[], int],
    port: int,
    timeout: int,
    *,
    board: StatusBoard | None = None,
    address: str = "127.0.0.1",
) -> HealthCheckServer:
    """A health server that is still to be started.

    >>> import time
    >>> from rallypoint.health import create_healthcheck_server
    >>> server = create_healthcheck_server(alive_callback=lambda: int(time.time()), port=0, timeout=60)
    """
    return HealthCheckServer(alive_callback, port, timeout, board=board, address=address)


def _own_names() -> set[str]:
    """By which this machine is known where it is: its name, with and without the domains in which names are looked up here."""
    name = os.uname().nodename.lower()
    short = name.partition(".")[0]
    try:
        with open(RESOLVER_SETTINGS, encoding="utf-8", errors="replace") as file:
            lines = [line.split() for line in file]
    except OSError:
        lines = []
    domains = [one.lower().strip(".") for first, *rest in filter(None, lines) if first in ("search", "domain") for one in rest]
    return {name, short, *(f"{short}.{domain}" for domain in domains)}


def describe(status: AgentStatus, progress_at: float | None, now: float) -> dict[str, object]:
    """The status as a document; times are ages in seconds."""
    return {
        "phase": status.ledger.phase,
        "phase_s": round(now - status.ledger.since, 3),
        **{name: getattr(status, name) for name in SHOWN},
        "uptime_s": round(now - status.began_at, 3),
        "last_progress_s": None if progress_at is None else round(now - progress_at, 3),
        "seconds": {phase: round(seconds, 3) for phase, seconds in totals(status.ledger, now).items()},
    }


class LatestValue(Value):
    group: str
    name: str
    value: float
    count: int  # of values so far


class PrometheusMetricHandler(MetricHandler):
    """Keeps the last value of each of a bounded number of metrics, and how many there were: Prometheus itself keeps the past.

    All of them are passed on to `next_handler`. Nothing of prometheus-client is needed here.
    """

    _never_waits = True

    def __init__(self, next_handler: MetricHandler | None = None) -> None:
        self._next_handler = next_handler
        self._latest: dict[tuple[str, str], LatestValue] = {}
        self._lock = threading.Lock()
        self.dropped = 0  # values of metrics beyond the bound, and those that are no numbers

    def emit(self, metric_data: MetricData) -> None:
        if self._next_handler is not None:
            _pass_to(self._next_handler, metric_data)
        group, name = str(metric_data.group_name)[:MOST_CHARACTERS], str(metric_data.name)[:MOST_CHARACTERS]
        value = _number(metric_data.value)
        with self._lock:
            known = self._latest.get((group, name))
            if value is None or (known is None and len(self._latest) >= MOST_NAMES):
                self.dropped += 1
            else:
                self._latest[group, name] = LatestValue(group, name, value, known.count + 1 if known else 1)

    def latest(self) -> list[LatestValue]:
        with self._lock:
            return list(self._latest.values())


def _number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]  # whatever others have put in
    except (TypeError, ValueError, OverflowError):
        return None


def open_listeners_or_explain(address: str, port: int) -> list[socket.socket]:
    """Sockets that listen at `port` on every local address of `address`; port 0 is any that is free. UsageError: why not."""
    _parse_port(port)
    host = address.strip("[]")
    try:
        if not host:
            raise OSError(errno.EADDRNOTAVAIL, "an address has to be named")
        return [socket.socket(fileno=sock.detach()) for sock in hold_port(host, (port,))]
    except UnicodeError:
        raise UsageError(f"{ADDRESS_SETTING}: {address!r} is no address") from None
    except OSError as error:
        setting = SETTING if error.errno in PORT_ERRORS else ADDRESS_SETTING
        raise UsageError(
            f"{setting}: the health endpoint cannot listen at {address} port {port}: {_explain(error, port)}"
        ) from error


def resolve_health_port(given: int | None) -> int:
    """The port as given, else as the environment says it; 0, any that is free, where neither does."""
    return _parse_port((environment.text(defaults.ENV_HEALTH_CHECK_PORT) or 0) if given is None else given)


def _parse_port(value: str | int) -> int:
    text = str(value).strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > PORT_DIGITS or int(text) > HIGHEST_PORT:
        raise UsageError(f"{SETTING}: {value!r:.40} is no port; they are from 0, which means any that is free, to {HIGHEST_PORT}")
    return int(text)


def _explain(error: OSError, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            holders = ", ".join(_holders(port))
            return f"the port is taken{f' by {holders}' if holders else ''}; name another, or 0 for any that is free"
        case errno.EACCES:
            return f"it is below {_first_unprivileged_port()}, where only root may listen; name a higher one"
        case errno.EADDRNOTAVAIL:
            return "that is no address of this machine; 127.0.0.1 is for itself only, 0.0.0.0 is every address that it has"
    return error.strerror or str(error)


def _first_unprivileged_port() -> int:
    try:
        with open("/proc/sys/net/ipv4/ip_unprivileged_port_start", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 1024


def _holders(port: int) -> list[str]:
    """The processes that listen at a port, as far as we may know."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")) if wanted else ():
        if wanted.intersection(_open_files(pid)):
            found.append(f"process {pid} ({_command(pid)})")
    return found[:NAMES_LISTED]


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}", encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        yield from (row[9] for row in rows if row[3] == LISTENS and int(row[1].rpartition(":")[2], 16) == port)


def _open_files(pid: str) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        for fd in os.listdir(folder):
            yield os.readlink(f"{folder}/{fd}")
    except OSError:  # it is not ours to look at, or it has ended
        return


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "ended meanwhile"
