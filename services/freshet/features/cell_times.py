"""Times of one Arrow column, and integers, which may count times: exact conversion to 64-bit integers.

The first value that does not fit is refused. Letters: N rows.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from freshet.config.avro.schema import Primitive, spell
from freshet.config.spec.inputs import UNIT_NS
from freshet.features.arrow_arrays import (
    UNIT_WORDS,
    CellFormat,
    Misfit,
    blank_nulls,
    is_textual,
    nulls_of,
    quote_text,
    show_value,
    text_hint,
    to_numpy,
    wrong_column,
)
from freshet.features.cells import (
    HIGH,
    NUMBER,
    ROUNDED,
    WORDS,
    excel_form,
    floats_of_texts,
    integers_of_decimals,
    integers_of_floats,
    integers_of_texts,
)
from freshet.types import F64, I64, Bool

DAY_S = 86_400
FINE = re.compile(r"[.,]\d{6}\d*[1-9]")  # a fraction finer than a microsecond


def read_integers(
    array: Any, form: CellFormat, type_: Primitive, unit: str | None
) -> tuple[I64, Bool | None]:
    """Convert to (N,) int64, exactly; a logical type has a `unit` (ms, us, ns, days; "time ms" of a day).

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
        return to_numpy(array.cast(pa.uint8()), 0).astype(np.int64), nulls
    if pa.types.is_integer(kind):
        values = to_numpy(array, 0)
        if values.dtype == np.uint64 and len(values) and values.max() > HIGH:
            row = int((values > HIGH).argmax())
            raise Misfit(row, "", expected, str(values[row]), text_hint("ids beyond 63 bits"))
        return values.astype(np.int64), nulls
    if pa.types.is_floating(kind):
        return integers_of_floats(array, expected, nulls)
    if pa.types.is_decimal(kind):
        return integers_of_decimals(array, expected, nulls)
    if pa.types.is_temporal(kind):
        return _integers_of_times(array, type_, unit, nulls)
    if is_textual(kind):
        if unit is None or unit.startswith("time"):
            return integers_of_texts(array, form, expected)
        a_time = "a date" if unit == "days" else "a time"
        expected = f"{UNIT_WORDS[unit]} since 1970, or {a_time} as ISO 8601 text"
        return _times_of_texts(array, form, unit, expected, exact=True)
    raise wrong_column(array, expected)


def read_times(array: Any, form: CellFormat, unit: str, logical_unit: str) -> tuple[I64, Bool | None]:
    """Convert an event's time to (N,) int64, rounded down to whole units.

    Args:
        array: Column of numbers, texts, timestamps or dates.
        form: Notation of cells.
        unit: Unit of numbers by the spec: s, ms, us, ns or days; "iso" for texts.
        logical_unit: Unit of the result: s, ms, us, ns or days.

    Raises Misfit for a value that is no time.
    """
    kind, nulls = array.type, nulls_of(array)
    other = "ISO 8601 text" if is_textual(kind) else "a timestamp"
    expected = f"a time (a number of {unit}, or {other})" if unit != "iso" else "a time as ISO 8601 text"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return _scale_timestamps(array, logical_unit, nulls, exact=False, expected=expected), nulls
    if is_textual(kind):
        return _times_of_texts(array, form, logical_unit, expected, exact=False, unit=unit)
    if unit == "iso":
        hint = 'times in numbers have their unit in the spec: s, ms, us, ns or days, such as time = "ts:ms"'
        raise wrong_column(array, expected, hint)
    if pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale <= 0):
        try:
            values, nulls = _read_longs(array, form, Primitive("long"), None)
        except Misfit as misfit:
            raise Misfit(misfit.row, "", expected, misfit.found) from None
        return _scale_integers(values, unit, logical_unit, expected, array), nulls
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        numbers = to_numpy(array.cast(pa.float64()), np.nan)
        return _scale_floats(numbers, unit, logical_unit, expected, array)
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.int64), np.ones(len(array), np.bool_)
    raise wrong_column(array, expected)


def _scale_integers(values: I64, unit: str, wanted: str, expected: str, array: Any) -> I64:
    have_ns, want_ns = UNIT_NS[unit], UNIT_NS[wanted]
    if want_ns >= have_ns:
        return values // (want_ns // have_ns)
    factor = have_ns // want_ns
    bad = np.abs(values.astype(np.float64)) * factor >= 2.0**63
    if bad.any():
        row = int(bad.argmax())
        raise Misfit(row, "", expected, show_value(array, row))
    return values * factor


def _scale_floats(numbers: F64, unit: str, wanted: str, expected: str, array: Any) -> tuple[I64, Bool | None]:
    scaled = numbers * (UNIT_NS[unit] / UNIT_NS[wanted])
    none = np.isnan(numbers)
    bad = ~none & ~(np.abs(scaled) < 2.0**62)
    if bad.any():
        row = int(bad.argmax())
        raise Misfit(row, "", expected, show_value(array, row))
    # the double nearest to 1700000000.123 is smaller than it, so add 1e-6 of a unit before rounding down
    whole = np.floor(np.where(none, 0.0, scaled) + 1e-6 * (wanted in ("s", "ms"))).astype(np.int64)
    return whole, none if none.any() else None


def _times_of_texts(
    array: Any, form: CellFormat, wanted: str, expected: str, *, exact: bool, unit: str | None = None
) -> tuple[I64, Bool | None]:
    """Parse cells as numbers in `unit`, else as ISO 8601 texts."""
    last = 0  # row of the error: where the parser that got furthest failed
    if unit != "iso":
        try:
            values, none = integers_of_texts(array, form, expected)
            return (values if unit is None else _scale_integers(values, unit, wanted, expected, array)), none
        except Misfit as misfit:
            last = misfit.row
    cells, nulls = blank_nulls(array, form.files.nulls)
    some = None if not nulls.any() else nulls
    if unit not in (None, "iso") and not exact:
        try:
            numbers = np.where(nulls, np.nan, floats_of_texts(array, form, expected)[0])
            rounded = pc.match_substring_regex(cells, f"^{excel_form(form).pattern}$").index(True).as_py()
            if not form.cells or rounded < 0:
                return _scale_floats(numbers, str(unit), wanted, expected, array)
        except Misfit as misfit:
            last = max(last, misfit.row)
        else:
            raise Misfit(rounded, "", expected, quote_text(cells[rounded].as_py()), ROUNDED)
    found = _parse_iso_texts(cells, nulls, exact=exact)
    if isinstance(found, int):
        last = max(last, found)
        text = cells[last].as_py()
        hint = ""
        if exact and FINE.search(text):
            hint = f"the field counts {UNIT_WORDS[wanted]}: round the column to them"
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


def _integers_of_times(
    array: Any, type_: Primitive, unit: str | None, nulls: Bool | None
) -> tuple[I64, Bool | None]:
    kind = array.type
    expected = f"{WORDS[type_.name].partition(' (')[0]} ({spell(type_)})"
    if unit is None:
        raise wrong_column(
            array,
            expected,
            'the schema says what the number counts: {"type": "long", "logicalType": "timestamp-millis"}',
        )
    if unit.startswith("time "):
        if not pa.types.is_time(kind):
            raise wrong_column(array, expected)
        have = pa.timestamp(kind.unit)
        ints = array.cast(pa.int32() if pa.types.is_time32(kind) else pa.int64()).cast(pa.int64())
        return _scale_timestamps(ints.cast(have), unit[5:], nulls, exact=True, expected=expected), nulls
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        raise wrong_column(array, expected)
    return _scale_timestamps(array, unit, nulls, exact=True, expected=expected), nulls


def _scale_timestamps(array: Any, wanted: str, nulls: Bool | None, *, exact: bool, expected: str) -> I64:
    """Convert timestamps and dates to whole units of `wanted`, rounded down unless `exact`."""
    kind = array.type
    values = to_numpy(array.cast(pa.int32() if pa.types.is_date32(kind) else pa.int64()), 0).astype(np.int64)
    have = "days" if pa.types.is_date32(kind) else "ms" if pa.types.is_date64(kind) else kind.unit
    common = math.gcd(UNIT_NS[have], UNIT_NS[wanted])
    up, down = UNIT_NS[have] // common, UNIT_NS[wanted] // common
    bad = np.abs(values.astype(np.float64)) * up >= 2.0**63
    if exact and down > 1:
        bad |= (values * up) % down != 0
    if nulls is not None:
        bad &= ~nulls
    if bad.any():
        row = int(bad.argmax())
        hint = f"the field counts {UNIT_WORDS[wanted]} in 64 bits: round the column to them"
        raise Misfit(row, "", expected, show_value(array, row), hint)
    scaled: I64 = (values * up) // down
    return scaled
