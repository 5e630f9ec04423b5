"""A function and its arguments, packed for another interpreter.

It is multiprocessing's own pickling, with the same preparation (the path, ``__main__`` of a script), so whatever can be sent to a
``multiprocessing.Process`` can be sent here. A function that pickle cannot name, such as a lambda or one from a notebook, is
sent by value where ``cloudpickle`` is installed. The parcel lies in a memory file: it needs no reader while it is written.
"""

from __future__ import annotations

import io
import marshal
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rallypoint.errors import UsageError

__all__ = ["Parcel", "pack"]


class Parcel(NamedTuple):
    """A memory file with the content, and every file descriptor that must go along, under its own number."""

    fd: int
    fds: tuple[int, ...]

    def close(self) -> None:
        os.close(self.fd)


def pack(content: Any, name: str) -> Parcel:
    """Write path, preparation and content, in the order in which the receiver needs them."""
    import pickle
    from multiprocessing import spawn

    preparation = spawn.get_preparation_data(name)
    if not os.path.exists(preparation.get("init_main_from_path", "/")):  # as for a program that was read from stdin
        del preparation["init_main_from_path"]
    main_can_be_imported = "init_main_from_name" in preparation or "init_main_from_path" in preparation
    tracker_fd = _tracker_fd()
    with _collecting_fds() as passed:
        head = pickle.dumps((preparation, tracker_fd))
        body = _pickle_content(content, main_can_be_imported)
    fd = os.memfd_create("parcel", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(marshal.dumps(sys.path) + head + body)
    os.lseek(fd, 0, os.SEEK_SET)
    tracker = () if tracker_fd is None else (tracker_fd,)
    return Parcel(fd, (fd, *tracker, *passed))


def _pickle_content(content: Any, main_can_be_imported: bool) -> bytes:
    """By name as multiprocessing does it; by value if that fails, or if ``__main__`` is a session that nobody can import."""
    from multiprocessing.reduction import ForkingPickler

    if not main_can_be_imported and (_is_from_main(content[0]) or _have_cloudpickle()):
        return _pickle_by_value(content, "it is defined in an interactive session, which a new interpreter cannot import")
    buffer = io.BytesIO()
    try:
        ForkingPickler(buffer).dump(content)
    except Exception as error:  # pickling runs the code of every object in the content, which may raise anything
        return _pickle_by_value(content, f"pickle says: {error}")
    return buffer.getvalue()


def _is_from_main(function: Any) -> bool:
    return getattr(function, "__module__", "") == "__main__"


def _have_cloudpickle() -> bool:
    from importlib.util import find_spec

    return find_spec("cloudpickle") is not None


def _pickle_by_value(content: Any, reason: str) -> bytes:
    name = getattr(content[0], "__qualname__", repr(content[0]))
    if not _have_cloudpickle():
        raise UsageError(
            f"the function {name} or its arguments cannot be sent to a new process: {reason}. Define it at the top level of a "
            "module, or install rallypoint[functions], or use start_method='fork'"
        )
    try:
        return _cloudpickle(content)
    except Exception as error:  # as above
        raise UsageError(f"the function {name} or its arguments cannot be sent to a new process: {error}") from error


def _cloudpickle(content: Any) -> bytes:
    """By value, but queues, pipes and the like as multiprocessing sends them."""
    from collections import ChainMap
    from multiprocessing.reduction import ForkingPickler

    import cloudpickle

    as_multiprocessing_does = dict(ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
    table = ChainMap(as_multiprocessing_does, cloudpickle.Pickler.dispatch_table)
    buffer = io.BytesIO()
    pickler = type("Pickler", (cloudpickle.Pickler,), {"dispatch_table": table})  # it is looked up in the class
    pickler(buffer).dump(content)
    return buffer.getvalue()


class _Spawning:
    """What multiprocessing's queues, locks and pipes ask for when they are pickled for a child: a way to pass their files on."""

    def __init__(self) -> None:
        self.passed: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.passed.append(fd)
        return fd

    class DupFd:
        def __init__(self, fd: int) -> None:
            self.fd = fd

        def detach(self) -> int:
            return self.fd


@contextmanager
def _collecting_fds() -> Iterator[list[int]]:
    from multiprocessing import context

    spawning = _Spawning()
    context.set_spawning_popen(spawning)  # type: ignore[arg-type]  # it asks for no more than the above
    try:
        yield spawning.passed
    finally:
        context.set_spawning_popen(None)


def _tracker_fd() -> int | None:
    """The line to multiprocessing's resource tracker, if this process has one: its children are to share it."""
    from multiprocessing import resource_tracker

    fd: int | None = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]  # getfd() would start one
    return fd
