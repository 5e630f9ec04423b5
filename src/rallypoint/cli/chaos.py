"""The command ``rallypoint chaos``: faults for a running job, by a seed or a schedule, to see whether it stands them.

What is to be done is said before anything is: to which job, which faults and which not and why, how often and for how long. A
line for each fault, and one for what came of it; in the end a table.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from rallypoint.base import defaults, limits
from rallypoint.base.json_text import clip
from rallypoint.base.signals import inbox
from rallypoint.base.text import many, parse_span, plural, ranges, span_text
from rallypoint.chaos import plan as plans
from rallypoint.chaos.drill import Drill, Tell
from rallypoint.chaos.faults import FILL, KINDS, kinds_of, text_of
from rallypoint.chaos.grip import Grip
from rallypoint.chaos.guard import Guard
from rallypoint.chaos.guardian import MOST_FILES
from rallypoint.chaos.outcome import table
from rallypoint.chaos.plan import Listed, Plan, Seeded
from rallypoint.chaos.scene import Scene
from rallypoint.chaos.schedule import read_schedule, schedule_text
from rallypoint.cli.command_line import split_list
from rallypoint.cli.jobs import Flags, read_arguments
from rallypoint.cli.main import print_text
from rallypoint.errors import SIGNAL_BASE, ExitCode, RallypointError, UsageError

__all__ = ["USAGE", "chaos_main"]

LEAST_EVERY_S = 0.1
SEED_MAX = 1 << 63
FORMAT = 1
_VALUED = ("--seed", "--every", "--for", "--only", "--schedule", "--patience")
_OF_SEED = ("--seed", "--every", "--for", "--only")
USAGE = f"""\
usage: rallypoint chaos [JOB] [--seed N] [--every 30s] [--for 10m] [--only KIND,KIND] [--force] [--dry-run] [--json]
       rallypoint chaos [JOB] --schedule FILE [--force] [--dry-run] [--json]

Hurt a running job, on this machine, to see whether it goes on: {", ".join(KINDS)}. Say what was done and what came of it.
JOB is the job's ID, the beginning of it, or the process ID of its launcher; it can be left out where one job runs here.

  --seed      draw the faults from this number: the same for the same job each time [a new one, which is told]
  --every     so much time lies between two faults, give or take a half [{span_text(defaults.DRILL_EVERY_S)}]
  --for       end after that time [{span_text(defaults.DRILL_FOR_S)}]
  --only      only these kinds of faults [all but {FILL}, which hurts others on this machine too]
  --schedule  the faults of this file, or of standard input if it is -: lines such as `+30s kill rank 3`, `+1m stop node 1 for 8s`
  --force     also what ends the job, as far as is known
  --patience  so long may the job take to run again [{span_text(defaults.DRILL_PATIENCE_S)}]
  --dry-run   print what would be done, as a schedule, and do nothing
  --json      print one JSON document a line instead of text
  --help      show this help and exit

Ctrl-C ends it. However it ends, what it has stopped goes on, and what it has cut or filled is as before.
Exit codes: 0 the job runs on, or has finished; 1 it ended by a failure, did not run again in time, or no fault could be given;
2 wrong input, nothing was done; 128+n signal n ended the drill."""


def chaos_main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        flags, words = read_arguments(USAGE, argv, _VALUED)
        if "--help" in flags:
            return print_text(USAGE)
        if len(words) > 1:
            raise UsageError(USAGE.partition("\n")[0])
        return _prepare(words[0] if words else "", _read_plan(flags), flags)
    except RallypointError as error:
        print(f"rallypoint chaos: error: {clip(str(error), 10_000)}", file=sys.stderr)
        return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.WORKER_FAILED
    except KeyboardInterrupt:
        return SIGNAL_BASE + 2


# --- what is asked for -----------------------------------------------------------------------------------------------------


def _read_plan(flags: Flags) -> Plan:
    is_forced = "--force" in flags
    if name := flags.get("--schedule"):
        if both := [flag for flag in _OF_SEED if flag in flags]:
            raise UsageError(f"--schedule says all that {both[0]} would; use one of them")
        return Listed(read_schedule(*_read_file(name)), is_forced)
    every_s, for_s = _span(flags, "--every", defaults.DRILL_EVERY_S), _span(flags, "--for", defaults.DRILL_FOR_S)
    if every_s < LEAST_EVERY_S:
        raise UsageError(f"--every {flags['--every']}: at least {span_text(LEAST_EVERY_S)}")
    try:
        kinds = kinds_of(split_list(flags["--only"])) if "--only" in flags else plans.BY_DEFAULT
    except ValueError as error:
        raise UsageError(f"--only: {error}") from None
    return Seeded(_seed(flags.get("--seed")), every_s, for_s, kinds, is_forced)


def _read_file(name: str) -> tuple[str, str]:
    if name == "-":
        return sys.stdin.read(), "standard input"
    try:
        with open(name, encoding="utf-8", errors="replace") as file:
            return file.read(), name
    except OSError as error:
        raise UsageError(f"--schedule {name}: {error.strerror}") from None


def _span(flags: Flags, name: str, default_s: float) -> float:
    try:
        return parse_span(flags[name]) if name in flags else default_s
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None


def _seed(text: str | None) -> int:
    if text is None:
        return int.from_bytes(os.urandom(4), "little")
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < SEED_MAX):
        raise UsageError(f"--seed {text!r} is not a whole number from 0 to {SEED_MAX - 1}")
    return int(text)


# --- doing it --------------------------------------------------------------------------------------------------------------


def _prepare(job: str, plan: Plan, flags: Flags) -> int:
    """Find the job, see that there is something that can be done to it, and do it."""
    patience_s = _span(flags, "--patience", defaults.DRILL_PATIENCE_S)
    limits.as_many_as_allowed(MOST_FILES)
    grip = Grip(job)
    try:
        scene = grip.first_scene()
        _check(plan, scene)
        if "--dry-run" in flags:
            return _show(plan, scene, "--json" in flags)
        tell = _tell_json if "--json" in flags else _tell
        tell({"event": "begin", "format": FORMAT, "job": scene.job.job, "plan": _plan_words(plan), "text": _head(plan, scene)})
        with Guard() as guard:
            return _run(grip, guard, plan, tell, patience_s)
    finally:
        grip.close()


def _run(grip: Grip, guard: Guard, plan: Plan, tell: Tell, patience_s: float) -> int:
    with inbox.watch(defaults.SIGNALS_TO_HANDLE):
        drill = Drill(grip, guard, plan, tell, patience_s, inbox.fileno(), lambda: bool(inbox.collect() or inbox.received))
        drill.run()
        code = _exit_code(drill)
        if (number := inbox.take()) is not None:
            code = SIGNAL_BASE + number
    tell({"event": "end", "exit_code": code, **_end(drill, grip.name)})
    return code


def _exit_code(drill: Drill) -> int:
    end = drill.standing.end
    is_good = bool(drill.outcomes) and all(one.is_good for one in drill.outcomes) and (end is None or end.is_good)
    return ExitCode.SUCCESS if is_good else ExitCode.WORKER_FAILED


def _check(plan: Plan, scene: Scene) -> None:
    """UsageError: nothing of it could be done, or not what a schedule says."""
    if wrong := plans.why_refused(plan, scene):
        told = "; ".join(f"{where}: {why}" for where, why in wrong.items())
        begin = f"nothing can be done to {scene.job.job}: " if isinstance(plan, Seeded) else ""
        advice = "" if plan.is_forced else " (--force does also what ends the job)"
        raise UsageError(f"{begin}{told}{advice if any('would end' in why for why in wrong.values()) else ''}")


# --- in words --------------------------------------------------------------------------------------------------------------


def _show(plan: Plan, scene: Scene, as_json: bool) -> int:
    if not scene.is_running and isinstance(plan, Seeded):
        raise UsageError(f"{scene.job.job} does not run on all nodes yet: it is {scene.job.phase or 'silent'}")
    entries = plans.foresee(plan, scene)
    if as_json:
        for entry in entries:
            print_text(json.dumps({"event": "planned", "at_s": entry.at_s, "fault": text_of(entry.fault)}))
        return ExitCode.SUCCESS
    head = "".join(f"# {line}\n" for line in _head(plan, scene).splitlines()[:-1])
    return print_text(head + schedule_text(entries))


def _plan_words(plan: Plan) -> dict[str, object]:
    if isinstance(plan, Listed):
        entries = [{"at_s": entry.at_s, "fault": text_of(entry.fault)} for entry in plan.entries]
        return {"schedule": entries, "force": plan.is_forced}
    return {"seed": plan.seed, "every_s": plan.every_s, "for_s": plan.for_s, "only": list(plan.kinds), "force": plan.is_forced}


def _head(plan: Plan, scene: Scene) -> str:
    own, job = scene.own, scene.job
    here = sorted(worker.rank for node in own for worker in node.workers)
    whose = f"{plural(len(here), 'rank')} {ranges(here)}" if here else "no rank"
    who = f"{job.job}: {len(own)} of {many(len(job.nodes), 'node')} and {whose} on this machine"
    spent = f"generation {job.generation}, {job.restarts} of {many(own[0].max_restarts if own else 0, 'restart')} spent"
    lines = [f"{who}, {spent}"]
    if isinstance(plan, Listed):
        lines.append(f"{many(len(plan.entries), 'fault')} of a schedule, in {span_text(plan.entries[-1].at_s)}")
    else:
        out = dict(plans.left_out(plan, scene))
        lines.append(
            f"seed {plan.seed}: {', '.join(kind for kind in plan.kinds if kind not in out)};"
            f" about every {span_text(plan.every_s)}, for {span_text(plan.for_s)}"
        )
        lines += [f"no {kind}: {why}" for kind, why in out.items()]
    return "\n".join([*lines, "Ctrl-C ends it, and undoes what lasts"])


def _end(drill: Drill, job: str) -> dict[str, object]:
    now = drill.standing
    if now.end is not None:
        how = now.end.text
    elif now.phase:
        how = f"{now.phase}, generation {now.generation}, {now.restarts} of {many(now.max_restarts, 'restart')} spent"
    else:
        how = "nobody answers"
    counts = {"given": len(drill.outcomes) + drill.unjudged, "skipped": drill.skipped, "unjudged": drill.unjudged}
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "none given"
    text = "\n".join([*([table(drill.outcomes)] if drill.outcomes else []), f"{job}: {how}; faults: {told}"])
    return {"job": job, "phase": now.phase, "is_over": now.end is not None, **counts, "text": text}


def _tell(told: dict[str, object]) -> None:
    at_s = told.get("at_s")
    text = str(told["text"])
    print_text(f"{f'+{at_s:.1f}s':<9} {clip(text, 4096)}" if isinstance(at_s, float) else text)


def _tell_json(told: dict[str, object]) -> None:
    print_text(json.dumps(told))
