"""What is released: the same from whatever folder and day it is built, with all that it needs, and nothing else. F18."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.timeout(500)]  # it fetches what it takes to build, for each build anew

ROOT = Path(__file__).parents[2]
PARTS = ("src", "tools", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
ASSETS = {".html", ".css", ".js"}
LATE = 2_000_000_000  # a day in 2033


def run(*command: object, cwd: Path, **more: str) -> str:
    environ = {"PATH": os.environ["PATH"], "HOME": str(cwd), **more}
    for name, value in os.environ.items():
        if name.startswith(("PIP_", "SSL_", "http", "HTTP")):
            environ[name] = value
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of them, from two folders whose files are years apart."""
    found = []
    for name, moment in (("here", None), ("a longer/path to it", LATE)):
        folder = tmp_path_factory.mktemp("dist") / name
        folder.mkdir(parents=True)
        for part in PARTS:
            source = ROOT / part
            skip = shutil.ignore_patterns("__pycache__")
            (shutil.copytree(source, folder / part, ignore=skip) if source.is_dir() else shutil.copy(source, folder / part))
        for path in folder.rglob("*"):
            if moment is not None:
                os.utime(path, (moment, moment))
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps")
        run(*pip, "--wheel-dir", folder / "out", folder, cwd=folder)
        found += (folder / "out").glob("*.whl")
    return found


def test_two_builds_are_the_same_to_the_byte(wheels: list[Path]) -> None:
    first, second = wheels
    assert first.name == second.name
    assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest()


def test_the_wheel_has_all_of_the_package_and_nothing_else(wheels: list[Path]) -> None:
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = set(wheel.namelist())
        metadata = next(wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        texts = b"".join(wheel.read(name) for name in names)
    sources = (path for path in (ROOT / "src").rglob("*") if path.suffix in {".py", *ASSETS} or path.name == "py.typed")
    expected = {str(path.relative_to(ROOT / "src")) for path in sources}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "Requires-Python: >=3.10" in metadata
    assert [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line] == []
    assert any(name.endswith("sboms/rallypoint.cdx.json") for name in names)
    assert str(ROOT).encode() not in texts


def test_the_wheel_runs_where_nothing_else_is(wheels: list[Path], tmp_path: Path) -> None:
    """F18: in an environment of its own it runs a job, and loads nothing that is not its own."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-index", wheels[0], cwd=tmp_path)
    (tmp_path / "hello.py").write_text("import os\nprint('worker', os.environ['RANK'])\n")
    out = run(python.with_name("rallyrun"), "--standalone", "--nproc-per-node", "2", "hello.py", cwd=tmp_path)
    assert sorted(out.split("\n")) == ["", "worker 0", "worker 1"]
    assert "rallypoint" in run(python.with_name("rallypoint"), "--version", cwd=tmp_path)
    assert "torch" not in run(python, "-c", "import rallypoint.agent.launch, sys; print(*sys.modules)", cwd=tmp_path).split()
