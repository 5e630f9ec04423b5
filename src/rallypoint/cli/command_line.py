"""The parser of ``rallyrun``'s command line: small, fast, and with no surprises for the script's own arguments.

The rules are few. Flags stand before the script, are never abbreviated, and take `_` for `-`; a value follows its flag, after
a space or `=` (`-t3` will do for a short flag). A value that begins with a dash must be written with `=`, so that a forgotten
value is noticed instead of swallowing the next flag. The first word that is no flag is the script, and everything after it is
the script's, untouched. A flag that is not given is taken from its environment variable, else from the table. A list is
separated by commas and may be given in several pieces.

argparse would cost half of the time that a cold start may take, and would read `--n` meant for the script as `--nnodes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

from rallypoint.base.text import parse_size, parse_truth
from rallypoint.cli.options import BY_NAME, OPTIONS, Option
from rallypoint.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rallypoint.cli.options import Kind

__all__ = ["closest", "complete", "is_given", "parse", "source", "split_list"]


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> SimpleNamespace:
    """The arguments by name, as torchrun's parser would give them; UsageError names the flag or the variable that is wrong.

    After a flag that is answered at once (``--help``) nothing is read; `training_script` is then empty.
    """
    given, rest = _read_flags(argv)
    answered = any(option.answers and option.dest in given for option in OPTIONS)
    if not (rest or answered):
        raise UsageError("no script was given; write rallyrun [flags] script [arguments of the script], or see rallyrun --help")
    variables = {} if answered else _read_variables(environ, given)
    values = {**_defaults(), **variables, **given}
    script, *arguments = rest or [""]
    return SimpleNamespace(
        **values,
        training_script=script,
        training_script_args=arguments,
        from_flags=frozenset(given),
        from_environment=frozenset(variables),
    )


def complete(args: Any, environ: Mapping[str, str]) -> SimpleNamespace:
    """A copy of arguments that somebody else put together, with the variable or the default of every flag that they lack."""
    known = vars(args)
    variables = {} if "from_environment" in known else _read_variables(environ, known)
    origins = {"from_flags": frozenset(), "from_environment": frozenset(variables)}
    return SimpleNamespace(**{**_defaults(), **origins, "training_script_args": [], **variables, **known})


def source(args: SimpleNamespace, dest: str) -> str:
    """Where this value came from, to be named in an error: the environment variable or the flag."""
    flag = "--" + dest.replace("_", "-")
    return BY_NAME[flag].variable if dest in args.from_environment else flag


def is_given(args: SimpleNamespace, dest: str) -> bool:
    """Whether a flag or its variable says this, and not the table."""
    return dest in args.from_flags or dest in args.from_environment


def closest(word: str, known: Sequence[str]) -> str | None:
    """What the user may have meant by `word`: the only known one that it begins, else the most alike."""
    begun = [name for name in known if name.startswith(word)]
    if len(begun) == 1:
        return begun[0]
    import difflib

    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


def _defaults() -> dict[str, Any]:
    return {option.dest: [] if option.kind == "list" else option.default for option in OPTIONS}


def _read_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What the flags before the script say, and all from the script on."""
    given: dict[str, Any] = {}
    at = 0
    while at < len(argv):
        token = argv[at]
        if token == "--":
            return given, list(argv[at + 1 :])
        if not token.startswith("-") or token == "-":
            return given, list(argv[at:])
        at += 1
        option, text = _recognise(token)
        if option.kind != "flag" and text is None:
            text = _next_value(option, argv, at)
            at += 1
        _keep(given, option, text)
        if option.answers:
            break
    return given, []


def _recognise(token: str) -> tuple[Option, str | None]:
    """The flag that a word names, and the value if the word holds that too."""
    name, equals, text = token.partition("=")
    option = BY_NAME.get(name.replace("_", "-"))
    if option:
        return option, text if equals else None
    option = BY_NAME.get(token[:2]) if token[1] != "-" else None
    if option:
        return option, token[2:]
    raise _unknown(name)


def _unknown(name: str) -> UsageError:
    meant = closest(name.replace("_", "-"), [option.name for option in OPTIONS])
    advice = f"did you mean {meant}?" if meant else "rallyrun --help lists the flags"
    return UsageError(f"unknown flag {name}: {advice} (Flags are not abbreviated; those of the script stand after it.)")


def _next_value(option: Option, argv: Sequence[str], at: int) -> str:
    text = argv[at] if at < len(argv) else None
    if text is None:
        raise UsageError(f"{option.name} needs a value: {option.name} {option.metavar}")
    if text.startswith("-") and not text[1:2].isdigit() and text != "-":
        raise UsageError(f"{option.name} needs a value, but {text} follows; a value with a dash is written {option.name}={text}")
    return text


def _keep(given: dict[str, Any], option: Option, text: str | None) -> None:
    if option.kind == "flag":
        if text is not None:
            raise UsageError(f"{option.short or option.name} takes no value, but was given {text!r}")
        given[option.dest] = True
    else:
        value = _convert(option, text or "", option.name)
        given[option.dest] = [*given.get(option.dest, []), *value] if option.kind == "list" else value


def _read_variables(environ: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What the environment says about flags that were not given; an empty variable says nothing."""
    return {
        option.dest: _convert(option, environ[option.variable], option.variable)
        for option in OPTIONS
        if environ.get(option.variable) and option.dest not in given
    }


def _convert(option: Option, text: str, named: str) -> Any:
    convert, expected = _KINDS[option.kind]
    try:
        value = convert(text)
    except ValueError:
        raise UsageError(f"{named} must be {expected}, not {text!r}") from None
    if option.choices and value not in option.choices:
        raise UsageError(f"{named} must be one of {', '.join(option.choices)}, not {text!r}")
    return value


def split_list(text: str) -> list[str]:
    """The parts between commas; a doubled comma stands for a comma."""
    pieces = (piece.replace("\0", ",") for piece in text.replace(",,", "\0").split(","))
    return [piece for piece in pieces if piece]


_KINDS: dict[Kind, tuple[Callable[[str], Any], str]] = {
    "str": (str, "a text"),
    "choice": (str, "a text"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "flag": (parse_truth, "1 or 0"),
    "list": (split_list, "a list"),
    "size": (parse_size, "a number of bytes, as in 4096, 500M or 2G"),
}
