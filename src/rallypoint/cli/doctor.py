"""The command ``rallypoint doctor``: whether this machine is fit, and reaches where a job's nodes meet; and what to do if not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from rallypoint.base import defaults
from rallypoint.base.json_text import clip
from rallypoint.cli.command_line import closest, split_list
from rallypoint.cli.main import print_text
from rallypoint.errors import ExitCode, RallypointError, UsageError
from rallypoint.preflight.rules import CHECKS, NETWORK, Finding

__all__ = ["USAGE", "doctor_main"]

USAGE = """\
usage: rallypoint doctor [--endpoint HOST[:PORT]] [--checks CHECK[,CHECK]] [--json]
       rallypoint doctor --listen PORT

Check this machine, and the way to where a job's nodes meet, and say what to do about what is wrong. Exit code 4 if anything is.

  --endpoint  where the nodes meet, or where another doctor listens; then clocks, speed and the way back are measured too
  --checks    which checks of this machine, as for `rallyrun --preflight` [all of ours]
  --listen    be the other end, at this port, until Ctrl-C
  --json      print one JSON document instead of a table
  --help      show this help and exit"""
_VALUED = ("--endpoint", "--checks", "--listen")
_KNOWN = (*_VALUED, "--json", "--help")


def doctor_main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        flags = _read_flags(argv)
        if "--help" in flags:
            return print_text(USAGE)
        if "--listen" in flags:
            return _listen(flags["--listen"])
        return _report(list(_examine(flags)), "--json" in flags)
    except RallypointError as error:
        print(f"rallypoint doctor: error: {clip(str(error), 10_000)}", file=sys.stderr)
        return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.WORKER_FAILED
    except KeyboardInterrupt:
        return ExitCode.SUCCESS


def _read_flags(argv: Sequence[str]) -> dict[str, str]:
    flags: dict[str, str] = {}
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        name = "--help" if name == "-h" else name
        if name not in _KNOWN or (equals and name not in _VALUED):
            meant = closest(name, _KNOWN)
            raise UsageError(
                f"unknown argument {name}; " + (f"did you mean {meant}?" if meant else f"there are {', '.join(_KNOWN)}")
            )
        flags[name] = (value if equals else next(rest, "")) if name in _VALUED else ""
        if name in _VALUED and not flags[name]:
            raise UsageError(f"{name} needs a value")
    return flags


def _examine(flags: dict[str, str]) -> Iterator[Finding]:
    from rallypoint.net.endpoint import parse_rendezvous_endpoint
    from rallypoint.preflight.checks import read_specs, run_all
    from rallypoint.preflight.network import examine, examine_name

    try:
        specs = read_specs(split_list(flags.get("--checks", ",".join(name for name in CHECKS if name != NETWORK))))
    except ValueError as problem:
        raise UsageError(f"--checks: {problem}") from problem
    endpoint = flags.get("--endpoint")
    place = parse_rendezvous_endpoint(endpoint, defaults.ELASTIC_PORT) if endpoint else None
    for one in run_all(specs):
        # Only a job can need a device; that there is none is no fault of the machine.
        is_without = one.what == "no NVIDIA device is visible" and "--checks" not in flags
        yield one.replace(state="unknown", advice="") if is_without else one
    yield examine_name()
    if place is not None:
        yield from examine(*place)


def _report(findings: list[Finding], as_json: bool) -> int:
    from rallypoint.preflight.reach import table

    bad = [one for one in findings if one.state == "bad"]
    if as_json:
        rows = [dict(zip(Finding._fields, one, strict=True)) for one in findings]
        print_text(json.dumps({"is_fit": not bad, "findings": rows}, indent=2))
    else:
        print_text(table(findings))
    return ExitCode.HOST_UNUSABLE if bad else ExitCode.SUCCESS


def _listen(port: str) -> int:
    import socket
    import threading

    from rallypoint.preflight.network import serve, watch_for_unanswered

    if not port.isdecimal() or not int(port) < 1 << 16:
        raise UsageError(f"--listen: {port!r} is not a port, 0 to 65535")
    try:
        door = socket.create_server(("", int(port)), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):  # without IPv6
        try:
            door = socket.create_server(("", int(port)))
        except OSError as error:
            raise UsageError(f"--listen: port {port}: {error.strerror}") from None
    with door:
        own = door.getsockname()[1]
        print_text(f"listening: on the other machine, run: rallypoint doctor --endpoint {socket.gethostname()}:{own}")
        is_over = threading.Event()
        watch = threading.Thread(target=watch_for_unanswered, args=(own, _tell_unanswered, is_over.wait), daemon=True)
        watch.start()
        try:
            serve(door)
        finally:
            is_over.set()
    return ExitCode.SUCCESS


def _tell_unanswered(address: str) -> None:
    print_text(
        f"{address} tries to connect, and does not get our answers: what it sends arrives here, what we send is lost on the way;"
        " look for a firewall or an asymmetric route"
    )
