import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.json_text import kind_of, shown

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(), below, max_size=3),
    max_leaves=5,
)


@given(VALUES)
def test_errors_name_types_as_json_does(value: object) -> None:
    words = {"an object", "an array", "a string", "a number", "true", "false", "null"}
    assert kind_of(value) in words
    assert len(shown(value)) <= 60


@pytest.mark.parametrize(
    ("value", "words"), [(None, "null"), (True, "true"), (False, "false"), (0, "0"), (math.pi, repr(math.pi))]
)
def test_single_values_are_shown_as_json_writes_them(value: object, words: str) -> None:
    assert shown(value) == words
