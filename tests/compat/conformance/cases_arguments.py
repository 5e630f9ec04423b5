"""The command line: what becomes of hundreds of argument lists, and the functions that read them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any
from unittest import mock

from tests.compat.conformance.harness import case, command, environment, folder, outcome, plain, together

SCRIPT = ["train.py"]
FLAGS = {
    "nnodes": ["1", "2", "1:2", "4:4", "1:", ":2", "a", "3:2", "1:2:3"],
    "nproc-per-node": ["1", "4", "auto", "cpu", "gpu", "x"],
    "rdzv-backend": ["static", "c10d", "etcd", "other"],
    "rdzv-endpoint": ["", "host", "host:5", "[::1]:5"],
    "rdzv-id": ["none", "my-id", "5"],
    "rdzv-conf": ["", "a=b", "a=b,c=d", "timeout=5"],
    "max-restarts": ["0", "3", "-1", "x", "1.5"],
    "monitor-interval": ["0.1", "5", "x"],
    "start-method": ["spawn", "fork", "forkserver", "thread"],
    "event-log-handler": ["null", "console"],
    "role": ["default", "trainer"],
    "log-dir": ["/tmp/logs"],
    "redirects": ["0", "3", "0:1,1:2", "x"],
    "tee": ["0", "3", "0:1,1:2"],
    "local-ranks-filter": ["", "0", "0,1"],
    "node-rank": ["0", "2", "x"],
    "master-addr": ["127.0.0.1", "host"],
    "master-port": ["29500", "x"],
    "local-addr": ["10.0.0.1"],
    "logs-specs": ["default"],
    "numa-binding": ["node", "socket", "exclusive", "core-complex", "x"],
    "signals-to-handle": ["SIGTERM", "SIGTERM,SIGUSR1"],
    "shutdown-timeout": ["5", "x"],
    "duplicate-stdout-filters": ["[]", "a,b"],
    "duplicate-stderr-filters": ["x"],
}
SWITCHES = ("standalone", "module", "no-python", "run-path", "virtual-local-rank")


def parsed(argv: list[str]) -> dict[str, Any]:
    from torch.distributed.run import parse_args

    return outcome(lambda: vars(parse_args(argv)))


def facts_of(lists: list[list[str]]) -> dict[str, Any]:
    return {" ".join(argv): without_own(parsed(argv)) for argv in lists}


def without_own(facts: dict[str, Any]) -> dict[str, Any]:
    """Only torch's flags: a parser may know more."""
    if isinstance(facts.get("value"), dict):
        facts["value"] = {name: value for name, value in facts["value"].items() if name in TORCHS}
    return facts


TORCHS = {
    "nnodes",
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "standalone",
    "max_restarts",
    "monitor_interval",
    "start_method",
    "event_log_handler",
    "role",
    "module",
    "no_python",
    "run_path",
    "log_dir",
    "redirects",
    "tee",
    "local_ranks_filter",
    "node_rank",
    "master_addr",
    "master_port",
    "local_addr",
    "logs_specs",
    "numa_binding",
    "signals_to_handle",
    "shutdown_timeout",
    "virtual_local_rank",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "training_script",
    "training_script_args",
    "use_env",
}


@case
def flags_with_values() -> dict[str, Any]:
    return facts_of([[f"--{flag}", value, *SCRIPT] for flag, values in FLAGS.items() for value in values])


@case
def flags_with_values_after_an_equals_sign() -> dict[str, Any]:
    return facts_of([[f"--{flag}={values[-1]}", *SCRIPT] for flag, values in FLAGS.items()])


@case
def flags_with_underscores() -> dict[str, Any]:
    return facts_of([[f"--{flag.replace('-', '_')}", values[0], *SCRIPT] for flag, values in FLAGS.items() if "-" in flag])


@case
def switches() -> dict[str, Any]:
    lists = [[f"--{name}", *SCRIPT] for name in SWITCHES] + [
        [f"--{name.replace('-', '_')}", *SCRIPT] for name in SWITCHES if "-" in name
    ]
    return facts_of(
        [
            *lists,
            ["-m", "mod"],
            ["-r", "3", *SCRIPT],
            ["-t", "3", *SCRIPT],
            ["-r3", *SCRIPT],
            ["--module", "--no-python", *SCRIPT],
            ["--standalone", "--nnodes", "2", *SCRIPT],
        ]
    )


@case
def the_scripts_own_arguments() -> dict[str, Any]:
    lists = (
        [],
        ["train.py"],
        ["train.py", "a", "b"],
        ["train.py", "--lr", "1"],
        ["train.py", "--nnodes", "5"],
        ["train.py", "--", "x"],
        ["--", "train.py", "x"],
        ["train.py", "-h"],
        ["train.py", "--help"],
        ["--nnodes=1", "train.py", "--nproc-per-node", "9"],
        ["--unknown", "train.py"],
        ["--nnodes"],
        ["--version", "train.py"],
        ["train.py", "-m"],
        ["train.py", ""],
        ["-m", "mod", "-m", "x"],
    )
    return facts_of([list(one) for one in lists])


@case
def variables_instead_of_flags() -> dict[str, Any]:
    facts = {}
    for flag, values in FLAGS.items():
        with environment(**{f"PET_{flag.replace('-', '_').upper()}": values[-1]}):
            facts[flag] = without_own(parsed(SCRIPT))
    with environment(PET_NNODES="3", PET_STANDALONE="1", PET_MODULE="0", PET_NO_PYTHON="1"):
        facts["several"] = without_own(parsed(SCRIPT))
        facts["flag wins"] = without_own(parsed(["--nnodes", "5", *SCRIPT]))
    return facts


@case
def numbers_of_nodes() -> dict[str, Any]:
    from torch.distributed.run import parse_min_max_nnodes

    return {
        repr(text): outcome(parse_min_max_nnodes, text)
        for text in ("1", "1:1", "2:5", "5:2", "0", "a", "1:a", "", "1:2:3", ":", "-1", " 1:2 ")
    }


@case
def numbers_of_workers() -> dict[str, Any]:
    from torch.distributed.run import determine_local_world_size

    facts = {repr(text): outcome(determine_local_world_size, text) for text in ("1", "8", "0", "-1", "a", "", "gpus", "2.5")}
    with mock.patch("os.cpu_count", return_value=7):
        facts["cpu is a number"] = outcome(lambda: isinstance(determine_local_world_size("cpu"), int))
    return facts


def arguments(*argv: str) -> Any:
    from torch.distributed.run import parse_args

    return parse_args(list(argv))


@case
def endpoints_of_arguments() -> dict[str, Any]:
    from torch.distributed.run import get_rdzv_endpoint, get_use_env

    return {
        "static": outcome(lambda: get_rdzv_endpoint(arguments("--master-addr", "h", "--master-port", "5", "x.py"))),
        "static without port": outcome(lambda: get_rdzv_endpoint(arguments("--master-addr", "h", "x.py"))),
        "c10d": outcome(lambda: get_rdzv_endpoint(arguments("--rdzv-backend", "c10d", "--rdzv-endpoint", "e:1", "x.py"))),
        "endpoint wins": outcome(lambda: get_rdzv_endpoint(arguments("--rdzv-endpoint", "e:1", "--master-port", "5", "x.py"))),
        "use env": outcome(lambda: get_use_env(arguments("x.py"))),
        "use env given": [
            outcome(get_use_env, argparse.Namespace(use_env=False)),
            outcome(get_use_env, argparse.Namespace(use_env=True)),
        ],
    }


@case
def configs_from_arguments() -> dict[str, Any]:
    from torch.distributed.run import config_from_args

    names = (
        "min_nodes",
        "max_nodes",
        "nproc_per_node",
        "run_id",
        "role",
        "rdzv_endpoint",
        "rdzv_backend",
        "rdzv_configs",
        "rdzv_timeout",
        "max_restarts",
        "monitor_interval",
        "start_method",
        "log_line_prefix_template",
        "local_addr",
        "event_log_handler",
        "signals_to_handle",
        "virtual_local_rank",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "shutdown_timeout",
    )

    def made(*argv: str) -> Any:
        config, command, args = config_from_args(arguments(*argv))
        facts = {name: plain(getattr(config, name)) for name in names}
        if facts["rdzv_backend"] == "c10d" and "c10d" not in argv:
            facts["run_id"] = len(facts["run_id"]) > 5
        command = command if isinstance(command, str) else command.__name__
        return [facts, command.replace(sys.executable, "PYTHON"), args]

    lines = (
        ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "--rdzv-id", "i", "x.py"),
        ("--nnodes", "1:4", "--nproc-per-node", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h", "x.py", "a", "--b"),
        ("--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--master-port", "5", "x.py"),
        ("--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "x.py"),
        ("--master-port", "5", "x.py"),
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "--rdzv-conf", "timeout=5,join_timeout=7", "x.py"),
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "-m", "mod", "a"),
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "--no-python", "prog", "a"),
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "--run-path", "x.py", "a"),
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "--no-python", "-m", "prog"),
        ("--logs-specs", "no_such_specs", "x.py"),
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "--local-ranks-filter", "0,x", "x.py"),
        ("--nnodes", "0", "x.py"),
        ("--max-restarts", "-1", "x.py"),
        ("--nnodes", "2:1", "x.py"),
        (
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "h:1",
            "--virtual-local-rank",
            "--signals-to-handle",
            "SIGTERM",
            "--shutdown-timeout",
            "9",
            "x.py",
        ),
        (
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "h:1",
            "--role",
            "r",
            "--local-addr",
            "l",
            "--monitor-interval",
            "2",
            "--max-restarts",
            "3",
            "x.py",
        ),
    )
    return {" ".join(line): outcome(made, *line) for line in lines}


@case
def the_parser_itself() -> dict[str, Any]:
    from torch.distributed.run import REMAINDER, get_args_parser

    parser = get_args_parser()
    parser.add_argument("--mine", default="d")
    known, unknown = parser.parse_known_args(["--mine", "v", "--nnodes", "2", "x.py", "--theirs"])
    return {
        "kind": isinstance(parser, argparse.ArgumentParser),
        "mine": [known.mine, known.nnodes, known.training_script, known.training_script_args, unknown],
        "defaults": {
            name: plain(parser.get_default(name)) for name in sorted(TORCHS) if name not in ("use_env", "training_script")
        },
        "remainder": REMAINDER == argparse.REMAINDER,
        "is a parent": outcome(
            lambda: (
                argparse.ArgumentParser(parents=[parser], add_help=False, conflict_handler="resolve").parse_args(["x.py"]).nnodes
            )
        ),
        "types": [type(parser.parse_args(["--max-restarts", "2", "x.py"]).max_restarts).__name__],
    }


@case
def actions_that_read_variables() -> dict[str, Any]:
    from torch.distributed.run import check_env, env

    def values(argv: list[str]) -> Any:
        parser = argparse.ArgumentParser()
        parser.add_argument("--foo", "-f", action=env, default="d")
        parser.add_argument("--number", action=env, type=int, default=3)
        parser.add_argument("--check", action=check_env)
        return vars(parser.parse_args(argv))

    def required() -> Any:
        parser = argparse.ArgumentParser()
        parser.add_argument("--needed", action=env, required=True)
        return vars(parser.parse_args([]))

    facts = {"nothing": outcome(values, []), "given": outcome(values, ["--foo", "x", "--check"]), "required": outcome(required)}
    with environment(PET_FOO="env", PET_NUMBER="7", PET_CHECK="1", PET_NEEDED="n", PET_F="short"):
        facts |= {
            "variables": outcome(values, []),
            "both": outcome(values, ["--foo", "x"]),
            "required variable": outcome(required),
        }
    with environment(PET_CHECK="0"):
        facts["zero"] = outcome(values, [])
    with environment(PET_CHECK="x"):
        facts["no number"] = outcome(values, [])
    return facts


@case
def a_whole_run() -> dict[str, Any]:
    from torch.distributed.run import main, run

    facts = {}
    with folder() as path:
        program = f'echo "$RANK $WORLD_SIZE $*" > {path}/$RANK'
        for name, function in (("main", main), ("run", lambda argv: run(arguments(*argv)))):
            argv = ["--standalone", "--nproc-per-node", "2", "--no-python", "sh", "-c", program, "name", "--nnodes"]
            facts[name] = [outcome(function, argv), sorted(one.read_text() for one in path.iterdir())]
        facts["fails"] = outcome(main, ["--standalone", "--nproc-per-node", "1", "--no-python", "sh", "-c", "exit 5"])
        (path / "script.py").write_text(
            f"import os, sys; open(f'{path}/py', 'w').write(repr([__name__, sys.argv[1:], os.environ['RANK']]))"
        )
        facts["script"] = [
            outcome(main, ["--standalone", "--", str(path / "script.py"), "--x", "1"]),
            (path / "py").read_text() if (path / "py").exists() else None,
        ]
    return facts


@case
def a_script_in_this_process() -> dict[str, Any]:
    from torch.distributed.run import run_script_path

    with folder() as path:
        (path / "s.py").write_text(
            f"import sys, json; json.dump([__name__, sys.argv[0].endswith('s.py'), sys.argv[1:]], open({str(path / 'o')!r}, 'w'))"
        )
        before = list(sys.argv)
        try:
            answer = outcome(run_script_path, str(path / "s.py"), "a", "--b")
        finally:
            sys.argv = before
        return {"answer": answer, "told": json.loads((path / "o").read_text())}


@case
def the_old_command() -> dict[str, Any]:
    from torch.distributed.launch import get_args_parser, launch, main, parse_args

    with folder() as path:
        (path / "s.py").write_text(f"import os, sys; open(f'{path}/{{os.environ[\"RANK\"]}}', 'w').write(repr(sys.argv[1:]))")
        facts = {
            "parsed": outcome(lambda: [parse_args(["--use-env", "s.py"]).use_env, parse_args(["s.py"]).use_env]),
            "main": outcome(main, ["--nproc-per-node=2", "--standalone", str(path / "s.py"), "x"]),
            "told": sorted(one.read_text() for one in path.iterdir() if one.name.isdigit()),
            "launch": outcome(lambda: launch(parse_args(["--standalone", "--use-env", str(path / "s.py"), "y"]))),
        }
        facts["then"] = (path / "0").read_text()
    facts["parser"] = isinstance(get_args_parser(), argparse.ArgumentParser)
    facts["environment"] = "RANK" in os.environ
    return facts


def environment_program(path: Any) -> list[str]:
    program = f"import json, os; json.dump(dict(os.environ), open(f'{path}/' + os.environ['RANK'], 'w'))"
    return ["--no-python", sys.executable, "-S", "-c", program]


@case
def environments_of_whole_runs() -> dict[str, Any]:
    from torch.distributed.run import main

    names = ("LOCAL_RANK", "WORLD_SIZE", "ROLE_NAME", "OMP_NUM_THREADS", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID")
    facts = {}
    for name, flags in (
        ("one", ["--nproc-per-node", "1"]),
        ("two", ["--nproc-per-node", "2", "--role", "r", "--max-restarts", "3"]),
        ("virtual", ["--nproc-per-node", "2", "--virtual-local-rank"]),
    ):
        with folder() as path, environment(OMP_NUM_THREADS=None, CUDA_VISIBLE_DEVICES="4,5"):
            answer = outcome(main, ["--standalone", *flags, *environment_program(path)])
            found = [json.loads(one.read_text()) for one in sorted(path.iterdir())]
        facts[name] = [answer, [{key: one.get(key) for key in (*names[:-1], "CUDA_VISIBLE_DEVICES")} for one in found]]
        facts[f"{name}: id"] = [len(one["TORCHELASTIC_RUN_ID"]) > 5 for one in found]
    with folder() as path, environment(OMP_NUM_THREADS="6"):
        main(["--standalone", "--nproc-per-node", "2", *environment_program(path)])
        facts["threads"] = [json.loads(one.read_text())["OMP_NUM_THREADS"] for one in path.iterdir()]
    return facts


@case
def logs_of_whole_runs() -> dict[str, Any]:
    from torch.distributed.run import main

    facts = {}
    for name, flags in (
        ("redirected", ["-r", "3"]),
        ("one of them", ["-r", "0:1"]),
        ("teed", ["-t", "3"]),
        ("filtered", ["-r", "3", "--local-ranks-filter", "0"]),
        ("restarted", ["-r", "1", "--max-restarts", "1"]),
    ):
        fails = f'[ "$TORCHELASTIC_RESTART_COUNT" = 0 ] && [ {name} = restarted ] && exit 3'
        with folder() as path:
            program = f'echo "out $RANK"; echo "err $RANK" >&2; {fails}; exit 0'
            argv = ["--nproc-per-node", "2", "--standalone", "--log-dir", str(path), *flags, "--no-python", "sh", "-c", program]
            answer = outcome(main, argv)
            files = {one.relative_to(path).as_posix().split("/", 1)[1]: one.read_text() for one in sorted(path.rglob("*.log"))}
        facts[name] = [answer, {place: text for place, text in files.items() if text}]
    return facts


@case
def exit_codes_of_the_command() -> dict[str, Any]:
    """Each in a process of its own, all at the same time."""
    lists = {
        "success": ["--standalone", "--no-python", "true"],
        "failure": ["--standalone", "--no-python", "false"],
        "bad flag": ["--no-such-flag", "x.py"],
    }
    codes = together(
        *[
            lambda argv=argv: subprocess.run(command("torch.distributed.run", argv), timeout=100).returncode
            for argv in lists.values()
        ]
    )
    return dict(zip(lists, codes, strict=True))


@case
def settings_that_do_not_end_a_job() -> dict[str, Any]:
    """Quotes that the shell has left, and settings of other back ends."""
    import torch.distributed.run as run_module

    facts = {}
    texts = ("'join_timeout=5,close_timeout=6'", '"join_timeout=5"', "protocol=http,cacert=/x,join_timeout=5", "join_timeout = 5")
    for text in texts:
        facts[text] = outcome(lambda t=text: isinstance(run_module.config_from_args(arguments("--rdzv-conf", t, "x.py")), tuple))
    return facts
