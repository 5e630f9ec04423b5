"""Imports go downward, and what decides imports nothing that could touch the world."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import rallypoint

# From the top to the bottom; a module may import its own layer and those below it.
LAYERS = (
    ("__main__",),
    ("compat", "parser_actions", "torch_run"),  # compat comes to all others by name, when they are asked for
    ("cli",),
    ("demo", "tui"),
    ("ssh",),
    ("agent",),
    ("web",),
    ("chaos", "inspect", "inspection"),
    ("health", "notices"),
    ("timers",),
    ("rendezvous",),
    ("schedulers",),
    ("control_plane", "hangs", "worker"),
    ("preflight",),
    ("processes",),
    ("failures",),
    ("events", "story", "telemetry"),
    ("output",),
    ("affinity",),
    ("hardware",),
    ("data", "metrics"),
    ("testing",),
    ("protocol",),
    ("checkpoint",),
    ("coordination",),
    ("store",),
    ("net",),
    ("base", "errors", "worker_site"),
)
HEIGHT = {name: len(LAYERS) - index for index, names in enumerate(LAYERS) for name in names}

PURE = {
    "__future__", "_json", "abc", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools", "itertools", "json",
    "math", "operator", "re", "shlex", "signal", "string", "struct", "types", "typing", "zlib",
}  # fmt: skip
# What decides, as functions of (state, observation, now): no I/O, no clock, no thread. The simulator drives most of it.
PURE_MODULES = {
    "base": ["json_text", "text"],
    "chaos": ["faults", "outcome", "plan", "scene", "schedule"],
    "checkpoint": ["layout", "moves"],
    "coordination": ["cell.document", "fence", "keyspace", "model"],
    "failures": ["hints"],
    "hangs": ["collectives", "pulse_page", "rules"],
    "hardware": ["binding"],
    "health": ["rules"],
    "inspection": ["log_lines", "log_rules", "log_times", "view"],
    "net": ["http"],
    "notices": ["document", "rules"],
    "output": ["waits"],
    "protocol": [
        "agent_machine", "draining", "generation", "inquiry", "job_records", "leader", "pace", "participant", "restarts",
        "resumption", "session", "shutdown", "verdict", "worker_plan",
    ],
    "preflight": ["reach", "rules"],
    "processes": ["import_record", "standby_rules", "warm_rules"],
    "ssh": ["rules"],
    "store": ["values"],
    "schedulers": ["batch", "choose", "found", "kubernetes", "manifests", "mpi", "slurm"],
    "story": ["event_records", "phases", "regroups", "story"],
    "telemetry": ["spans"],
    "timers": ["timer_table"],
    "tui": ["lines", "model"],
    "web": ["document", "rules"],
}  # fmt: skip
PURE_NAMES = {f"rallypoint.{folder}.{name}" for folder, names in PURE_MODULES.items() for name in names}
PURE_OF_OURS = (*sorted(PURE_NAMES), "rallypoint.base.records", "rallypoint.base.defaults", "rallypoint.errors")
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}

# Each of these costs several milliseconds, or pulls in a module that does; a cold start is promised to be quick.
TOO_HEAVY = (
    "argparse", "asyncio", "dataclasses", "datetime", "importlib.metadata", "inspect", "json", "logging", "multiprocessing",
    "pickle", "random", "shutil", "subprocess", "tempfile", "torch", "traceback", "typing", "uuid",
)  # fmt: skip
UNASKED = (  # of what nobody has asked for
    "rallypoint.notices", "rallypoint.telemetry", "opentelemetry", "urllib", "http", "rallypoint.hangs", "rallypoint.preflight",
    "rallypoint.chaos", "rallypoint.agent.draining", "rallypoint.agent.notices",
)  # fmt: skip
HOT = ("rallypoint.__main__", "rallypoint.cli.main", "rallypoint.agent.launch", "rallypoint.agent.local_agent")


def layer_of(name: str) -> str | None:
    """The part of the package that a full name belongs to, or None where it is not ours."""
    first, *rest = name.split(".")
    return rest[0] if first == "rallypoint" and rest else None


def height(name: str) -> int:
    """How high a module stands; what is not ours, and the package itself, is below everything."""
    return HEIGHT.get(layer_of(name) or "", 0)


def test_every_module_has_a_layer(modules: dict[str, Any]) -> None:
    parts = {layer_of(name) for name in modules} - {None}
    assert parts <= set(HEIGHT)


def test_imports_go_downward(modules: dict[str, Any]) -> None:
    upward = [
        f"{module.name}:{line} imports {imported}"
        for module in modules.values()
        for imported, line in module.imports()
        if module.name != "rallypoint" and height(imported) > height(module.name)
    ]
    assert upward == []


def test_modules_import_from_where_a_name_lives(modules: dict[str, Any]) -> None:
    """The package's own front door, with its lazy names, is for users: it would turn every import upside down."""
    through_the_door = [
        f"{module.path.name}:{line} imports {imported}"
        for module in modules.values()
        for imported, line in module.imports()
        if module.name != "rallypoint" and imported.startswith("rallypoint.") and imported.count(".") == 1
        and imported not in modules and imported not in ("rallypoint.__version__", "rallypoint._lazily")
    ]  # fmt: skip
    assert through_the_door == []


def test_modules_do_not_use_the_doors_of_packages_either(modules: dict[str, Any]) -> None:
    through_a_door = [
        f"{module.path.name}:{line} imports {imported}"
        for module in modules.values()
        for imported, line in module.imports()
        if imported not in modules and imported.startswith("rallypoint.") and imported.count(".") > 1
        and "_HOMES" in modules[imported.rpartition(".")[0]].text
    ]  # fmt: skip
    assert through_a_door == []


def is_pure(imported: str) -> bool:
    """Whether a name that is imported is that of a pure module, or stands in one."""
    of_ours = any(imported == one or imported.startswith(f"{one}.") for one in PURE_OF_OURS)
    return of_ours or imported.partition(".")[0] in PURE


def test_what_is_called_pure_is_there(modules: dict[str, Any]) -> None:
    assert set(modules) >= PURE_NAMES
    assert {name for name in modules if layer_of(name) == "protocol" and name != "rallypoint.protocol"} <= PURE_NAMES


def test_pure_modules_import_nothing_that_is_not(modules: dict[str, Any]) -> None:
    """Only each other, records, errors, defaults and what the standard library has of pure functions."""
    impure = [
        f"{name}:{line} imports {imported}"
        for name in sorted(PURE_NAMES)
        for imported, line in modules[name].imports()
        if not is_pure(imported)
    ]
    assert impure == []


def test_pure_modules_call_nothing_impure(modules: dict[str, Any]) -> None:
    calls = [
        f"{name}:{node.lineno} calls {node.func.id}"
        for name in sorted(PURE_NAMES)
        for node in ast.walk(modules[name].tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS
    ]
    assert calls == []


def test_torch_is_never_imported(modules: dict[str, Any]) -> None:
    """P38: the launcher works without torch, and where torch is installed it costs nothing."""
    guilty = [
        f"{module.name}:{line}" for module in modules.values() for name, line in module.imports() if name.split(".")[0] == "torch"
    ]
    assert guilty == []


def test_textual_is_imported_by_the_live_screen_alone(modules: dict[str, Any]) -> None:
    """It is an extra, and takes long to import; the one command that needs it says so where it is not there."""
    importers = {
        module.name
        for module in modules.values()
        for name, _ in module.imports()
        if name.split(".")[0] in ("rich", "textual") or name.startswith("rallypoint.tui.app")
    }
    assert importers == {"rallypoint.tui.app", "rallypoint.cli.top"}


def test_the_launcher_alone_imports_nothing_heavy() -> None:
    """P38: what is loaded with the launcher leaves out all that costs milliseconds."""
    program = f"import sys, {', '.join(HOT)}; print('\\n'.join(sys.modules))"
    # Without site-packages, whose .pth files may import things of their own.
    env = {**os.environ, "PYTHONPATH": str(Path(rallypoint.__file__).parents[1])}
    command = [sys.executable, "-S", "-c", program]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=env, timeout=30)
    assert [name for name in TOO_HEAVY if name in answer.stdout.split()] == []


def test_a_real_start_imports_nothing_heavy(start_rallyrun: Any) -> None:
    """P38: nor is any of it imported on the way, up to the first line of a worker."""
    worker = ["--no-python", "sh", "-c", "echo started >&2; exec sleep 60"]
    job = start_rallyrun(["--standalone", "--nproc-per-node", "2", *worker], env={"PYTHONPROFILEIMPORTTIME": "1"})
    job.wait_for_line("started")
    lines = job.stderr.partition("started")[0].splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "rallypoint.agent.local_agent" in imported
    assert [name for name in TOO_HEAVY if name in imported] == []
    assert [name for name in imported if name.startswith(UNASKED)] == []
