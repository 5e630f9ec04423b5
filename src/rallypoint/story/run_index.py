"""Which runs there were on this host: so that ``rallypoint explain`` needs no path for the newest one.

In the user's folder for state, each run that has a file of events has a link to its folder, named by the moment at which that was
noted:

    <state>/rallypoint/runs/<host>/<nanoseconds since 1970>_<random>  -> the run's folder

A link is made in one step and holds all that there is to know, so nobody waits for anybody, and nothing can be half written.
Hosts may share a home, and each has a folder of its own. The oldest links go when there are too many, and those whose folder is
gone lead nowhere and are passed over. Where there is no such folder, and none can be made, nothing is noted.
"""

from __future__ import annotations

import os
import time

from rallypoint.base import defaults, environment

__all__ = ["forget", "newest", "note"]

MOST_RUNS = 100
_PARTS = ("rallypoint", "runs")
_DIGITS = 20  # so that names are in the order of time, for some centuries
_own: dict[str, str] = {}  # the links of this process, by where they lead to


def note(folder: str) -> None:
    """Put a run on record, and let go of the oldest; OSError if that cannot be."""
    state = environment.state_dir()
    if not state or not _is_ours(state):
        return
    os.makedirs(state, exist_ok=True)
    for part in (*_PARTS, os.uname().nodename):
        state = os.path.join(state, part)
        _make_private(state)
    link = os.path.join(state, f"{time.time_ns():0{_DIGITS}}_{os.urandom(4).hex()}")
    os.symlink(folder, link)
    _own[folder] = link
    for old in sorted(_names(state))[:-MOST_RUNS]:
        _unlink(os.path.join(state, old))


def forget(folder: str) -> None:
    """The folder of a run of this process is gone."""
    if folder in _own:
        _unlink(_own.pop(folder))


def newest() -> str:
    """The folder of the newest run on this host that has its events still; empty if there is none."""
    targets = (target for _, target in _links())
    return next((one for one in targets if os.path.isfile(os.path.join(one, defaults.EVENT_FILE))), "")


def _is_ours(path: str) -> bool:
    """Who works as root in the home of somebody else leaves nothing there that its owner could not remove."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_uid == os.geteuid()


def _make_private(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return


def _names(home: str) -> list[str]:
    try:
        return [name for name in os.listdir(home) if name[:_DIGITS].isdecimal()]
    except OSError:
        return []


def _links() -> list[tuple[str, str]]:
    """Each with where it leads to, the newest first."""
    state = environment.state_dir()
    home = os.path.join(state, *_PARTS, os.uname().nodename) if state else ""
    found = []
    for name in sorted(_names(home), reverse=True):
        path = os.path.join(home, name)
        try:
            found.append((path, os.readlink(path)))
        except OSError:  # gone meanwhile, or no link
            continue
    return found


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:  # another run was quicker
        return
