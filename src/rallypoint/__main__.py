"""The commands ``rallyrun`` and ``rallypoint``, and ``python -m rallypoint``.

Two things happen before anything else is imported. Ctrl-C gets an end without a traceback: from here on there is no
moment at which it would show one. And the warden is started, so that it is ready when the first worker is wanted.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main", "rallyrun"]


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
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if sys.platform != "linux":
        sys.exit(f"rallypoint needs Linux 5.4 or newer: it relies on pidfds and subreapers, which {sys.platform} does not have")
    if run_arguments and run_arguments[0] not in ("--help", "-h", "--version"):
        from rallypoint.processes import init_duty, warden_client

        warden_client.prepare()
        init_duty.reap_orphans_if_first()


if __name__ == "__main__":
    sys.exit(main())
