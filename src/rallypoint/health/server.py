"""The health endpoint: an HTTP server that says whether the agent is alive, whether its workers run, and how it stands.

All answers are made from the status board, which the agent fills as it goes. Nobody asks the agent itself, so the endpoint
answers while nodes regroup and while workers are stopped, and who asks often does not slow the job down.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence

from rallypoint.base.json_text import to_json
from rallypoint.health import rules as health
from rallypoint.health.port import open_listeners_or_explain
from rallypoint.health.status import AgentStatus, StatusBoard
from rallypoint.net.http import Request, Response, is_named_so
from rallypoint.net.http_server import HttpServer
from rallypoint.net.service_thread import importing
from rallypoint.story.phases import totals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.health.exposition import Exposition
    from rallypoint.health.metric_values import PrometheusMetricHandler

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

ENDPOINTS = {
    "/healthz": "whether the agent is alive",
    "/readyz": "whether its workers run",
    "/metrics": "numbers for Prometheus",
}
FRESH = (("Cache-Control", "no-store"),)
STRANGE_NAME = "this machine is asked by its address, by its own name, or by the name that --health-addr gives\n"
RESOLVER_SETTINGS = "/etc/resolv.conf"
NO_PROMETHEUS = "metrics need prometheus-client: pip install 'rallypoint[metrics]'\n"


class HealthCheckServer:
    """Answers at /healthz, /readyz and /metrics.

    The `alive_callback` gives the time of the last progress in whole seconds of ``time.time()``; an older one than `timeout`
    seconds is not healthy. With a `board`, which knows what the agent is doing, that decides instead, and `stopping_s` is
    how long it takes at most to stop workers. `listeners` are used if they were opened before; else `start` listens at `address`.
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
    ) -> None:
        self._alive_callback = alive_callback
        self._port = port
        self._address = address
        self._names = _own_names() | {address.strip("[]").lower()}
        self._board = board
        self._listeners = list(listeners)
        self._limits = health.Limits(timeout, stopping_s=stopping_s)
        self._metric_handler = metric_handler
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

    def _answer(self, request: Request) -> Response:
        if not is_named_so(request.headers.get("host"), self._names):
            return Response(403, STRANGE_NAME, headers=FRESH)
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
    """A health server that is still to be started."""
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
        "generation": status.generation,
        "group_rank": status.group_rank,
        "group_world_size": status.group_world_size,
        "world_size": status.world_size,
        "ranks": status.ranks,
        "pids": status.pids,
        "restarts": status.restarts,
        "max_restarts": status.max_restarts,
        "failed_workers": status.failed_workers,
        "hung_workers": status.hung_workers,
        "expired_timers": status.expired_timers,
        "run_id": status.run_id,
        "role": status.role,
        "hostname": status.hostname,
        "uptime_s": round(now - status.began_at, 3),
        "last_progress_s": None if progress_at is None else round(now - progress_at, 3),
        "seconds": {phase: round(seconds, 3) for phase, seconds in totals(status.ledger, now).items()},
    }
