"""The job's secret: where it comes from, what is no secret, and that workers do not see it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base import defaults, report
from rallypoint.errors import UsageError
from rallypoint.processes import warden_start
from rallypoint.rendezvous.settings import Settings, load_secret, read_settings

SECRET = "correct horse battery staple"


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    report.set_sink(lambda _level, text: lines.append(text))
    yield lines
    report.set_sink(None)


@pytest.fixture
def secret_file(tmp_path: Path) -> Any:
    def write(data: bytes, mode: int = 0o600) -> Settings:
        path = tmp_path / "secret"
        path.write_bytes(data)
        path.chmod(mode)
        return read_settings({"secret_file": str(path)}, {})

    return write


def refusal(settings: Settings, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_secret(settings, environ)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_there_need_be_none() -> None:
    assert load_secret(Settings(), {}) is None
    assert load_secret(Settings(), {defaults.ENV_SECRET: ""}) is None


def test_it_comes_from_a_file_or_the_environment(secret_file: Any, said: list[str]) -> None:
    """P36: and both ways give the same."""
    assert load_secret(Settings(), {defaults.ENV_SECRET: SECRET}) == SECRET.encode()
    assert load_secret(secret_file(f"{SECRET} \r\n".encode()), {}) == SECRET.encode()
    assert load_secret(secret_file(b" \xff" * 10), {}) == b" \xff" * 10
    assert said == []


def test_two_secrets_are_refused(secret_file: Any) -> None:
    told = refusal(secret_file(SECRET.encode()), RALLYPOINT_SECRET=SECRET)
    assert "given twice, in secret_file (--secret-file or --rdzv-conf) and in RALLYPOINT_SECRET" in told


@pytest.mark.parametrize(("data", "told"), [
    (b"", "has 0 bytes"), (b"\n" * 20, "has 0 bytes"), (b"x" * 15, "has 15 bytes, and needs 16"), (b"x" * 4097, "at most 4096"),
])  # fmt: skip
def test_what_is_no_secret(data: bytes, told: str, secret_file: Any) -> None:
    assert told in refusal(secret_file(data))
    if data:
        assert told in refusal(Settings(), RALLYPOINT_SECRET=data.decode())


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, told in [("none", "No such file"), (".", "Is a directory"), ("pipe", "not a regular file")]:
        assert told in refusal(read_settings({"secret_file": str(tmp_path / name)}, {}))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_that_others_can_read_is_told(mode: int, secret_file: Any, said: list[str]) -> None:
    assert load_secret(secret_file(SECRET.encode(), mode), {}) == SECRET.encode()
    assert len(said) == 1
    assert "chmod 600" in said[0]


def test_a_link_to_a_file_will_do(secret_file: Any, tmp_path: Path) -> None:
    """As Kubernetes mounts secrets."""
    secret_file(SECRET.encode())
    (tmp_path / "link").symlink_to("secret")
    assert load_secret(read_settings({"secret_file": str(tmp_path / "link")}, {}), {}) == SECRET.encode()


# --- workers do not see it ---------------------------------------------------------------------------------------------------

LOOK = """
import os
shown = open("/proc/self/environ", "rb").read()
warden = open(f"/proc/{os.getppid()}/environ", "rb").read()
print("saw", "RALLYPOINT_SECRET" in os.environ, b"horse" in shown, b"horse" in warden, b"KEPT=yes" in shown)
"""


@pytest.mark.parametrize("flags", [["--standalone"], ["--standalone", "--run-path"]], ids=["script", "run-path"])
def test_a_script_does_not_see_it(flags: list[str], rallyrun: Any, script: Any) -> None:
    """P36: neither in its environment nor in that of the process that started it."""
    done = rallyrun([*flags, script(LOOK, name="look.py")], env={defaults.ENV_SECRET: SECRET, "KEPT": "yes"})
    assert done.stdout.split() == ["saw", "False", "False", "False", "True"], done.stderr


PROGRAM = """
import os, sys
from rallypoint import LaunchConfig, elastic_launch

def look():
    shown = open("/proc/self/environ", "rb").read()
    return "RALLYPOINT_SECRET" in os.environ, b"horse" in shown, b"KEPT=yes" in shown

if __name__ == "__main__":
    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method=sys.argv[1])
    print(elastic_launch(config, look)(), os.environ["RALLYPOINT_SECRET"])
"""


@pytest.mark.parametrize("method", defaults.START_METHODS)
def test_a_function_does_not_see_it(method: str, script: Any) -> None:
    """P36: however it is started; the program that launches it keeps its own environment."""
    command = [sys.executable, str(script(PROGRAM, name="program.py")), method]
    env = {**os.environ, defaults.ENV_SECRET: SECRET, "KEPT": "yes"}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=env).stdout.strip()
    assert answer == f"{{0: (False, False, True), 1: (False, False, True)}} {SECRET}"


def test_the_warden_knows_the_name_of_the_variable() -> None:
    assert warden_start._SECRETS == defaults.ENV_SECRETS
