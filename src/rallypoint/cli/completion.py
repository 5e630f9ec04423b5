"""Scripts with which shells complete the commands ``rallyrun`` and ``rallypoint``.

They complete flags, and the values of those flags that have a set of them, up to the script; what stands after the script is the
script's own, and is completed as file names. ``rallypoint`` has commands first; after ``run`` all is as with ``rallyrun``.
"""

from __future__ import annotations

import re
from functools import cache

from rallypoint.base import defaults
from rallypoint.cli import chaos, demo, doctor, explain, init, jobs, logs, stacks, top
from rallypoint.cli.command_line import BY_NAME, OPTIONS, Option
from rallypoint.cli.usage import COMMANDS
from rallypoint.rendezvous import registry
from rallypoint.schedulers import plug_ins

__all__ = ["script"]

_FOLDERS = ("--log-dir",)
_RUN = "run"
_GENERAL = ("--help", "--version")
_FOR_TORCHRUN = (defaults.BACKEND_PLUGIN, defaults.BACKEND_PLUGIN_ETCD)  # other names of c10d and etcd


def script(shell: str) -> str:
    """What is to be evaluated in `shell` to complete our command lines."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish, "tcsh": _tcsh}[shell]()


@cache  # to look for plug-ins takes long
def _suggestions() -> dict[str, tuple[str, ...]]:
    """Values that can be suggested for flags that also take others, those of installed plug-ins included."""
    return {
        "--nproc-per-node": ("auto", "cpu", "gpu", "xpu"),
        "--rdzv-backend": tuple(name for name in registry.available() if name not in _FOR_TORCHRUN),
        "--scheduler": plug_ins.available(),
        "--redirects": ("0", "1", "2", "3"),
        "--tee": ("0", "1", "2", "3"),
        "--omp-num-threads": ("auto",),
        "--preload": ("auto",),
        "--event-log-handler": ("null", "console"),
    }


def _values(option: Option) -> tuple[str, ...]:
    return option.choices or _suggestions().get(option.name, ())


def _names(option: Option) -> list[str]:
    return [name for name in (option.short, option.name) if name]


def _valued() -> list[str]:
    """The flags that are followed by a value."""
    return [name for name, option in BY_NAME.items() if option.kind != "flag"]


def _flags_of_commands() -> dict[str, list[str]]:
    """What the help of each command lists, but for ``run``."""
    commands = (chaos, demo, doctor, explain, init, logs, stacks, top)
    usages = {one.__name__.rpartition(".")[2]: one.USAGE for one in commands} | jobs.USAGES
    return {name: sorted({*re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE), "--help"}) for name, text in usages.items()}


# --- bash ------------------------------------------------------------------------------------------------------------------


_BASH = """\
# bash completion for rallyrun and rallypoint: eval "$(rallyrun --print-completion bash)"
_rallyrun_from() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} i=$1 word flag=
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
_rallyrun() {{
    COMPREPLY=()
    _rallyrun_from 1
}}
_rallypoint() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} flags=
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=( $(compgen -W "{commands}" -- "$cur") )
        return
    fi
    case ${{COMP_WORDS[1]}} in
        {run}) _rallyrun_from 2; return ;;
{command_cases}
    esac
    if [[ $cur == -* ]]; then
        COMPREPLY=( $(compgen -W "$flags" -- "$cur") )
    else
        compopt -o default
    fi
}}
complete -F _rallyrun rallyrun
complete -F _rallypoint rallypoint
"""


def _bash() -> str:
    cases = [
        f'            {"|".join(_names(option))}) COMPREPLY=( $(compgen -W "{" ".join(_values(option))}" -- "$cur") ) ;;'
        for option in OPTIONS
        if _values(option)
    ]
    cases += [f'            {name}) COMPREPLY=( $(compgen -d -- "$cur") ); compopt -o filenames ;;' for name in _FOLDERS]
    command_cases = [f'        {name}) flags="{" ".join(flags)}" ;;' for name, flags in _flags_of_commands().items()]
    return _BASH.format(
        valued="|".join(_valued()),
        cases="\n".join(cases),
        flags=" ".join(BY_NAME),
        run=_RUN,
        commands=" ".join([*COMMANDS, *_GENERAL]),
        command_cases="\n".join(command_cases),
    )


# --- zsh -------------------------------------------------------------------------------------------------------------------


_ZSH = """\
#compdef rallyrun rallypoint
# zsh completion for rallyrun and rallypoint: rallyrun --print-completion zsh > ${{fpath[1]}}/_rallyrun
_rallyrun_flags() {{
    _arguments -S \\
{specs}
        '1:script:_files' \\
        '*::argument:_files'
}}
_rallypoint_commands() {{
    local curcontext="$curcontext" state line
    _arguments -C \\
        '1:command:(({commands}))' \\
        '*::argument:->rest'
    [[ $state == rest ]] || return
    case $words[1] in
        {run}) _rallyrun_flags ;;
{command_cases}
        *) _files ;;
    esac
}}
_rallyrun() {{
    if [[ $service == rallypoint ]]; then
        _rallypoint_commands
    else
        _rallyrun_flags
    fi
}}
if [[ ${{funcstack[1]}} == _rallyrun ]]; then
    _rallyrun "$@"
else
    compdef _rallyrun rallyrun rallypoint
fi
"""


def _zsh() -> str:
    specs = [f"        {_zsh_spec(option, name)} \\" for option in OPTIONS for name in _names(option)]
    commands = [f'{name}\\:"{_quoted(purpose)}"' for name, purpose in COMMANDS.items()]
    command_cases = [
        f"        {name}) _arguments {' '.join(flags)} '*:file:_files' ;;" for name, flags in _flags_of_commands().items()
    ]
    return _ZSH.format(specs="\n".join(specs), commands=" ".join(commands), run=_RUN, command_cases="\n".join(command_cases))


def _zsh_spec(option: Option, name: str) -> str:
    """One argument of _arguments: the flag, where its value may stand, what it means, and what the value can be."""
    text = _quoted(option.help).replace("[", "(").replace("]", ")").replace(":", "\\:")
    if option.kind == "flag":
        return f"'{name}[{text}]'"
    action = "_files -/" if option.name in _FOLDERS else f"({' '.join(_values(option))})" if _values(option) else " "
    mark = "=" if name.startswith("--") else "+"
    return f"'{name}{mark}[{text}]:{option.dest}:{action}'"


def _quoted(text: str) -> str:
    """A text that may stand between quotes: no shell is to find anything in it that it would act on."""
    return re.sub(r"['\"`$\\]", "", text)


# --- fish ------------------------------------------------------------------------------------------------------------------


_FISH = """\
# fish completion for rallyrun and rallypoint: rallyrun --print-completion fish | source
function __rallyrun_before_script
    set -l valued {valued}
    set -l words (commandline -opc)
    set -e words[1]
    if set -q argv[1]
        contains -- "$words[1]" $argv; or return 1
        set -e words[1]
    end
    while set -q words[1]
        set -l word (string replace -a _ - -- $words[1])
        set -e words[1]
        if test "$word" = --; or not string match -q -- '-*' $word
            return 1
        end
        contains -- $word $valued; and set -q words[1]; and set -e words[1]
    end
    return 0
end
"""


def _fish() -> str:
    lines = [_FISH.format(valued=" ".join(_valued())).rstrip()]
    for command, condition in (("rallyrun", "__rallyrun_before_script"), ("rallypoint", f"__rallyrun_before_script {_RUN}")):
        lines += [f"complete -c {command} -n '{condition}' {_fish_rule(option)}" for option in OPTIONS]
    lines += [
        f"complete -c rallypoint -n __fish_use_subcommand -f -a {name} -d '{_quoted(purpose)}'"
        for name, purpose in COMMANDS.items()
    ]
    lines += [f"complete -c rallypoint -n __fish_use_subcommand -f -l {name[2:]}" for name in _GENERAL]
    lines += [
        f"complete -c rallypoint -n '__fish_seen_subcommand_from {command}' -l {flag[2:]}"
        for command, flags in _flags_of_commands().items()
        for flag in flags
    ]
    return "\n".join(lines) + "\n"


def _fish_rule(option: Option) -> str:
    short = f"-s {option.short[1:]} " if option.short else ""
    if option.name in _FOLDERS:
        value = "-x -a '(__fish_complete_directories)' "
    elif _values(option):
        value = f"-x -a '{' '.join(_values(option))}' "
    else:
        value = "" if option.kind == "flag" else "-r "
    return f"{short}-l {option.name[2:]} {value}-d '{_quoted(option.help)}'"


# --- tcsh ------------------------------------------------------------------------------------------------------------------


def _tcsh() -> str:
    """tcsh knows the word before the cursor, not the place of the script, so flags are offered after it too."""
    values = [f"'n/{name}/({' '.join(_values(option))})/'" for option in OPTIONS if _values(option) for name in _names(option)]
    folders = [f"'n/{name}/d/'" for name in _FOLDERS]
    flags = " ".join(option.name[2:] for option in OPTIONS)
    rules = " ".join([f"'c/--/({flags})/'", *values, *folders, "'p/*/f/'"])
    return (
        "# tcsh completion for rallyrun and rallypoint: rallyrun --print-completion tcsh > FILE, then source FILE\n"
        f"complete rallyrun {rules}\n"
        f"complete rallypoint 'p/1/({' '.join(COMMANDS)})/' {rules}\n"
    )
