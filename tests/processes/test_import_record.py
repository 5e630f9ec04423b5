"""What is known of a program's imports: read with limits, brought up to date, and forgotten in time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rallypoint.processes.import_record import (
    FILE_BYTES,
    KEPT_S,
    MOST_MODULES,
    MOST_PROGRAMS,
    ImportRecord,
    Measured,
    add_measured,
    find_record,
    put_record,
    read_measured,
    read_records,
    record_of,
    write_records,
)
from rallypoint.worker_site import import_times

NEW = record_of("/train.py", "python 3", 1000.0)
CHANGED = "the program changes OMP_NUM_THREADS in its environment before it imports that"


@pytest.mark.parametrize(
    ("text", "measured"),
    [
        ("", None),
        ("rubbish\n", None),
        ("imports\n", Measured()),
        ("imports\ntorch 2.000 -\nnumpy 0.1 -\n", Measured((("torch", 2.0), ("numpy", 0.1)))),
        ("imports\ntorch 2.0 -\nnum", Measured((("torch", 2.0),))),
        ("imports\ntorch 2.0 OMP_NUM_THREADS\n", Measured((("torch", 2.0),), (("torch", CHANGED),))),
        ("imports\nmy-module 1 -\na/b 1 -\n. 1 -\na nan -\nb inf -\nc -1 -\nd x -\ne 1e30 -\n\0\n", Measured()),
    ],
)
def test_what_a_worker_writes_is_read_with_care(text: str, measured: Measured | None) -> None:
    assert read_measured(text) == measured


def test_both_sides_spell_it_the_same() -> None:
    assert read_measured(f"{import_times.HEAD}\na 1.0 {import_times.UNCHANGED}\n") == Measured((("a", 1.0),))


def test_what_was_measured_is_added() -> None:
    first = add_measured(NEW, Measured((("torch", 2.0), ("numpy", 0.1))))
    warm = add_measured(first, Measured((("pandas", 0.5),)))
    assert warm.modules == (("torch", 2.0), ("numpy", 0.1), ("pandas", 0.5)), "what was there already took no time"
    assert warm.measured_at == NEW.measured_at


def test_of_too_many_modules_the_longest_stay() -> None:
    record = add_measured(NEW, Measured(tuple((f"m{number}", float(number)) for number in range(MOST_MODULES + 1))))
    assert len(record.modules) == MOST_MODULES
    assert record.modules[0] == ("m1", 1.0)


def test_who_was_refused_stays_out_and_who_waits_for_a_variable_only_while_it_does() -> None:
    refused = add_measured(NEW, Measured((), (("tensorflow", "3 threads"), ("torch", CHANGED))))
    again = add_measured(refused, Measured((("torch", 2.0), ("tensorflow", 3.0))))
    assert again.left_out == (("tensorflow", "3 threads"),)


def test_each_program_has_its_own_and_after_a_while_it_is_measured_anew() -> None:
    records = [NEW, record_of("/train.py", "python 4", 1000.0), record_of("/other.py", "python 3", 1000.0)]
    assert find_record(records, NEW.replace(measured_at=1000.0 + KEPT_S - 1)) == NEW
    assert find_record(records, NEW.replace(measured_at=1000.0 + KEPT_S)) is None
    assert find_record(records, record_of("/third.py", "python 3", 1000.0)) is None


def test_those_that_ran_last_are_kept() -> None:
    records: list[ImportRecord] = []
    for number in [*range(MOST_PROGRAMS + 5), 10]:
        records = put_record(records, record_of(f"/{number}.py", "python", 0.0))
    assert len(records) == MOST_PROGRAMS
    assert [one.program for one in records[:2]] == ["/10.py", f"/{MOST_PROGRAMS + 4}.py"]


def test_what_is_written_can_be_read_whatever_it_is_of() -> None:
    why = "é\n\0" * 1000
    modules = tuple((f"module_{number:03}_" + "x" * 200, 1.5) for number in range(MOST_MODULES))
    full = [
        add_measured(
            record_of(f"/é/\udcff\n{number}" + "/long" * 1000, "python", 5.0), Measured(modules, ((modules[0][0], why),))
        )
        for number in range(MOST_PROGRAMS)
    ]
    text = write_records(full)
    assert len(text) <= FILE_BYTES
    read = read_records(text)
    assert read == tuple(full[: len(read)])
    assert len(read) > 1


def change(**fields: object) -> str:
    [program] = json.loads(write_records([NEW]))["programs"]
    return json.dumps({"form": 1, "programs": [{**program, **fields}]})


DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "[" * 100_000, '{"form": 2, "programs": []}', '{"form": 1}', '{"form": 1, "programs": {}}',
        json.dumps({"form": 1, "programs": [{}] * (MOST_PROGRAMS + 1)}),
        change(modules=[["my-module", 1.0]]), change(modules=[["os; import evil", 1.0]]), change(modules=[["torch", "2"]]),
        change(modules=[["torch", -1]]), change(modules=[["torch", float("nan")]]), change(modules=[["torch"]]),
        change(modules=[[["torch"], 1.0]]), change(modules=[["a", 1.0]] * (MOST_MODULES + 1)), change(modules=DEEP),
        change(program="a\nb"), change(program=5), change(measured_at=float("inf")), change(left_out=[["a", "b\x1b[0m"]]),
        change(more=1),
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_records(text)
    assert read_records(change()) == (NEW,)
