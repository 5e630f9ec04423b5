"""Which workers may be forks of an interpreter that is warm already, and what that one may know before the fork. Pure.

The keeper of warm workers is started with the command of a worker, and goes no further than the interpreter's own start. So a
fork of it goes on as a fresh interpreter would, if all that is read before that point is the same for every worker: the command
up to the script's arguments, and the variables of the environment that say nothing of a worker's place in the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.base import defaults as names

__all__ = ["environment_ahead", "environment_of_all", "read_modules", "why_fresh"]

# They differ between workers, or between one generation and the next.
_PLACE = frozenset({
    names.ENV_LOCAL_RANK, names.ENV_RANK, names.ENV_GROUP_RANK, names.ENV_ROLE_RANK, names.ENV_ROLE_NAME,
    names.ENV_LOCAL_WORLD_SIZE, names.ENV_WORLD_SIZE, names.ENV_GROUP_WORLD_SIZE, names.ENV_ROLE_WORLD_SIZE,
    names.ENV_MASTER_ADDR, names.ENV_MASTER_PORT, names.ENV_RESTART_COUNT, names.ENV_GENERATION, names.ENV_ERROR_FILE,
    names.ENV_PULSE, names.ENV_STACKS, names.ENV_CHECKPOINT, names.ENV_STANDBY,
})  # fmt: skip
_KNOWN_AHEAD = frozenset({names.ENV_LOCAL_RANK, names.ENV_LOCAL_WORLD_SIZE, names.ENV_ROLE_NAME, names.ENV_STACKS})
_ENDS_FLAGS = "cm"  # what follows is a command or a module
_TAKES_VALUE = "WX"
_UNFIT = "EIShV?"  # the interpreter would not look into our folder, or not run anything


def read_modules(value: str | Sequence[str]) -> tuple[str, ...]:
    """The modules that ``--preload`` names; ValueError says what is wrong with one."""
    given = value.split(",") if isinstance(value, str) else list(value)
    modules = [one.strip() for one in given]
    for module in modules:
        if not all(map(str.isidentifier, module.split("."))):
            raise ValueError(f"{module!r} is not the name of a module; write it as in an import, such as torch or torch.nn")
    return tuple(dict.fromkeys(modules))


def why_fresh(commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], executable: str, is_bound: bool) -> str:
    """Why these workers must be fresh interpreters; empty if they need not be."""
    program, *arguments = commands[0]
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
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            break
        if argument.startswith("--"):
            return argument
        for position, letter in enumerate(argument[1:], 2):
            if letter in _UNFIT:
                return f"-{letter}"
            if letter in _ENDS_FLAGS:
                return ""
            if letter in _TAKES_VALUE:
                if position == len(argument):
                    next(rest, "")
                break
    return ""


def environment_of_all(envs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What all workers find in their environments, now and in later generations."""
    first, *others = envs
    return {name: value for name, value in first.items() if name not in _PLACE and all(env.get(name) == value for env in others)}
