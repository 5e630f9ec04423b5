"""Whether what was built is fit to be released: ``python -m tools.release.check FOLDER`` reads it, installs it and runs it.

It is installed into bare environments, one for each interpreter that is given or found, without pip and without the network.
There the smoke suite runs with nothing but the wheel.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path

__all__ = ["complaints_of_sdist", "complaints_of_wheel", "main", "pythons"]

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
MINORS = range(10, 15)
COMMANDS = {"rallyrun": "rallypoint.__main__:rallyrun", "rallypoint": "rallypoint.__main__:main"}
PARTS_OF_SDIST = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"}
NOT_RELEASED = re.compile(r"^(\.venv[^/]*|build|dist|site|\.git|\.\w+_cache)/|(^|/)__pycache__/|\.py[co]$")
STARTS = 15

Files = Mapping[str, bytes]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.release.check", description="Check what is in dist/, and run it alone."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", action="append", help="an interpreter to install it for (default: each that is found)")
    options = parser.parse_args()
    [wheel], [sdist] = (sorted(options.folder.glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    machine = {str(ROOT), str(Path.home()), sys.prefix} - {"/", "/root"}
    of_sdist = _files_of_sdist(sdist)
    complaints = [*complaints_of_wheel(_files_of_wheel(wheel), of_sdist, machine), *complaints_of_sdist(of_sdist, machine)]
    if not wheel.name.endswith("-py3-none-any.whl"):
        complaints.append(f"{wheel.name} is not for every Python 3 and system")
    if complaints:
        raise SystemExit("not fit to be released:\n" + "\n".join(f"  {complaint}" for complaint in complaints))
    print(f"{wheel.name}: contents, metadata, record, types and bill of materials are as they should be")
    for python in options.python or pythons():
        with tempfile.TemporaryDirectory() as folder:
            print(_try(python, wheel, Path(folder)))


def pythons() -> list[str]:
    """This interpreter, and those of other supported versions that are on the path or with pyenv."""
    found = {sys.version_info[1]: sys.executable}
    for minor in MINORS:
        with_pyenv = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3.{minor}"))
        candidates = [*map(str, with_pyenv[-1:]), shutil.which(f"python3.{minor}")]
        if path := next((one for one in candidates if one and _runs(one)), None):
            found.setdefault(minor, path)
    return [found[minor] for minor in sorted(found)]


def _runs(python: str) -> bool:
    """A shim of pyenv is on the path and yet there may be nothing behind it."""
    return subprocess.run([python, "-c", "import venv"], check=False, capture_output=True).returncode == 0


def complaints_of_wheel(files: Files, sdist: Files, machine: set[str]) -> list[str]:
    """What is wrong with it; `machine` are paths that must not be told."""
    info = next((name.partition("/")[0] for name in files if name.endswith(".dist-info/METADATA")), "")
    source = {name.partition("/src/")[2] for name in sdist if "/src/" in name}
    package = {name for name in files if not name.startswith(f"{info}/")}
    return [
        *(f"{name} is not part of the package" for name in sorted(package - source)),
        *(f"{name} is missing" for name in sorted(source - package)),
        *([] if "rallypoint/py.typed" in files else ["there is no py.typed, so type checkers would not look at it"]),
        *([] if f"{info}/licenses/LICENSE" in files else ["the licence is missing"]),
        *_wrong_metadata(files.get(f"{info}/METADATA", b"").decode()),
        *_wrong_commands(files.get(f"{info}/entry_points.txt", b"").decode()),
        *_wrong_record(files, files.get(f"{info}/RECORD", b"").decode()),
        *_wrong_bill(files, info),
        *_told_paths(files, machine),
    ]


def complaints_of_sdist(files: Files, machine: set[str]) -> list[str]:
    names = {name.partition("/")[2] for name in files}
    return [
        *(f"the source archive has no {name}" for name in sorted(PARTS_OF_SDIST - names)),
        *(f"the source archive has {name}" for name in sorted(names) if NOT_RELEASED.search(name)),
        *_told_paths(files, machine),
    ]


def _wrong_metadata(text: str) -> Iterator[str]:
    metadata = HeaderParser().parsestr(text)
    expected = {"Name": "rallypoint", "Requires-Python": ">=3.10", "Description-Content-Type": "text/markdown"}
    yield from (f"{name} is {metadata[name]!r}, not {value!r}" for name, value in expected.items() if metadata[name] != value)
    if "BSD-3-Clause" not in (metadata["License-Expression"] or metadata["License"] or ""):
        yield "the metadata name no licence"
    if "Typing :: Typed" not in metadata.get_all("Classifier", []):
        yield "the metadata do not say that it is typed"
    if not metadata.get_payload():
        yield "there is no description"
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    yield from (f"it needs {requirement}, although it must need nothing" for requirement in needed)


def _wrong_commands(text: str) -> Iterator[str]:
    lines = {line.replace(" ", "") for line in text.splitlines()}
    yield from (f"there is no command {name}" for name, target in COMMANDS.items() if f"{name}={target}" not in lines)


def _wrong_record(files: Files, text: str) -> Iterator[str]:
    told = {row[0]: row[1:] for row in csv.reader(io.StringIO(text)) if row}
    yield from (f"RECORD does not name {name}" for name in sorted(set(files) - set(told)))
    for name, (digest, size) in told.items():
        if digest and name in files:
            found = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
            if digest != f"sha256={found}" or int(size) != len(files[name]):
                yield f"{name} is not what RECORD says"


def _wrong_bill(files: Files, info: str) -> Iterator[str]:
    bill = files.get(f"{info}/sboms/rallypoint.cdx.json")
    if bill is None:
        yield "there is no bill of materials"
        return
    component = json.loads(bill)["metadata"]["component"]
    if f"{component['name']}-{component['version']}.dist-info" != info:
        yield f"the bill of materials is that of {component['name']} {component['version']}: run python -m tools.release.sbom"


def _told_paths(files: Files, machine: set[str]) -> Iterator[str]:
    for name, content in files.items():
        yield from (f"{name} tells the path {path}" for path in sorted(machine) if path.encode() in content)


def _files_of_wheel(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def _files_of_sdist(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as sdist:
        return {one.name: file.read() for one in sdist if (file := sdist.extractfile(one)) is not None}


def _try(python: str, wheel: Path, folder: Path) -> str:
    """Install it for this interpreter, where nothing else is, and run it; what there is to say of it."""
    _run([python, "-m", "venv", "--without-pip", str(folder / "env")])
    bare = str(folder / "env" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", bare]
    _run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)])
    said = _run([bare, str(SMOKE)]).strip().splitlines()[-1]
    took_ms, bare_ms = (_start_ms([bare, "-c", code]) for code in ("import rallypoint.agent.launch", "pass"))
    return f"{said}; import takes {took_ms - bare_ms:.0f} ms"


def _start_ms(command: Sequence[str]) -> float:
    """At best: whatever else runs can only make it longer."""
    times = []
    for _ in range(STARTS):
        began = time.monotonic()
        _run(command)
        times.append(time.monotonic() - began)
    return min(times) * 1000


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
