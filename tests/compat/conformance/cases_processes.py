"""Groups of processes: streams, log files, waiting, ending, and the helpers below them."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests.compat.conformance.harness import case, folder, outcome, plain, tree, until


@case
def streams_from_text() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import Std

    texts = (
        "0",
        "1",
        "2",
        "3",
        "4",
        "-1",
        "",
        "a",
        "0:1",
        "0:1,1:2",
        "0:0,1:1,2:2,3:3",
        "0:4",
        "0:",
        ":1",
        "0:1,",
        "0:1,1",
        "0,1",
        "1:1:1",
        " 1",
        "1 ",
        "0: 1",
        "01",
        "3,",
        "a:1",
        "0:-1",
    )
    return {repr(text): outcome(Std.from_str, text) for text in texts}


@case
def streams_as_flags() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.api import Std

    return {
        "members": {name: int(one) for name, one in Std.__members__.items()},
        "or": plain([Std.OUT | Std.ERR == Std.ALL, Std.NONE | Std.OUT == Std.OUT]),
        "within": [Std.OUT in Std.ALL, Std.ERR in Std.OUT, bool(Std.NONE)],
        "by value": [Std(number).name for number in range(4)],
        "not a value": outcome(lambda: int(Std(8))),
    }


@case
def streams_for_each_rank() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import Std, to_map

    return {
        "one": plain(to_map(Std.OUT, 2)),
        "some": plain(to_map({0: Std.ALL, 2: Std.ERR}, 4)),
        "none": plain(to_map({}, 2)),
        "too many": plain(to_map({5: Std.ALL}, 2)),
        "no ranks": plain(to_map(Std.OUT, 0)),
    }


def reified(**given: Any) -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    with folder() as path:
        specs = DefaultLogsSpecs(log_dir=str(path), **given)
        envs = {rank: {"TORCHELASTIC_RUN_ID": "the-run", "TORCHELASTIC_RESTART_COUNT": "2"} for rank in range(2)}
        dest = specs.reify(envs)

        def place(name: str) -> str:
            if not name.startswith(str(path)):
                return name
            return Path(name).relative_to(path).as_posix().split("/", 1)[1]

        facts = {
            name: {rank: place(one) for rank, one in getattr(dest, name).items()}
            for name in ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files")
        }
        facts["filtered"] = [place(dest.filtered_stdout), place(dest.filtered_stderr)]
        facts["told"] = [place(env.get("TORCHELASTIC_ERROR_FILE", "")) for env in envs.values()]
        facts["root"] = specs.root_log_dir == str(path)
        facts["run folder"] = [one.name.startswith("the-run_") for one in path.iterdir()]
        facts["folders"] = sorted(
            one.relative_to(path).as_posix().split("/", 1)[1] for one in path.rglob("*") if one.is_dir() and one.parent != path
        )
    return plain(facts)


@case
def where_logs_go() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std

    facts = {
        "nothing": reified(),
        "redirected": reified(redirects=Std.ALL),
        "one of them": reified(redirects={0: Std.OUT}),
        "teed": reified(tee=Std.OUT),
        "both": reified(redirects={0: Std.ERR}, tee={1: Std.ALL}),
        "filtered": reified(local_ranks_filter={1}),
        "filtered and teed": reified(tee=Std.ALL, local_ranks_filter={0}),
        "filtered and redirected": reified(redirects=Std.ALL, local_ranks_filter={0}),
        "abstract": outcome(LogsSpecs),
        "empty": plain(vars(LogsDest()) if hasattr(LogsDest(), "__dict__") else None),
    }
    specs = DefaultLogsSpecs()
    facts["repr"] = outcome(lambda: isinstance(repr(specs), str))
    with folder() as path:
        target = path / "deep" / "er"
        made = DefaultLogsSpecs(log_dir=str(target))
        made.reify({0: {}})
        facts["made"] = target.is_dir()
        made.reify({0: {}})
        facts["again"] = len(list(target.iterdir()))
    facts["not a folder"] = outcome(lambda: DefaultLogsSpecs(log_dir=__file__).reify({0: {}}))
    return facts


def started(path: Path, program: str, count: int = 2, *, redirects: Any = None, tee: Any = None, **more: Any) -> Any:
    """`count` shells that run a program."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

    specs = DefaultLogsSpecs(
        str(path), redirects=Std.NONE if redirects is None else redirects, tee=Std.NONE if tee is None else tee
    )
    envs = {
        rank: {"LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "0"} for rank in range(count)
    }
    return start_processes(
        "echo", "sh", {rank: ("-c", program, "name", f"arg{rank}") for rank in range(count)}, envs, specs, **more
    )


@case
def programs_that_succeed() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import PContext, Std, SubprocessContext

    with folder() as path:
        context = started(path, 'echo "$1 $LOCAL_RANK"; echo "e$LOCAL_RANK" >&2', redirects=Std.ALL)
        kinds = [
            isinstance(context, PContext),
            isinstance(context, SubprocessContext),
            context.name,
            context.nprocs,
            context.entrypoint,
        ]
        pids = context.pids()
        result = context.wait(period=0.05)
        again = outcome(lambda: plain(context.wait(0).return_values))
        context.close()
        texts = {
            rank: [Path(result.stdouts[rank]).read_text(), Path(result.stderrs[rank]).read_text()]
            for rank in sorted(result.stdouts)
        }
        files = tree(path)
    return {
        "kinds": kinds,
        "pids": [sorted(pids), all(pid > 1 for pid in pids.values())],
        "failed": result.is_failed(),
        "values": plain(result.return_values),
        "failures": plain(result.failures),
        "texts": plain(texts),
        "again": again,
        "files": [name for name in files if name.endswith(".log")],
    }


@case
def programs_that_fail() -> dict[str, Any]:
    with folder() as path:
        context = started(path, '[ "$LOCAL_RANK" = 1 ] && exit 5; exec sleep 30')
        result = until(lambda: context.wait(1, 0.05))
        context.close()
        first = result.failures[1]
    return {
        "failed": result.is_failed(),
        "who": plain(sorted(rank for rank, one in result.failures.items() if one.exitcode == 5)),
        "code": first.exitcode,
        "rank": first.local_rank,
        "pid": first.pid > 0,
        "values": plain(result.return_values),
    }


@case
def programs_ended_by_signals() -> dict[str, Any]:
    with folder() as path:
        context = started(path, "kill -ABRT $$", 1)
        result = until(lambda: context.wait(1, 0.05))
        context.close()
    failure = result.failures[0]
    return {"code": failure.exitcode, "signal": failure.signal_name(), "message": "SIGABRT" in failure.message}


@case
def a_program_that_leaves_an_error_file() -> dict[str, Any]:
    with folder() as path:
        text = '{"message": {"message": "told", "extraInfo": {"py_callstack": "s", "timestamp": "1700000001"}}}'
        context = started(path, f"echo '{text}' > $TORCHELASTIC_ERROR_FILE; exit 1", 1)
        result = until(lambda: context.wait(1, 0.05))
        context.close()
        failure = result.failures[0]
        return {
            "data": plain(failure.error_file_data["message"]),
            "time": failure.timestamp,
            "file": [os.path.basename(failure.error_file), os.path.exists(failure.error_file)],
        }


@case
def waiting_for_programs() -> dict[str, Any]:
    with folder() as path:
        context = started(path, "exec sleep 30")
        looked = context.wait(timeout=0)
        begun = time.monotonic()
        waited = context.wait(timeout=0.3, period=0.1)
        took = time.monotonic() - begun
        pids = context.pids()
        context.close()
        gone = until(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in pids.values()))
        closed = outcome(context.close)
    return {"looked": plain(looked), "waited": plain(waited), "in time": 0.25 < took < 3, "gone": gone, "close again": closed}


@case
def ending_programs() -> dict[str, Any]:
    facts = {}
    for name, trap, words, arguments in (
        ("by default", 'trap "echo term; exit 3" TERM', "ready", {}),
        ("with another signal", 'trap "echo int; exit 3" INT', "ready", {"death_sig": signal.SIGINT}),
        ("who does not listen", 'trap "" TERM', "ready\\ndeaf", {"death_sig": signal.SIGTERM, "timeout": 1}),
    ):
        from torch.distributed.elastic.multiprocessing import Std

        with folder() as path:
            context = started(path, f"{trap}; printf '{words}\\n'; while :; do sleep 0.05; done", 1, redirects=Std.OUT)
            until(lambda p=path: any("ready" in one.read_text() for one in p.rglob("stdout.log")))
            begun = time.monotonic()
            answer = outcome(context.close, **arguments)
            pid = context.pids()[0]
            facts[name] = [
                answer,
                time.monotonic() - begun < 4,
                not Path(f"/proc/{pid}/stat").exists(),
                next(iter(path.rglob("stdout.log"))).read_text(),
            ]
    return facts


@case
def programs_that_cannot_be_started() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    def start(args: Any, envs: Any, entrypoint: Any = "true") -> Any:
        with folder() as path:
            return start_processes("x", entrypoint, args, envs, DefaultLogsSpecs(str(path)))

    return {
        "no such program": outcome(start, {0: ()}, {0: {}}, "no-such-program-here"),
        "fewer environments": outcome(start, {0: (), 1: ()}, {0: {}}),
        "fewer arguments": outcome(start, {0: ()}, {0: {}, 1: {}}),
        "ranks with a gap": outcome(start, {0: (), 2: ()}, {0: {}, 2: {}}),
        "none": outcome(start, {}, {}),
    }


def gives(value: Any, *_: Any) -> Any:
    print(f"rank {os.environ['LOCAL_RANK']}", flush=True)
    return [value, os.environ["LOCAL_RANK"], os.environ["MINE"]]


def raises(message: str, is_there: str) -> None:
    """One raises once the other is there: a signal that finds a forked worker on its way into its function can be lost."""
    if os.environ["LOCAL_RANK"] == "0":
        until(lambda: os.path.exists(is_there))
        raise ValueError(message)
    Path(is_there).touch()
    time.sleep(30)


def exits(code: int) -> None:
    sys.exit(code)


def functions(path: Path, function: Any, args: tuple[Any, ...], count: int = 2, **more: Any) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    envs = {rank: {"LOCAL_RANK": str(rank), "MINE": f"m{rank}"} for rank in range(count)}
    more.setdefault("start_method", "fork")
    specs = DefaultLogsSpecs(str(path), **{key: more.pop(key) for key in ("redirects", "tee") if key in more})
    return start_processes("fun", function, dict.fromkeys(range(count), args), envs, specs, **more)


@case
def functions_that_return() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import MultiprocessContext, Std

    with folder() as path:
        context = functions(path, gives, ("v",), redirects=Std.OUT)
        result = context.wait(period=0.05)
        context.close()
        texts = [Path(result.stdouts[rank]).read_text() for rank in sorted(result.stdouts)]
    return {
        "kind": isinstance(context, MultiprocessContext),
        "values": plain(result.return_values),
        "failed": result.is_failed(),
        "texts": texts,
        "environment": "MINE" in os.environ,
    }


@case
def functions_that_raise() -> dict[str, Any]:
    with folder() as path:
        context = functions(path, raises, ("the words", str(path / "there")))
        result = until(lambda: context.wait(1, 0.05))
        context.close()
        failure = result.failures[0]
        data = failure.error_file_data["message"]
    return {
        "failed": result.is_failed(),
        "who": 0 in result.failures,
        "code": failure.exitcode,
        "keys": sorted(data),
        "message": data["message"],
        "stack": "raises" in data["extraInfo"]["py_callstack"],
    }


@case
def functions_that_exit() -> dict[str, Any]:
    facts = {}
    for code in (0, 7):
        with folder() as path:
            context = functions(path, exits, (code,), 1)
            result = until(lambda c=context: c.wait(1, 0.05))
            context.close()
            facts[str(code)] = plain(
                [result and result.is_failed(), result and {rank: one.exitcode for rank, one in result.failures.items()}]
            )
    return facts


@case
def functions_by_other_methods() -> dict[str, Any]:
    def start(method: str) -> Any:
        with folder() as path:
            return functions(path, gives, ("v",), start_method=method)

    return {"unknown": outcome(start, "no such method")}


@case
def lines_that_are_teed() -> dict[str, Any]:
    """What a tee shows on the console, with its prefixes, and what the files hold."""
    from torch.distributed.elastic.multiprocessing import Std

    with folder() as path:
        read, write = os.pipe()
        kept = os.dup(1)
        os.dup2(write, 1)
        before, sys.stdout = sys.stdout, io.TextIOWrapper(os.fdopen(os.dup(write), "wb", 0), write_through=True)
        try:
            context = started(path, 'echo "out $LOCAL_RANK"', tee=Std.OUT)
            result = context.wait(period=0.05)
            context.close()
            with_prefixes = started(
                path / "second", 'echo "line $LOCAL_RANK"', tee=Std.OUT, log_line_prefixes={0: "[zero]: ", 1: "[one]: "}
            )
            with_prefixes.wait(period=0.05)
            with_prefixes.close()
        finally:
            sys.stdout.close()
            sys.stdout = before
            os.dup2(kept, 1)
            os.close(kept)
            os.close(write)
        with os.fdopen(read) as stream:
            shown = sorted(stream.read().splitlines())
        texts = [Path(result.stdouts[rank]).read_text() for rank in sorted(result.stdouts)]
    return {"shown": shown, "texts": texts}


@case
def lines_that_are_filtered() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import Std

    with folder() as path:
        context = started(
            path,
            'echo "loss $LOCAL_RANK"; echo "other"; echo "bad" >&2',
            tee=Std.ALL,
            duplicate_stdout_filters=["loss"],
            duplicate_stderr_filters=["bad"],
        )
        context.wait(period=0.05)
        context.close()
        found = {one.name: sorted(line.strip() for line in one.read_text().splitlines()) for one in path.rglob("filtered_*")}
    return {"files": found}


@case
def files_for_filtered_lines() -> dict[str, Any]:
    """Which of them are there as soon as the processes are, whatever these will print."""
    from torch.distributed.elastic.multiprocessing import Std

    facts = {}
    for name, tee in (("tee", Std.ALL), ("no tee", Std.NONE)):
        for filters in (["loss"], [], None):
            with folder() as path:
                both = {"duplicate_stdout_filters": filters, "duplicate_stderr_filters": ["bad"]}
                context = started(path, "exec sleep 60", 1, tee=tee, redirects=Std.ALL, **both)
                facts[f"{name}, {filters}"] = sorted(one.name for one in path.rglob("filtered_*"))
                context.close(signal.SIGKILL)
    return facts


@case
def results_of_processes() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import ProcessFailure, RunProcsResult

    result = RunProcsResult()
    failed = RunProcsResult(failures={0: ProcessFailure(0, 1, 1, "none")})
    return {
        "empty": plain([result.return_values, result.failures, result.stdouts, result.stderrs, result.is_failed()]),
        "failed": failed.is_failed(),
    }


@case
def contexts_are_abstract() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, MultiprocessContext, PContext, SubprocessContext

    with folder() as path:
        specs = DefaultLogsSpecs(str(path))
        context = SubprocessContext("n", "true", {0: ()}, {0: {}}, specs)
        function = MultiprocessContext("n", exits, {0: (0,)}, {0: {}}, "fork", specs)
        return {
            "abstract": outcome(lambda: PContext("n", "true", {0: ()}, {0: {}}, specs)),
            "made": [context.name, context.nprocs, function.nprocs],
            "pids": outcome(context.pids),
        }


@case
def one_process_by_hand() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler
    from torch.distributed.elastic.multiprocessing.subprocess_handler.handlers import get_subprocess_handler as home
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler as class_home

    with folder() as path:
        handler = get_subprocess_handler(
            "sh", ("-c", 'echo "$X"; echo bad >&2; exit 4'), {"X": "mine"}, str(path / "o"), str(path / "e"), 3, None
        )
        code = handler.proc.wait(10)
        facts = {
            "close": outcome(handler.close),
            "code": code,
            "rank": handler.local_rank_id,
            "out": (path / "o").read_text(),
            "err": (path / "e").read_text(),
            "kind": isinstance(handler, SubprocessHandler),
        }
        running = SubprocessHandler("sleep", ("30",), {}, None, None, 0, None)
        running.close(signal.SIGTERM)
        facts["ended"] = running.proc.wait(10)
    facts["same"] = [home is get_subprocess_handler, class_home is SubprocessHandler]
    return facts


@case
def streams_into_files() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.redirects import get_libc, redirect

    with folder() as path:
        with redirect("stdout", str(path / "o")):
            print("by python", flush=True)
            os.write(1, b"by number\n")
            os.system("echo by child")
        with redirect("stderr", str(path / "e")):
            print("error", file=sys.stderr, flush=True)
        facts = {"out": (path / "o").read_text(), "err": (path / "e").read_text()}
        facts["unknown"] = outcome(lambda: redirect("stdin", str(path / "x")).__enter__())
    libc = get_libc()
    facts["libc"] = [type(libc).__name__ if libc is None else isinstance(libc, ctypes.CDLL)]
    return facts


@case
def which_streams_are_redirected() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.api import get_std_cm

    calls: list[str] = []

    class Managed:
        def __enter__(self) -> None:
            calls.append("entered")

        def __exit__(self, *_: Any) -> None:
            calls.append("left")

    def redirect(name: str) -> Any:
        calls.append(name)
        return Managed()

    with get_std_cm("some file", redirect):
        pass
    with get_std_cm("", redirect):
        calls.append("nothing")
    return {"calls": calls}


@case
def the_tail_of_files() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog

    with folder() as path:
        for rank in range(2):
            (path / f"{rank}.log").write_text("")
        shown = io.StringIO()
        tail = TailLog("name", {rank: str(path / f"{rank}.log") for rank in range(2)}, shown, interval_sec=0.01)
        facts: dict[str, Any] = {"before": tail.stopped(), "start": tail.start() is tail}
        for rank in range(2):
            with (path / f"{rank}.log").open("a") as file:
                file.write(f"first {rank}\nsecond {rank}\n")
        until(lambda: shown.getvalue().count("\n") == 4)
        with (path / "0.log").open("a") as file:
            file.write("last\n")
        facts["stop"] = outcome(tail.stop)
        facts["stopped"] = tail.stopped()
        facts["lines"] = sorted(shown.getvalue().splitlines())
        facts["again"] = outcome(tail.stop)
    return facts


@case
def the_tail_with_prefixes_and_filters() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog

    with folder() as path:
        (path / "log").write_text("good\nbad\ngood too\n")
        shown, empty = io.StringIO(), io.StringIO()
        tail = TailLog(
            "n",
            {0: str(path / "log")},
            shown,
            log_line_prefixes={0: "[p]: "},
            interval_sec=0.01,
            log_line_filter=lambda line: "good" in line,
        ).start()
        until(lambda: shown.getvalue().count("\n") == 2)
        tail.stop()
        nothing = TailLog("n", {}, empty).start()
        stopped = [outcome(nothing.stop), nothing.stopped()]
        missing = TailLog("n", {0: str(path / "missing")}, empty, interval_sec=0.01).start()
        return {
            "lines": shown.getvalue().splitlines(),
            "no files": stopped,
            "missing file": outcome(missing.stop),
            "empty": empty.getvalue(),
        }


@case
def the_tail_of_one_file() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.tail_log import tail_logfile

    with folder() as path:
        (path / "log").write_text("one\ntwo\nno end")
        finished, shown, chosen = threading.Event(), io.StringIO(), io.StringIO()

        def follow(header: str, dst: Any, *more: Any) -> dict[str, Any]:
            finished.clear()
            threading.Timer(0.2, finished.set).start()
            return outcome(tail_logfile, header, str(path / "log"), dst, finished, 0.01, *more)

        answer = follow("[h]: ", shown)
        follow("", chosen, lambda line: line.startswith("t"))
        missing = outcome(tail_logfile, "", str(path / "missing"), shown, finished, 0.01)
    return {"answer": answer, "lines": shown.getvalue().splitlines(), "chosen": chosen.getvalue(), "missing": missing}


@case
def a_context_that_callers_replace() -> dict[str, Any]:
    """What callers read of a context: its tails, which it always has."""
    with folder() as path:
        context = started(path, "true", 1)
        context.wait(period=0.05)
        facts = {"tails": hasattr(context, "_tail_logs")}
        with mock.patch.object(type(context), "wait", return_value="replaced"):
            facts["replaced"] = context.wait(period=0.05)
        context.close()
    return facts


def large(count: int) -> list[int]:
    return list(range(count))


def nothing() -> None:
    pass


@case
def functions_with_more_to_return() -> dict[str, Any]:
    with folder() as path:
        many = functions(path, large, (100_000,), 1)
        result = many.wait(period=0.05)
        many.close()
        none = functions(path, nothing, ())
        empty = none.wait(period=0.05)
        none.close()
    return {"many": [len(result.return_values[0]), result.return_values[0][-1]], "none": plain(empty.return_values)}


@case
def functions_in_a_fresh_interpreter() -> dict[str, Any]:
    with folder() as path:
        context = functions(path, gives, ("v",), 1, start_method="spawn")
        result = context.wait(period=0.05)
        context.close()
    return {"values": plain(result.return_values), "failed": result.is_failed()}


@case
def processes_of_another_thread() -> dict[str, Any]:
    answers: list[Any] = []

    def work(path: Path) -> None:
        context = started(path, "exit 0")
        answers.append(plain(context.wait(period=0.05).return_values))
        context.close()

    with folder() as path:
        thread = threading.Thread(target=lambda: answers.append(outcome(work, path)))
        thread.start()
        thread.join(10)
    return {"answers": answers, "done": not thread.is_alive()}


@case
def streams_into_files_by_name() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.redirects import redirect_stderr, redirect_stdout

    with folder() as path:
        with redirect_stdout(str(path / "o")):
            os.write(1, b"out\n")
        with redirect_stderr(to_file=str(path / "e")):
            os.write(2, b"err\n")
        with redirect_stdout(str(path / "o")):
            os.write(1, b"again\n")
        return {"out": (path / "o").read_text(), "err": (path / "e").read_text()}


@case
def streams_into_files_side_by_side() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.redirects import redirect

    with folder() as path:
        with redirect("stdout", str(path / "both")), redirect("stderr", str(path / "both")):
            os.write(1, b"one\n")
            os.write(2, b"two\n")

        def failing() -> None:
            with redirect("stdout", str(path / "x")):
                os.write(1, b"before\n")
                raise KeyError("x")

        failed = outcome(failing)
        return {"both": (path / "both").read_text(), "failed": failed, "kept": (path / "x").read_text()}


@case
def contexts_made_by_hand() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, MultiprocessContext, SubprocessContext

    facts = {}
    with folder() as path:
        specs = DefaultLogsSpecs(str(path))
        programs = SubprocessContext("n", "sh", {0: ("-c", "exit 0"), 1: ("-c", "exit 0")}, {0: {}, 1: {}}, specs)
        calls = MultiprocessContext("n", large, {0: (3,), 1: (2,)}, {0: {}, 1: {}}, "fork", specs)
        for name, context in (("programs", programs), ("functions", calls)):
            context.start()
            result = context.wait(period=0.05)
            context.close()
            facts[name] = [sorted(context.pids()), plain(result.return_values), result.is_failed()]
    return facts


@case
def log_files_of_ones_own() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, start_processes

    class Mine(LogsSpecs):  # type: ignore[misc]
        def __init__(self, place: Path) -> None:
            super().__init__()
            self.place = place
            self.asked: list[Any] = []

        @property
        def root_log_dir(self) -> str:
            return str(self.place)

        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            self.asked.append(plain(envs))
            names = {rank: str(self.place / f"worker-{rank}") for rank in envs}
            errors = {rank: str(self.place / f"error-{rank}") for rank in envs}
            return LogsDest(names, dict.fromkeys(envs, ""), {}, {}, errors, "", "")

    with folder() as path:
        mine = Mine(path)
        program = 'echo "here $X"; echo "$TORCHELASTIC_ERROR_FILE"'
        context = start_processes("n", "sh", {0: ("-c", program)}, {0: {"X": "x"}}, mine)
        result = context.wait(period=0.05)
        context.close()
        text = (path / "worker-0").read_text().replace(str(path), "")
        return {"text": text, "stdouts": [Path(one).name for one in result.stdouts.values()], "asked": len(mine.asked) >= 1}


@case
def a_signal_ends_a_wait() -> dict[str, Any]:
    facts = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        with folder() as path:
            context = started(path, "exec sleep 30")
            threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
            answer: Any = outcome(context.wait)
            try:
                context.wait(0.5)
            except Exception as error:
                answer = [answer, plain(getattr(error, "sigval", None))]
            context.close(number)
            pids = context.pids().values()
            facts[number.name] = [answer, until(lambda p=pids: not any(Path(f"/proc/{pid}/stat").exists() for pid in p))]
    return facts


@case
def what_a_context_tells_of_itself() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import Std

    with folder() as path:
        context = started(path, "exit 0", redirects=Std.OUT)
        context.wait(period=0.05)
        context.close()
        names = ("stdouts", "stderrs", "error_files")
        facts = {name: {rank: Path(one).name for rank, one in getattr(context, name).items()} for name in names}
        facts["args"] = context.args
        facts["envs"] = {rank: sorted(env) for rank, env in context.envs.items()}
        facts["name"] = [context.name, context.entrypoint, context.nprocs]
    return plain(facts)


@case
def a_failure_ends_the_others() -> dict[str, Any]:
    """Whoever is told of it, by a wait of either kind, finds nobody left; those that failed by themselves are all told."""
    facts: dict[str, Any] = {}
    for name, wait in (("wait", lambda one: one.wait(period=0.05)), ("for a time", lambda one: one.wait(100, 0.05))):
        with folder() as path:
            context = started(path, 'test "$1" = arg2 && exec sleep 60; exit 3', 3)
            until(lambda c=context: sum(has_ended(pid) for pid in c.pids().values()) == 2)
            result = wait(context)
            left = [pid for pid in context.pids().values() if Path(f"/proc/{pid}/stat").exists()]
            facts[name] = [result.is_failed(), left, [result.failures[rank].exitcode for rank in (0, 1)]]
            facts[f"{name}: who was stopped"] = result.failures[2].exitcode if 2 in result.failures else None
            context.close()
    return facts


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except FileNotFoundError:
        return True
