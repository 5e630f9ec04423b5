"""JSON without the json module: the same text, and a refusal of whatever has no form."""

from __future__ import annotations

import json
import math
from enum import Enum, IntEnum
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.json_text import to_json

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(scalars, inner),
    max_leaves=20,
)


class Colour(str, Enum):
    RED = "red"


class Size(IntEnum):
    LARGE = 3


@given(values)
def test_it_is_the_text_of_json(value: object) -> None:
    assert to_json(value) == json.dumps(value)


@pytest.mark.parametrize("value", [Colour.RED, Size.LARGE, {Colour.RED: Size.LARGE}, "\ud800", -0.0, 1e300, 10**400])
def test_odd_values_are_written_as_json_does(value: object) -> None:
    assert to_json(value) == json.dumps(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_in_json_is_null(value: float) -> None:
    assert to_json([value]) == "[null]"


def test_any_mapping_and_sequence_will_do() -> None:
    assert to_json(MappingProxyType({"ranks": range(3)})) == '{"ranks": [0, 1, 2]}'


@pytest.mark.parametrize(
    "value", [b"bytes", bytearray(b"x"), memoryview(b"x"), {1}, object(), 1j, {(1, 2): 3}, {b"key": 1}, [b""]]
)
def test_what_has_no_form_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="JSON"):
        to_json(value)
