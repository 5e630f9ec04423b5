"""The error file: how a worker that dies of an exception tells the agent why.

A worker finds the path in its environment and writes one JSON object there, in the format that programs written for torchrun
write and read; ``extraInfo`` holds strings only:

    {"message": {"message": "ValueError: boom",
                 "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1700000000", "timestamp_ns": "1700000000123456789"},
                 "errorCode": 1}}

``errorCode`` stands there once a parent has passed its child's error on. ``timestamp_ns`` is ours: which of two failures was the
first is often decided below a second. The short form ``{"message": "text", "timestamp": 1700000000}`` is read too.

This module is imported inside workers. So it imports next to nothing, and nothing that it does may hide the error it records.
"""

from __future__ import annotations

import functools
import os
import sys

from rallypoint.base import defaults, environment

TYPE_CHECKING = False  # spares workers the import of typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, NoReturn, ParamSpec, TypeVar

    _P = ParamSpec("_P")
    _R = TypeVar("_R")

__all__ = ["WISH", "ErrorHandler", "fail", "get_error_handler", "read_error_file", "record", "record_quietly", "users_traceback"]

WISH = "rallypoint_wish"  # in extraInfo: what the worker asked for when it failed
_ERROR_FILE_BYTES_MAX = 16 * 1024 * 1024
_CALLERS = (__name__, "rallypoint.processes.function_worker")  # of the user's function


class ErrorHandler:
    """Records what ended this process. Subclasses override what they know more about.

    >>> from rallypoint import ErrorHandler, record
    >>> class Pages(ErrorHandler):
    ...     def record_exception(self, e):
    ...         print("page somebody:", e)
    ...         super().record_exception(e)
    >>> def main():
    ...     raise ValueError("no such data set")
    >>> record(main, Pages())()
    Traceback (most recent call last):
    ValueError: no such data set
    """

    _fn_name: str | None = None

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        """The name of the function that is about to run."""
        self._fn_name = fn_name

    def initialize(self) -> None:
        """Ask Python to show every thread's stack on stderr when a signal such as SIGSEGV ends the process."""
        import faulthandler

        try:
            faulthandler.enable(all_threads=True)
        except (OSError, RuntimeError, ValueError, AttributeError):
            # A stderr that is closed, or no real file, as under a test runner or in a notebook: then there are no stacks.
            return

    def record_exception(self, e: BaseException) -> None:
        """Write `e` and its traceback into this process's error file, if it was given one."""
        path = self._get_error_file_path()
        if path:
            self._write_error_file(path, _error_data(e))

    def record_success(self) -> None:
        """The function has returned."""

    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
        """What to tell of a worker that a signal has ended, and that left no error file; in the launcher's process."""
        return message

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Put the exit code of the process that failed first into its error."""
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
            return
        from rallypoint.base import report

        report.debug(f"the error file {rootcause_error_file} is in the short form, which has no place for exit code {error_code}")

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Pass a child's error on, whatever it holds: copy its error file to this process's own."""
        error = _read_object(rootcause_error_file)
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, error, error_code)
        path = self._get_error_file_path()
        if path:
            self._write_error_file(path, error)

    def _get_error_file_path(self) -> str | None:
        return environment.own.get(defaults.ENV_ERROR_FILE)

    def _write_error_file(self, path: str, error: dict[str, Any]) -> None:
        """Whole or not at all: the agent may look at any time, and this process may be killed at any time."""
        import json

        scratch = f"{path}.{os.getpid()}.tmp"
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(scratch, "w", encoding="ascii") as file:
                file.write(json.dumps(error))
            os.replace(scratch, path)
        except OSError as why:
            _remove(scratch)
            _say(f"the error file {path} could not be written ({why}); the launcher will show stderr instead")


def get_error_handler() -> ErrorHandler:
    """The handler that `record` uses where it is given none.

    >>> from rallypoint.failures import get_error_handler
    >>> get_error_handler().initialize()
    """
    return ErrorHandler()


def record(fn: Callable[_P, _R], error_handler: ErrorHandler | None = None) -> Callable[_P, _R | None]:
    """Decorate the main function of a worker: an exception that leaves it is recorded in the error file, and raised again.

    The launcher shows the same for programs without it; what this adds is the whole message and stack, however long stderr is.
    ``sys.exit(0)`` inside `fn` becomes a normal return, so that a script run by path can be followed by more work.

    >>> from rallypoint import record
    >>> @record
    ... def main():
    ...     return "trained"
    >>> main()
    'trained'
    """
    handler = error_handler or get_error_handler()

    @functools.wraps(fn)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        _tell(handler, "set_entrypoint_fn_name", getattr(fn, "__qualname__", None))
        handler.initialize()
        try:
            result = fn(*args, **kwargs)
        except SystemExit as end:
            if end.code == 0:
                return None
            raise
        except Exception as error:  # all of them, because all of them end the worker; each is raised again
            record_quietly(handler, error)
            raise
        _tell(handler, "record_success")
        return result

    return wrapper


def fail(message: str, wish: str) -> NoReturn:
    """End this process as failed, for this reason; the launcher is told what is wished for."""
    import time

    now_ns = time.time_ns()
    handler = get_error_handler()
    path = handler._get_error_file_path()
    extra = {"timestamp": str(now_ns // 1_000_000_000), "timestamp_ns": str(now_ns), WISH: wish}
    if path:
        handler._write_error_file(path, {"message": {"message": message, "extraInfo": extra}})
    raise SystemExit(message)


def _tell(handler: ErrorHandler, method: str, *args: Any) -> None:
    """Call what a handler written for torch before 2.15 does not have."""
    known = getattr(handler, method, None)
    if known is not None:
        known(*args)


def read_error_file(path: str) -> dict[str, Any]:
    """The content of an error file; ValueError or OSError if it is none."""
    data = _read_object(path)
    if not isinstance(data.get("message"), (str, dict)):
        raise ValueError('it has no "message" that is a text or an object')
    return data


def _read_object(path: str) -> dict[str, Any]:
    from rallypoint.base.json_text import from_json

    with open(path, "rb") as file:
        content = file.read(_ERROR_FILE_BYTES_MAX + 1)
    if len(content) > _ERROR_FILE_BYTES_MAX:
        raise ValueError(f"it is larger than {_ERROR_FILE_BYTES_MAX} bytes")
    data = from_json(content)
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    return data


def record_quietly(handler: ErrorHandler, error: Exception) -> None:
    try:
        _record(handler, error)
    except Exception as why:
        # The last act of a dying process: whatever goes wrong here, the user must still see the error itself.
        _say(f"{type(error).__name__} could not be recorded: {type(why).__name__}: {why}")


def _record(handler: ErrorHandler, error: Exception) -> None:
    """A launcher passes on its first failing worker's error file, if there is one; that it had to is no error of its own."""
    # If it is a ChildFailedError, its module has been imported; if not, importing it here would be work for nothing.
    module = sys.modules.get("rallypoint.failures.process_failure")
    if module and isinstance(error, module.ChildFailedError) and error.failures:
        _, first = error.get_first_failure()
        if first.error_file != module.NOT_AVAILABLE:
            handler.dump_error_file(first.error_file, first.exitcode)
        return
    handler.record_exception(error)


def _error_data(error: BaseException) -> dict[str, Any]:
    import time
    import traceback

    now_ns = time.time_ns()
    stack = "".join(traceback.format_exception(type(error), error, users_traceback(error)))
    times = {"timestamp": str(now_ns // 1_000_000_000), "timestamp_ns": str(now_ns)}
    return {"message": {"message": _one_text(error), "extraInfo": {"py_callstack": stack, **times}}}


def users_traceback(error: BaseException) -> TracebackType | None:
    """Where the user's own code begins; that we called it tells nobody anything."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_globals.get("__name__") in _CALLERS:
        step = step.tb_next
    return step


def _one_text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        # A user's own __str__ may do anything, and it is not worth losing the stack for.
        return f"{type(error).__name__}: (its text cannot be shown)"


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def _say(text: str) -> None:
    from rallypoint.base import report

    report.warn(text)
