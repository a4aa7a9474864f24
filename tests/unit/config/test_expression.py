"""The language against Python itself: the same expression as a Python function, row by row."""

import math
import operator
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from freshet.config.expression import (
    Column,
    LabelValue,
    compile_condition,
    compile_score,
    compile_value,
    postfix_of,
)
from freshet.errors import BadInput, ConfigError

Row = Mapping[str, Any]
Fun = Callable[[Row], Any]
Pair = tuple[str, Fun]


def hash_text(text: str) -> int:
    return zlib.crc32(text.encode()) + 1


def column(values: list[Any]) -> Column:
    nulls = np.array([v is None for v in values])
    kinds = {type(v) for v in values if v is not None}
    if str in kinds:
        return Column(np.array([hash_text(v or "") for v in values], np.uint64), nulls)
    if bool in kinds:
        return Column(np.array([bool(v) for v in values]), nulls)
    dtype = np.int64 if kinds <= {int} else np.float64
    return Column(np.array([v or 0 for v in values], dtype), nulls)


def reduced(name: str, argument: Column, groups: list[int], size: int) -> Column:
    """Return the aggregate of each group of actions, as the native join computes it."""
    found: list[list[float]] = [[] for _ in range(size)]
    for i, group in enumerate(groups):
        if argument.nulls is None or not argument.nulls[i]:
            found[group].append(float(argument.values[i]))
    functions: dict[str, Callable[[list[float]], float]] = {
        "sum": sum,
        "count": len,
        "max": max,
        "min": min,
        "last": lambda values: values[-1],
    }
    empty = 0.0 if name in ("sum", "count") else None
    return column([functions[name](values) if values else empty for values in found])


def labels_of(value: LabelValue, columns: Mapping[str, Column], groups: list[int], size: int) -> Column:
    """Return the value of each of `size` impressions; action i belongs to impression `groups[i]`."""
    arguments = value.argument_columns(columns, len(groups))
    return value.finish(
        [reduced(a.name, c, groups, size) for a, c in zip(value.aggregates, arguments, strict=True)]
    )


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def strict(f: Callable[..., Any]) -> Callable[..., Any]:
    """Null in, null out; what has no finite value is null."""

    def call(*arguments: Any) -> Any:
        if any(a is None for a in arguments):
            return None
        try:
            return finite(float(f(*(float(a) for a in arguments))))
        except (ArithmeticError, ValueError):
            return None

    return call


def compare(f: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda a, b: a is not None and b is not None and f(a, b)


ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
COMPARISONS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def join(f: Callable[..., Any], *parts: Fun) -> Fun:
    return lambda row: f(*(p(row) for p in parts))


def constant(value: Any) -> Fun:
    return lambda row: value


def field(name: str) -> Fun:
    return lambda row: row[name]


literals = st.one_of(st.integers(0, 1000), st.floats(0, 1e6, allow_subnormal=False)).map(
    lambda v: (repr(v), constant(v))
)
number_fields = st.sampled_from(["x", "y", "i"]).map(lambda n: (f"action.{n}", field(n)))


def numbers(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    return st.one_of(
        st.tuples(inner, st.sampled_from(sorted(ARITHMETIC)), inner).map(
            lambda t: (f"({t[0][0]} {t[1]} {t[2][0]})", join(strict(ARITHMETIC[t[1]]), t[0][1], t[2][1]))
        ),
        inner.map(lambda p: (f"-{p[0]}", join(strict(operator.neg), p[1]))),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(
            lambda t: (
                f"{t[0]}({t[1][0]}, {t[2][0]})",
                join(strict(min if t[0] == "min" else max), t[1][1], t[2][1]),
            )
        ),
        inner.map(lambda p: (f"sqrt({p[0]})", join(strict(math.sqrt), p[1]))),
        inner.map(lambda p: (f"abs({p[0]})", join(strict(abs), p[1]))),
    )


number = st.recursive(st.one_of(literals, number_fields), numbers, max_leaves=6)
text_equal = st.tuples(st.sampled_from(["==", "!="]), st.sampled_from(["click", "buy", "it's", ""])).map(
    lambda t: (
        f"action.t {t[0]} {quoted(t[1])}",
        join(compare(COMPARISONS[t[0]]), field("t"), constant(t[1])),
    )
)
number_compare = st.tuples(number, st.sampled_from(sorted(COMPARISONS)), number).map(
    lambda t: (f"{t[0][0]} {t[1]} {t[2][0]}", join(compare(COMPARISONS[t[1]]), t[0][1], t[2][1]))
)
is_null = st.tuples(number, st.booleans()).map(
    lambda t: (f"{t[0][0]} is {'not ' if t[1] else ''}null", join(lambda v: (v is None) != t[1], t[0][1]))
)
is_in = st.tuples(
    st.booleans(), st.lists(st.sampled_from(["click", "buy", "play"]), min_size=1, max_size=3)
).map(
    lambda t: (
        f"action.t {'not in' if t[0] else 'in'} [{', '.join(map(quoted, t[1]))}]",
        join(lambda v: v is not None and ((v in t[1]) != t[0]), field("t")),
    )
)
flag = st.just(("action.b", join(lambda v: v is True, field("b"))))


def quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def conditions(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    return st.one_of(
        st.tuples(inner, inner).map(
            lambda t: (f"({t[0][0]} and {t[1][0]})", join(lambda a, b: a and b, t[0][1], t[1][1]))
        ),
        st.tuples(inner, inner).map(
            lambda t: (f"({t[0][0]} or {t[1][0]})", join(lambda a, b: a or b, t[0][1], t[1][1]))
        ),
        inner.map(lambda p: (f"not ({p[0]})", join(operator.not_, p[1]))),
    )


condition = st.recursive(
    st.one_of(text_equal, number_compare, is_null, is_in, flag), conditions, max_leaves=5
)
maybe = st.none()
rows = st.lists(
    st.fixed_dictionaries(
        {
            "x": maybe | st.floats(-1e6, 1e6, allow_subnormal=False),
            "y": maybe | st.floats(-10, 10, allow_subnormal=False),
            "i": maybe | st.integers(-(2**40), 2**40),
            "t": maybe | st.sampled_from(["click", "buy", "it's", "", "other"]),
            "b": maybe | st.booleans(),
        }
    ),
    min_size=1,
    max_size=8,
)
EMPTY = {"x": 0.0, "y": 0.0, "i": 0, "t": "", "b": False}


def columns_of(given_rows: list[Row]) -> dict[str, Column]:
    padded = [*given_rows, EMPTY]  # fixes each column's kind even where all its values are null
    return {name: column([r[name] for r in padded]) for name in EMPTY}


@given(condition, rows)
def test_a_condition_is_what_python_says(pair: Pair, given_rows: list[Row]) -> None:
    text, python = pair

    found = compile_condition(text, hash_text=hash_text).true(columns_of(given_rows), len(given_rows) + 1)

    assert found.tolist() == [python(r) for r in [*given_rows, EMPTY]], text


@given(number, rows)
def test_a_number_is_what_python_says(pair: Pair, given_rows: list[Row]) -> None:
    text, python = pair

    value = compile_value(text)
    everyone = [*given_rows, EMPTY]
    found = labels_of(value, columns_of(given_rows), list(range(len(everyone))), len(everyone))

    for i, row in enumerate(everyone):
        expected = python(row)
        is_null = found.nulls is not None and found.nulls[i]
        assert is_null == (expected is None), text
        if expected is not None:
            assert found.values[i] == expected, text


def refusals(text: str) -> list[ConfigError]:
    """What the three compilers say against a text; any other exception than ConfigError fails the test."""
    found = []
    for compile_ in (compile_condition, compile_score, compile_value):
        try:
            compile_(text)
        except ConfigError as error:
            found.append(error)
    return found


@given(st.text(st.characters(codec="ascii"), max_size=60))
def test_any_text_compiles_or_is_refused_with_its_place(text: str) -> None:
    assert all("^" in error.hint for error in refusals(text))


WORDS = [
    "action.a",
    "click",
    "1",
    "'x'",
    "(",
    ")",
    "[",
    "]",
    ",",
    "and",
    "or",
    "not",
    "in",
    "is",
    "null",
    "==",
    "<",
    "+",
    "-",
    "*",
    "sum",
    "max",
    "exp",
    "true",
]
pieces = st.sampled_from(WORDS)


@given(st.lists(pieces, max_size=14).map(" ".join))
def test_any_words_compile_or_are_refused_with_their_place(text: str) -> None:
    assert all("^" in error.hint for error in refusals(text))


def test_and_binds_tighter_than_or_and_looser_than_comparisons() -> None:
    columns = {"a": Column(np.array([True])), "n": Column(np.array([2.0]))}

    assert compile_condition("action.a or action.a and false").true(columns).tolist() == [True]
    assert compile_condition("not action.n == 3").true(columns).tolist() == [True]
    assert compile_condition("1 + action.n * 2 == 5").true(columns).tolist() == [True]
    assert compile_condition("-action.n + 3 == 1").true(columns).tolist() == [True]
    assert compile_condition("7 % action.n == 1").true(columns).tolist() == [True]


def test_lists_hold_constants_of_one_kind() -> None:
    columns = {"n": Column(np.array([-1.0, 2.5, 7.0]))}

    assert compile_condition("action.n in [-1, 2.5]").true(columns).tolist() == [True, True, False]
    for text, expected in (
        ("action.n in [1, 'x']", "numbers only, or text only, in a list"),
        ("action.n in [action.n]", "a number or 'text'"),
        ("action.n in [true]", "a number or 'text'"),
        ("action.n in []", "a value"),
        ("action.n in [1", '"]"'),
        ("action.n not 3", '"in"'),
    ):
        with pytest.raises(ConfigError) as caught:
            compile_condition(text)
        assert caught.value.expected == expected


def test_the_largest_of_several_numbers() -> None:
    found = compile_score("max(a, b, 0.5) - min(a, b, 0.5)").evaluate(
        {"a": Column(np.array([0.1, 0.9])), "b": Column(np.array([0.2, 0.3]))}
    )

    assert found.values == pytest.approx([0.4, 0.6])
    assert len(found) == 2


def test_large_integers_are_compared_exactly() -> None:
    columns = {"id": Column(np.array([2**62, 2**62 + 1], np.int64))}

    assert compile_condition("action.id == action.id").true(columns).all()
    assert compile_condition("action.id == 4611686018427387905").true(columns).tolist() == [False, True]


def test_the_designs_score() -> None:
    score = compile_score("click * (1 + 0.1 * watch) + 20 * click * buy")
    columns = {
        "click": Column(np.array([0.5, 0.1], np.float32)),
        "watch": Column(np.array([10.0, 0.0])),
        "buy": Column(np.array([0.0, 0.5])),
    }

    assert score.fields() == ("click", "watch", "buy")
    assert score.evaluate(columns).values == pytest.approx([1.0, 1.1])


def test_a_value_sums_over_the_actions_of_each_impression() -> None:
    value = compile_value("sum(action.seconds) / 60")
    seconds = Column(np.array([30.0, 60.0, 0.0, 90.0]), np.array([False, False, True, False]))

    found = labels_of(value, {"seconds": seconds}, [0, 2, 0, 2], 3)

    assert value.fields() == ("seconds",)
    assert found.filled(-1.0).tolist() == [0.5, 0.0, 2.5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("count()", [2, 0, 2]),
        ("count(action.x)", [1, 0, 2]),
        ("max(action.x)", [3, None, 5]),
        ("min(action.x)", [3, None, 4]),
        ("last(action.x)", [3, None, 4]),
        ("action.x", [3, None, 4]),
        ("max(sum(action.x), 4)", [4, 4, 9]),
        ("2 * count() + max(action.x)", [7, None, 9]),
    ],
)
def test_aggregates_skip_nulls_and_take_actions_in_order(text: str, expected: list[float | None]) -> None:
    x = Column(np.array([3.0, 0.0, 5.0, 4.0]), np.array([False, True, False, False]))

    found = labels_of(compile_value(text), {"x": x}, [0, 0, 2, 2], 3)

    assert [
        None if found.nulls is not None and found.nulls[i] else found.values[i] for i in range(3)
    ] == expected


def test_truth_may_arrive_as_numbers() -> None:
    flags = {"b": Column(np.array([1.0, 0.0, 1.0]), np.array([False, False, True]))}

    assert compile_condition("action.b").true(flags).tolist() == [True, False, False]
    assert compile_condition("action.b == true").true(flags).tolist() == [True, False, False]
    assert compile_condition("not action.b").true(flags).tolist() == [False, True, True]


def test_division_by_zero_is_null() -> None:
    found = labels_of(compile_value("1 / action.x"), {"x": Column(np.zeros(1))}, [0], 1)

    assert found.nulls is not None
    assert found.nulls.tolist() == [True]


def test_text_compiled_without_a_hash_is_never_evaluated() -> None:
    with pytest.raises(ValueError, match="without a hash"):
        compile_condition("action.t == 'x'").true({"t": column(["x"])})


def test_a_column_of_another_kind_is_bad_input() -> None:
    for text in ("action.t == 'x'", "action.t in ['x']"):
        with pytest.raises(BadInput, match="of one kind"):
            compile_condition(text, hash_text=hash_text).true({"t": Column(np.array([1.0]))})
    with pytest.raises(BadInput, match="expected true or false"):
        compile_condition("not action.t").true({"t": column(["x"])})
    with pytest.raises(BadInput, match="expected a number"):
        compile_condition("action.t + 1 > 2").true({"t": column(["x"])})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "action.type = 'click'",
            "x.toml: labels.a.on = \"action.type = 'click'\"\n"
            "  expected a number, a name, 'text' or an operator\n"
            "  action.type = 'click'\n"
            "              ^ write == to compare",
        ),
        (
            "type == 'click'",
            "x.toml: labels.a.on = \"type == 'click'\"\n"
            "  expected a field, action.…\n"
            "  type == 'click'\n"
            "  ^ a condition or value sees the action: action.type",
        ),
        (
            "action.type < 'click'",
            "x.toml: labels.a.on = \"action.type < 'click'\"\n"
            "  expected a number here: < compares the order of numbers\n"
            "  action.type < 'click'\n"
            "                ^ this is a text",
        ),
        (
            "1 < action.n < 3",
            "x.toml: labels.a.on = '1 < action.n < 3'\n"
            "  expected no second comparison here\n"
            "  1 < action.n < 3\n"
            "               ^ comparisons do not chain: write a < b and b < c",
        ),
        (
            "action.n + 1",
            "x.toml: labels.a.on = 'action.n + 1'\n"
            "  expected a boolean here: a condition is true or false\n"
            "  action.n + 1\n"
            "           ^ this is a number",
        ),
        (
            "action.a == null",
            "x.toml: labels.a.on = 'action.a == null'\n"
            "  expected a value\n"
            "  action.a == null\n"
            "              ^ null stands only after is: x is null",
        ),
        (
            "action.a == 'x' and action.a == 3",
            "x.toml: labels.a.on = \"action.a == 'x' and action.a == 3\"\n"
            "  expected equal kinds on both sides of ==\n"
            "  action.a == 'x' and action.a == 3\n"
            "                               ^ left is a text, right is a number",
        ),
    ],
)
def test_a_condition_that_is_wrong_is_shown_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_condition(text, where="x.toml", key="labels.a.on")

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sum(sum(action.x))", "no function over actions inside another"),
        ("sum(action.x) + action.y", "a function over actions around this field"),
        ("summ(action.x)", "one of the functions"),
        ("sum()", "sum() with 1 arguments"),
        ("count(action.x, action.y)", "count() with 0 or 1 arguments"),
        ("sqrt(action.x, 1)", "sqrt() with 1 arguments"),
        ("action.x > 1", "a number here: the value of a label is a number"),
        ("(" * 40 + "1" + ")" * 40, "an expression nested at most 32 deep"),
        ("1 " + "+ 1" * 1000, "an expression of at most 2000 characters"),
        ("1e999", "a number that a double can hold"),
        ("1 2", "an operator or the end of the expression"),
        ("max(1, 'x')", "a number here: max() is a function of numbers"),
    ],
)
def test_a_value_that_is_wrong_says_what_was_expected(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_value(text)

    assert caught.value.expected.startswith(expected)


class CountedColumns(dict[str, Column]):
    """Columns that count how often one is read."""

    reads = 0

    def __getitem__(self, path: str) -> Column:
        self.reads += 1
        return super().__getitem__(path)


@pytest.mark.parametrize("text", ["-" * 10 + "y", "-(-(-y))", "-abs(-sqrt(-(-y)))"])
def test_an_operand_of_a_sign_is_evaluated_once(text: str) -> None:
    columns = CountedColumns(y=Column(np.ones(1)))

    assert abs(compile_score(text).evaluate(columns, 1).values[0]) == 1
    assert columns.reads == 1


CLIMBING = "(" * 30 + "y" + "+y" * 2 + ")+y+y+y" * 30
"""Brackets on the left of each sum, whose levels add up."""


@pytest.mark.parametrize("text", ["+".join(["y"] * 128), "*".join(["y"] * 100), CLIMBING])
def test_a_long_score_is_what_python_says(text: str) -> None:
    y = np.array([1.0, 2.0])

    assert compile_score(text).numbers({"y": y}, 2).tolist() == eval(text, {"y": y}).tolist()


@pytest.mark.parametrize(
    "text", ["+".join(["y"] * 129), "+".join(["y"] * 499), "*".join(["y"] * 999), CLIMBING + "+y" * 50]
)
def test_a_score_of_too_many_levels_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="at most 128 levels") as refused:
        compile_score(text)

    assert "put brackets around parts" in str(refused.value)


def test_a_score_of_too_many_levels_is_read_in_halves() -> None:
    half = "+".join(["y"] * 120)

    assert compile_score(f"({half})+({half})").numbers({"y": np.ones(1)}, 1).tolist() == [240.0]
    with pytest.raises(ConfigError, match="at most 128 levels, found 240"):
        compile_score(f"{half}+{half}")


def test_a_field_that_the_schema_lacks_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        compile_condition("action.typ == 'x'", kinds={"type": "text", "n": "number"})

    assert caught.value.expected == "a field that exists: type, n"
    assert caught.value.hint == "action.typ == 'x'\n  ^ did you mean \"type\"?"


def test_a_field_of_another_kind_than_the_schema_says_is_refused() -> None:
    with pytest.raises(ConfigError, match="equal kinds on both sides of =="):
        compile_condition("action.n == 'x'", kinds={"n": "number"})


LEAVES = st.sampled_from(["a", "b", "2", "0.1", "1e308", "0"])
SCORES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda x: f"-({x})"),
        st.tuples(inner, inner).map(lambda t: f"max({t[0]}, {t[1]})"),
    ),
    max_leaves=8,
)
NUMBERS = arrays(np.float64, 5, elements=st.floats(-1e308, 1e308) | st.sampled_from([0.0, 1.0, math.nan]))


STEPS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@given(SCORES, NUMBERS, NUMBERS)
def test_steps_on_a_stack_are_the_score(text: str, a: Any, b: Any) -> None:
    score, columns = compile_score(text), {"a": a, "b": b}
    steps = postfix_of(score.node)

    assert (steps is None) == ("/" in text or "max" in text)
    stack: list[Any] = []
    with np.errstate(all="ignore"):
        for op, value in steps or ():
            if op in ("number", "label"):
                stack.append(columns[value] if isinstance(value, str) else np.full(5, value))
            else:
                right = stack.pop()
                stack.append(-right if op == "negate" else STEPS[op](stack.pop(), right))
    for found in stack:
        finite_or_nan = np.where(np.isfinite(found), found, math.nan)
        np.testing.assert_array_equal(finite_or_nan, score.numbers(columns, 5))


def test_a_score_is_null_where_it_is_not_finite() -> None:
    for text in ("a * a", "max(a * a, 0)"):
        found = compile_score(text).numbers({"a": np.array([1e200, 2.0, math.nan])}, 3)
        np.testing.assert_array_equal(found, [math.nan, 4.0, math.nan])
