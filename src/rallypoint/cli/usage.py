"""What is made of the table of flags for people and shells: ``--help``, the page of the documentation, and completion scripts.

The scripts for bash, zsh and tcsh complete flags, and the values of those flags that have a fixed set of them, up to the script;
what stands after the script is the script's own, and is completed as file names.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rallypoint.base import defaults
from rallypoint.cli.command_line import GROUPS, OPTIONS, Option

__all__ = ["OVERVIEW", "completion_script", "help_text", "markdown"]

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
failed or the store was lost; 4 this host cannot run the workers; 70 a bug in rallypoint; 128+n signal n ended the job
(Ctrl-C: 130)."""

# What ``rallypoint --help`` prints.
OVERVIEW = """\
usage: rallypoint run [flags] script [script arguments]

Commands:
  run         run a job, same as rallyrun; see `rallypoint run --help` for its flags
  explain     show what happened in a run and where its time went, from its log folder
  stacks      show the Python stacks of running workers, through their control sockets

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


# Values that can be suggested for flags that also take others.
_SUGGESTIONS = {
    "--nproc-per-node": ("auto", "cpu", "gpu", "xpu"),
    "--rdzv-backend": (defaults.BACKEND_CLI, defaults.BACKEND_ELASTIC),
    "--redirects": ("0", "1", "2", "3"),
    "--tee": ("0", "1", "2", "3"),
    "--omp-num-threads": ("auto",),
}
_FOLDERS = ("--log-dir",)


def completion_script(shell: str) -> str:
    """What is to be evaluated in `shell` to complete the command line of rallyrun."""
    return {"bash": _bash, "zsh": _zsh, "tcsh": _tcsh}[shell]()


def _values(option: Option) -> tuple[str, ...]:
    return option.choices or _SUGGESTIONS.get(option.name, ())


def _names(option: Option) -> list[str]:
    return [name for name in (option.short, option.name) if name]


_BASH = """\
# bash completion for rallyrun: eval "$(rallyrun --print-completion bash)"
_rallyrun() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} i=1 word flag=
    COMPREPLY=()
    # bash splits a word at "=", so that a flag and its value are two or three words here.
    while (( i < COMP_CWORD )); do
        word=${{COMP_WORDS[i]}}
        flag=
        case ${{word//_/-}} in
            {valued})
                flag=${{word//_/-}}
                [[ ${{COMP_WORDS[i+1]}} == = ]] && (( i++ ))
                (( i += 2 ))
                ;;
            --|[!-]*) compopt -o default; return ;;
            *) (( i++ )) ;;
        esac
    done
    if (( i > COMP_CWORD )) && [[ -n $flag ]]; then
        [[ $cur == = ]] && cur=
        case $flag in
{cases}
            *) compopt -o default ;;
        esac
    elif [[ $cur == -* ]]; then
        COMPREPLY=( $(compgen -W "{flags}" -- "${{cur//_/-}}") )
    else
        compopt -o default
    fi
}}
complete -F _rallyrun rallyrun
"""


def _bash() -> str:
    cases = [
        f'            {"|".join(_names(option))}) COMPREPLY=( $(compgen -W "{" ".join(_values(option))}" -- "$cur") ) ;;'
        for option in OPTIONS
        if _values(option)
    ]
    cases += [f'            {name}) COMPREPLY=( $(compgen -d -- "$cur") ); compopt -o filenames ;;' for name in _FOLDERS]
    valued = "|".join(name for option in OPTIONS if option.kind != "flag" for name in _names(option))
    flags = " ".join(name for option in OPTIONS for name in _names(option))
    return _BASH.format(valued=valued, cases="\n".join(cases), flags=flags)


_ZSH = """\
#compdef rallyrun
# zsh completion for rallyrun: rallyrun --print-completion zsh > ${{fpath[1]}}/_rallyrun
_rallyrun() {{
    _arguments -S \\
{specs}
        '1:script:_files' \\
        '*::argument:_files'
}}
if [[ ${{funcstack[1]}} == _rallyrun ]]; then
    _rallyrun "$@"
else
    compdef _rallyrun rallyrun
fi
"""


def _zsh() -> str:
    specs = [f"        {_zsh_spec(option, name)} \\" for option in OPTIONS for name in _names(option)]
    return _ZSH.format(specs="\n".join(specs))


def _zsh_spec(option: Option, name: str) -> str:
    """One argument of _arguments: the flag, where its value may stand, what it means, and what the value can be."""
    text = option.help.replace("'", "").replace("[", "(").replace("]", ")").replace(":", "\\:")
    if option.kind == "flag":
        return f"'{name}[{text}]'"
    action = "_files -/" if option.name in _FOLDERS else f"({' '.join(_values(option))})" if _values(option) else " "
    mark = "=" if name.startswith("--") else "+"
    return f"'{name}{mark}[{text}]:{option.dest}:{action}'"


def _tcsh() -> str:
    """tcsh knows the word before the cursor, not the place of the script, so flags are offered after it too."""
    values = [f"'n/{name}/({' '.join(_values(option))})/'" for option in OPTIONS if _values(option) for name in _names(option)]
    folders = [f"'n/{name}/d/'" for name in _FOLDERS]
    flags = " ".join(option.name[2:] for option in OPTIONS)
    rules = [f"'c/--/({flags})/'", *values, *folders, "'p/*/f/'"]
    return "# tcsh completion for rallyrun: rallyrun --print-completion tcsh > FILE, then source FILE\n" + (
        f"complete rallyrun {' '.join(rules)}\n"
    )
