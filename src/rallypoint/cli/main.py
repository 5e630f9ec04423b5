"""The commands ``rallyrun`` and ``rallypoint``: from a command line to a running job, and from its end to an exit code.

This is the outermost boundary of the process: whatever comes up from below is turned into words on stderr and one of the codes of
`ExitCode`. What rallypoint has to say while it runs goes there too, line by line, each in a single write, so that it does not mix
with what workers say. ``LOGLEVEL`` chooses how much. A stderr that takes nothing stops nothing: only when all is over is it
waited for, as any program would, though not for ever, and no longer than until the next signal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

from rallypoint import errors
from rallypoint.base import defaults, environment, outbox, report
from rallypoint.cli import command_line
from rallypoint.cli.arguments import config_from_args, get_rdzv_endpoint, parse_min_max_nnodes
from rallypoint.cli.entry_point import get_use_env, run_script_path
from rallypoint.errors import SIGNAL_BASE, ExitCode
from rallypoint.hardware.devices import determine_local_world_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "config_from_args", "determine_local_world_size", "get_rdzv_endpoint", "get_use_env", "main", "parse_args",
    "parse_min_max_nnodes", "print_text", "rallypoint_main", "run", "run_script_path",
]  # fmt: skip

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARN": 30, "WARNING": 30, "ERROR": 40, "CRITICAL": 50, "FATAL": 50}
_SIGINT = 2
_NEXT_STEPS = {
    ExitCode.PREEMPTED: "start it again to go on",
    ExitCode.UNSAVED: "start it again to go on from its last checkpoint",
    ExitCode.STOPPED: "it was on purpose, so that no scheduler need start it again",
}
_ON_PURPOSE = (errors.SignalException, errors.JobStoppedError, errors.JobPreemptedError, KeyboardInterrupt)
_LAST_LINES_S = 60.0  # for a console that takes its time, as a pager does
_LAST_LINES_AFTER_A_SIGNAL_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``rallyrun``; returns its exit code."""
    return _speaking(lambda: _launch(argv))


def _launch(argv: Sequence[str] | None) -> int:
    args = SimpleNamespace(pass_exit_code=False, requeue=False, from_environment=frozenset())
    before = _story()
    try:
        args = parse_args(argv)
        if not args.training_script:
            return _answer(args)
        if args.requeue:
            from rallypoint.cli import requeue

            requeue.check(command_line.source(args, "requeue"), environment.own)
        is_json = args.log_format == defaults.LOG_FORMAT_JSON
        if is_json:
            _set_sink(is_json)
        with nullcontext() if is_json else _watched():
            if args.hosts or args.hostfile:
                from rallypoint.cli import hosts

                return hosts.run_on_hosts(args)
            run(args)
    except (Exception, KeyboardInterrupt) as error:  # the process ends here, whatever it was
        code = _explain(error, args)
        if code == ExitCode.PREEMPTED and args.requeue:
            from rallypoint.cli import requeue

            requeue.requeue(error, environment.own)
        if code != ExitCode.USAGE and not isinstance(error, _ON_PURPOSE):
            _point_to(_story(), before)
        return code
    return ExitCode.SUCCESS


def rallypoint_main(argv: Sequence[str] | None = None) -> int:
    """The command ``rallypoint``: ``rallypoint run …`` is ``rallyrun …``."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command == "run":
        return main(rest)
    if command == "explain":
        from rallypoint.cli.explain import explain_main

        return explain_main(rest)
    if command == "stacks":
        from rallypoint.cli.stacks import stacks_main

        return stacks_main(rest)
    if command in ("ps", "status", "stop", "drain", "restart"):
        from rallypoint.cli.jobs import jobs_main

        return jobs_main(command, rest)
    if command == "top":
        from rallypoint.cli.top import top_main

        return top_main(rest)
    if command == "logs":
        from rallypoint.cli.logs import logs_main

        return logs_main(rest)
    if command == "chaos":
        from rallypoint.cli.chaos import chaos_main

        return chaos_main(rest)
    if command == "demo":
        from rallypoint.cli.demo import demo_main

        return demo_main(rest)
    if command == "init":
        from rallypoint.cli.init import init_main

        return init_main(rest)
    if command == "doctor":
        from rallypoint.cli.doctor import doctor_main

        return doctor_main(rest)
    if command == "--version":
        return print_text(_version("rallypoint"))
    if command in ("-h", "--help"):
        from rallypoint.cli import usage

        return print_text(usage.OVERVIEW)
    return _speaking(lambda: _refuse(command))


def _refuse(command: str) -> int:
    from rallypoint.cli import usage

    meant = command_line.closest(command, list(usage.COMMANDS))
    advice = f"did you mean rallypoint {meant}?" if meant else f"the commands are: {', '.join(usage.COMMANDS)}"
    report.error(f"rallypoint: error: unknown command {command!r}; {advice}")
    return ExitCode.USAGE


def _speaking(work: Callable[[], int]) -> int:
    """Do it with stderr for all that there is to say, and see to it that the last of it is read."""
    _set_sink()
    outbox.begin_duty()
    try:
        code = work()
        _await_readers(was_stopped=code > SIGNAL_BASE or code in _NEXT_STEPS)
        return code
    finally:
        outbox.end_duty(0.0)
        report.set_sink(None)  # whoever called us may have a logger of its own


def _await_readers(was_stopped: bool) -> None:
    """Give them some time for our lines; for what workers have printed as much as they like, as the workers would have done."""
    if outbox.flush(0.2):  # nearly always, and then nothing is to be imported for it
        return
    from rallypoint.base.signals import inbox

    signals: list[int] = []

    def is_interrupted() -> bool:
        signals.extend(inbox.collect())
        return bool(signals)

    with inbox.watch(defaults.SIGNALS_TO_HANDLE):
        while not outbox.flush(_LAST_LINES_AFTER_A_SIGNAL_S if was_stopped else _LAST_LINES_S, is_interrupted):
            if was_stopped or signals or not outbox.is_owing():
                return


def parse_args(args: Sequence[str] | None = None) -> SimpleNamespace:
    """The command line and the PET_ variables, as arguments under torchrun's names."""
    for name, meant in command_line.misnamed(environment.own):
        report.warn(f"{name} is not read; the variable of {meant.name} is {meant.variable}")
    return command_line.parse(sys.argv[1:] if args is None else args, environment.own)


def run(args: Any) -> None:
    """Run the job that `args` describe, to its end."""
    config, entry, arguments = config_from_args(args)
    if getattr(args, "dry_run", False):  # arguments of a parser of torchrun's have none
        from rallypoint.cli import dry_run

        print_text(dry_run.describe(config, entry, arguments))
        return
    from rallypoint.agent import launch

    launch.elastic_launch(config, entry)(*arguments)


def _answer(args: SimpleNamespace) -> int:
    """The flags that want an answer and no job."""
    if args.version:
        return print_text(_version("rallyrun"))
    if args.help:
        from rallypoint.cli import usage

        return print_text(usage.help_text())
    from rallypoint.cli import completion

    return print_text(completion.script(args.print_completion))


def _explain(error: BaseException, args: SimpleNamespace) -> int:
    """Say what ended the job, and choose the exit code that tells it to a scheduler."""
    pass_exit_code = args.pass_exit_code
    if errors.is_child_failure(error):
        report.error(str(error))
        failed = ExitCode.HOPELESS if getattr(error, "is_hopeless", False) else ExitCode.WORKER_FAILED
        return _first_cause(error) if pass_exit_code else failed
    match error:
        case errors.JobFailedError() if pass_exit_code and error.cause_exitcode is not None:
            report.error(f"rallyrun: error: {error}")
            return _first_cause(error)
        case KeyboardInterrupt() if not isinstance(error, errors.SignalException):
            return SIGNAL_BASE + _SIGINT
    code = errors.exit_code(error)
    if isinstance(error, errors.HostsError):  # a line for each
        report.error(f"rallyrun: error: {error}")
        return code
    if code in _NEXT_STEPS:
        report.info(f"{error}; exit code {code}: {_NEXT_STEPS[code]}")
        return code
    if isinstance(error, errors.SignalException):
        return code
    if code == ExitCode.INTERNAL:
        return _confess(error)
    if errors.is_hosts_fault(error) and not isinstance(error, errors.RallypointError):
        report.debug(_traceback(error))
        report.error(f"rallyrun: error: this host cannot run the workers: {_trouble(error)}")
    else:
        report.error(f"rallyrun: error: {_named_as_given(error, args)}")
    return code


def _named_as_given(error: BaseException, args: SimpleNamespace) -> str:
    """One line; a field of the API is called by the flag or the variable that filled it."""
    text, field = errors.in_words(error), getattr(error, "field", "")
    given_as = command_line.source_of_field(args, field) if field else None
    return f"{given_as}{text.removeprefix(field)}" if given_as else text


def _story() -> str:
    """Where the last run of this process has left its events, if anywhere."""
    files = sys.modules.get("rallypoint.story.event_file")  # if it is not loaded, there was no run
    return files.current.path if files is not None and files.current is not None else ""


def _point_to(path: str, before: str) -> None:
    """Where this run has left its events, the last line says how to read them."""
    if path not in ("", before):
        import shlex

        report.info(f"for what happened, and when: rallypoint explain {shlex.quote(os.path.dirname(path))}")


def _trouble(error: BaseException) -> str:
    """What the host lacks, and where that is set; with nothing left to read that from, what the error itself says."""
    try:
        from rallypoint.base import limits

        return limits.exhausted(error) or errors.in_words(error)
    except (ImportError, OSError, MemoryError):
        return errors.in_words(error)


def _first_cause(error: Any) -> int:
    """The exit code of the worker that failed first, as a shell would give it."""
    code = error.cause_exitcode
    if code is None:
        code = int(error.get_first_failure()[1].exitcode) if error.failures else ExitCode.WORKER_FAILED
    return SIGNAL_BASE - code if code < 0 else code or ExitCode.WORKER_FAILED


def _confess(error: BaseException) -> int:
    """What nobody foresaw is a bug of ours, and its traceback is what will find it."""
    report.error(_traceback(error))
    report.error("rallyrun: error: this is a bug in rallypoint, not in your program; please report it with the lines above")
    return ExitCode.INTERNAL


def _traceback(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()


def _version(program: str) -> str:
    from rallypoint import __version__

    return f"{program} {__version__}"


def print_text(text: str) -> int:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.rstrip("\n").encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.SUCCESS


@contextmanager
def _watched() -> Iterator[None]:
    """Within the block, a person at the terminal sees what is waited for."""
    if os.isatty(2) and _least_level() <= report.INFO:
        from rallypoint.output import live_line

        report.set_live_line(live_line.TerminalLine(2) if live_line.can_show(2) else None)
    try:
        yield
    finally:
        report.set_live_line(None)


def _least_level() -> int:
    name = environment.text(defaults.ENV_LOG_LEVEL).strip().upper()
    return int(name) if name.isdecimal() else _LEVELS.get(name, report.INFO)


def _set_sink(is_json: bool = False) -> None:
    def as_text(level: int, text: str) -> str:
        return text if level >= report.ERROR else f"rallyrun: {text}"

    in_form = as_text
    if is_json:  # imported here, and not in the thread that writes: a fork must not find it in the middle of that
        from rallypoint.output.json_lines import own_line as in_form

    report.set_sink(lambda level, text: _write(in_form(level, text)), min(_least_level(), report.ERROR))


def _write(text: str) -> None:
    with report.stepping_aside(2):
        _write_line(text)


def _write_line(text: str) -> None:
    data = memoryview(f"{text}\n".encode(errors="backslashreplace"))
    try:
        while data:
            data = data[os.write(2, data) :]
    except BlockingIOError:  # somebody who shares it has made it so
        from rallypoint.output.console import write_all

        write_all(2, data)
    except OSError:  # a stderr that is closed or full must not end a job that runs well
        return
