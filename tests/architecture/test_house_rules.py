"""Small functions, everything named and explained: what keeps the code a pleasure to read."""

from __future__ import annotations

import ast
from statistics import median
from typing import Any

FUNCTION_LINES = 60
MEDIAN_FUNCTION_LINES = 10
BROAD = {"Exception", "BaseException"}
VAGUE_NAMES = {"api", "utils", "util", "helpers", "common", "misc"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
# Who may go past base.environment, and why.
AROUND_ENVIRONMENT = {
    "rallypoint.base.environment",
    "rallypoint.compat.installation",  # writes it, for the processes that this one will start, and takes that back
    "rallypoint.processes.function_worker",  # a fork that becomes a worker: it puts the worker's in place of its own
    "rallypoint.processes.keeper",  # the same
    "rallypoint.processes.warden_start",  # loads nothing of ours: it runs before all else
    "rallypoint.worker_site.import_times",  # the same, in a worker's interpreter: it compares what the program finds
    "rallypoint.worker_site.sitecustomize",  # the same, in every interpreter that a worker starts
}
# Who reads JSON past base.json_text, and why.
AROUND_JSON = {
    "rallypoint.base.json_text",
    "rallypoint.agent.workers",  # a public class that reads what its twin in torch has written
    "rallypoint.chaos.guard",  # of a process of its own, through a pair of sockets
    "rallypoint.chaos.guardian",  # the other end
    "rallypoint.checkpoint.client",  # of its own job's other workers
    "rallypoint.coordination.testimony",  # in the warden, which loads nothing of ours for it
    "rallypoint.events",  # as agent.workers
    "rallypoint.story.event_logs",  # reads millions of lines, whose numbers it bounds
    "rallypoint.telemetry.sink",  # what this process has written itself
}
CAPABILITIES = {"CoordinatedHandler", "WakingHandler", "WardedContext", "PContext", "DefaultLogsSpecs"}
UNFINISHED = ("TODO", "FIXME", "XXX", "HACK")


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_functions_are_short(modules: dict[str, Any]) -> None:
    lengths = {f"{name}.{node.name}": lines_of(node) for name, module in modules.items() for node in module.functions}
    assert {name: length for name, length in lengths.items() if length >= FUNCTION_LINES} == {}
    assert median(lengths.values()) <= MEDIAN_FUNCTION_LINES


def test_every_module_opens_with_why(modules: dict[str, Any]) -> None:
    assert [name for name, module in modules.items() if not ast.get_docstring(module.tree)] == []


def test_annotations_are_never_evaluated(modules: dict[str, Any]) -> None:
    lacking = [name for name, module in modules.items() if ("__future__.annotations") not in dict(module.imports())]
    assert lacking == []


def test_every_module_says_what_it_offers(modules: dict[str, Any]) -> None:
    def offers(tree: ast.Module) -> bool:
        targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)

    assert [name for name, module in modules.items() if not offers(module.tree)] == []


def test_names_say_something(modules: dict[str, Any]) -> None:
    assert [name for name in modules if name.split(".")[-1] in VAGUE_NAMES] == []


def test_nothing_is_left_unfinished(modules: dict[str, Any]) -> None:
    found = [
        f"{name}:{number}"
        for name, module in modules.items()
        for number, line in enumerate(module.text.splitlines(), 1)
        if any(word in line for word in UNFINISHED)
    ]
    assert found == []


def test_the_environment_is_read_in_one_place(modules: dict[str, Any]) -> None:
    around = {name for name, module in modules.items() if any(map(touches_environment, ast.walk(module.tree)))}
    assert around <= AROUND_ENVIRONMENT


def touches_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module in ("os", "posix") and any(alias.name in ENVIRONMENT for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and ast.unparse(node.value) in ("os", "posix")


def test_json_is_read_in_one_place(modules: dict[str, Any]) -> None:
    """There it is known what can be wrong with it; nested too deeply, it would else end threads by a RecursionError."""
    around = {name for name, module in modules.items() if any(map(reads_json, ast.walk(module.tree)))}
    assert around == AROUND_JSON


def reads_json(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("load", "loads") and ast.unparse(node.value) == "json"


def test_a_broad_except_gives_its_reason(modules: dict[str, Any]) -> None:
    """Only at a named boundary, with the reason in a comment on its line or the next; or to clean up and raise it again."""
    unexplained = []
    for name, module in modules.items():
        lines = module.text.splitlines()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and is_broad(node):
                beside = lines[node.lineno - 1 : node.lineno + 1]
                if not any("#" in line for line in beside):
                    unexplained.append(f"{name}:{node.lineno}")
    assert unexplained == []


def is_broad(handler: ast.ExceptHandler) -> bool:
    if isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None:
        return False
    return handler.type is None or (isinstance(handler.type, ast.Name) and handler.type.id in BROAD)


def test_what_an_agents_collaborators_can_do_is_asked_in_one_place(modules: dict[str, Any]) -> None:
    """Everywhere else in the agent a null object stands for the one that can do no more."""

    def asked(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            return {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
        return {node.cls.id} if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name) else set()

    found = {
        name: kinds
        for name, module in modules.items()
        if name.startswith("rallypoint.agent") and (kinds := CAPABILITIES & set().union(*map(asked, ast.walk(module.tree))))
    }
    assert found == {"rallypoint.agent.capabilities": CAPABILITIES}
