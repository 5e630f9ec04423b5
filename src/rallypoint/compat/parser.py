"""torchrun's flags as an `argparse.ArgumentParser`, for programs that take that parser and build on it.

``rallyrun`` itself reads its command line in `command_line`, without argparse. This parser is made from the same table of flags,
but has torchrun's flags only: a program that adds some of its own must not find the names taken. Whatever of ours the parsed
arguments lack, `config_from_args` takes from its variable or its default.
"""

from __future__ import annotations

import sys
from argparse import REMAINDER, ArgumentParser

from rallypoint.cli.command_line import BY_NAME, Option, split_list
from rallypoint.parser_actions import check_env, env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence
    from typing import Any

__all__ = ["REMAINDER", "get_args_parser", "parse_args"]

TORCHRUN_FLAGS = (
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--standalone",
    "--max-restarts",
    "--monitor-interval",
    "--start-method",
    "--event-log-handler",
    "--role",
    "--module",
    "--no-python",
    "--run-path",
    "--log-dir",
    "--redirects",
    "--tee",
    "--local-ranks-filter",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
    "--virtual-local-rank",
)

_TYPES: dict[str, Any] = {"str": str, "choice": str, "int": int, "float": float, "list": split_list}


def get_args_parser() -> ArgumentParser:
    """A new parser of torchrun's command line, with its names, defaults and variables."""
    parser = ArgumentParser(description="Launch a distributed program, and look after it. Flags stand before the script.")
    for name in TORCHRUN_FLAGS:
        _add(parser, BY_NAME[name])
    parser.add_argument("training_script", type=str, help="The script, module or program that each worker runs.")
    parser.add_argument("training_script_args", nargs=REMAINDER, help="All that follows it is the script's own.")
    return parser


def parse_args(args: Sequence[str] | None) -> Namespace:
    """The command line as torchrun's parser reads it; None takes that of this process."""
    return get_args_parser().parse_args(sys.argv[1:] if args is None else args)


def _add(parser: ArgumentParser, option: Option) -> None:
    """One flag, under each of its spellings."""
    names = dict.fromkeys(filter(None, (option.short, option.name, f"--{option.dest}")))
    rules: dict[str, Any] = {"help": option.help.replace("%", "%%")}
    if option.kind == "flag":
        parser.add_argument(*names, action=check_env, default=option.default, **rules)
        return
    rules["type"] = _TYPES[option.kind]
    rules["default"] = [] if option.kind == "list" else option.default
    if option.choices:
        rules["choices"] = list(option.choices)
    parser.add_argument(*names, action=env if option.has_variable else "store", **rules)
