"""Random specs: each accepted one is rendered and parsed to an equal spec."""

import contextlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from freshet.config.spec.identity import render, toml_value
from freshet.config.spec.parse import parse_spec
from freshet.errors import ConfigError
from tests.fixtures.effort import examples
from tests.unit.config.spec.random_specs import specs, text_of

NOT_A_VALUE: st.SearchStrategy[Any] = st.one_of(
    st.none().map(lambda _: {}), st.integers(), st.text(max_size=5), st.booleans(), st.just([])
)

KEYS = st.text() | st.text("aZ0._- ", max_size=4)
WHOLE = st.integers(-(2**63), 2**63 - 1)

accepted = 0


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=examples(300))
@given(specs())
def test_rendered_spec_parses_to_the_same_spec(values_: dict[str, Any]) -> None:
    global accepted  # noqa: PLW0603 - counted over all examples, so that the test cannot pass on refusals alone
    try:
        spec = parse_spec(text_of(values_))
    except ConfigError:
        return
    accepted += 1

    assert parse_spec(render(spec)) == spec


def test_enough_of_the_random_specs_were_accepted() -> None:
    assert accepted == 0 or accepted > examples(300) // 10  # 0: the test before this one was not selected


@settings(deadline=None)
@given(specs(), st.data())
def test_any_value_is_read_or_refused_with_a_config_error(
    values_: dict[str, Any], data: st.DataObject
) -> None:
    at: Any = values_
    while True:
        key = data.draw(st.sampled_from(sorted(at)))
        if not isinstance(at[key], dict) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(NOT_A_VALUE)
    with contextlib.suppress(ConfigError):
        parse_spec(text_of(values_))


@given(
    st.recursive(
        st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.booleans(),
        lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
    )
)
def test_toml_values_parse_to_themselves(value: Any) -> None:
    if isinstance(value, int) and abs(value) >= 2**63:
        return
    assert tomllib.loads(f"x = {toml_value(value)}")["x"] == value


@settings(deadline=None, max_examples=examples(50))
@given(st.dictionaries(KEYS, WHOLE | st.dictionaries(KEYS, WHOLE, max_size=2), max_size=3))
@example({"a.b": 1, "a": {"b": 2}, "😀": 3})
def test_options_of_a_custom_model_keep_their_keys(options: dict[str, Any]) -> None:
    text = FEED[: FEED.index("[model]")] + f'[model]\nkind = "a:B"\noptions = {toml_value(options)}\n'
    spec = parse_spec(text)

    assert spec.model.options == options
    assert parse_spec(render(spec)) == spec


FEED = (Path(__file__).parents[4] / "examples" / "feed" / "freshet.toml").read_text()
SPLICES = st.sampled_from(
    ["", "[", "]", "{", "}", '"', "=", ".", "\n", "0", "-1", "9" * 5000, "nan", "true", "'", "#", "é", "a"]
)


@settings(deadline=None, max_examples=examples(300))
@given(st.lists(st.tuples(st.integers(0, len(FEED)), st.integers(0, 8), SPLICES), min_size=1, max_size=3))
def test_damaged_file_is_read_or_refused_with_a_config_error(
    damage: list[tuple[int, int, str]],
) -> None:
    text = FEED
    for at, length, splice in damage:
        text = text[:at] + splice + text[at + length :]
    with contextlib.suppress(ConfigError):
        parse_spec(text)


def test_value_without_a_toml_form_is_an_error() -> None:
    with pytest.raises(TypeError, match="TOML has no object"):
        toml_value(object())
