"""What a process with the id 1 owes to its container: to reap every orphan, for nobody else can.

Descendants of workers go to the warden. Others, such as what ``docker exec`` leaves behind, come to us when we are the first
process. A thread that does nothing but wait reaps them; whoever waits for a child of ours finds it reaped already, and knows why.
"""

from __future__ import annotations

import os
import threading
import time

__all__ = ["reap_orphans_if_first"]

NO_CHILD_PAUSE_S = 1.0  # between one warden and the next there may be no child to wait for


def reap_orphans_if_first() -> None:
    """As process 1, and only then, reap whatever ends from now on."""
    if os.getpid() == 1:
        threading.Thread(target=_reap_for_ever, name="rallypoint-orphans", daemon=True).start()


def _reap_for_ever() -> None:
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(NO_CHILD_PAUSE_S)
