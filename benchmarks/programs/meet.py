"""Some of the nodes of one job, in one process, each with a handler and a connection of its own.

``meet.py KIND PORT NODES FIRST COUNT`` says "ready" when all handlers are made, waits for a line on stdin, and prints when the
first call was made and when the last of its nodes had its seat, on the machine's monotonic clock.
"""

from __future__ import annotations

import importlib
import select
import sys
import threading
import time
from typing import Any


def ours(port: int, nodes: int, is_host: bool) -> Any:
    from rallypoint.base import report
    from rallypoint.rendezvous.handler import RendezvousParameters
    from rallypoint.rendezvous.registry import get_rendezvous_handler

    report.set_sink(lambda _level, _text: None)
    endpoint = f"127.0.0.1:{port}"
    return get_rendezvous_handler(RendezvousParameters("c10d", endpoint, "bench", nodes, nodes, is_host=is_host))


def torchs(port: int, nodes: int, is_host: bool) -> Any:
    api = importlib.import_module("torch.distributed.elastic.rendezvous")
    registry = importlib.import_module("torch.distributed.elastic.rendezvous.registry")
    params = api.RendezvousParameters("c10d", f"127.0.0.1:{port}", "bench", nodes, nodes, is_host=is_host)
    return registry.get_rendezvous_handler(params)


def meet_all_of_ours(handlers: list[Any]) -> float:
    """As an agent does, which waits for its handler and for other things at once."""
    poll = select.poll()
    waiting = {}
    for handler in handlers:
        if handler.poll_rendezvous() is None:
            waiting[handler.wakeup_fd()] = handler
            poll.register(handler.wakeup_fd(), select.POLLIN)
    while waiting:
        for fd, _ in poll.poll():
            if waiting[fd].poll_rendezvous() is not None:
                poll.unregister(fd)
                del waiting[fd]
    return time.monotonic()


def meet_all_of_torchs(handlers: list[Any]) -> float:
    """Each blocks its thread."""
    threads = [threading.Thread(target=handler.next_rendezvous, daemon=True) for handler in handlers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic()


def main() -> None:
    kind, port, nodes, first, count = sys.argv[1], *map(int, sys.argv[2:])
    make, meet_all = (ours, meet_all_of_ours) if kind == "rallyrun" else (torchs, meet_all_of_torchs)
    threading.stack_size(256 * 1024)
    handlers = [make(port, nodes, first + index == 0) for index in range(count)]
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    print(began, meet_all(handlers), flush=True)
    sys.stdin.readline()  # nobody leaves before all are there


if __name__ == "__main__":
    main()
