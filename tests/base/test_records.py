"""Records and values behave as the dataclasses that a type checker takes them for."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.records import Record, Value, field


class Point(Value):
    x: int
    y: int = 2


class Tagged(Point):
    tag: str = ""


class Empty(Value):
    pass


class Box(Record):
    size: int
    things: list[int] = field(factory=list)
    lid: str = field(default="flat", kw_only=True)

    def __post_init__(self) -> None:
        self.size += 1


class Sealed(Record):
    text: str
    size: int = field(init=False)
    mark: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        self.size = len(self.text)


@pytest.mark.parametrize(
    ("made", "fields"),
    [
        (Point(1), {"x": 1, "y": 2}),
        (Point(1, 3), {"x": 1, "y": 3}),
        (Point(y=3, x=1), {"x": 1, "y": 3}),
        (Tagged(1, tag="t"), {"x": 1, "y": 2, "tag": "t"}),
        (Box(1), {"size": 2, "things": [], "lid": "flat"}),
        (Box(1, [4], lid="round"), {"size": 2, "things": [4], "lid": "round"}),
        (Empty(), {}),
        (Sealed("abc"), {"text": "abc", "mark": "", "size": 3}),
    ],
)
def test_fields_are_set_in_their_order(made: Record | Value, fields: dict[str, object]) -> None:
    assert list(vars(made).items()) == list(fields.items())


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (Point, "misses 'x'"),
        (lambda: Point(1, 2, 3), "takes 2 positional arguments, but 3 were given"),
        (lambda: Point(1, x=2), "got x twice"),
        (lambda: Point(1, z=2), "unexpected keyword argument 'z'"),
        (lambda: Box(1, [], "round"), "takes 2 positional"),
        (lambda: Sealed("abc", 3), "takes 1 positional"),
        (lambda: Sealed("abc", size=3), "unexpected keyword argument 'size'"),
    ],
)
def test_a_wrong_call_is_a_type_error_that_names_the_field(make: object, complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        make()  # type: ignore[operator]


def test_a_default_that_is_made_is_made_for_each() -> None:
    assert Box(1).things is not Box(1).things


def test_values_are_equal_by_class_and_fields() -> None:
    assert Point(1) == Point(1, 2)
    assert hash(Point(1)) == hash(Point(1, 2))
    assert Point(1) != Tagged(1)
    assert Empty() != Point(1)
    assert Point(1) != (1, 2)


def test_a_value_cannot_be_changed_and_a_record_is_no_key() -> None:
    with pytest.raises(AttributeError, match="x cannot be changed"):
        Point(1).x = 2  # type: ignore[misc]
    with pytest.raises(AttributeError, match="x cannot be deleted"):
        del Point(1).x
    with pytest.raises(TypeError, match="unhashable"):
        hash(Box(1))


def test_a_value_can_be_matched_unpacked_and_changed_into_another() -> None:
    match Point(3, 4):
        case Point(x, y):
            assert (x, y) == (3, 4)
    assert [*Point(3, 4)] == [3, 4]
    assert Point(3, 4).replace(y=5) == Point(3, 5)


@given(st.builds(Tagged, st.integers(), st.integers(), st.text()))
def test_copies_and_pickles_are_equal(value: Tagged) -> None:
    assert pickle.loads(pickle.dumps(value)) == copy.copy(value) == copy.deepcopy(value) == value
    assert eval(repr(value)) == value


def test_dataclasses_and_inspect_take_them_for_dataclasses() -> None:
    """Code elsewhere asks configurations for their fields, and makes changed copies."""
    assert [one.name for one in dataclasses.fields(Box)] == ["size", "things", "lid"]
    assert dataclasses.is_dataclass(Point)
    assert dataclasses.asdict(Box(1)) == {"size": 2, "things": [], "lid": "flat"}
    assert dataclasses.replace(Box(1), size=7).size == 8
    assert list(inspect.signature(Box).parameters) == ["size", "things", "lid"]
    assert inspect.signature(Box).parameters["lid"].kind is inspect.Parameter.KEYWORD_ONLY


def test_a_dataclass_can_be_made_of_one() -> None:
    @dataclasses.dataclass
    class BigBox(Box):
        weight: int = 9

    assert dataclasses.asdict(BigBox(1, weight=3)) == {"size": 2, "things": [], "lid": "flat", "weight": 3}
