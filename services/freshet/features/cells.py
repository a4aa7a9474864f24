"""Exact conversion of one Arrow column to one Avro type; the first value that does not fit is refused.

Columns of Parquet and Arrow files are typed. Columns of csv files are binary arrays of text, parsed as the
type of their field. Letters: N rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from freshet.config.avro.schema import Enum, Fixed, Primitive, Type, spell
from freshet.config.spec.inputs import UNIT_NS, Files
from freshet.types import F64, I64, U8, Bool, BytesColumn

__all__ = [
    "CellFormat",
    "Misfit",
    "parse_iso_time",
    "read_booleans",
    "read_floats",
    "read_integers",
    "read_texts",
    "read_times",
    "unwrap_array",
]

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
DAY_S = 86_400
LOW, HIGH = -(2**63), 2**63 - 1
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,9})?", re.ASCII)
ROUNDED = (
    "Excel rounds such numbers to six digits where it saves them: give the column a number format without"
    " decimals first, or write it as text"
)
NUMERAL = re.compile(r"\d|^\W*inf", re.IGNORECASE)
"""Marks of a number in some notation, which no word for null has: digits of any script, infinity."""
FINE = re.compile(r"[.,]\d{6}\d*[1-9]")  # a fraction finer than a microsecond
TRUTHS = {"true": True, "false": False}
EXACT_BITS = {"halffloat": 11, "float": 24, "double": 53}
"""Bits up to which a floating-point column distinguishes neighbouring integers."""

UNIT_WORDS = {
    "d": "days",
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}

WORDS = {
    "int": "a whole number of 32 bits (int)",
    "long": "a whole number from -2^63 to 2^63-1 (long)",
    "float": "a finite number (float)",
    "double": "a finite number (double)",
    "boolean": "true or false (boolean)",
}


class Misfit(Exception):
    """A value that does not fit its field. The file's reader adds the file's name and the row in the file."""

    def __init__(self, row: int, path: str, expected: str, found: str, hint: str = "") -> None:
        super().__init__(expected)
        self.row, self.path, self.expected, self.found, self.hint = row, path, expected, found, hint


@dataclass(frozen=True, slots=True)
class CellFormat:
    """Notation of a column's values: csv cells by the spec's [files], or typed."""

    files: Files
    cells: bool = False  # columns are texts of csv cells

    def kind(self, kind: Any) -> str:
        """Describe the type of a column."""
        return "cells of a csv file" if self.cells else str(kind)


def unwrap_array(array: Any) -> Any:  # noqa: PLR0911 - one for each kind of array
    """Convert dictionary, run-end, extension and view arrays to plain arrays of their values."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.uuid":
            return pa.array([None if v is None else str(v) for v in array.to_pylist()], pa.string())
        return unwrap_array(array.storage)
    if pa.types.is_dictionary(kind):
        return unwrap_array(array.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return unwrap_array(pc.run_end_decode(array))
    if _has_type(kind, "is_string_view"):
        return array.cast(pa.large_string())
    if _has_type(kind, "is_binary_view"):
        return array.cast(pa.large_binary())
    if _has_type(kind, "is_list_view") or _has_type(kind, "is_large_list_view"):
        return array.cast(pa.large_list(kind.value_type))
    return array


def _has_type(kind: Any, name: str) -> bool:
    """Test a type by a predicate that only newer releases of Arrow have."""
    test = getattr(pa.types, name, None)
    return test is not None and bool(test(kind))


def nulls_of(array: Any) -> Bool | None:
    """Return the (N,) mask of nulls; None if there are none."""
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False)) if array.null_count else None


# --- integers


def read_integers(
    array: Any, form: CellFormat, type_: Primitive, unit: str | None
) -> tuple[I64, Bool | None]:
    """Convert to (N,) int64, exactly; a logical type has a `unit` (ms, us, ns, d, "time ms", "time us").

    Raises Misfit for a fraction, a number beyond 64 bits (32 for an int) and a value that is no number.
    """
    values, nulls = _read_longs(array, form, type_, unit)
    if type_.name == "int":
        bad = (values < -(2**31)) | (values >= 2**31)
        if nulls is not None:
            bad &= ~nulls
        if bad.any():
            row = int(bad.argmax())
            raise Misfit(row, "", WORDS["int"], str(values[row]))
    return values, nulls


def _read_longs(  # noqa: PLR0911 - one for each kind of column
    array: Any, form: CellFormat, type_: Primitive, unit: str | None
) -> tuple[I64, Bool | None]:
    kind, nulls = array.type, nulls_of(array)
    expected = WORDS[type_.name]
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.int64), np.ones(len(array), np.bool_)
    if pa.types.is_boolean(kind):
        return _to_numpy(array.cast(pa.uint8()), 0).astype(np.int64), nulls
    if pa.types.is_integer(kind):
        values = _to_numpy(array, 0)
        if values.dtype == np.uint64 and len(values) and values.max() > HIGH:
            row = int((values > HIGH).argmax())
            raise Misfit(row, "", expected, str(values[row]), _text_hint("ids beyond 63 bits"))
        return values.astype(np.int64), nulls
    if pa.types.is_floating(kind):
        return _integers_of_floats(array, expected, nulls)
    if pa.types.is_decimal(kind):
        return _integers_of_decimals(array, expected, nulls)
    if pa.types.is_temporal(kind):
        return _integers_of_times(array, type_, unit, nulls)
    if _is_textual(kind):
        if unit is None or unit.startswith("time"):
            return _integers_of_texts(array, form, expected)
        counted = UNIT_WORDS.get(unit, unit)
        expected = f"{counted} since 1970, or {'a date' if unit == 'd' else 'a time'} as ISO 8601 text"
        return _times_of_texts(array, form, unit, expected, exact=True)
    raise _wrong_column(array, expected)


def _integers_of_floats(array: Any, expected: str, nulls: Bool | None) -> tuple[I64, Bool | None]:
    floats = _to_numpy(array.cast(pa.float64()), np.nan)
    none = np.isnan(floats)
    bits = EXACT_BITS[str(array.type)]
    bad = ~none & ((floats != np.floor(floats)) | (np.abs(floats) > 2**bits - 1))
    if bad.any():
        row = int(bad.argmax())
        found = f"{float(floats[row])!r}"
        if np.isfinite(floats[row]) and floats[row] == np.floor(floats[row]):
            raise Misfit(
                row,
                "",
                expected,
                f"{found} in a column of {array.type}",
                f"such a column holds whole numbers exactly up to 2^{bits} only: write integers, or text",
            )
        raise Misfit(row, "", expected, found)
    values = np.where(none, 0.0, floats).astype(np.int64)
    return values, none if none.any() else nulls


def _integers_of_decimals(array: Any, expected: str, nulls: Bool | None) -> tuple[I64, Bool | None]:
    try:
        return _to_numpy(array.cast(pa.int64()), 0), nulls
    except pa.ArrowInvalid:
        for row, value in enumerate(array.to_pylist()):
            if value is not None and (value != value.to_integral_value() or not LOW <= value <= HIGH):
                longer = value == value.to_integral_value()
                hint = _text_hint("longer ids") if longer else "a whole number is written without a fraction"
                raise Misfit(row, "", expected, format(value, "f"), hint) from None
        whole = [0 if value is None else int(value) for value in array.to_pylist()]
        return np.array(whole, np.int64), nulls


def _integers_of_texts(array: Any, form: CellFormat, expected: str) -> tuple[I64, Bool | None]:
    if not _contains(array, b"xX"):  # Arrow parses 0x1F as 31
        try:
            return _to_numpy(_decode_texts(array).cast(pa.int64()), 0), nulls_of(array)
        except (pa.ArrowInvalid, UnicodeDecodeError):
            pass
    cells, nulls = _blank_nulls(array, form.files.nulls)
    pattern = r"^\s*\+?(-?[0-9]+)(?:[.][0]*)?\s*$".replace("[.]", re.escape(form.files.decimal))
    short = pc.replace_substring_regex(cells, pattern, r"\1")
    short_enough = np.asarray(
        pc.match_substring_regex(short, r"^-?[0-9]{1,18}$").fill_null(False).to_numpy(zero_copy_only=False)
    )
    out = _to_numpy(pc.if_else(pa.array(short_enough), short, "0").cast(pa.int64()), 0).copy()
    for row in np.flatnonzero(~short_enough & ~nulls).tolist():
        text = cells[row].as_py()
        number = _parse_decimal(text, form.files.decimal)
        if number is None or not _is_whole(number) or (form.cells and _excel_form(form).fullmatch(text)):
            raise _not_a_number(row, text, expected, form)
        if number.adjusted() > 20 or not LOW <= int(number) <= HIGH:
            raise Misfit(row, "", expected, quote_text(text), _text_hint("ids beyond 63 bits"))
        out[row] = int(number)
    return out, nulls if nulls.any() else None


# --- floats


def read_floats(array: Any, form: CellFormat, type_: Primitive) -> tuple[F64, Bool | None]:
    """Convert to (N,) float64, the nearest to the written number; NaN is null. Raises Misfit for a value that
    is no finite number."""
    kind, nulls, expected = array.type, nulls_of(array), WORDS[type_.name]
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.float64), np.ones(len(array), np.bool_)
    if pa.types.is_boolean(kind):
        return _to_numpy(array.cast(pa.uint8()), 0).astype(np.float64), nulls
    if pa.types.is_integer(kind):
        return _to_numpy(array, 0).astype(np.float64), nulls
    if pa.types.is_decimal(kind):
        values = _to_numpy(
            array.cast(pa.string()).cast(pa.float64()), 0.0
        )  # from text, as that rounds to nearest
    elif pa.types.is_floating(kind):
        values = _to_numpy(array.cast(pa.float64()), np.nan)
    elif _is_textual(kind):
        values, nulls = _floats_of_texts(array, form, expected)
    else:
        raise _wrong_column(array, expected)
    none = np.isnan(values)
    if nulls is not None:
        none |= nulls
    bad = ~none & ~(np.abs(values) <= (np.finfo(np.float32).max if type_.name == "float" else np.inf))
    bad |= ~none & np.isinf(values)
    if bad.any():
        row = int(bad.argmax())
        raise Misfit(row, "", expected, _show_value(array, row))
    return values, none if none.any() else None


def _floats_of_texts(array: Any, form: CellFormat, expected: str) -> tuple[F64, Bool | None]:
    files = form.files
    if files.decimal == ".":
        try:
            values = _to_numpy(_decode_texts(array).cast(pa.float64()), 0.0)
            if np.isfinite(values).all():
                return values, nulls_of(array)
        except (pa.ArrowInvalid, UnicodeDecodeError):
            pass
    cells, nulls = _blank_nulls(array, files.nulls)
    out = np.zeros(len(cells), np.float64)
    for row in np.flatnonzero(~nulls).tolist():
        text = cells[row].as_py()
        number = _parse_decimal(text, files.decimal)
        if number is None:
            raise _not_a_number(row, text, expected, form)
        out[row] = float(number)
    return out, nulls if nulls.any() else None


def _excel_form(form: CellFormat) -> re.Pattern[str]:
    """Match numbers of 12 digits and more as Excel saves them: rounded to six digits."""
    return re.compile(rf"-?\d({re.escape(form.files.decimal)}\d{{1,5}})?E\+(1[1-9]|[2-9]\d)")


def _is_whole(number: Decimal) -> bool:
    """Return whether a number has no fraction, without expanding its digits."""
    if number.adjusted() <= 20:
        return number == number.to_integral_value()
    exponent = number.as_tuple().exponent
    return isinstance(exponent, int) and exponent >= 0


def _parse_decimal(text: str, mark: str) -> Decimal | None:
    """Parse a number exactly, with the decimal mark `mark`; None if it is none."""
    text = text.strip()
    if mark != ".":
        if "." in text:
            return None
        text = text.replace(mark, ".")
    if not NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def _not_a_number(row: int, text: str, expected: str, form: CellFormat) -> Misfit:
    hint = ""
    whole = "whole" in expected
    if form.cells and _excel_form(form).fullmatch(text):
        hint = ROUNDED
    elif form.files.decimal == "," and "." in text and NUMBER.fullmatch(text.strip()):
        hint = (
            'the spec says that "," stands before a fraction: leave [files] decimal out for files with points'
        )
    elif form.files.decimal == "." and re.fullmatch(r"\s*[+-]?\d+,\d+\s*", text):
        hint = 'numbers with a decimal comma: [files] decimal = ","'
    elif re.fullmatch(r"\s*[+-]?\d{1,3}([,.' _]\d{3})+([.,]\d+)?\s*", text):
        hint = "write numbers without marks between thousands"
    elif whole and re.fullmatch(r"(0[xX])?[0-9a-fA-F]+", text) and re.search(r"[a-fA-FxX]", text):
        hint = 'a hexadecimal id is a text: its field has the type "string" in the schema'
    elif text.strip().lower() in TRUTHS:
        hint = "write 1 for true and 0 for false"
    elif not NUMERAL.search(text) and re.fullmatch(r"[^\w.]*[\w/]{0,6}|-+|\?+", text):
        words = ", ".join(f'"{w}"' for w in (*form.files.nulls, _escape_toml(text)))
        hint = f"if it stands for no value, the spec says so: [files] nulls = [{words}]"
    elif NUMBER.fullmatch(text.strip()):
        hint = "a whole number is written without a fraction"
    return Misfit(row, "", expected, quote_text(text), hint)


def _escape_toml(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


# --- booleans


def read_booleans(array: Any, form: CellFormat) -> tuple[U8, Bool | None]:
    """Convert to (N,) uint8, 0 or 1.

    Cells are true or false in either case, 0 or 1. Raises Misfit for any other value.
    """
    kind, nulls, expected = array.type, nulls_of(array), WORDS["boolean"]
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.uint8), np.ones(len(array), np.bool_)
    if pa.types.is_boolean(kind):
        return _to_numpy(array.cast(pa.uint8()), 0), nulls
    if _is_textual(kind):
        cells, none = _blank_nulls(array, form.files.nulls)
        coded = cells.dictionary_encode()
        known = [_parse_boolean(text, form.files.decimal) for text in coded.dictionary.to_pylist()]
        codes = coded.indices.to_numpy(zero_copy_only=False)
        bad = np.array([v is None for v in known], np.bool_)[codes] & ~none
        if bad.any():
            row = int(bad.argmax())
            raise Misfit(row, "", expected, quote_text(cells[row].as_py()))
        return np.array([bool(v) for v in known], np.uint8)[codes], none if none.any() else None
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        values = _to_numpy(array.cast(pa.float64(), safe=False), np.nan)
        none = np.isnan(values)
        bad = ~none & (values != 0) & (values != 1)
        if bad.any():
            row = int(bad.argmax())
            raise Misfit(row, "", expected, _show_value(array, row))
        return np.where(none, 0, values).astype(np.uint8), none if none.any() else None
    raise _wrong_column(array, expected)


def _parse_boolean(text: str, mark: str) -> bool | None:
    """Parse a word, or a number that is 0 or 1 (NumPy writes 1.000e+00); None if it is neither."""
    word = TRUTHS.get(text.strip().lower())
    number = _parse_decimal(text, mark) if word is None else None
    return word if number is None or number not in (0, 1) else bool(number)


# --- texts


def read_texts(array: Any, form: CellFormat, type_: Type) -> tuple[BytesColumn, Bool | None]:
    """Convert to the (N,) byte strings of a string, bytes, fixed or enum.

    A field of text takes integers and decimals as decimal text, times as ISO 8601 text.

    Raises Misfit for other types of columns, and for characters that bytes cannot hold.
    """
    kind = array.type
    raw = isinstance(type_, Fixed) or (isinstance(type_, Primitive) and type_.name == "bytes")
    if raw and getattr(type_, "logical", None) == "decimal":
        return _encode_decimals(array, form, type_)
    if pa.types.is_null(kind):
        none = np.ones(len(array), np.bool_)
        return BytesColumn(np.empty(0, np.uint8), np.zeros(len(array), np.int64)), none
    if pa.types.is_integer(kind) and not raw:
        array = array.cast(pa.string())
    elif pa.types.is_decimal(kind) and not raw:
        array = pa.array([None if v is None else format(v, "f") for v in array.to_pylist()], pa.string())
    elif pa.types.is_timestamp(kind) and not raw:
        array = _format_times(array)
    elif pa.types.is_date(kind) and not raw:
        array = _format_dates(array)
    elif not _is_textual(kind):
        raise _wrong_column(
            array, _describe_text(type_), "write the column as text, as events spell its values"
        )
    if form.cells and form.files.text_nulls:
        array = _null_words(array, form.files.text_nulls)
    nulls = nulls_of(array)
    if raw and (form.cells or not _is_binary(kind)):
        return _encode_latin1(array, type_), nulls
    return _buffers(array), nulls


def _encode_latin1(array: Any, type_: Type) -> BytesColumn:
    """Encode texts as Latin-1, as Avro's JSON writes bytes."""
    out = []
    for row, text in enumerate(_decode_texts(array).to_pylist()):
        try:
            out.append((text or "").encode("latin-1"))
        except UnicodeEncodeError:
            raise Misfit(
                row, "", f"characters to U+00FF, a byte each ({spell(type_)})", quote_text(text)
            ) from None
    return BytesColumn.of(out)


def _encode_decimals(array: Any, form: CellFormat, type_: Type) -> tuple[BytesColumn, Bool | None]:
    """Encode decimals as the big-endian two's complement of their unscaled value."""
    assert isinstance(type_, Primitive | Fixed)
    scale = dict(type_.attributes).get("scale", 0)
    expected = f"a number with at most {scale} digits after the point ({spell(type_)})"
    if _is_textual(array.type):
        cells, nulls = _blank_nulls(array, form.files.nulls)
        values = [None if none else _parse_decimal(text, form.files.decimal) for text, none in
                  zip(cells.to_pylist(), nulls.tolist(), strict=True)]  # fmt: skip
    elif pa.types.is_decimal(array.type) or pa.types.is_integer(array.type):
        values = [None if v is None else Decimal(v) for v in array.to_pylist()]
        nulls = np.array([v is None for v in values], np.bool_)
    else:
        raise _wrong_column(array, expected)
    out = []
    for row, value in enumerate(values):
        if value is None and not nulls[row]:
            raise Misfit(row, "", expected, _show_value(array, row))
        whole = 0 if value is None else _unscaled(value, scale)
        if whole is None:
            raise Misfit(row, "", expected, _show_value(array, row))
        size = type_.size if isinstance(type_, Fixed) else (whole + (whole < 0)).bit_length() // 8 + 1
        try:
            out.append(whole.to_bytes(size, "big", signed=True))
        except OverflowError:
            raise Misfit(
                row, "", f"a number of {size} bytes ({spell(type_)})", _show_value(array, row)
            ) from None
    return BytesColumn.of(out), nulls if nulls.any() else None


def _unscaled(value: Decimal, scale: int) -> int | None:
    """Return a decimal times 10^scale; None for a fraction or more than 1,000 digits.

    Works on the digits, as `Decimal` rounds products to 28 digits.
    """
    if not value:
        return 0
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int) or value.adjusted() + scale > 1000:
        return None
    text = "".join(map(str, digits))
    shift = exponent + scale
    if shift < 0:
        if len(text) <= -shift or text[shift:].strip("0"):
            return None
        text, shift = text[:shift], 0
    whole: int = int(text) * 10**shift
    return -whole if sign else whole


def _describe_text(type_: Type) -> str:
    return f"one of {', '.join(type_.symbols)}" if isinstance(type_, Enum) else f"text ({spell(type_)})"


# --- times


def read_times(array: Any, form: CellFormat, unit: str, logical_unit: str) -> tuple[I64, Bool | None]:
    """Convert an event's time to (N,) int64, rounded down to whole units.

    Args:
        array: Column of numbers, texts, timestamps or dates.
        form: Notation of cells.
        unit: Unit of numbers by the spec: s, ms, us, ns or days; "iso" for texts.
        logical_unit: Unit of the result: s, ms, us or ns.

    Raises Misfit for a value that is no time.
    """
    kind, nulls = array.type, nulls_of(array)
    other = "ISO 8601 text" if _is_textual(kind) else "a timestamp"
    expected = f"a time (a number of {unit}, or {other})" if unit != "iso" else "a time as ISO 8601 text"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return _scale_timestamps(array, logical_unit, nulls, exact=False, expected=expected), nulls
    if _is_textual(kind):
        return _times_of_texts(array, form, logical_unit, expected, exact=False, unit=unit)
    if unit == "iso":
        raise _wrong_column(
            array,
            expected,
            'times in numbers have their unit in the spec: s, ms or us, such as time = "ts:ms"',
        )
    if pa.types.is_integer(kind):
        try:
            values, nulls = _read_longs(array, form, Primitive("long"), None)
        except Misfit as misfit:
            raise Misfit(misfit.row, "", expected, misfit.found) from None
        return _scale_integers(values, unit, logical_unit, expected, array), nulls
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        numbers = _to_numpy(array.cast(pa.float64()), np.nan)
        return _scale_floats(numbers, unit, logical_unit, expected, array)
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.int64), np.ones(len(array), np.bool_)
    raise _wrong_column(array, expected)


def _scale_integers(values: I64, unit: str, wanted: str, expected: str, array: Any) -> I64:
    have_ns, want_ns = UNIT_NS[unit], UNIT_NS[wanted]
    if want_ns >= have_ns:
        return values // (want_ns // have_ns)
    factor = have_ns // want_ns
    bad = np.abs(values.astype(np.float64)) * factor >= 2.0**63
    if bad.any():
        row = int(bad.argmax())
        raise Misfit(row, "", expected, _show_value(array, row))
    return values * factor


def _scale_floats(numbers: F64, unit: str, wanted: str, expected: str, array: Any) -> tuple[I64, Bool | None]:
    scaled = numbers * (UNIT_NS[unit] / UNIT_NS[wanted])
    none = np.isnan(numbers)
    bad = ~none & ~(np.abs(scaled) < 2.0**62)
    if bad.any():
        row = int(bad.argmax())
        raise Misfit(row, "", expected, _show_value(array, row))
    # the double nearest to 1700000000.123 is smaller than it, so add 1e-6 of a unit before rounding down
    whole = np.floor(np.where(none, 0.0, scaled) + 1e-6 * (PER_SECOND[wanted] <= 1000)).astype(np.int64)
    return whole, none if none.any() else None


def _times_of_texts(
    array: Any, form: CellFormat, wanted: str, expected: str, *, exact: bool, unit: str | None = None
) -> tuple[I64, Bool | None]:
    """Parse cells as numbers in `unit`, else as ISO 8601 texts."""
    last = 0  # row of the error: where the parser that got furthest failed
    if unit != "iso":
        try:
            values, none = _integers_of_texts(array, form, expected)
            return (values if unit is None else _scale_integers(values, unit, wanted, expected, array)), none
        except Misfit as misfit:
            last = misfit.row
    cells, nulls = _blank_nulls(array, form.files.nulls)
    some = None if not nulls.any() else nulls
    if unit not in (None, "iso") and not exact:
        if form.cells and _excel_form(form).fullmatch(text := str(cells[last].as_py())):
            raise Misfit(last, "", expected, quote_text(text), ROUNDED)
        try:
            numbers, _ = _floats_of_texts(array, form, expected)
            return _scale_floats(np.where(nulls, np.nan, numbers), str(unit), wanted, expected, array)
        except Misfit as misfit:
            last = max(last, misfit.row)
    found = _parse_iso_texts(cells, nulls, exact=exact)
    if isinstance(found, int):
        last = max(last, found)
        text = cells[last].as_py()
        hint = ""
        if exact and FINE.search(text):
            hint = f"the field counts {UNIT_WORDS.get(wanted, wanted)}: round the column to them"
        elif last and (parse_iso_time(text) is not None or NUMBER.fullmatch(text.strip())):
            hint = "a column of times holds numbers or ISO 8601 texts: rows before it hold the other kind"
        raise Misfit(last, "", expected, quote_text(text), hint)
    return _scale_timestamps(found, wanted, nulls, exact=exact, expected=expected), some


def _parse_iso_texts(cells: Any, nulls: Bool, *, exact: bool) -> Any:
    """Parse ISO 8601 texts, UTC if without an offset, to timestamps.

    Returns the row of the first text that is none, or with `exact` is finer than a microsecond, if Arrow
    cannot parse the column.
    """
    cells = pc.replace_substring_regex(cells, r"\s*(?:UTC|GMT)\s*$", "Z")  # BigQuery's csv
    for unit in ("us", "ns"):
        for zone in ("UTC", None):
            try:
                return pc.if_else(pa.array(nulls), None, cells).cast(pa.timestamp(unit, zone))
            except pa.ArrowInvalid:
                continue
    out = np.zeros(len(cells), np.int64)
    for row in np.flatnonzero(~nulls).tolist():
        text = cells[row].as_py()
        moment = parse_iso_time(text)
        if moment is None or (exact and FINE.search(text)):
            return row
        out[row] = moment
    return pa.array(out).cast(pa.timestamp("us", "UTC"))


def parse_iso_time(text: str) -> int | None:
    """Parse an ISO 8601 text, UTC if without an offset, to microseconds since 1970; None if it is none."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except (ValueError, AttributeError):
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    delta = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (delta.days * DAY_S + delta.seconds) * 10**6 + delta.microseconds


def _format_times(array: Any) -> Any:
    """Format timestamps as ISO 8601 texts in UTC."""
    naive = array.cast(pa.timestamp(array.type.unit))
    return pc.strftime(naive, format="%Y-%m-%dT%H:%M:%SZ")


def _format_dates(array: Any) -> Any:
    """Format dates as ISO 8601 texts. Raises Misfit for parts of a day and for years beyond 32767."""
    if pa.types.is_date64(array.type):
        part = _to_numpy(array.cast(pa.int64()), 0) % (DAY_S * 1000) != 0
        if part.any():
            row = int(part.argmax())
            raise Misfit(row, "", "a whole day", f"{array[row].value} milliseconds since 1970")
    out = array.cast(pa.date32()).cast(pa.string())
    bad = np.asarray(pc.starts_with(out, "<").fill_null(False).to_numpy(zero_copy_only=False))
    if bad.any():
        row = int(bad.argmax())
        raise Misfit(row, "", "a date with a text of its own (years to 32767)", _show_value(array, row))
    return out


def _integers_of_times(
    array: Any, type_: Primitive, unit: str | None, nulls: Bool | None
) -> tuple[I64, Bool | None]:
    kind = array.type
    expected = f"{WORDS[type_.name].partition(' (')[0]} ({spell(type_)})"
    if unit is None:
        raise _wrong_column(
            array,
            expected,
            'the schema says what the number counts: {"type": "long", "logicalType": "timestamp-millis"}',
        )
    if unit.startswith("time "):
        if not pa.types.is_time(kind):
            raise _wrong_column(array, expected)
        have = pa.timestamp(kind.unit)
        ints = array.cast(pa.int32() if pa.types.is_time32(kind) else pa.int64()).cast(pa.int64())
        return _scale_timestamps(ints.cast(have), unit[5:], nulls, exact=True, expected=expected), nulls
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        raise _wrong_column(array, expected)
    return _scale_timestamps(array, unit, nulls, exact=True, expected=expected), nulls


def _scale_timestamps(array: Any, wanted: str, nulls: Bool | None, *, exact: bool, expected: str) -> I64:
    """Convert timestamps and dates to whole units of `wanted`, rounded down unless `exact`."""
    kind = array.type
    if pa.types.is_date32(kind):
        values, have, scale = _to_numpy(array.cast(pa.int32()), 0).astype(np.int64), 1, DAY_S
    elif pa.types.is_date64(kind):
        values, have, scale = _to_numpy(array.cast(pa.int64()), 0), 1000, 1
    else:
        values, have, scale = _to_numpy(array.cast(pa.int64()), 0), PER_SECOND[kind.unit], 1
    want, divide = (1, DAY_S) if wanted == "d" else (PER_SECOND[wanted], 1)
    if scale == divide == DAY_S:
        days: I64 = values
        return days
    up, down = want * scale, have * divide
    common = np.gcd(up, down)
    up, down = int(up // common), int(down // common)
    bad = np.abs(values.astype(np.float64)) * up >= 2.0**63
    if exact and down > 1:
        bad |= (values * up) % down != 0
    if nulls is not None:
        bad &= ~nulls
    if bad.any():
        row = int(bad.argmax())
        unit = UNIT_WORDS.get(wanted, wanted)
        hint = f"the field counts {unit} in 64 bits: round the column to them"
        raise Misfit(row, "", expected, _show_value(array, row), hint)
    scaled: I64 = (values * up) // down
    return scaled


# --- Arrow arrays


def _is_textual(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind)) or _is_binary(kind)


def _is_binary(kind: Any) -> bool:
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    )


def _to_numpy(array: Any, value: Any) -> Any:
    """Return values as NumPy, nulls as `value`. Skips `fill_null` without nulls, as it always copies."""
    filled = array.fill_null(value) if array.null_count else array
    return filled.to_numpy(zero_copy_only=False)


def _decode_texts(array: Any) -> Any:
    """Decode binary cells to strings. Raises Misfit for bytes that are not UTF-8."""
    if not _is_binary(array.type):
        return array
    if pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    try:
        return array.cast(pa.large_string() if pa.types.is_large_binary(array.type) else pa.string())
    except pa.ArrowInvalid:
        for row, cell in enumerate(array.to_pylist()):
            try:
                (cell or b"").decode()
            except UnicodeDecodeError:
                raise Misfit(
                    row,
                    "",
                    "text in UTF-8",
                    repr(cell)[1:61],
                    'a csv in another encoding has it in the spec: [files] encoding = "latin-1"',
                ) from None
        raise


def _blank_nulls(array: Any, words: Iterable[str]) -> tuple[Any, Bool]:
    """Return cells as strings, with words for null emptied, and the (N,) mask of empty cells."""
    cells = _decode_texts(array)
    some = pa.array(["", *words], cells.type)
    none = pc.or_kleene(pc.is_in(cells, value_set=some), pc.is_null(cells)).fill_null(True)
    nulls = np.asarray(none.to_numpy(zero_copy_only=False))
    return pc.if_else(none, pa.scalar("", cells.type), cells), nulls


def _null_words(array: Any, words: Iterable[str]) -> Any:
    some = pa.array([w.encode() for w in words], array.type)
    return pc.if_else(pc.is_in(array, value_set=some), pa.scalar(None, array.type), array)


def _contains(array: Any, characters: bytes) -> bool:
    """Return whether the cells contain one of the characters."""
    data = _buffers(array).data
    return any(bool((data == character).any()) for character in characters)


def _buffers(array: Any) -> BytesColumn:
    """View the offsets and data of strings as a byte column, without a copy of the data."""
    if pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    filled = array.fill_null(b"" if _is_binary(array.type) else "") if array.null_count else array
    _, offsets, data = filled.buffers()
    if not len(filled):
        return BytesColumn.of([])
    step = np.int64 if large else np.int32
    at = np.frombuffer(offsets, step, len(filled) + 1, filled.offset * np.dtype(step).itemsize).astype(
        np.int64
    )
    raw = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return BytesColumn(raw[at[0] : at[-1]], at[1:] - at[0])


def _show_value(array: Any, row: int) -> str:
    try:
        value = array[row].as_py()
    except (ValueError, OverflowError):  # Python's datetime has no nanoseconds and no year 17036
        return _show_time(array[row])
    if isinstance(value, str):
        return quote_text(value)
    if isinstance(value, bytes):
        return repr(value)[1:61]
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")
    return str(value) if isinstance(value, time | timedelta) else repr(value)[:60]


def _show_time(scalar: Any) -> str:
    try:
        text = str(scalar.cast(pa.string()).as_py())
    except pa.ArrowException:
        text = "<"
    if not text.startswith("<"):
        return text
    return f"{scalar.value} {UNIT_WORDS[getattr(scalar.type, 'unit', 'd')]} since 1970"


def quote_text(text: str, most: int = 60) -> str:
    """Quote a text for messages: shortened, with unprintable characters escaped."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: most + 1])
    return f"'{shown}'" if len(text) <= most else f"'{shown[:most]}'..."


def _wrong_column(array: Any, expected: str, hint: str = "") -> Misfit:
    """Return the error, at the first value, for a column whose type fits no value of the field."""
    nulls = nulls_of(array)
    row = 0 if nulls is None else int((~nulls).argmax())
    if hasattr(array.type, "value_type"):
        hint = (
            'a field that holds a list has the type "array" in the schema; a sample is one impression, a row'
            " each, and whole events are what `freshet replay files` reads"
        )
    elif pa.types.is_duration(array.type) or pa.types.is_time(array.type):
        hint = "write the column as a number of one unit, or as text"
    return Misfit(row, "", expected, f"{_show_value(array, row)} in a column of {array.type}", hint)


def _text_hint(subject: str) -> str:
    return f'{subject} are read as texts: give the field the type "string" in the schema'
