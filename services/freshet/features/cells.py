"""Exact conversion of one Arrow column to numbers, booleans, texts or bytes of one Avro type.

The first value that does not fit is refused. Columns of Parquet and Arrow files are typed. Columns of csv
files are binary arrays of text, parsed as the type of their field. `cell_times` reads times and integers,
which may count time. Letters: N rows.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from freshet.config.avro.schema import Enum, Fixed, Primitive, Type, spell
from freshet.features.arrow_arrays import (
    CellFormat,
    Misfit,
    blank_nulls,
    bytes_of,
    contains_any,
    decode_texts,
    is_binary,
    is_textual,
    null_words,
    nulls_of,
    quote_text,
    show_value,
    text_hint,
    to_numpy,
    wrong_column,
)
from freshet.types import F64, I64, U8, Bool, BytesColumn

LOW, HIGH = -(2**63), 2**63 - 1
DAY_MS = 86_400_000
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,9})?", re.ASCII)
ROUNDED = (
    "Excel rounds such numbers to six digits where it saves them: give the column a number format without"
    " decimals first, or write it as text"
)
NUMERAL = re.compile(r"\d|^\W*inf", re.IGNORECASE)
"""Marks of a number in some notation, which no word for null has: digits of any script, infinity."""
TRUTHS = {"true": True, "false": False}
EXACT_BITS = {"halffloat": 11, "float": 24, "double": 53}
"""Bits up to which a floating-point column distinguishes neighbouring integers."""

WORDS = {
    "int": "a whole number of 32 bits (int)",
    "long": "a whole number from -2^63 to 2^63-1 (long)",
    "float": "a finite number (float)",
    "double": "a finite number (double)",
    "boolean": "true or false (boolean)",
}


def integers_of_floats(array: Any, expected: str, nulls: Bool | None) -> tuple[I64, Bool | None]:
    """Convert a floating-point column to (N,) int64, and the nulls. Raises Misfit for a fraction."""
    floats = to_numpy(array.cast(pa.float64()), np.nan)
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


def integers_of_decimals(array: Any, expected: str, nulls: Bool | None) -> tuple[I64, Bool | None]:
    """Convert a decimal column to (N,) int64, and the nulls. Raises Misfit for a number that is no int64."""
    try:
        return to_numpy(array.cast(pa.int64()), 0), nulls
    except pa.ArrowInvalid:
        for row, value in enumerate(array.to_pylist()):
            if value is not None and (value != value.to_integral_value() or not LOW <= value <= HIGH):
                longer = value == value.to_integral_value()
                hint = text_hint("longer ids") if longer else "a whole number is written without a fraction"
                raise Misfit(row, "", expected, format(value, "f"), hint) from None
        whole = [0 if value is None else int(value) for value in array.to_pylist()]
        return np.array(whole, np.int64), nulls


def integers_of_texts(array: Any, form: CellFormat, expected: str) -> tuple[I64, Bool | None]:
    """Parse cells to (N,) int64, and the nulls. Raises Misfit for a text that is no integer of 64 bits."""
    if not contains_any(array, b"xX"):  # Arrow parses 0x1F as 31
        try:
            plain = _without_words(array, form)
            return to_numpy(plain.cast(pa.int64()), 0), nulls_of(plain)
        except (pa.ArrowInvalid, UnicodeDecodeError):
            pass
    cells, nulls = blank_nulls(array, form.files.nulls)
    pattern = r"^\s*\+?(-?[0-9]+)(?:[.][0]*)?\s*$".replace("[.]", re.escape(form.files.decimal))
    short = pc.replace_substring_regex(cells, pattern, r"\1")
    short_enough = np.asarray(
        pc.match_substring_regex(short, r"^-?[0-9]{1,18}$").fill_null(False).to_numpy(zero_copy_only=False)
    )
    out = to_numpy(pc.if_else(pa.array(short_enough), short, "0").cast(pa.int64()), 0).copy()
    for row in np.flatnonzero(~short_enough & ~nulls).tolist():
        text = cells[row].as_py()
        number = _parse_decimal(text, form.files.decimal)
        if number is None or not _is_whole(number) or (form.cells and excel_form(form).fullmatch(text)):
            raise _not_a_number(row, text, expected, form)
        if number.adjusted() > 20 or not LOW <= int(number) <= HIGH:
            raise Misfit(row, "", expected, quote_text(text), text_hint("ids beyond 63 bits"))
        out[row] = int(number)
    return out, nulls if nulls.any() else None


def read_floats(array: Any, form: CellFormat, type_: Primitive) -> tuple[F64, Bool | None]:
    """Convert to (N,) float64, the nearest to the written number; NaN is null. Raises Misfit for a value that
    is no finite number."""
    kind, nulls, expected = array.type, nulls_of(array), WORDS[type_.name]
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.float64), np.ones(len(array), np.bool_)
    if pa.types.is_boolean(kind):
        return to_numpy(array.cast(pa.uint8()), 0).astype(np.float64), nulls
    if pa.types.is_integer(kind):
        return to_numpy(array, 0).astype(np.float64), nulls
    if pa.types.is_decimal(kind):
        values = to_numpy(
            array.cast(pa.string()).cast(pa.float64()), 0.0
        )  # from text, as that rounds to nearest
    elif pa.types.is_floating(kind):
        values = to_numpy(array.cast(pa.float64()), np.nan)
    elif is_textual(kind):
        values, nulls = floats_of_texts(array, form, expected)
    else:
        raise wrong_column(array, expected)
    none = np.isnan(values)
    if nulls is not None:
        none |= nulls
    bad = ~none & ~(np.abs(values) <= (np.finfo(np.float32).max if type_.name == "float" else np.inf))
    bad |= ~none & np.isinf(values)
    if bad.any():
        row = int(bad.argmax())
        raise Misfit(row, "", expected, show_value(array, row))
    return values, none if none.any() else None


def floats_of_texts(array: Any, form: CellFormat, expected: str) -> tuple[F64, Bool | None]:
    """Parse cells to (N,) float64, and the nulls. Raises Misfit for a text that is no number."""
    files = form.files
    if files.decimal == ".":
        try:
            plain = _without_words(array, form)
            values = to_numpy(plain.cast(pa.float64()), 0.0)
            if np.isfinite(values).all():
                return values, nulls_of(plain)
        except (pa.ArrowInvalid, UnicodeDecodeError):
            pass
    cells, nulls = blank_nulls(array, files.nulls)
    out = np.zeros(len(cells), np.float64)
    for row in np.flatnonzero(~nulls).tolist():
        text = cells[row].as_py()
        number = _parse_decimal(text, files.decimal)
        if number is None:
            raise _not_a_number(row, text, expected, form)
        out[row] = float(number)
    return out, nulls if nulls.any() else None


def _without_words(array: Any, form: CellFormat) -> Any:
    """Return cells as strings, with nulls in place of the words for null that a cast reads as numbers."""
    words = [word for word in form.files.nulls if NUMERAL.search(word)]
    return null_words(decode_texts(array), words) if words else decode_texts(array)


def excel_form(form: CellFormat) -> re.Pattern[str]:
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
    if form.cells and excel_form(form).fullmatch(text):
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


def read_booleans(array: Any, form: CellFormat) -> tuple[U8, Bool | None]:
    """Convert to (N,) uint8, 0 or 1.

    Cells are true or false in either case, 0 or 1. Raises Misfit for any other value.
    """
    kind, nulls, expected = array.type, nulls_of(array), WORDS["boolean"]
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.uint8), np.ones(len(array), np.bool_)
    if pa.types.is_boolean(kind):
        return to_numpy(array.cast(pa.uint8()), 0), nulls
    if is_textual(kind):
        cells, none = blank_nulls(array, form.files.nulls)
        coded = cells.dictionary_encode()
        known = [_parse_boolean(text, form.files.decimal) for text in coded.dictionary.to_pylist()]
        codes = coded.indices.to_numpy(zero_copy_only=False)
        bad = np.array([v is None for v in known], np.bool_)[codes] & ~none
        if bad.any():
            row = int(bad.argmax())
            raise Misfit(row, "", expected, quote_text(cells[row].as_py()))
        return np.array([bool(v) for v in known], np.uint8)[codes], none if none.any() else None
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        values = to_numpy(array.cast(pa.float64(), safe=False), np.nan)
        none = np.isnan(values)
        bad = ~none & (values != 0) & (values != 1)
        if bad.any():
            row = int(bad.argmax())
            raise Misfit(row, "", expected, show_value(array, row))
        return np.where(none, 0, values).astype(np.uint8), none if none.any() else None
    raise wrong_column(array, expected)


def _parse_boolean(text: str, mark: str) -> bool | None:
    """Parse a word, or a number that is 0 or 1 (NumPy writes 1.000e+00); None if it is neither."""
    word = TRUTHS.get(text.strip().lower())
    number = _parse_decimal(text, mark) if word is None else None
    return word if number is None or number not in (0, 1) else bool(number)


def is_raw(type_: Type) -> bool:
    """Return whether a type is bytes or fixed: as JSON, a character to U+00FF for each byte."""
    return isinstance(type_, Fixed) or (isinstance(type_, Primitive) and type_.name == "bytes")


def read_texts(array: Any, form: CellFormat, type_: Type) -> tuple[BytesColumn, Bool | None]:
    """Convert to the (N,) byte strings of a string, bytes, fixed or enum.

    A field of text takes integers and decimals as decimal text, times as ISO 8601 text.

    Raises Misfit for other types of columns, and for characters that bytes cannot hold.
    """
    kind = array.type
    raw = is_raw(type_)
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
    elif not is_textual(kind):
        raise wrong_column(
            array, _describe_text(type_), "write the column as text, as events spell its values"
        )
    if form.cells and form.files.text_nulls:
        array = null_words(array, form.files.text_nulls)
    nulls = nulls_of(array)
    if raw and (form.cells or not is_binary(kind)):
        return _encode_latin1(array, type_), nulls
    return bytes_of(array), nulls


def _encode_latin1(array: Any, type_: Type) -> BytesColumn:
    """Encode texts as Latin-1, as Avro's JSON writes bytes."""
    out = []
    for row, text in enumerate(decode_texts(array).to_pylist()):
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
    if is_textual(array.type):
        cells, nulls = blank_nulls(array, form.files.nulls)
        values = [None if none else _parse_decimal(text, form.files.decimal) for text, none in
                  zip(cells.to_pylist(), nulls.tolist(), strict=True)]  # fmt: skip
    elif pa.types.is_decimal(array.type) or pa.types.is_integer(array.type):
        values = [None if v is None else Decimal(v) for v in array.to_pylist()]
        nulls = np.array([v is None for v in values], np.bool_)
    else:
        raise wrong_column(array, expected)
    out = []
    for row, value in enumerate(values):
        if value is None and not nulls[row]:
            raise Misfit(row, "", expected, show_value(array, row))
        whole = 0 if value is None else _unscaled(value, scale)
        if whole is None:
            raise Misfit(row, "", expected, show_value(array, row))
        size = type_.size if isinstance(type_, Fixed) else (whole + (whole < 0)).bit_length() // 8 + 1
        try:
            out.append(whole.to_bytes(size, "big", signed=True))
        except OverflowError:
            raise Misfit(
                row, "", f"a number of {size} bytes ({spell(type_)})", show_value(array, row)
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


def _format_times(array: Any) -> Any:
    """Format timestamps as ISO 8601 texts in UTC."""
    naive = array.cast(pa.timestamp(array.type.unit))
    return pc.strftime(naive, format="%Y-%m-%dT%H:%M:%SZ")


def _format_dates(array: Any) -> Any:
    """Format dates as ISO 8601 texts. Raises Misfit for parts of a day and for years beyond 32767."""
    if pa.types.is_date64(array.type):
        part = to_numpy(array.cast(pa.int64()), 0) % DAY_MS != 0
        if part.any():
            row = int(part.argmax())
            raise Misfit(row, "", "a whole day", f"{array[row].value} milliseconds since 1970")
    out = array.cast(pa.date32()).cast(pa.string())
    bad = np.asarray(pc.starts_with(out, "<").fill_null(False).to_numpy(zero_copy_only=False))
    if bad.any():
        row = int(bad.argmax())
        raise Misfit(row, "", "a date with a text of its own (years to 32767)", show_value(array, row))
    return out
