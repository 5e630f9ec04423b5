"""Limits on how long a part of a worker's program may take, kept by another process, which ends the worker that exceeds one.

    import rallypoint.timers as timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=60, scope="step"):
        train_one_step()

The names are those of ``torch.distributed.elastic.timer``. Each is loaded when it is first used: a worker that only has a client
does not pay for servers.
"""

from __future__ import annotations

from rallypoint import _lazily

TYPE_CHECKING = bool()  # see rallypoint
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
    "FileTimerClient": "timers.file_timer",
    "FileTimerRequest": "timers.file_timer",
    "FileTimerServer": "timers.file_server",
    "LocalTimerClient": "timers.local_timer",
    "LocalTimerServer": "timers.local_timer",
    "TimerClient": "timers.interface",
    "TimerRequest": "timers.interface",
    "TimerServer": "timers.interface",
    "configure": "timers.interface",
    "expires": "timers.interface",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazily(__name__, _HOMES)
