"""Jobs that were given no secret: who gets in all the same, and who does not. Real agents, real munge, another user."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import make_certificates

NOBODY = 65534
FOUND = "agents of the same user find its secret"
# First as the owner, which also loads all that it takes; then as another user, with whatever such a one may try.
TRIES = f"""
import json, os, sys, time
from rallypoint.coordination.embedded.client import EmbeddedCoordination
from rallypoint.coordination.embedded.inquiring import job_at
from rallypoint.coordination.engine import CoordinationError
from rallypoint.coordination.model import Put, Transaction
from rallypoint.rendezvous.secrets import Keyring

port = int(sys.argv[1])

def name(secret):
    return job_at("127.0.0.1", port, secret, time.monotonic() + 60)

def join(secret):
    node = EmbeddedCoordination("127.0.0.1", port, "a-job", secret)
    try:
        node.connect(time.monotonic() + 60)
        node.grant(60.0, time.monotonic() + 60)
        node.transact(Transaction((), (Put("stranger", b""),)), time.monotonic() + 60)
        return len(node.read("", time.monotonic() + 60).items)
    finally:
        node.close()

def tell(what, secret):
    try:
        print(json.dumps(["done", what(secret)]), flush=True)
    except CoordinationError as error:
        print(json.dumps(["refused", str(error)]), flush=True)

for what in (name, join):
    tell(what, Keyring())
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
for what in (name, join):
    for secret in (Keyring(), None, b"a secret that was guessed"):
        tell(what, secret)
"""


@pytest.fixture
def munge(open_folder: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]) -> Iterator[Path]:
    """A munge of our own; the folder with its two commands, which every user can run."""
    daemon = shutil.which("munged", path=f"{os.environ['PATH']}:/usr/sbin")
    if daemon is None:
        pytest.skip("not installed: munge")
    (open_folder / "key").write_bytes(os.urandom(128))
    (open_folder / "key").chmod(0o400)
    (open_folder / "bin").mkdir(mode=0o755)
    for name in ("munge", "unmunge"):
        command = open_folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {shutil.which(name)} --socket={open_folder}/sock "$@"\n')
        command.chmod(0o755)
    files = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    flags = [f"--{flag}={open_folder}/{name}" for flag, name in files.items()]
    with (
        (open_folder / "out").open("w") as out,
        subprocess.Popen([daemon, "--foreground", *flags], stdout=out, stderr=out) as server,
    ):
        wait_until((open_folder / "sock").exists)
        yield open_folder / "bin"
        server.send_signal(signal.SIGTERM)


def with_path(folder: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"{folder}:{os.environ['PATH']}", **more}


def tries(job: Any, env: dict[str, str]) -> list[list[Any]]:
    """What came of each try: two of the owner, and then six of another user."""
    done = subprocess.run(
        [sys.executable, "-c", TRIES, str(job.port)], env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert not done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def finish(job: Any, *nodes: Any) -> None:
    job.finish()
    assert [node.wait() for node in nodes] == [0] * len(nodes)


def test_agents_of_one_user_find_their_secret_in_the_home(job: Any) -> None:
    """Without a flag, and nobody has to be told of anything; `rallypoint ps` finds it too."""
    host = job.start_host(nnodes="2", workers=1)
    other = job.start(nnodes="2", workers=1)
    starts = host.wait_for_world(2) + other.wait_for_world(2)
    assert not [name for start in starts for name in start.env if "SECRET" in name]
    asked = [sys.executable, "-m", "rallypoint", "ps", "--endpoint", f"localhost:{job.port}"]
    listed = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    assert "a-job" in listed.stdout, listed.stderr
    finish(job, host, other)
    assert FOUND in host.stderr
    assert not [line for node in (host, other) for line in node.stderr.splitlines() if "cannot find the job's secret" in line]


def test_an_agent_with_another_home_takes_part_all_the_same(job: Any, tmp_path: Path) -> None:
    """As it would with torchrun: that homes differ must not end a job. It says so, once."""
    host = job.start_host(nnodes="2", workers=1)
    other = job.start(nnodes="2", workers=1, env={"XDG_STATE_HOME": str(tmp_path / "another home")})
    host.wait_for_world(2)
    finish(job, host, other)
    assert other.stderr.count("this node cannot find the job's secret where its store says that it is (home: ") == 1


def test_none_is_none(job: Any) -> None:
    host = job.start_host("--secret", "none", nnodes="2", workers=1)
    other = job.start(nnodes="2", workers=1)
    host.wait_for_world(2)
    finish(job, host, other)
    assert "no secret: anyone who can reach it can join or end the job (see --secret)" in host.stderr


def test_where_nothing_can_be_had_it_is_said(job: Any, tmp_path: Path) -> None:
    (tmp_path / "no folder").touch()
    env = {"XDG_STATE_HOME": str(tmp_path / "no folder"), "PATH": str(Path(sys.executable).parent)}
    host = job.start_host(nnodes="2", workers=1, env=env)
    other = job.start(nnodes="2", workers=1, env=env)
    host.wait_for_world(2)
    finish(job, host, other)
    assert host.stderr.count("no secret: anyone who can reach it can join or end the job (see --secret)") == 1


@pytest.mark.root
def test_another_user_of_the_machine_stays_out(job: Any, tmp_path: Path) -> None:
    """P36: the kernel says who that is, where the home alone has a secret; it is not told the job's name either."""
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    host = job.start_host(nnodes="2", workers=1, env=env)
    assert_kept_out(tries(job, env), f"user {NOBODY} of the same machine")
    other = job.start(nnodes="2", workers=1, env=env)
    host.wait_for_world(2)
    finish(job, host, other)


@pytest.mark.root
@pytest.mark.parametrize("slurm", [False, True], ids=["munge", "slurm"])
def test_p36_under_munge_another_user_stays_out_and_the_owner_needs_no_flag(
    job: Any, munge: Path, tmp_path: Path, slurm: bool
) -> None:
    """P36: agents whose homes differ find the secret by munge; in a job of Slurm it is asked of everybody."""
    envs = [
        with_path(munge, XDG_STATE_HOME=str(tmp_path / f"home {node}"), **({"SLURM_JOB_ID": "7"} if slurm else {}))
        for node in range(3)
    ]
    host = job.start_host("--scheduler", "none", nnodes="2", workers=1, env=envs[0])
    assert FOUND in host.stderr
    assert ("nobody else can join" in host.stderr) == slurm
    assert_kept_out(tries(job, envs[2]), "could not open what it is in" if slurm else f"user {NOBODY} of the same machine")
    if slurm:
        without = job.start("--scheduler", "none", nnodes="2", workers=1, env={**envs[2], "PATH": os.environ["PATH"]})
        assert without.wait() == 3
        assert "could not open what it is in (munge or home); give the same --secret FILE to all nodes" in without.stderr
    other = job.start("--scheduler", "none", nnodes="2", workers=1, env=envs[1])
    host.wait_for_world(2)
    finish(job, host, other)
    assert "cannot find the job's secret" not in other.stderr


def assert_kept_out(outcomes: list[list[Any]], why: str) -> None:
    assert [what for what, _ in outcomes] == ["done"] * 2 + ["refused"] * 6, outcomes
    assert outcomes[0][1] == "a-job"
    assert [told for _, told in outcomes[2:] if "a-job" in told] == []
    assert [why in told for _, told in outcomes[2:]] == [True, True, False] * 2, outcomes


def test_agents_speak_tls_with_certificates_of_their_own(job: Any, tmp_path: Path) -> None:
    """Who has one is let in; who has another's, or none, is told what is wrong. That an agent was killed is known at once."""
    files = make_certificates(tmp_path / "certificates")

    def flags(cert: Path, key: Path) -> list[str]:
        return ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(files.ca)]

    host = job.start_host(*flags(files.server_cert, files.server_key), nnodes="1:2", workers=1)
    assert "only who has a certificate of the same authority can join" in host.stderr
    without = job.start(nnodes="1:2", workers=1)
    stranger = job.start(*flags(files.stranger_cert, files.stranger_key), nnodes="1:2", workers=1)
    assert (without.wait(), stranger.wait()) == (3, 3)
    assert "this store speaks TLS, and the node does not" in without.stderr
    assert "TLS has failed" in stranger.stderr
    other = job.start(*flags(files.client_cert, files.client_key), nnodes="1:2", workers=1)
    host.wait_for_world(2)
    conf = f"tls_cert={files.client_cert},tls_key={files.client_key},tls_ca={files.ca}"
    asked = [sys.executable, "-m", "rallypoint", "ps", "--endpoint", f"localhost:{job.port}", "--conf", conf]
    listed = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    assert "a-job" in listed.stdout, listed.stderr
    other.kill()
    host.wait_for_line("was lost: its agent was killed")
    finish(job, host)
