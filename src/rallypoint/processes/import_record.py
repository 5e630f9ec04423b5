"""What programs imported when they ran last, as it is measured, kept in a file, and brought up to date. Pure.

Neither the file nor what a worker has written is believed: both are read with limits, and only names that could stand in an
``import`` come out of them.

What has been measured is added to what was known: a program that ends early, or finds modules imported already, imports less than
it may. So nothing would ever be forgotten, and after a while all of it is, and is measured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rallypoint.base.json_text import (
    clip,
    count_fitting,
    from_json,
    read_fields,
    read_integer,
    read_list,
    read_seconds,
    read_text,
    to_json,
)
from rallypoint.base.records import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

__all__ = [
    "FILE_BYTES", "MEASURED_BYTES", "ImportRecord", "Measured", "add_measured", "find_record", "put_record", "read_measured",
    "read_records", "record_of", "write_records",
]  # fmt: skip

FORM = 1
FILE_BYTES = 256 << 10
MEASURED_BYTES = 64 << 10
MOST_PROGRAMS, MOST_MODULES = 32, 64
KEPT_S = 7 * 24 * 3600.0
_TEXT_BYTES, _PROGRAM_BYTES = 300, 2000
_CHANGES = "the program changes "
_HEAD, _UNCHANGED = "imports", "-"  # as worker_site.import_times writes them


class Measured(Value):
    """Modules with the seconds that each took, and those that are not to be imported for the program, with the reason."""

    modules: tuple[tuple[str, float], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()


class ImportRecord(Value):
    """Of one program under one interpreter."""

    program: str
    python: str
    measured_at: float  # wall clock: it is read in another run
    modules: tuple[tuple[str, float], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()


def read_measured(text: str) -> Measured | None:
    """What a worker has written so far, line by line; None if it has not even begun to measure."""
    head, *lines = text.split("\n")
    if head != _HEAD:
        return None
    modules, left_out = {}, {}
    for line in lines[: 4 * MOST_MODULES]:
        try:
            name, took, changed = line.split(" ")
            modules[_read_module(name)] = _read_duration(float(took))
        except ValueError:  # the last line may be half written
            continue
        if changed != _UNCHANGED:
            left_out[name] = f"{_CHANGES}{clip(changed, _TEXT_BYTES)} in its environment before it imports that"
    return Measured(tuple(modules.items()), tuple(left_out.items()))


def add_measured(record: ImportRecord, measured: Measured) -> ImportRecord:
    """Of too many, those that took longest stay."""
    modules = {**dict(record.modules), **dict(measured.modules)}
    longest = sorted(modules, key=lambda name: -modules[name])[:MOST_MODULES]
    kept = tuple((name, took_s) for name, took_s in modules.items() if name in longest)
    imported = dict(measured.modules)
    still_left_out = {name: why for name, why in record.left_out if name not in imported or not why.startswith(_CHANGES)}
    left_out = list({**still_left_out, **dict(measured.left_out)}.items())[-MOST_MODULES:]
    return record.replace(modules=kept, left_out=tuple((name, clip(why, _TEXT_BYTES)) for name, why in left_out))


def record_of(program: str, python: str, now: float) -> ImportRecord:
    """Of a program of which nothing is known yet."""
    return ImportRecord(clip(program, _PROGRAM_BYTES), clip(python, _PROGRAM_BYTES), now)


def find_record(records: Sequence[ImportRecord], wanted: ImportRecord) -> ImportRecord | None:
    """What is known of that program, unless it is too old; clocks of hosts that share a folder may differ."""
    same = (one for one in records if _is_same(one, wanted) and abs(wanted.measured_at - one.measured_at) < KEPT_S)
    return next(same, None)


def put_record(records: Sequence[ImportRecord], record: ImportRecord) -> list[ImportRecord]:
    """In the place of what was known of that program; of too many, those that ran last stay."""
    return [record, *(one for one in records if not _is_same(one, record))][:MOST_PROGRAMS]


def _is_same(one: ImportRecord, other: ImportRecord) -> bool:
    return (one.program, one.python) == (other.program, other.python)


def read_records(text: str) -> tuple[ImportRecord, ...]:
    """ValueError: it is not what `write_records` makes."""
    data = from_json(text)
    readers = {"form": read_integer, "programs": lambda value: read_list(MOST_PROGRAMS, _read_record, value)}
    fields = read_fields(data, readers)
    if fields["form"] != FORM:
        raise ValueError(f"it has form {fields['form']}, and {FORM} is known")
    return tuple(fields["programs"])


def write_records(records: Sequence[ImportRecord]) -> str:
    """As many of them as there is room for."""
    programs = [
        {
            "program": one.program,
            "python": one.python,
            "measured_at": one.measured_at,
            "modules": [list(pair) for pair in one.modules],
            "left_out": [list(pair) for pair in one.left_out],
        }
        for one in records
    ]
    return to_json({"form": FORM, "programs": programs[: count_fitting(programs, FILE_BYTES - 100)]}) + "\n"


def _read_record(value: object) -> ImportRecord:
    readers = {
        "program": lambda text: read_text(_PROGRAM_BYTES, text),
        "python": lambda text: read_text(_PROGRAM_BYTES, text),
        "measured_at": read_seconds,
        "modules": lambda pairs: read_list(MOST_MODULES, lambda pair: _read_pair(pair, _read_duration), pairs),
        "left_out": lambda pairs: read_list(MOST_MODULES, lambda pair: _read_pair(pair, _read_reason), pairs),
    }
    return ImportRecord(**read_fields(value, readers))


def _read_pair(value: object, read: Callable[[object], T]) -> tuple[str, T]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be a list of two")
    return _read_module(value[0]), read(value[1])


def _read_module(value: object) -> str:
    name = read_text(_TEXT_BYTES, value)
    if not all(map(str.isidentifier, name.split("."))):
        raise ValueError("must be the name of a module")
    return name


def _read_reason(value: object) -> str:
    return read_text(_TEXT_BYTES, value)


def _read_duration(value: object) -> float:
    took_s = read_seconds(value)
    if not 0 <= took_s < KEPT_S:
        raise ValueError("must be the seconds that an import takes")
    return took_s
