"""What ``torch.distributed.run`` offers to programs that launch jobs from Python, under its names and with its meanings.

It differs from the command ``rallyrun`` in what it promises a caller: the arguments come from an argparse parser,
`config_from_args` takes them as they are, and whatever goes wrong is raised instead of turned into an exit code. Names are looked
up here at the time of use, because callers replace them here.

The parser is made from the same table of flags as that of ``rallyrun``, but has torchrun's flags only: a program that adds some
of its own must not find the names taken. Whatever of ours the parsed arguments lack, `config_from_args` takes from its variable
or its default.
"""

from __future__ import annotations

import os
import sys
from argparse import REMAINDER, Action, ArgumentParser

from rallypoint.agent.config import LaunchConfig
from rallypoint.agent.launch import elastic_launch
from rallypoint.base import defaults, environment
from rallypoint.cli import arguments, command_line
from rallypoint.cli.arguments import get_rdzv_endpoint, parse_min_max_nnodes
from rallypoint.cli.command_line import BY_NAME, Option, split_list
from rallypoint.cli.entry_point import EntryPoint, check_entry_point, get_use_env, run_script_path
from rallypoint.compat.torch_names import get_logger, macros
from rallypoint.failures.error_files import record
from rallypoint.hardware.devices import determine_local_world_size
from rallypoint.output.log_specs import DefaultLogsSpecs, LogsSpecs, Std
from rallypoint.parser_actions import check_env, env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence
    from typing import Any

__all__ = [
    "REMAINDER",
    "DefaultLogsSpecs",
    "LaunchConfig",
    "LogsSpecs",
    "Std",
    "check_env",
    "config_from_args",
    "determine_local_world_size",
    "elastic_launch",
    "env",
    "get_args_parser",
    "get_logger",
    "get_rdzv_endpoint",
    "get_use_env",
    "macros",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "record",
    "run",
    "run_script_path",
]


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
    "--log-line-prefix-template",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
    "--virtual-local-rank",
    "--print-completion",
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


def config_from_args(args: Any) -> tuple[LaunchConfig, EntryPoint, list[str]]:
    """The job that `args` describe: its configuration, what each worker starts, and the arguments for that."""
    return arguments.config_from_args(args, as_given=True)


def run(args: Any) -> None:
    """Run the job that `args` describe, to its end.

    One node that needs no other gets a free port and a random id; `args` tell it afterwards, as torchrun's do.
    """
    _settle(args)
    config, entry, entry_args = config_from_args(args)
    elastic_launch(config=config, entrypoint=entry)(*entry_args)


@record
def main(args: Sequence[str] | None = None) -> None:
    """Run the job of a command line; None takes that of this process."""
    run(parse_args(args))


def _settle(args: Any) -> None:
    known = command_line.complete(args, environment.own)
    check_entry_point(known)
    least, most = parse_min_max_nnodes(known.nnodes)
    if arguments.is_standalone(known, least, most):
        args.nnodes = "1:1"
        args.rdzv_backend = defaults.BACKEND_ELASTIC
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = os.urandom(8).hex()
    if known.master_port is None:
        args.master_port = defaults.MASTER_PORT


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
    action = _PrintCompletion if option.answers else env if option.has_variable else "store"
    parser.add_argument(*names, action=action, **rules)


class _PrintCompletion(Action):
    """A flag that is answered, and ends the program."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        from rallypoint.cli import completion

        print(completion.script(values), end="")
        parser.exit()
