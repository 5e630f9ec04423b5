"""Links by which people find their way in log folders: to the newest run, to its newest attempt, and to workers by global rank.

    <log_dir>/latest                                                  -> <run_id>_<random>
    <log_dir>/<run_id>_<random>/latest                                -> attempt_<n>
    <log_dir>/<run_id>_<random>/attempt_<n>/ranks/rank_<global_rank>  -> ../<local_rank>

No name of the layout can be one of theirs, and the ranks have a folder of their own, so that a pattern for the files of all
workers, ``attempt_0/*/stdout.log``, finds each once. They are made by a thread of their own when the workers run already. Nothing
of ours needs them, so nothing is wrong where there are none: on a file system without links, on a full disk, in a lost folder.
"""

from __future__ import annotations

import os
import stat

from rallypoint.base import defaults, report
from rallypoint.base.outbox import Outbox
from rallypoint.base.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.output.log_specs import LogFolder

__all__ = ["Linked", "link_maker"]

RANKS = "ranks"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Linked(Value):
    """What there is to be found: a run, whether it is new in the log folder, and its new attempt, if it has one."""

    folder: LogFolder
    is_new_run: bool
    attempt: str
    global_ranks: dict[int, str]  # by local rank


def _make_links(linked: Linked) -> None:
    try:
        fd = linked.folder.open()
        try:
            if linked.attempt:
                _link_ranks(fd, linked)
                _point_latest(fd, linked.attempt)
            if linked.is_new_run:
                _point_latest_run(linked.folder.path)
        finally:
            os.close(fd)
    except OSError as error:
        report.debug(f"links to the newest logs could not be made in {linked.folder.path}: {error.strerror}")


def _link_ranks(run_fd: int, linked: Linked) -> None:
    path = f"{linked.attempt}/{RANKS}"
    os.mkdir(path, dir_fd=run_fd)
    fd = os.open(path, _FOLDER, dir_fd=run_fd)
    try:
        for local_rank, rank in linked.global_ranks.items():
            os.symlink(os.path.join(os.pardir, str(local_rank)), f"rank_{rank}", dir_fd=fd)
    finally:
        os.close(fd)


def _point_latest_run(path: str) -> None:
    fd = os.open(os.path.dirname(path), _FOLDER & ~os.O_NOFOLLOW)
    try:
        _point_latest(fd, os.path.basename(path))
    finally:
        os.close(fd)


def _point_latest(fd: int, name: str) -> None:
    """In one step, so that it leads somewhere at any moment; what somebody else has put there under this name stays."""
    if not _is_ours_or_free(fd):
        return
    new = f".{defaults.LATEST}_{os.urandom(4).hex()}"
    os.symlink(name, new, dir_fd=fd)
    try:
        os.rename(new, defaults.LATEST, src_dir_fd=fd, dst_dir_fd=fd)
    except OSError:
        os.unlink(new, dir_fd=fd)
        raise


def _is_ours_or_free(fd: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(defaults.LATEST, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return True


link_maker = Outbox(_make_links)  # one for all of this process, which may hang alone
