"""Which workers may be forks of an interpreter that is warm already, and what that one may know before the fork. Pure.

The keeper of warm workers is started with the command of a worker, and goes no further than the interpreter's own start. So a
fork of it goes on as a fresh interpreter would, if all that is read before that point is the same for every worker: the command
up to the script's arguments, and the variables of the environment that say nothing of a worker's place in the job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rallypoint.base import defaults as names
from rallypoint.base.records import Value

__all__ = [
    "choose_modules", "environment_ahead", "environment_of_all", "head_of", "program_of", "read_modules", "why_fresh",
]  # fmt: skip

# They differ between workers, or between one generation and the next.
_PLACE = frozenset({
    names.ENV_LOCAL_RANK, names.ENV_RANK, names.ENV_GROUP_RANK, names.ENV_ROLE_RANK, names.ENV_ROLE_NAME,
    names.ENV_LOCAL_WORLD_SIZE, names.ENV_WORLD_SIZE, names.ENV_GROUP_WORLD_SIZE, names.ENV_ROLE_WORLD_SIZE,
    names.ENV_MASTER_ADDR, names.ENV_MASTER_PORT, names.ENV_RESTART_COUNT, names.ENV_GENERATION, names.ENV_ERROR_FILE,
    names.ENV_PULSE, names.ENV_STACKS, names.ENV_CHECKPOINT, names.ENV_STANDBY, names.ENV_IMPORTS, names.ENV_TIMER_FILE,
})  # fmt: skip
_KNOWN_AHEAD = frozenset({names.ENV_LOCAL_RANK, names.ENV_LOCAL_WORLD_SIZE, names.ENV_ROLE_NAME, names.ENV_STACKS})
_ENDS_FLAGS = "cm"  # what follows is a command or a module
_TAKES_VALUE = "WX"
_UNFIT = "EIShV?"  # the interpreter would not look into our folder, or not run anything

# Which modules are worth it, of those that a program imports.
LEAST_S = 0.05
COVERED = 0.95  # of the time that all of these take
MOST_MODULES = 16


def read_modules(value: str | Sequence[str]) -> tuple[str, ...]:
    """The modules that ``--preload`` names; ValueError says what is wrong with one."""
    given = value.split(",") if isinstance(value, str) else list(value)
    modules = [one.strip() for one in given]
    for module in modules:
        if not all(map(str.isidentifier, module.split("."))):
            raise ValueError(f"{module!r} is not the name of a module; write it as in an import, such as torch or torch.nn")
    if names.PRELOAD_AUTO in modules and len(set(modules)) > 1:
        raise ValueError(f"{names.PRELOAD_AUTO} chooses the modules itself, and stands alone; leave it out, or the names")
    return tuple(dict.fromkeys(modules))


def choose_modules(imported: Sequence[tuple[str, float]], left_out: Collection[str] = ()) -> tuple[tuple[str, float], ...]:
    """Those that take longest, in the order in which the program imported them, of modules and the seconds that each took."""
    slow = sorted((one for one in imported if one[1] >= LEAST_S and one[0] not in left_out), key=lambda one: -one[1])
    enough_s, covered_s = COVERED * sum(took_s for _, took_s in slow), 0.0
    chosen = set()
    for name, took_s in slow[:MOST_MODULES]:
        if covered_s < enough_s:
            chosen.add(name)
            covered_s += took_s
    found: list[tuple[str, float]] = []
    for one in imported:
        comes_with_another = any(f"{other}.".startswith(f"{one[0]}.") for other, _ in found)  # a package, with its modules
        if one[0] in chosen and not comes_with_another:
            found.append(one)
    return tuple(found)


def program_of(command: Sequence[str]) -> tuple[str, str]:
    """What a command of Python's runs: -m and a module, or nothing and a script. Both are empty if it is neither."""
    read = _read_arguments(command[1:])
    if read.kind == "c" or read.what == "-":
        return "", ""
    return ("-m" if read.kind else ""), read.what


def head_of(command: Sequence[str]) -> tuple[str, ...]:
    """A command of Python's without the arguments of the program, in which alone workers may differ."""
    return tuple(command[: 1 + _read_arguments(command[1:]).count])


def why_fresh(commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], executable: str, is_bound: bool) -> str:
    """Why these workers must be fresh interpreters; empty if they need not be."""
    program, *arguments = commands[0]
    if not program:
        return "they are forks already, by their start method"
    if program != executable:
        return f"they run {program}, not this Python ({executable})"
    if flag := _unfit_flag(arguments):
        return f"Python's flag {flag} hides the folder through which they are prepared"
    for name in sorted({name for env in envs for name in env if name.startswith("PYTHON")}):
        if len({env.get(name) for env in envs}) > 1:
            return f"{name} differs between them"
    if is_bound and not all(names.ENV_OMP_NUM_THREADS in env for env in envs):
        return f"they are bound to CPUs, which libraries count when they are imported; set {names.ENV_OMP_NUM_THREADS}"
    return ""


def environment_ahead(env: Mapping[str, str]) -> dict[str, str]:
    """What a process may know before it has its place in the job. What it must not read then is missing, not wrong."""
    return {name: value for name, value in env.items() if name not in _PLACE - _KNOWN_AHEAD}


def _unfit_flag(arguments: Sequence[str]) -> str:
    flags = _read_arguments(arguments).flags
    return next((flag for flag in flags if flag.startswith("--") or flag[1] in _UNFIT), "")


class _Arguments(Value):
    """Python's flags, one by one; the letter of the last if a command or a module follows; what follows; how many these are."""

    flags: list[str]
    kind: str
    what: str
    count: int


def _read_arguments(arguments: Sequence[str]) -> _Arguments:
    flags: list[str] = []
    rest = enumerate(arguments, 1)
    for count, argument in rest:
        if not argument.startswith("-") or argument == "-":
            return _Arguments(flags, "", argument, count)
        if argument.startswith("--"):
            return _Arguments([*flags, argument], "", "", count)
        for position, letter in enumerate(argument[1:], 2):
            flags.append(f"-{letter}")
            if letter in _ENDS_FLAGS:
                last, what = (count, argument[position:]) if argument[position:] else next(rest, (count, ""))
                return _Arguments(flags, letter, what, last)
            if letter in _TAKES_VALUE:
                if position == len(argument):
                    next(rest, None)
                break
    return _Arguments(flags, "", "", len(arguments))


def environment_of_all(envs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What all workers find in their environments, now and in later generations."""
    first, *others = envs
    return {name: value for name, value in first.items() if name not in _PLACE and all(env.get(name) == value for env in others)}
