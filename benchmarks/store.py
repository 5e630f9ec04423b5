"""The store that workers use, beside torch's server of the same protocol: operations a second, connects at once, memory.

The clients are torch's own where it is installed, each in a process of its own and connected to both servers, which are asked in
turn, for a moment each: where the scheduler happens to place a client and a server counts for as much as what they do, so the
median of the ratios of many short rounds is judged. Ours are measured too. The columns bear the names of the launchers:
rallyrun's is our server, whoever the client is.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import geometric_mean, median
from types import TracebackType
from typing import NamedTuple

from benchmarks.contestants import PROGRAMS, RALLYRUN, TORCHRUN, clean_environment, launchers
from benchmarks.figures import Figure, Target, at_least, at_most
from benchmarks.jobs import memory

__all__ = ["measure"]


class Plan(NamedTuple):
    """How a number of clients is measured, and judged."""

    rounds: int
    round_s: float
    least_ratio: float  # of each operation


OPERATIONS = ("set", "get", "add", "check", "wait", "multi_get")  # the last of 8 keys
MANY = 16  # clients
PLANS = {1: Plan(31, 0.1, 0.8), MANY: Plan(9, 0.3, 0.5)}  # by the number of clients
LEAST_MEAN = 0.8  # of the ratios of all operations, with many clients
HEAD_START_S = 0.02  # for all clients to learn what is next
WHOSE = {RALLYRUN: "our", TORCHRUN: "torch's"}
CONNECTIONS = 2000
CONNECT_S = 1.0
BURSTS = 3
LINE_TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0

Samples = dict[str, list[float]]  # by server


class Program:
    """A program that is told and tells one line at a time; leaving the context ends its stdin, and with it the program."""

    def __init__(self, name: str, *arguments: object) -> None:
        command = [sys.executable, str(PROGRAMS / name), *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment()
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        try:
            self.process.communicate(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def line(self) -> str:
        """The next one, which must be the only one that is under way."""
        assert self.process.stdout is not None
        is_there = select.select([self.process.stdout], [], [], LINE_TIMEOUT_S)[0]
        line = self.process.stdout.readline() if is_there else ""
        if not line:
            raise SystemExit(f"benchmarks: {self.process.args!r} did not say what it should")
        return line.strip()


def measure() -> list[Figure]:
    servers = [contestant.name for contestant in launchers()]
    return [*_rates(servers), *_bursts(servers)]


# --- operations a second ---------------------------------------------------------------------------------------------------


def _rates(servers: list[str]) -> list[Figure]:
    with ExitStack() as stack:
        hosts = [stack.enter_context(Program("store_peer.py", "serve", name)) for name in servers]
        ports = [host.line() for host in hosts]
        with _clients(servers[-1], MANY, ports) as clients:
            figures = [*_compare(servers, servers[-1], clients[:1]), *_compare(servers, servers[-1], clients)]
        if TORCHRUN not in servers:
            return figures
        with _clients(RALLYRUN, 1, ports) as clients:
            return [*figures, *(figure._replace(targets=()) for figure in _compare(servers, RALLYRUN, clients))]


@contextmanager
def _clients(kind: str, count: int, ports: list[str]) -> Iterator[list[Program]]:
    with ExitStack() as stack:
        clients = [stack.enter_context(Program("store_peer.py", "use", kind, rank, *ports)) for rank in range(count)]
        for client in clients:
            client.line()
        yield clients


def _compare(servers: list[str], kind: str, clients: Sequence[Program]) -> list[Figure]:
    """All operations, by so many clients at once."""
    plan = PLANS[len(clients)]
    samples: dict[str, Samples] = {operation: {name: [] for name in servers} for operation in OPERATIONS}
    for turn in range(plan.rounds):
        for operation in OPERATIONS:
            for name in _in_turn(servers, turn):
                samples[operation][name].append(_rate(clients, operation, servers.index(name), plan.round_s))
    return _figures(samples, kind, len(clients))


def _rate(clients: Sequence[Program], operation: str, place: int, seconds: float) -> float:
    """Operations a second of all clients together, from the moment they begin until the last is done."""
    starts_at = time.monotonic() + HEAD_START_S
    for client in clients:
        client.say(f"{operation} {place} {starts_at} {seconds}")
    told = [client.line().split() for client in clients]
    return sum(int(count) for count, _ in told) / (max(float(ended_at) for _, ended_at in told) - starts_at)


def _figures(samples: dict[str, Samples], kind: str, count: int) -> list[Figure]:
    who = f"{count} of {WHOSE[kind]} clients"
    ratios = {operation: _ratios(values) for operation, values in samples.items()}
    figures = [
        Figure(f"store: {operation}, {who}", "ops/s", values, (_by_round(PLANS[count].least_ratio, ratios[operation]),), True)
        for operation, values in samples.items()
    ]
    means = [geometric_mean(one_round) for one_round in zip(*ratios.values(), strict=True)]
    targets = (at_least(LEAST_MEAN, "x"),) if count == MANY else ()
    return [*figures, Figure(f"store: geometric mean of the ratios, {who}", "x torch's", {RALLYRUN: means}, targets, True)]


def _ratios(samples: Samples) -> list[float]:
    return [ours / torchs for ours, torchs in zip(samples[RALLYRUN], samples.get(TORCHRUN, ()), strict=False)]


def _by_round(limit: float, ratios: list[float]) -> Target:
    """The median of what our server did in a round, compared with torch's in the same."""
    found = f", is {median(ratios):.2f}x" if ratios else ""
    return Target(f">= {limit:g}x {TORCHRUN} by round{found}", TORCHRUN, lambda _ours, _torchs: median(ratios) >= limit)


# --- many connections ------------------------------------------------------------------------------------------------------


def _bursts(servers: list[str]) -> list[Figure]:
    times: Samples = {name: [] for name in servers}
    sizes: Samples = {name: [] for name in servers}
    for turn in range(BURSTS):
        for name in _in_turn(servers, turn):
            seconds, size_kb = _burst(name)
            times[name].append(seconds)
            sizes[name].append(size_kb)
    what = f"{CONNECTIONS:,} connects at once"
    return [
        Figure(f"store: {what}, until all are answered", "s", times, (at_most(CONNECT_S, "s"),)),
        Figure(f"store: RSS of the server for each of {CONNECTIONS:,} connections", "KB", sizes),
    ]


def _burst(server: str) -> tuple[float, float]:
    """Seconds, and kilobytes for each connection; of a new server, for one that has grown does not shrink again."""
    with Program("store_peer.py", "serve", server) as host:
        port, pids = host.line(), [host.process.pid]
        before_mb = memory(pids).rss_mb
        with Program("store_burst.py", port, CONNECTIONS) as burst:
            seconds = float(burst.line())
            return seconds, (memory(pids).rss_mb - before_mb) * 1024 / CONNECTIONS


def _in_turn(servers: list[str], turn: int) -> list[str]:
    """Now one is first, now the other."""
    return servers if turn % 2 == 0 else servers[::-1]
