"""Values of Arrow columns as Avro types: exact, or refused as a misfit, whatever the column is."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import Fixed, Primitive
from freshet.config.spec.inputs import Files
from freshet.features.arrow_arrays import CellFormat, Misfit
from freshet.features.cell_times import read_integers, read_times
from freshet.features.cells import read_booleans, read_floats, read_texts

TYPED, CELLS = CellFormat(Files()), CellFormat(Files(), cells=True)
WIDE = Context(prec=100)
DECIMAL = Primitive("bytes", "decimal", (("precision", 38), ("scale", 10)))

TEMPORAL = [pa.timestamp(u, z) for u in ("s", "ms", "us", "ns") for z in (None, "UTC")]
TEMPORAL += [pa.date32(), pa.date64(), pa.time32("s"), pa.time64("ns"), pa.duration("ns")]
NUMBERS = [pa.int64(), pa.uint64(), pa.decimal128(38, 0), pa.decimal256(60, 0)]


READERS: list[Callable[[Any], Any]] = [
    lambda array: read_integers(array, TYPED, Primitive("long"), None),
    lambda array: read_integers(array, TYPED, Primitive("long"), "us"),
    lambda array: read_integers(array, TYPED, Primitive("long"), "ns"),
    lambda array: read_integers(array, TYPED, Primitive("int"), "days"),
    lambda array: read_integers(array, TYPED, Primitive("int"), "time ms"),
    lambda array: read_floats(array, TYPED, Primitive("double")),
    lambda array: read_booleans(array, TYPED),
    lambda array: read_texts(array, TYPED, Primitive("string")),
    lambda array: read_texts(array, TYPED, DECIMAL),
    lambda array: read_times(array, TYPED, "ms", "ms"),
]


@given(st.sampled_from(TEMPORAL + NUMBERS), st.integers(-(2**63), 2**64 - 1), st.sampled_from(READERS))
def test_any_typed_value_is_read_or_refused(kind: Any, value: int, read: Callable[[Any], Any]) -> None:
    try:
        array = pa.array([value, None], kind)
    except (pa.ArrowInvalid, OverflowError):
        return  # no value of this type
    refused = None
    try:
        read(array)
    except Misfit as misfit:
        refused = misfit
    assert refused is None or (refused.row == 0 and refused.found)


@given(st.integers(-(10**38) + 1, 10**38 - 1))
def test_a_decimal_keeps_all_its_digits(unscaled: int) -> None:
    value = Decimal(unscaled).scaleb(-10, WIDE)
    typed, _ = read_texts(pa.array([value], pa.decimal128(38, 10)), TYPED, DECIMAL)
    cells, _ = read_texts(pa.array([format(value, "f").encode()]), CELLS, DECIMAL)

    assert [int.from_bytes(v, "big", signed=True) for v in (*typed, *cells)] == [unscaled, unscaled]


@pytest.mark.parametrize("text", ["0.00000000001", "1.00000000001", "1e999999999", "1e-999999999", "x"])
def test_a_decimal_that_does_not_fit_is_refused(text: str) -> None:
    with pytest.raises(Misfit):
        read_texts(pa.array([b"1", text.encode()]), CELLS, DECIMAL)
    with pytest.raises(Misfit):
        read_texts(pa.array([text.encode()]), CELLS, Fixed("F", 4, "decimal", DECIMAL.attributes))


@given(st.integers(-(2**33), 2**33), st.integers(0, 10**9 - 1))
def test_a_text_of_nanoseconds_is_read_or_refused(second: int, nanos: int) -> None:
    day = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=second)
    array = pa.array([f"{day:%Y-%m-%dT%H:%M:%S}.{nanos:09d}Z".encode()])

    (exact,), _ = read_integers(array, CELLS, Primitive("long"), "ns")
    (rounded,), _ = read_times(array, CELLS, "ms", "us")

    assert exact == second * 10**9 + nanos
    assert rounded == second * 10**6 + nanos // 1000
    if nanos % 1000:
        with pytest.raises(Misfit, match="microseconds"):
            read_integers(array, CELLS, Primitive("long"), "us")


def test_a_column_of_two_kinds_of_times_is_refused() -> None:
    with pytest.raises(Misfit) as refused:
        read_times(pa.array([b"1790000000000", b"2026-01-31"]), CELLS, "ms", "ms")

    assert (refused.value.row, refused.value.found) == (1, "'2026-01-31'")
    assert "rows before it hold the other kind" in refused.value.hint


WORDS_FOR_NULL = ("-1", "0", "-999", "1e9", "999.5", "1970-01-01", "NA", "NaN", "-inf", "7E+11")
WORDED = CellFormat(Files(nulls=WORDS_FOR_NULL), cells=True)
LABEL = Primitive("float")
OF_CELLS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "int": (lambda array: read_integers(array, WORDED, Primitive("long"), None), ("1", "1e3", "+7", "123.0")),
    "date": (lambda array: read_integers(array, WORDED, Primitive("int"), "days"), ("1", "+7")),
    "moment": (lambda array: read_integers(array, WORDED, Primitive("long"), "ms"), ("2024-01-02",)),
    "float": (lambda array: read_floats(array, WORDED, Primitive("double")), ("1", "1.5", "+7", "-0.0")),
    "label": (lambda array: read_floats(array, WORDED, LABEL), ("1", "1.5", "+7")),
    "truth": (lambda array: read_booleans(array, WORDED), ("1", "true")),
    "decimal": (lambda array: read_texts(array, WORDED, DECIMAL), ("1", "1.5", "+7")),
    "time": (lambda array: read_times(array, WORDED, "ms", "ms"), ("1700000000000", "17.5", "+7")),
    "days": (lambda array: read_times(array, WORDED, "days", "us"), ("19000", "19000.5")),
    "iso": (lambda array: read_times(array, WORDED, "iso", "ms"), ("2024-01-02", "2024-01-02T03:04:05Z")),
}


@pytest.mark.parametrize("kind", OF_CELLS)
def test_a_cell_means_the_same_whatever_its_neighbours(kind: str) -> None:
    read, values = OF_CELLS[kind]

    def first(*cells: str) -> Any:
        found, nulls = read(pa.array([c.encode() for c in cells]))
        return None if nulls is not None and nulls[0] else found[0]

    alone = {cell: first(cell) for cell in (*WORDS_FOR_NULL, *values)}

    assert [cell for cell, value in alone.items() if value is None] == list(WORDS_FOR_NULL)
    for cell, value in alone.items():
        for neighbour in ("", *alone):
            assert first(cell, neighbour) == value, f"{cell!r} beside {neighbour!r}"


def test_a_time_that_excel_rounded_is_refused_beside_fractions() -> None:
    with pytest.raises(Misfit) as refused:
        read_times(pa.array([b"1700000000000.5", b"1.7E+12"]), CELLS, "ms", "ms")

    assert refused.value.row == 1
    assert "Excel rounds" in refused.value.hint


def test_a_time_in_a_decimal_column_keeps_its_nanoseconds() -> None:
    tick = 1_700_000_000_123_456_789
    found, _ = read_times(pa.array([Decimal(tick)], pa.decimal128(38, 0)), TYPED, "ns", "ns")

    assert found.tolist() == [tick]
