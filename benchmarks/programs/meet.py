"""Some of the nodes of one job, in one process, each with a handler and a connection of its own.

``meet.py KIND PORT NODES FIRST COUNT`` says "ready" when all handlers are made, waits for a line on stdin, and prints when the
first call was made and when the last of its nodes had its seat, on the machine's monotonic clock.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def ours(port: int, nodes: int, is_host: bool) -> Any:
    from rallypoint import report
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


def meet(handler: Any, done: Callable[[float], None]) -> None:
    handler.next_rendezvous()
    done(time.monotonic())


def main() -> None:
    kind, port, nodes, first, count = sys.argv[1], *map(int, sys.argv[2:])
    make = ours if kind == "rallyrun" else torchs
    threading.stack_size(256 * 1024)
    handlers = [make(port, nodes, first + index == 0) for index in range(count)]
    print("ready", flush=True)
    sys.stdin.readline()
    ends: list[float] = []
    began = time.monotonic()
    threads = [threading.Thread(target=meet, args=(handler, ends.append), daemon=True) for handler in handlers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(began, max(ends), flush=True)
    sys.stdin.readline()  # nobody leaves before all are there


if __name__ == "__main__":
    main()
