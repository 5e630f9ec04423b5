"""The package as syntax trees, read once, and the imports among its modules."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src"


class Module(NamedTuple):
    name: str  # dotted, without __init__
    path: Path
    text: str
    tree: ast.Module

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def imports(self) -> list[tuple[str, int]]:
        """Everything that is imported anywhere in the module, inside functions too, by full name, with its line."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(f"{self._origin(node)}.{alias.name}", node.lineno) for alias in node.names]
        return found

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.path.name == "__init__.py" else self.name.split(".")[:-1]
        base = package[: len(package) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])


def read_module(path: Path) -> Module:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    text = path.read_text()
    return Module(".".join(part for part in parts if part != "__init__"), path, text, ast.parse(text))


@pytest.fixture(scope="session")
def modules() -> dict[str, Module]:
    found = [read_module(path) for path in sorted((SOURCE / "rallypoint").rglob("*.py"))]
    return {module.name: module for module in found}
