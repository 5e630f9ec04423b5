"""What is made of the table of flags for people: ``--help``, and the page of the documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rallypoint.cli.command_line import GROUPS, OPTIONS, Option

__all__ = ["COMMANDS", "OVERVIEW", "help_text", "markdown"]

_WIDTH = 100
_INDENT = 6

_SYNOPSIS = """\
usage: rallyrun [flags] script [script arguments]
       rallyrun [flags] -m module [module arguments]
       rallyrun [flags] --no-python program [program arguments]

Start N workers on this machine, watch them, restart the group when one fails, and say why."""

_RULES = """\
Flags go before the script; everything after the script's name is passed to the script. `_` works in place of `-`. Flags
cannot be abbreviated. `${local_rank}` in the script's arguments is replaced for each worker. If a flag is not given, its
environment variable is used if set: PET_NPROC_PER_NODE for --nproc-per-node."""

_EXIT_CODES = """\
Exit codes: 0 all workers succeeded; 1 a worker failed and no restarts were left; 2 bad input, nothing was started; 3 rendezvous
failed or the store was lost; 4 this host cannot run the workers; 65 a worker failed in a way that no restart can help; 70 a bug
in rallypoint; 75 all workers have saved after a notice to leave; 76 not all have; 79 the job was stopped by `rallypoint stop`;
128+n signal n ended the job (Ctrl-C: 130)."""

# The commands of ``rallypoint``, and what each is for.
COMMANDS = {
    "run": "run a job, same as rallyrun; see `rallypoint run --help` for its flags",
    "ps": "list the jobs that run on this machine",
    "status": "show how a job stands: its nodes, ranks, restarts and why",
    "logs": "show what the workers of a job have written to their log files, or follow it",
    "top": "watch a job live, and steer it by keys",
    "stop": "stop a job on all of its nodes",
    "restart": "restart the workers of a job",
    "drain": "have one node leave its job; the others go on without it",
    "chaos": "hurt a running job on purpose, to see whether it goes on",
    "doctor": "check this machine and the way to the others, and say what to do",
    "explain": "show what happened in a run and where its time went, from its log folder",
    "stacks": "show the Python stacks of running workers",
    "demo": "watch a small job being hurt three times, and going on",
    "init": "print a batch script for Slurm, or a manifest for Kubernetes",
}

# What ``rallypoint --help`` prints.
OVERVIEW = f"""\
usage: rallypoint run [flags] script [script arguments]

Commands:
{chr(10).join(f"  {name:<11} {purpose}" for name, purpose in COMMANDS.items())}

  --help      show this help and exit
  --version   show the version and exit"""


def help_text() -> str:
    """What ``rallyrun --help`` prints."""
    groups = ("\n".join([f"{group}:", *map(_entry, _members(group))]) for group in GROUPS)
    return "\n\n".join([_SYNOPSIS, *groups, _wrap(_RULES), _wrap(_EXIT_CODES)]) + "\n"


def markdown() -> str:
    """The flags as Markdown: a heading and a table for each group."""
    return "\n".join(line for group in GROUPS for line in _table(group))


def _members(group: str) -> Iterator[Option]:
    return (option for option in OPTIONS if option.group == group)


def _entry(option: Option) -> str:
    default = f" [{_default(option)}]" if _default(option) else ""
    return f"  {_spelling(option)}\n{_wrap(option.help + default, _INDENT)}"


def _spelling(option: Option) -> str:
    names = f"{option.short}, {option.name}" if option.short else option.name
    return f"{names} {'|'.join(option.choices) or option.metavar}".rstrip()


def _default(option: Option) -> str:
    """The default where there is something to be said about it; a flag is off, and a missing one is described in words."""
    if option.default is None or option.kind == "flag":
        return ""
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def _wrap(text: str, indent: int = 0) -> str:
    margin = " " * indent
    return textwrap.fill(" ".join(text.split()), _WIDTH, initial_indent=margin, subsequent_indent=margin)


def _table(group: str) -> list[str]:
    rows = [f"| {' | '.join(_cells(option))} |" for option in _members(group)]
    return [f"## {group}", "", "| flag | default | variable | meaning |", "|---|---|---|---|", *rows, ""]


def _cells(option: Option) -> list[str]:
    cells = [f"`{_spelling(option)}`", _code(_default(option)), _code(option.variable), option.help]
    return [cell.replace("|", "\\|") for cell in cells]


def _code(text: str) -> str:
    return f"`{text}`" if text else "-"
