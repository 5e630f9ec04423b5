"""With ``--preload auto``, in one worker of a node: which installed modules the program imports, and how long each takes.

Loaded by our `sitecustomize`, and like that it stands alone. Python holds a lock while it loads a module, through a context
manager. Ours, which also looks at the clock, takes its place for a while: it runs before and after the loading, never around it,
so no traceback has a frame of it, and neither ``__import__`` nor finders nor loaders are any different.

What counts is what the program and its own modules import of what is installed, with all that this pulls in; not the program's
own modules, which change. Each is written down, at a place in the agent's memory, as soon as it is loaded: so it makes no
difference how the program ends. No failure of this may hurt the program: then nothing more is measured, and that is all.
"""

from __future__ import annotations

import _frozen_importlib
import _thread
import os
import sys
import time

__all__ = ["HEAD", "LEAST_S", "MOST", "WINDOW_S", "measure"]

HEAD = "imports"  # the first line, which tells that something was measured at all
WINDOW_S = 60.0  # what is imported later is no part of the start
MOST = 256
LEAST_S = 0.01
UNCHANGED = "-"
_LOCK = "_ModuleLockManager"
_INSTALLED = ("site-packages", "dist-packages")
_NEVER = ("__main__", "rallypoint", "sitecustomize", "usercustomize")


class _Import:
    """One that has begun, and what the program had changed in its environment by then."""

    def __init__(self, name: str, began_at: float, changed: str) -> None:
        self.name, self.began_at, self.changed = name, began_at, changed
        self.counted_s = 0.0  # of this time, what was counted for others within it


class _ImportTimes:
    def __init__(self, place: str, package: str) -> None:
        self._place = place
        self._never = (*_NEVER, package)
        self._roots = _installed_folders()
        self._began_at = time.monotonic()
        self._process, self._thread = os.getpid(), _thread.get_ident()
        self._open: list[_Import] = []
        self._counted: _Import | None = None  # all that is imported within it belongs to it
        self._environment: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # to compare them costs little
        self._known_environment = dict(self._environment)
        self._changed = UNCHANGED
        self._left = MOST
        self._offset = 0
        self._write(f"{HEAD}\n")
        self._lock = getattr(_frozen_importlib, _LOCK)
        setattr(_frozen_importlib, _LOCK, _timed(self._lock, self))

    def stop(self) -> None:
        setattr(_frozen_importlib, _LOCK, self._lock)

    def begin(self, name: str) -> _Import | None:
        if self._counted is not None or _thread.get_ident() != self._thread:
            return None
        now = time.monotonic()
        if now > self._began_at + WINDOW_S or not self._left:
            self.stop()
            return None
        if self._open and self._counts(self._open[-1].name):
            self._counted = self._open[-1]
            return None
        if self._environment != self._known_environment and self._changed == UNCHANGED:
            self._changed = _difference(self._environment, self._known_environment)
        one = _Import(name, now, self._changed)
        self._open.append(one)
        return one

    def end(self, one: _Import, is_loaded: bool) -> None:
        took_s = time.monotonic() - one.began_at
        if self._counted is one:
            self._counted = None
        while self._open.pop() is not one:
            pass
        counted_s = one.counted_s
        if is_loaded and self._counts(one.name):
            if self._environment != self._known_environment and one.changed == UNCHANGED:
                self._known_environment = dict(self._environment)  # it was not the program that changed it
            if took_s - counted_s >= LEAST_S:
                self._tell(one, took_s - counted_s)
                counted_s = took_s
        if self._open:
            self._open[-1].counted_s += counted_s

    def _counts(self, name: str) -> bool:
        """Whether it is installed, where every interpreter finds it by that name: as far as it is loaded, it knows its file."""
        file, top = getattr(sys.modules.get(name), "__file__", None), name.partition(".")[0]
        return isinstance(file, str) and file.startswith(tuple(root + top for root in self._roots)) and top not in self._never

    def _tell(self, one: _Import, took_s: float) -> None:
        if os.getpid() != self._process:  # a fork of the program's
            self.stop()
        elif all(map(str.isidentifier, one.name.split("."))):
            self._left -= 1
            self._write(f"{one.name} {took_s:.3f} {one.changed}\n")

    def _write(self, line: str) -> None:
        """Opened each time, so that the program has no file more than it would have."""
        text = line.encode()
        fd = os.open(self._place, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._offset += os.pwrite(fd, text, self._offset)
        finally:
            os.close(fd)


def _timed(lock: type, times: _ImportTimes) -> type:
    class Timed(lock):  # type: ignore[misc]  # whatever the interpreter has
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self._timed_name = name
            self._timed_import: _Import | None = None

        def __enter__(self) -> object:
            try:
                self._timed_import = times.begin(self._timed_name)
            except Exception:  # the program goes on, and is not measured
                times.stop()
            return super().__enter__()

        def __exit__(self, kind: object, error: object, trace: object) -> object:
            answer = super().__exit__(kind, error, trace)
            if self._timed_import is not None:
                try:
                    times.end(self._timed_import, kind is None)
                except Exception:  # as above: the agent may be gone, and its memory with it
                    times.stop()
            return answer

    return Timed


def _installed_folders() -> tuple[str, ...]:
    """Those of the path, before the program adds to it, whose content does not change from one run to the next."""
    standard = os.path.dirname(os.__file__)
    folders = [one for one in sys.path if os.path.basename(one) in _INSTALLED or one.startswith(standard)]
    return tuple(os.path.join(one, "") for one in folders)


def _difference(now: dict[bytes, bytes], before: dict[bytes, bytes]) -> str:
    names = sorted(name for name in {**now, **before} if now.get(name) != before.get(name))
    return next(filter(str.isidentifier, map(os.fsdecode, names)), "?")


def measure(package: str, place: str) -> None:
    """From now on, write to this file what the program imports; but not this package, which is its own."""
    _ImportTimes(place, package)
