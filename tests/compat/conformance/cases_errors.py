"""Failures of workers: what a failure knows, how it is told, how a worker leaves word of it."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests.compat.conformance.harness import case, environment, folder, outcome, plain


def written(path: Path, **more: Any) -> Path:
    path.write_text(
        json.dumps(
            {
                "message": {
                    "message": "ValueError: bad",
                    "extraInfo": {"py_callstack": "the stack", "timestamp": "1700000000"},
                    **more,
                }
            }
        )
    )
    return path


@case
def a_failure_without_an_error_file() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    by_code = ProcessFailure(local_rank=1, pid=997, exitcode=1, error_file="/no/such/file.json")
    by_signal = ProcessFailure(0, 996, -signal.SIGKILL, "/no/such/file.json")
    return {
        "fields": plain([by_code.local_rank, by_code.pid, by_code.exitcode, by_code.error_file]),
        "data": plain(by_code.error_file_data),
        "message": [by_code.message[:60], by_signal.message],
        "signal": [by_code.signal_name(), by_signal.signal_name()],
        "now": abs(by_code.timestamp - time.time()) < 60,
        "type of time": type(by_code.timestamp).__name__,
        "iso": len(by_code.timestamp_isoformat()) >= 19,
        "unknown signal": outcome(lambda: ProcessFailure(0, 1, -999, "/no").signal_name()),
    }


@case
def a_failure_with_an_error_file() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    with folder() as path:
        failure = ProcessFailure(0, 1, 1, str(written(path / "e.json")))
        with_code = ProcessFailure(0, 1, 1, str(written(path / "c.json", errorCode=7)))
        (path / "text.json").write_text(json.dumps({"message": "only text"}))
        text = outcome(lambda: ProcessFailure(0, 1, 1, str(path / "text.json")).message)
        (path / "bad.json").write_text("{ not json")
        bad = outcome(lambda: ProcessFailure(0, 1, 1, str(path / "bad.json")).message)
        (path / "odd.json").write_text(json.dumps({"other": 1}))
        odd = outcome(lambda: ProcessFailure(0, 1, 1, str(path / "odd.json")).timestamp > 0)
    return {
        "message": failure.message,
        "timestamp": failure.timestamp,
        "data": plain(failure.error_file_data),
        "code": plain(with_code.error_file_data["message"].get("errorCode")),
        "text only": text,
        "bad json": bad,
        "another shape": odd,
    }


def failures(count: int = 3) -> dict[int, Any]:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    with folder() as path:
        made = {}
        for rank in range(count):
            name = path / f"{rank}.json"
            stamp = str(1700000000 + (5 if rank != 1 else 0))
            name.write_text(
                json.dumps(
                    {"message": {"message": f"cause {rank}", "extraInfo": {"py_callstack": f"stack {rank}", "timestamp": stamp}}}
                )
            )
            made[rank] = ProcessFailure(local_rank=rank, pid=990 + rank, exitcode=-9 if rank == 2 else 1, error_file=str(name))
    return made


@case
def the_error_of_failed_children() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    error = ChildFailedError("trainer.py", failures())
    rank, first = error.get_first_failure()
    text = str(error)
    said = (
        "trainer.py",
        "FAILED",
        "cause 1",
        "Root Cause",
        "Other Failures",
        "exitcode",
        "SIGKILL",
        "991",
        "rank",
        "host",
        "time",
        "traceback",
        "error_file",
    )
    return {
        "name": error.name,
        "first": [rank, first.local_rank],
        "failures": sorted(error.failures),
        "says": {word: word in text for word in said},
        "formatted": outcome(lambda: isinstance(error.format_msg(), str)),
        "other delimiters": [
            "#" * 5 in error.format_msg("#", "~"),
            "~" * 5 in error.format_msg(boarder_delim="#", section_delim="~"),
        ],
        "none": outcome(lambda: ChildFailedError("x", {}).get_first_failure()),
        "raised": outcome(lambda: (_ for _ in ()).throw(error)),
    }


@case
def record_leaves_an_error_file() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def failing(message: str) -> None:
        """Its words."""
        raise ValueError(message)

    @record
    def fine(a: int, b: int = 2) -> int:
        return a + b

    with folder() as path:
        name = path / "error.json"
        with environment(TORCHELASTIC_ERROR_FILE=str(path / "deep" / "error.json")):
            no_folder = outcome(failing, "x")
        with environment(TORCHELASTIC_ERROR_FILE=str(name)):
            failed = outcome(failing, "the message", words=("the message",))
            good = fine(1, b=5)
        data = json.loads(name.read_text())
    with environment(TORCHELASTIC_ERROR_FILE=None):
        without = outcome(failing, "x")
    return {
        "fails": failed,
        "fine": good,
        "wrapped": [failing.__name__, failing.__doc__],
        "keys": [sorted(data), sorted(data["message"]), sorted(data["message"]["extraInfo"])],
        "message": data["message"]["message"],
        "stack": [
            "failing" in data["message"]["extraInfo"]["py_callstack"],
            "the message" in data["message"]["extraInfo"]["py_callstack"],
        ],
        "time": abs(int(data["message"]["extraInfo"]["timestamp"]) - time.time()) < 60,
        "without a file": without,
        "without its folder": no_folder,
    }


@case
def record_and_other_ways_to_end() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def leaving(code: Any) -> None:
        raise SystemExit(code)

    @record
    def interrupted() -> None:
        raise KeyboardInterrupt

    facts: dict[str, Any] = {}
    for code in (0, 3, None):
        with folder() as path, environment(TORCHELASTIC_ERROR_FILE=str(path / "e.json")):
            facts[f"exit {code}"] = [outcome(leaving, code), (path / "e.json").exists()]
    with folder() as path, environment(TORCHELASTIC_ERROR_FILE=str(path / "e.json")):
        try:
            interrupted()
        except KeyboardInterrupt:
            facts["interrupted"] = (path / "e.json").exists()
    return facts


@case
def record_with_a_handler_of_ones_own() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors import record

    handler = mock.MagicMock()

    def failing() -> None:
        raise RuntimeError("x")

    answer = outcome(record(failing, handler))
    calls = [one[0] for one in handler.method_calls]
    fine = mock.MagicMock()
    record(lambda: None, error_handler=fine)()
    return {
        "raises": answer,
        "calls": calls,
        "argument": plain(type(handler.record_exception.call_args.args[0]).__name__),
        "fine": [one[0] for one in fine.method_calls],
    }


@case
def record_passes_the_root_cause_on() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

    with folder() as path:
        failure = ProcessFailure(0, 1, 17, str(written(path / "child.json")))

        @record
        def launching() -> None:
            raise ChildFailedError("child", {0: failure})

        with environment(TORCHELASTIC_ERROR_FILE=str(path / "mine.json")):
            answer = outcome(launching)
        mine = json.loads((path / "mine.json").read_text())
    return {
        "raises": answer,
        "message": mine["message"]["message"],
        "code": mine["message"].get("errorCode"),
        "extra": mine["message"]["extraInfo"],
    }


@case
def the_error_handler() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, get_error_handler
    from torch.distributed.elastic.multiprocessing.errors.handlers import get_error_handler as home

    facts: dict[str, Any] = {"kind": type(get_error_handler()).__name__, "same": get_error_handler is home}
    handler = ErrorHandler()
    with folder() as path, environment(TORCHELASTIC_ERROR_FILE=str(path / "e.json")):
        facts["initialize"] = outcome(handler.initialize)
        try:
            raise FileNotFoundError("gone")
        except FileNotFoundError as error:
            facts["record"] = outcome(handler.record_exception, error)
        data = json.loads((path / "e.json").read_text())
        facts["message"] = data["message"]["message"]
    with environment(TORCHELASTIC_ERROR_FILE=None):
        facts["nowhere"] = outcome(handler.record_exception, ValueError("x"))
    return facts


@case
def the_error_handler_copies_a_root_cause() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    handler = ErrorHandler()
    facts: dict[str, Any] = {}
    for name, code in (("without code", 0), ("with code", 5)):
        with folder() as path, environment(TORCHELASTIC_ERROR_FILE=str(path / "mine.json")):
            facts[name] = outcome(handler.dump_error_file, str(written(path / "root.json")), code)
            facts[f"{name}: file"] = json.loads((path / "mine.json").read_text())
    with folder() as path, environment(TORCHELASTIC_ERROR_FILE=str(path / "mine.json")):
        (path / "mine.json").write_text("{}")
        facts["over an old one"] = outcome(handler.dump_error_file, str(written(path / "root.json")))
        facts["over an old one: file"] = json.loads((path / "mine.json").read_text())
    with folder() as path, environment(TORCHELASTIC_ERROR_FILE=None):
        facts["nowhere"] = outcome(handler.dump_error_file, str(written(path / "root.json")))
    with folder() as path, environment(TORCHELASTIC_ERROR_FILE=str(path / "mine.json")):
        facts["no root"] = outcome(handler.dump_error_file, str(path / "missing.json"))
        (path / "bad.json").write_text("no json")
        facts["bad root"] = outcome(handler.dump_error_file, str(path / "bad.json"))
    return facts


@case
def the_code_of_a_root_cause() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    handler = ErrorHandler()
    facts: dict[str, Any] = {}
    samples = {
        "dict": {"message": {"message": "m", "extraInfo": {}}},
        "with code": {"message": {"message": "m", "errorCode": 1}},
        "text": {"message": "m"},
        "no message": {"other": 1},
    }
    for name, data in samples.items():
        facts[name] = [outcome(handler.override_error_code_in_rootcause_data, "/f", data, 9), plain(data)]
    plain_data = {"message": {"message": "m"}}
    handler.override_error_code_in_rootcause_data("/f", plain_data)
    facts["default"] = plain_data
    return facts


@case
def the_signal_exception() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.api import SignalException as home

    error = SignalException("stopped", signal.SIGTERM)
    return {
        "text": str(error),
        "signal": plain(error.sigval),
        "same": home is SignalException,
        "kind": outcome(lambda: (_ for _ in ()).throw(error)),
        "lacks": outcome(SignalException, "x"),
    }


@case
def other_shapes_of_error_files() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    facts = {}
    shapes = {
        "time beside": {"message": "words", "timestamp": 10},
        "time as text": {"message": "words", "timestamp": "10"},
        "code": {"message": "words", "errorCode": 7, "timestamp": 10},
    }
    with folder() as path:
        for name, content in shapes.items():
            (path / "e.json").write_text(json.dumps(content))
            failure = ProcessFailure(0, 997, 1, str(path / "e.json"))
            facts[name] = [failure.message, failure.timestamp, plain(failure.error_file_data)]
    return facts


@case
def errors_that_travel() -> dict[str, Any]:
    import pickle

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    made = failures(1)
    error = ChildFailedError("name", made)
    return {
        "failure": pickle.loads(pickle.dumps(made[0])).pid,
        "failure is equal": pickle.loads(pickle.dumps(made[0])) == made[0],
        "error": "value" in outcome(lambda: pickle.loads(pickle.dumps(error)).name),
    }


@case
def the_first_failure_is_the_earliest() -> dict[str, Any]:
    """By the failures' own timestamps, with an error file or without."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    facts: dict[str, Any] = {}
    with folder() as path:
        (path / "old.json").write_text(json.dumps({"message": {"message": "m", "extraInfo": {"timestamp": "1700000000"}}}))
        orders = {"a file of old": (None, "old.json"), "set by hand": ("1600000000", "old.json"), "two without": ("5", None, "4")}
        for name, kinds in orders.items():
            made = {}
            for rank, kind in enumerate(kinds):
                is_file = kind is not None and kind.endswith(".json")
                made[rank] = ProcessFailure(rank, 990 + rank, 1, str(path / kind) if is_file else "/no/such/file")
                if kind is not None and not is_file:
                    made[rank].timestamp = int(kind)
            facts[name] = ChildFailedError("x", made).get_first_failure()[0]
    return facts


@case
def record_of_children_that_left_no_file() -> dict[str, Any]:
    """A launcher has no error of its own to record."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

    @record
    def launching() -> None:
        raise ChildFailedError("child", {0: ProcessFailure(0, 1, 17, "/no/such/file")})

    with folder() as path, environment(TORCHELASTIC_ERROR_FILE=str(path / "mine.json")):
        return {"raises": outcome(launching), "written": (path / "mine.json").exists()}
