"""The commands ``rallyrun`` and ``rallypoint``, and ``python -m rallypoint``.

Two things happen before anything else is imported. The warden is started, so that it is ready when the first worker is wanted.
And Ctrl-C gets an end without a traceback: from here on there is no moment at which it would show one.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main", "rallyrun"]

_ANSWERED_AT_ONCE = ("--help", "-h", "--version")


def rallyrun() -> int:
    """``rallyrun FLAGS script.py ARGUMENTS``."""
    _prepare(sys.argv[1:])
    from rallypoint import cli

    return cli.main(sys.argv[1:])


def main() -> int:
    """``rallypoint COMMAND``; ``rallypoint run`` is ``rallyrun``."""
    _prepare(sys.argv[2:] if sys.argv[1:2] == ["run"] else [])
    from rallypoint import cli

    return cli.rallypoint_main(sys.argv[1:])


def _prepare(run_arguments: list[str]) -> None:
    if sys.platform != "linux":
        sys.exit(f"rallypoint needs Linux 5.4 or newer: it relies on pidfds and subreapers, which {sys.platform} does not have")
    _open_standard_streams()
    if run_arguments and run_arguments[0] not in _ANSWERED_AT_ONCE:
        from rallypoint.processes.warden_start import start_warden

        started = start_warden()
        _die_quietly_of_interrupts()
        from rallypoint.processes import init_duty, warden_client

        warden_client.prepare(*started)
        init_duty.reap_orphans_if_first()
    else:
        _die_quietly_of_interrupts()


def _open_standard_streams() -> None:
    """A stream that was closed on us becomes /dev/null, so that no other file of ours gets its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _die_quietly_of_interrupts() -> None:
    import signal

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))


if __name__ == "__main__":
    sys.exit(main())
