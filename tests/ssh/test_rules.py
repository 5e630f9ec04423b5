"""What `--hosts` decides: which hosts, what is wrong with them, and how the whole ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.cli import command_line
from rallypoint.cli.hosts import plan
from rallypoint.errors import UsageError
from rallypoint.ssh import rules
from rallypoint.ssh.rules import SSH_FAILED, Host, Ready

HERE = Ready("3.11.2", "1.0", "head", "10.0.0.1", 20_001)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:8,b:8", [("a", 8), ("b", 8)]),
        ("a, me@b", [("a", None), ("me@b", None)]),
        ("gpu[08-10]:4", [("gpu08", 4), ("gpu09", 4), ("gpu10", 4)]),
        ("n[1,3],x", [("n1", None), ("n3", None), ("x", None)]),
        ("[fe80::1]:2,me@[::1]", [("fe80::1", 2), ("me@::1", None)]),
    ],
)
def test_hosts_of_a_list(text: str, hosts: list[tuple[str, int | None]]):
    assert [(host.name, host.workers) for host in rules.read_hosts(text)] == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "a:0", "a:x", "a:8,a:8", "-oProxyCommand=x", "a b", "n[1-", "me@", "a:1:2", "@a"])
def test_what_is_no_list_of_hosts_is_refused_by_its_name(text: str):
    with pytest.raises(UsageError, match="PET_HOSTS: "):
        rules.read_hosts(text, "PET_HOSTS")


def test_hostfiles_of_all_kinds():
    text = "# nodes\na slots=8 max-slots=16\n\nb:4  # half of it\nme@c 2\nd\ne\ne\nf max_slots=2\n"
    found = [(host.name, host.workers) for host in rules.read_hostfile(text, "hosts")]
    assert found == [("a", 8), ("b", 4), ("me@c", 2), ("d", None), ("e", 2), ("f", None)]


@pytest.mark.parametrize(
    ("text", "problem"), [("", "names no host"), ("a slot=8", "line 1 of hosts: 'slot=8'"), ("a\nb 0", "line 2 of hosts: '0'")]
)
def test_what_is_wrong_with_a_hostfile_is_told_by_its_line(text: str, problem: str):
    with pytest.raises(UsageError, match=problem):
        rules.read_hostfile(text, "hosts")


def test_the_command_holds_nothing_but_the_way():
    command = rules.command(["ssh", "-p", "22"], Host("me@a"), "/opt/my python", 4.0)
    assert command[:3] == ["ssh", "-p", "22"]  # before our own, as ssh takes the first of each
    assert command[-2] == "me@a"
    assert command[-1].startswith("exec '/opt/my python' -c ")
    assert "BatchMode=yes" in command


@pytest.mark.parametrize(
    ("addresses", "meeting"),
    [
        (["10.0.0.1", "10.0.0.2"], "10.0.0.1:20001"),
        (["127.0.0.1", "127.0.0.2"], "127.0.0.1:20001"),
        (["127.0.0.1", "10.0.0.2"], "head:20001"),
        (["fd00::1", "fd00::2"], "[fd00::1]:20001"),
        (["fe80::1%eth0", "fe80::2%eth0"], "a:20001"),
        (["", "10.0.0.2"], "head:20001"),
    ],
)
def test_where_they_meet(addresses: list[str], meeting: str):
    able = [HERE.replace(address=address) for address in addresses]
    assert rules.endpoint(able[0], Host("me@a"), able) == meeting


def test_which_variables_go_along():
    environ = {
        "NCCL_DEBUG": "INFO", "PATH": "/bin", "HOME": "/root", "PET_MAX_RESTARTS": "3", "PET_HOSTS": "a,b",
        "RALLYPOINT_SECRET": "s", "RALLYPOINT_LEASE": "3", "DATA": "/data", "RALLYPOINT_RUNTIME_DIR": "/run",
    }  # fmt: skip
    found = rules.far_variables(environ, ["DATA"], 1, False)
    assert found == {
        "NCCL_DEBUG": "INFO", "PATH": "/bin", "PET_MAX_RESTARTS": "3", "RALLYPOINT_LEASE": "3", "DATA": "/data",
        "RALLYPOINT_HOST_INDEX": "1", "RALLYPOINT_IS_HOST": "false", "PET_HOSTS": "", "PET_HOSTFILE": "",
    }  # fmt: skip


# --- what went wrong -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (255, "ssh: connect to host a port 22: Connection refused\n", "nothing answers at ssh's port"),
        (255, "me@a: Permission denied (publickey).\n", "no key of yours is accepted"),
        (255, "ssh: Could not resolve hostname a: Name or service not known", "cannot be resolved"),
        (255, "Host key verification failed.", "log in once by hand"),
        (255, "", "ssh failed"),
        (127, "sh: 1: exec: /opt/py: not found", "no Python at /opt/py"),
        (1, "ModuleNotFoundError: No module named 'rallypoint'", "rallypoint is not installed there for /opt/py"),
        (1, "ModuleNotFoundError: No module named 'rallypoint.ssh'", "this version of rallypoint is not installed"),
        (1, "Python 3.9.2 is too old", "needs 3.10 or later"),
        (3, "", "ended with code 3, and said nothing"),
        (None, "", "no answer within 60 s"),
    ],
)
def test_why_a_host_is_not_ready(code: int | None, said: str, words: str):
    assert words in rules.trouble(code, said, "/opt/py", 60.0)


def test_hosts_have_the_same_versions():
    assert rules.check_ready(HERE, "3.11.9", "1.0") == ""
    assert "Python 3.11.2 there, 3.12.0 here" in rules.check_ready(HERE, "3.12.0", "1.0")
    assert "rallypoint 1.0 there, 2.0 here" in rules.check_ready(HERE, "3.11.2", "2.0")
    assert rules.check_ready(HERE.replace(problem="no folder"), "3.11.2", "1.0") == "no folder"


# --- how it ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "least", "code"),
    [
        ([0, 0, 0], 3, 0),
        ([7, 7, 143], 3, 7),
        ([143, 0, 1], 3, 1),
        ([SSH_FAILED, 0, 0], 2, 0),  # a node was lost, and the others have finished
        ([75, 0, 0], 2, 0),  # one left after notice
        ([75, 76, 75], 3, 76),
        ([130, 130, SSH_FAILED], 3, 130),
        ([137, 0], 2, 137),
        ([SSH_FAILED, 0], 2, 4),
        ([SSH_FAILED, SSH_FAILED], 2, 4),
        ([79, 79], 2, 79),
    ],
)
def test_the_code_of_the_whole(codes: list[int], least: int, code: int):
    assert rules.job_code(codes, least) == code


@given(st.lists(st.sampled_from([0, 1, 65, 75, 76, 130, 137, SSH_FAILED]), min_size=1, max_size=5), st.integers(1, 5))
def test_success_is_what_enough_hosts_say(codes: list[int], least: int):
    if rules.job_code(codes, least) == 0:
        assert codes.count(0) >= min(least, len(codes))
        assert 1 not in codes


def test_others_are_ended_when_they_wait_for_nobody():
    assert "a has refused" in rules.why_end({"a": 2}, 3, 3, 0.0)
    assert rules.why_end({"a": 1}, 3, 3, 1.0) == ""  # they will know
    assert "only 2 hosts of at least 3 are left" in rules.why_end({"a": 1}, 3, 3, rules.OTHERS_S)
    assert rules.why_end({"a": SSH_FAILED}, 3, 2, rules.OTHERS_S) == ""
    assert rules.why_end({"a": 0}, 3, 3, rules.OTHERS_S) == ""


# --- the command line ------------------------------------------------------------------------------------------------------


def planned(*words: str, **environ: str) -> tuple[list[str], dict[str, str]]:
    """What the second of two hosts is told."""
    job = plan(command_line.parse([*words, "train.py", "--lr", "3"], environ), environ)
    able = [(job.hosts[0], HERE), (job.hosts[1], HERE.replace(address="10.0.0.2"))]
    return job.tell(1, able)


def test_what_an_agent_is_told():
    arguments, variables = planned("--hosts=a:8,b:4", "--max-restarts=3", "--notify=x,,y", "--module", RALLYPOINT_SECRET="s" * 32)
    again = command_line.parse(arguments, {})
    assert (again.nnodes, again.nproc_per_node, again.max_restarts, again.notify) == ("2:2", "4", 3, ["x,y"])
    assert (again.rdzv_backend, again.rdzv_endpoint, again.module) == ("c10d", "10.0.0.1:20001", True)
    assert (again.training_script, again.training_script_args) == ("train.py", ["--lr", "3"])
    assert variables["RALLYPOINT_SECRET"] == "s" * 32
    assert "s" * 32 not in " ".join(arguments)
    assert variables["RALLYPOINT_IS_HOST"] == "false"


def test_variables_are_told_as_variables():
    arguments, variables = planned("--hosts=a,b", PET_NPROC_PER_NODE="4", PET_NOTIFY="https://x", PET_NNODES="1:2")
    again = command_line.parse(arguments, variables)
    assert (again.nnodes, again.nproc_per_node, again.notify) == ("1:2", "4", ["https://x"])
    assert "https://x" not in " ".join(arguments)


def test_a_job_without_a_secret_gets_one():
    (_, first), (_, second) = planned("--hosts=a,b"), planned("--hosts=a,b")
    assert len(first["RALLYPOINT_SECRET"]) == 64
    assert first["RALLYPOINT_SECRET"] != second["RALLYPOINT_SECRET"]


def test_the_secret_that_is_given_is_read_here(tmp_path: Path):
    """And goes on as such: the file is not there. Where there is to be none, none is looked for."""
    file = tmp_path / "secret"
    file.write_text("a secret of some length\n")
    file.chmod(0o600)
    for flag in (f"--secret={file}", f"--secret-file={file}"):
        arguments, variables = planned("--hosts=a,b", flag)
        assert variables["RALLYPOINT_SECRET"] == "a secret of some length"
        assert str(file) not in " ".join(arguments)
    _, variables = planned("--hosts=a,b", "--secret=none")
    assert variables["RALLYPOINT_SECRET"] == "none"
    _, variables = planned("--hosts=a,b", RALLYPOINT_SECRET="none")
    assert variables["RALLYPOINT_SECRET"] == "none"
    assert len(planned("--hosts=a,b", "--secret=auto")[1]["RALLYPOINT_SECRET"]) == 64
    assert "RALLYPOINT_SECRET" not in planned("--hosts=a,b", "--rdzv-conf=secret=/there")[1]


def test_what_the_user_gives_wins():
    flags = ["--nnodes=1:2", "--rdzv-endpoint=head:99", "--rdzv-id=mine", "--nproc-per-node=2"]
    arguments, variables = planned("--hosts=a,b", *flags)
    again = command_line.parse(arguments, {})
    assert (again.nnodes, again.rdzv_endpoint, again.rdzv_id, again.nproc_per_node) == ("1:2", "head:99", "mine", "2")
    assert "RALLYPOINT_IS_HOST" not in variables


@pytest.mark.parametrize(("nnodes", "told"), [("2:3", "2:2"), ("1:3", "1:2"), ("2:4", "2:3"), ("1", "1:1")])
def test_nobody_waits_for_a_host_that_cannot_take_part(nnodes: str, told: str):
    job = plan(command_line.parse(["--hosts=a,b,c", f"--nnodes={nnodes}", "train.py"], {}), {})
    arguments, _ = job.tell(1, [(job.hosts[0], HERE), (job.hosts[2], HERE)])
    assert command_line.parse(arguments, {}).nnodes == told


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--hosts=a,b", "--hostfile=x"], "--hosts and --hostfile exclude each other"),
        (["--hostfile=nothing"], "--hostfile: nothing cannot be read"),
        (["--hosts=a,b", "--nnodes=3"], "--nnodes: 3 asks for 3 nodes, but there are 2 hosts"),
        (["--hosts=a:8,b", "--nproc-per-node=4"], "--nproc-per-node is 4, and a has 8 workers"),
        (["--hosts=a,b", "--node-rank=1"], "--node-rank is for one node"),
        (["--hosts=a,b", "--standalone"], "--standalone is for one node"),
        (["--hosts=a,b", "--rdzv-backend=static"], "--rdzv-backend: with --hosts"),
        (["--hosts=a,b", "--ssh-timeout=0.1"], "--ssh-timeout: 0.1 is too short"),
        (["--hosts=a,b", "--ssh-command='"], "--ssh-command: .* cannot be read"),
        (["--hosts=a,b", "--tee=9"], "--tee"),
        (["--hosts=a,b", "--drain-grace=-1"], "drain_grace"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(words: list[str], problem: str):
    with pytest.raises(UsageError, match=problem):
        planned(*words)


def test_orders_are_lines():
    text = rules.order(folder="a\nb", silence_s=3.5)
    assert text.count(b"\n") == 1
    assert json.loads(text) == {"folder": "a\nb", "silence_s": 3.5}
