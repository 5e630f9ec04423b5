"""Limits on how long a part of a worker's program may take, kept by another process, which ends the worker that exceeds one.

    import rallypoint.timers as timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=60, scope="step"):
        train_one_step()

The names are those of ``torch.distributed.elastic.timer``. Each is loaded when it is first used: a worker that only has a client
does not pay for servers.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.timers.file_server import FileTimerServer
    from rallypoint.timers.file_timer import FileTimerClient, FileTimerRequest
    from rallypoint.timers.interface import TimerClient, TimerRequest, TimerServer, configure, expires
    from rallypoint.timers.local_timer import LocalTimerClient, LocalTimerServer

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]

_HOMES = {
    "FileTimerClient": "file_timer",
    "FileTimerRequest": "file_timer",
    "FileTimerServer": "file_server",
    "LocalTimerClient": "local_timer",
    "LocalTimerServer": "local_timer",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'interface')}"), name)
    globals()[name] = value
    return value
