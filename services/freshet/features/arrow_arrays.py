"""Arrow arrays of one column: plain arrays, nulls, texts, and the error for a value that does not fit.

Needs the extra `replay` (pyarrow). Letters: N rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from freshet.config.spec.inputs import WORDS, Files
from freshet.types import Bool, BytesColumn

UNIT_WORDS = {**WORDS, "days": "days"}


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


def is_list(kind: Any) -> bool:
    """Return whether a type is a list of any size."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: Any) -> bool:
    """Return whether a type is a string."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_textual(kind: Any) -> bool:
    """Return whether a type is a string, or bytes as cells of csv."""
    return is_text(kind) or is_binary(kind)


def is_binary(kind: Any) -> bool:
    """Return whether a type is a byte string."""
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    )


def to_numpy(array: Any, value: Any) -> Any:
    """Return values as NumPy, nulls as `value`. Skips `fill_null` without nulls, as it always copies."""
    filled = array.fill_null(value) if array.null_count else array
    return filled.to_numpy(zero_copy_only=False)


def decode_texts(array: Any) -> Any:
    """Decode binary cells to strings. Raises Misfit for bytes that are not UTF-8."""
    if not is_binary(array.type):
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


def blank_nulls(array: Any, words: Iterable[str]) -> tuple[Any, Bool]:
    """Return cells as strings, with words for null emptied, and the (N,) mask of empty cells."""
    cells = decode_texts(array)
    some = pa.array(["", *words], cells.type)
    none = pc.or_kleene(pc.is_in(cells, value_set=some), pc.is_null(cells)).fill_null(True)
    nulls = np.asarray(none.to_numpy(zero_copy_only=False))
    return pc.if_else(none, pa.scalar("", cells.type), cells), nulls


def null_words(array: Any, words: Iterable[str]) -> Any:
    """Return strings, or byte strings, with nulls in place of these words."""
    some = pa.array([w.encode() for w in words], array.type)
    return pc.if_else(pc.is_in(array, value_set=some), pa.scalar(None, array.type), array)


def contains_any(array: Any, characters: bytes) -> bool:
    """Return whether the cells contain one of the characters."""
    data = bytes_of(array).data
    return any(bool((data == character).any()) for character in characters)


def bytes_of(array: Any) -> BytesColumn:
    """View the offsets and data of strings as a byte column, without a copy of the data."""
    if pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    filled = array.fill_null(b"" if is_binary(array.type) else "") if array.null_count else array
    _, offsets, data = filled.buffers()
    if not len(filled):
        return BytesColumn.of([])
    step = np.int64 if large else np.int32
    at = np.frombuffer(offsets, step, len(filled) + 1, filled.offset * np.dtype(step).itemsize).astype(
        np.int64
    )
    raw = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return BytesColumn(raw[at[0] : at[-1]], at[1:] - at[0])


def show_value(array: Any, row: int) -> str:
    """Return a value as text for messages."""
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
    unit = "ms" if pa.types.is_date64(scalar.type) else getattr(scalar.type, "unit", "days")
    return f"{scalar.value} {UNIT_WORDS[unit]} since 1970"


def quote_text(text: str) -> str:
    """Quote a text for messages: shortened, with unprintable characters escaped."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:61])
    return f"'{shown}'" if len(text) <= 60 else f"'{shown[:60]}'..."


def wrong_column(array: Any, expected: str, hint: str = "") -> Misfit:
    """Return the error, at the first value, for a column of a type that fits no value of the field."""
    nulls = nulls_of(array)
    row = 0 if nulls is None else int((~nulls).argmax())
    if hasattr(array.type, "value_type"):
        hint = (
            'a field that holds a list has the type "array" in the schema; a sample is one impression, a row'
            " each, and whole events are what `freshet replay files` reads"
        )
    elif pa.types.is_duration(array.type) or pa.types.is_time(array.type):
        hint = "write the column as a number of one unit, or as text"
    return Misfit(row, "", expected, f"{show_value(array, row)} in a column of {array.type}", hint)


def text_hint(subject: str) -> str:
    """Return the hint that numbers without a type of their own are read as texts."""
    return f'{subject} are read as texts: give the field the type "string" in the schema'
