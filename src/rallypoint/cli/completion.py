"""Completion scripts for bash, zsh and tcsh, made from `options.OPTIONS`.

Each of them completes flags, and the values of those flags that have a fixed set of them, up to the script; what stands after the
script is the script's own, and is completed as file names.
"""

from __future__ import annotations

from rallypoint.base import defaults
from rallypoint.cli.options import OPTIONS, Option

__all__ = ["script"]

# Values that can be suggested for flags that also take others.
_SUGGESTIONS = {
    "--nproc-per-node": ("auto", "cpu", "gpu", "xpu"),
    "--rdzv-backend": (defaults.BACKEND_CLI, defaults.BACKEND_ELASTIC),
    "--redirects": ("0", "1", "2", "3"),
    "--tee": ("0", "1", "2", "3"),
    "--omp-num-threads": ("auto",),
}
_FOLDERS = ("--log-dir",)


def script(shell: str) -> str:
    """What is to be evaluated in `shell` to complete the command line of rallyrun."""
    return {"bash": _bash, "zsh": _zsh, "tcsh": _tcsh}[shell]()


def _values(option: Option) -> tuple[str, ...]:
    return option.choices or _SUGGESTIONS.get(option.name, ())


def _takes_value(option: Option) -> bool:
    return option.kind != "flag"


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
    valued = "|".join(name for option in OPTIONS if _takes_value(option) for name in _names(option))
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
    if not _takes_value(option):
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
