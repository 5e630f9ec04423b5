"""Slurm's lists of nodes and of tasks, as they are written in its variables."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rallypoint.schedulers.slurm import expand, tasks_per_node


@pytest.mark.parametrize(("text", "names"), [
    ("n1", "n1"),
    ("n1,n2", "n1 n2"),
    ("n[1-3]", "n1 n2 n3"),
    ("n[3,1]", "n3 n1"),
    ("gpu-[08-11]", "gpu-08 gpu-09 gpu-10 gpu-11"),
    ("gpu[098-101]", "gpu098 gpu099 gpu100 gpu101"),
    ("a[1-2,07,010-011],b", "a1 a2 a07 a010 a011 b"),
    ("n[0-10/5]", "n0 n5 n10"),
    ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
    ("r[1-2]n[01-02]-ib", "r1n01-ib r1n02-ib r2n01-ib r2n02-ib"),
    ("a.b.example,c-[1].d", "a.b.example c-1.d"),
    (" n1 , n[2] ", "n1 n2"),
    ("127.0.0.[1-3]", "127.0.0.1 127.0.0.2 127.0.0.3"),
])  # fmt: skip
def test_lists(text: str, names: str) -> None:
    assert expand(text) == names.split()


@pytest.mark.parametrize(("text", "wrong"), [
    ("", "not the name of a node"),
    ("n1,,n2", "not the name of a node"),
    ("n[1-3", "brackets that do not match"),
    ("n1-3]", "brackets that do not match"),
    ("n[1[2]]", "brackets that do not match"),
    ("n[]", "not a number or a range"),
    ("n[a-b]", "not a number or a range"),
    ("n[-3]", "not a number or a range"),
    ("n[3-1]", "the lower one first"),
    ("n[1-9/0]", "the lower one first"),
    ("n[0-99999999]", "at most 100000"),
    ("n[0-999]m[0-999]", "more than 100000 nodes"),
    ("n[" + "1" * 100 + "]", "not a number or a range"),
    ("n 1", "not the name of a node"),
])  # fmt: skip
def test_what_is_no_list(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        expand(text)


@given(st.text(alphabet="n0123[],-/ab. ", max_size=40))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    try:
        names = expand(text)
    except ValueError:
        return
    assert names
    assert all(name and not set(name) & set("[], ") for name in names)


RANGES = st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(1, 4), st.integers(1, 3))


PARTS = st.tuples(st.sampled_from(["n", "gpu-", "r1c"]), st.lists(RANGES, min_size=1, max_size=3))


@given(st.lists(PARTS, min_size=1, max_size=3))
def test_lists_that_are_built_are_read_back(parts: list[tuple[str, list[tuple[int, int, int, int]]]]) -> None:
    written, names = [], []
    for prefix, ranges in parts:
        pieces = []
        for first, more, width, step in ranges:
            begin, last = f"{first:0{width}d}", f"{first + more:0{width}d}"
            pieces.append(f"{begin}-{last}" + (f"/{step}" if step > 1 else ""))
            names += [f"{prefix}{number:0{len(begin)}d}" for number in range(first, first + more + 1, step)]
        written.append(f"{prefix}[{','.join(pieces)}]")
    assert expand(",".join(written)) == names


BRACKETS = st.lists(RANGES.map(lambda one: (one[0], one[1], one[2])), min_size=1, max_size=3).map(
    lambda ranges: "[" + ",".join(f"{first:0{width}d}" + f"-{first + more}" * bool(more) for first, more, width in ranges) + "]"
)
NAMES = st.sampled_from(["n", "gpu-", "r1c", "a.b-", "x0y"])
PIECES = st.one_of(
    st.sampled_from(["login", "n7", "gpu-08", "a.example"]),
    st.tuples(NAMES, BRACKETS).map("".join),
    st.tuples(NAMES, BRACKETS, NAMES, BRACKETS).map("".join),
    st.tuples(NAMES, BRACKETS, NAMES, BRACKETS, NAMES, BRACKETS).map("".join),
)


@pytest.mark.root
@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs scontrol")
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES, min_size=1, max_size=3))
@example(["n[3,1]"])
@example(["a[1-2,07,010-011]", "b"])
@example(["r[1-2]n[01-02]"])
def test_f29_scontrol_reads_them_alike(tmp_path: Path, pieces: list[str]) -> None:
    """F29: whatever Slurm can write is read as it reads it, name by name and in its order.

    Of three brackets or more, `scontrol` counts the middle ones slowest; the first name, at which nodes meet, is the same.
    """
    text = ",".join(pieces)
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=c\nSlurmctldHost=localhost\nNodeName=n1\n")
    done = subprocess.run(
        ["scontrol", "show", "hostnames", text], capture_output=True, text=True, check=True, env={"SLURM_CONF": str(conf)}
    )
    ours, theirs = expand(text), done.stdout.split()
    assert ours[0] == theirs[0]
    if any(piece.count("[") > 2 for piece in pieces):
        ours, theirs = sorted(ours), sorted(theirs)
    assert ours == theirs


@pytest.mark.parametrize(("text", "counts"), [
    ("1", [1]), ("2(x3)", [2, 2, 2]), ("2(x2),1", [2, 2, 1]), ("", []), ("x", []), ("2(x", []), ("1(x99999999)", []),
])  # fmt: skip
def test_tasks(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts
