"""What a node costs the store, however many there are: operations and bytes to meet, for one failure with N victims, to end.

There is no network and no chance here: participants and a keyspace, in one process, as fast as they go. Bytes are what the values
of each request, answer and event would take as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import deque

from rallypoint.coordination.keyspace import Keyspace
from rallypoint.coordination.model import Event, Item, Outcome, Read, Request, Snapshot, Transaction
from rallypoint.protocol import job_records as job
from rallypoint.protocol import session
from rallypoint.protocol.generation import Policy
from rallypoint.protocol.participant import Joining, Participant
from rallypoint.protocol.restarts import RestartPolicy
from rallypoint.protocol.verdict import NodeReport, WorkerFailure

__all__ = ["Cost", "Crowd", "exponent", "measure"]

SIZES = (16, 64, 256, 1024)
ALL_SIZES = (*SIZES, 4096, 10_000)
PHASES = ("meet", "fail", "end")


class Cost:
    """What one phase took: requests that were served, and bytes that went over the wire in both directions."""

    def __init__(self) -> None:
        self.operations = 0
        self.bytes = 0

    def __repr__(self) -> str:
        return f"{self.operations} operations, {self.bytes} bytes"


class Crowd:
    """Many participants and the store that they share."""

    def __init__(self, count: int) -> None:
        self.keyspace = Keyspace()
        self.now = 0.0
        self.cost = Cost()
        self.news: dict[str, list[session.News]] = {}
        policy, restarts = Policy(count, count), RestartPolicy(3)
        self.members = [self._join(index, policy, restarts) for index in range(count)]
        self._watching: dict[str, list[Participant]] = {"down/": [], "up/": []}

    def _join(self, index: int, policy: Policy, restarts: RestartPolicy) -> Participant:
        lease = self.keyspace.grant(30.0, self.now)
        record = job.NodeRecord(f"node{index}", "10.0.0.1", 0, "default", 8, job.NOT_READY)
        member = Participant(Joining(f"id{index}", lease, record, {"protocol": 1}, lambda *_: None, policy, restarts))
        member.ready(self.now, 29500)
        return member

    def run(self) -> None:
        """Until nobody has anything to ask: what was asked is answered in turns, as a server does it."""
        busy = deque(self.members)
        while busy:
            member = busy.popleft()
            request = member.next_request(self.now)
            if request is not None:
                answer = self._serve(member, request)
                member.replied(request, answer, self.now)
                busy.append(member)
            self.news.setdefault(member.id, []).extend(member.take_news())
            busy.extend(self._tell())
            if not busy:
                busy.extend(self._let_time_pass())

    def _serve(self, member: Participant, request: Request) -> Outcome | Snapshot | None:
        self.cost.operations += 1
        answer: Outcome | Snapshot | None = None
        if isinstance(request, Transaction):
            answer = self.keyspace.transact(request)
        elif isinstance(request, Read):
            answer = self.keyspace.read(request.prefix)
        else:
            self._watching[request.prefix].append(member)
        self.cost.bytes += size(request) + size(answer)
        return answer

    def _tell(self) -> list[Participant]:
        """Pass on what has changed; whoever was told may have something to ask now."""
        told: dict[str, Participant] = {}
        for event in self.keyspace.take_changes():
            for prefix, watching in self._watching.items():
                if event.key.startswith(prefix):
                    self.cost.bytes += size(event) * len(watching)
                    for member in watching:
                        member.see(event, self.now)
                        told[member.id] = member
        return list(told.values())

    def _let_time_pass(self) -> list[Participant]:
        """A leader of many decides once for many events; everything else that waits is not waited for."""
        waking = [(at, member) for member in self.members if member.leader and (at := member.wake_at()) is not None]
        soon = [(at, member) for at, member in waking if self.now < at <= self.now + 1.0]
        if soon:
            self.now = min(at for at, _ in soon)
        return [member for at, member in soon if at <= self.now]

    # The phases.

    def meet(self) -> None:
        self.run()
        self._expect(session.Seated)

    def fail(self) -> None:
        """One worker fails, and all others for that; everybody reports, and meets again."""
        self.members[0].failed(self._report(0, "ValueError: bad luck"))
        for index, member in enumerate(self.members[1:], 1):
            member.failed(self._report(index, "Connection reset by peer"))
        self.run()
        self._expect(session.Regroup)
        for member in self.members:
            member.ready(self.now, 29500)
        self.run()
        self._expect(session.Seated)

    def end(self) -> None:
        for member in self.members:
            member.done()
        self.run()
        self._expect(session.Ended)

    @staticmethod
    def _report(index: int, message: str) -> NodeReport:
        failures = [WorkerFailure(8 * index + local, local, "default", "host", 7, 1, message, 0.0) for local in range(8)]
        return NodeReport(f"node{index}", 0, tuple(failures))

    def _expect(self, kind: type) -> None:
        """Everybody has heard that, and nothing else that matters."""
        heard, self.news = self.news, {}
        for member in self.members:
            found = [type(one) for one in heard[member.id] if not isinstance(one, session.Progress)]
            assert found == [kind], f"{member.id} heard {found}"


def size(message: object) -> int:
    """How long this would be on the wire, roughly: its values as JSON."""
    return len(json.dumps(_plain(message)))


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, Item | Event | Outcome | Snapshot) or hasattr(value, "_fields"):
        return [_plain(one) for one in value.__dict__.values()]
    return value


def measure(count: int) -> dict[str, Cost]:
    """What each phase costs for so many nodes."""
    crowd, costs = Crowd(count), {}
    for phase in PHASES:
        crowd.cost = costs[phase] = Cost()
        getattr(crowd, phase)()
    return costs


def exponent(sizes: list[int], totals: list[float]) -> float:
    """The slope of the line through the logarithms: 1 if a total grows with the number of nodes, 2 with its square."""
    xs, ys = [math.log(size) for size in sizes], [math.log(total) for total in totals]
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True)) / sum((x - middle_x) ** 2 for x in xs)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.scale", description="What a node costs the store.")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(ALL_SIZES))
    options = parser.parse_args(arguments)
    found: dict[int, dict[str, Cost]] = {}
    for count in options.sizes:
        begun = time.monotonic()
        found[count] = measure(count)
        each = [
            f"{name}: {cost.operations / count:.2f} operations, {cost.bytes / count:.0f} bytes"
            for name, cost in found[count].items()
        ]
        print(f"{count:>6} nodes, for each  {'; '.join(each)}; all in {time.monotonic() - begun:.1f} s", flush=True)
    worst = 0.0
    for phase in PHASES:
        operations = exponent(options.sizes, [found[count][phase].operations for count in options.sizes])
        size_ = exponent(options.sizes, [found[count][phase].bytes for count in options.sizes])
        worst = max(worst, operations, size_)
        print(f"{phase}: total operations grow as n^{operations:.3f}, total bytes as n^{size_:.3f}")
    return 0 if worst <= 1.1 else 1


if __name__ == "__main__":
    sys.exit(main())
