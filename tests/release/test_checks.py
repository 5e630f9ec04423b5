"""What `make dist` looks at before something is released: each thing that could be wrong is told, and nothing else is."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tools.release import sbom
from tools.release.check import complaints_of_sdist, complaints_of_wheel, pythons

import rallypoint

INFO = "rallypoint-1.2.3.dist-info"
MACHINE = {"/somewhere/rallypoint"}
METADATA = """\
Metadata-Version: 2.4
Name: rallypoint
Version: 1.2.3
License-Expression: BSD-3-Clause
Classifier: Typing :: Typed
Requires-Python: >=3.10
Requires-Dist: textual>=6.0; extra == 'tui'
Description-Content-Type: text/markdown

# rallypoint
"""
COMMANDS = "[console_scripts]\nrallypoint = rallypoint.__main__:main\nrallyrun = rallypoint.__main__:rallyrun\n"
Files = dict[str, bytes]


def recorded(files: Files) -> Files:
    rows = [f"{INFO}/RECORD,,"]
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}")
    return {**files, f"{INFO}/RECORD": "\n".join(rows).encode()}


def a_wheel() -> Files:
    return {
        "rallypoint/__init__.py": b"",
        "rallypoint/py.typed": b"",
        f"{INFO}/METADATA": METADATA.encode(),
        f"{INFO}/entry_points.txt": COMMANDS.encode(),
        f"{INFO}/licenses/LICENSE": b"BSD",
        f"{INFO}/sboms/rallypoint.cdx.json": json.dumps(sbom.document("1.2.3", {})).encode(),
    }


def a_sdist() -> Files:
    names = [
        "src/rallypoint/__init__.py",
        "src/rallypoint/py.typed",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "pyproject.toml",
        "PKG-INFO",
    ]
    return {f"rallypoint-1.2.3/{name}": b"" for name in names}


def test_nothing_is_wrong_with_what_is_right() -> None:
    assert complaints_of_wheel(recorded(a_wheel()), a_sdist(), MACHINE) == []
    assert complaints_of_sdist(a_sdist(), MACHINE) == []


def put(name: str, content: bytes) -> Callable[[Files], object]:
    return lambda files: files.update({name: content})


def drop(name: str) -> Callable[[Files], object]:
    return lambda files: files.pop(name)


def change(name: str, old: str, new: str) -> Callable[[Files], object]:
    return lambda files: files.update({name: files[name].decode().replace(old, new).encode()})


WRONG = {
    "a test": (put("tests/test_it.py", b""), "tests/test_it.py is not part of the package"),
    "compiled": (put("rallypoint/__init__.pyc", b""), "rallypoint/__init__.pyc is not part of the package"),
    "a module too few": (drop("rallypoint/__init__.py"), "rallypoint/__init__.py is missing"),
    "no types": (drop("rallypoint/py.typed"), "there is no py.typed, so type checkers would not look at it"),
    "no licence": (drop(f"{INFO}/licenses/LICENSE"), "the licence is missing"),
    "no bill": (drop(f"{INFO}/sboms/rallypoint.cdx.json"), "there is no bill of materials"),
    "a path": (
        put("rallypoint/__init__.py", b"'/somewhere/rallypoint/src'"),
        "rallypoint/__init__.py tells the path /somewhere/rallypoint",
    ),
    "a command": (change(f"{INFO}/entry_points.txt", "rallyrun =", "rally ="), "there is no command rallyrun"),
    "needs something": (
        change(f"{INFO}/METADATA", "; extra == 'tui'", ""),
        "it needs textual>=6.0, although it must need nothing",
    ),
    "an old Python": (change(f"{INFO}/METADATA", ">=3.10", ">=3.8"), "Requires-Python is '>=3.8', not '>=3.10'"),
    "another release's bill": (
        put(f"{INFO}/sboms/rallypoint.cdx.json", json.dumps(sbom.document("1.2.2", {})).encode()),
        "the bill of materials is that of rallypoint 1.2.2: run python -m tools.release.sbom",
    ),
}


@pytest.mark.parametrize(("spoil", "complaint"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_wheel_is_told(spoil: Callable[[Files], object], complaint: str) -> None:
    files = a_wheel()
    spoil(files)
    assert complaint in complaints_of_wheel(recorded(files), a_sdist(), MACHINE)


def test_a_file_that_was_changed_after_it_was_recorded_is_told() -> None:
    files = {**recorded(a_wheel()), "rallypoint/__init__.py": b"import evil", "rallypoint/more.py": b""}
    complaints = complaints_of_wheel(files, a_sdist(), MACHINE)
    assert "rallypoint/__init__.py is not what RECORD says" in complaints
    assert "RECORD does not name rallypoint/more.py" in complaints


def test_what_is_wrong_with_a_source_archive_is_told() -> None:
    files = a_sdist()
    del files["rallypoint-1.2.3/LICENSE"]
    files |= {"rallypoint-1.2.3/tools/site/conf.py": b"", "rallypoint-1.2.3/.venv/bin/python": b""}
    files |= {"rallypoint-1.2.3/README.md": b"see /somewhere/rallypoint"}
    assert complaints_of_sdist(files, MACHINE) == [
        "the source archive has no LICENSE",
        "the source archive has .venv/bin/python",
        "rallypoint-1.2.3/README.md tells the path /somewhere/rallypoint",
    ]


def test_the_bill_of_materials_is_that_of_this_code() -> None:
    """If not: python -m tools.release.sbom"""
    assert sbom.FILE.read_text() == sbom.text()
    bill = json.loads(sbom.text())
    assert bill["metadata"]["component"]["version"] == rallypoint.__version__
    assert bill["dependencies"][0]["dependsOn"] == []
    assert {"cloudpickle", "textual", "opentelemetry-sdk"} <= {one["name"] for one in bill["components"]}
    assert {one["scope"] for one in bill["components"]} == {"optional"}
    assert "pytest" not in sbom.text()


def test_every_interpreter_that_is_tried_is_there() -> None:
    assert all(Path(python).exists() for python in pythons())
