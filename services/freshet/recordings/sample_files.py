"""Files of samples or events with columns, converted to Avro, with checked labels and times.

Types come from the schema of served events. Without one they follow from the features; a first pass over all
files then decides whether an id is a number or a text, the same for all files. Needs the extra `replay`.

Letters: N rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from freshet.config.avro.schema import (
    Array,
    AvroField,
    Primitive,
    Record,
    Type,
    Union,
    field_at,
    sample_schema,
)
from freshet.config.spec.model import Feature, Files, Label, Spec, TimeField
from freshet.config.spec.rules import bounds_text, within
from freshet.config.spec.schemas import load_schema
from freshet.errors import BadInput
from freshet.features.arrow import TableEncoder, find_column, strip_null
from freshet.features.arrow_arrays import CellFormat, Misfit, null_words, unwrap_array
from freshet.features.cell_times import read_times
from freshet.features.cells import read_booleans, read_floats
from freshet.recordings.event_times import EventTimes
from freshet.recordings.tables import Batch, TableFile
from freshet.types import F32, I64, U64, Bool, BytesColumn


def event_rows(
    path: Path, time: TimeField, schema: Record, files: Files
) -> Iterator[tuple[int, I64, BytesColumn, Callable[[int], str]]]:
    """Read events from a file with columns.

    Yields (number of the first row from 0, (N,) int64 event times in µs, N Avro records, function from the
    number of a row to its place).

    Raises BadInput, with file and row, if a value cannot be read or does not fit its field.
    """
    file = TableFile(path, files)
    form = CellFormat(files, cells=file.cells)
    encoder = TableEncoder(schema, form, time_units={time.path: time.unit}, every_column=True)
    for batch in file.batches():
        try:
            times_us = _event_times(find_column(batch.rows, time.path), time, form)
            records = encoder.encode(batch.rows)
        except Misfit as misfit:
            raise refused(file, batch, misfit, misfit.path or time.path) from None
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        yield batch.first, times_us, records, file.where


def _event_times(array: Any, time: TimeField, form: CellFormat) -> I64:
    if array is None:
        raise BadInput(f"no column {time.path!r}, the event's time")
    values, none = read_times(unwrap_array(array), form, time.unit, "us")
    if none is not None and none.any():
        raise Misfit(int(none.argmax()), time.path, "a time: every event needs one", "nothing")
    return values


NUMBER = Primitive("double")


@dataclass(frozen=True, slots=True, eq=False)
class SampleRows:
    """N consecutive rows of a file."""

    first_row: int  # number of the first row, over all files
    schema: Record
    payloads: BytesColumn  # (N,) Avro records of that schema, without framing
    times_ms: I64  # (N,) event time
    labels: Mapping[str, tuple[F32, Bool]]  # by label: (N,) values, (N,) whether the row has one
    requests: U64  # (N,) equal for rows of one request
    share: float = 1.0  # progress over all files at the end of these rows, estimated

    def __len__(self) -> int:
        return len(self.times_ms)


def needed_columns(spec: Spec) -> list[str]:
    """Return the columns that the spec requires: fields of features, the event time, the labels."""
    return list(
        dict.fromkeys([*_fields(spec), spec.events.served.time.path, *(label.name for label in spec.labels)])
    )


def read_samples(
    spec: Spec, paths: Sequence[Path], request: str | None = None, seen: EventTimes | None = None
) -> Iterator[SampleRows]:
    """Read samples from files, in the order of the rows.

    Args:
        request: column that groups consecutive rows with equal values into a request; all rows of a request
            are scored before any of them trains. A row without a value is a request of its own.
            None: every row is a request.
        seen: checks of event times.

    Raises:
        ConfigError: a column is missing.
        BadInput: a file cannot be read, or a value does not fit its field, loss or time; the message has
            file, row and column.
    """
    wanted = [*needed_columns(spec), *([request] if request else [])]
    files = [TableFile(path, spec.files) for path in paths]
    columns = [file.columns_of(wanted) for file in files]
    schema = _schema(spec, files, columns)
    row = 0
    run = _Runs()
    for number, file in enumerate(files):
        reader = _Reader(spec, file, schema, request, run)
        for batch in file.batches(columns[number]):
            rows = reader.convert(batch, row, (number + batch.share) / len(files))
            if seen is not None:
                seen.add(rows.times_ms, partial(_place, file, batch))
            row += len(rows)
            yield rows


def _place(file: TableFile, batch: Batch, row: int) -> str:
    return file.where(batch.first + row)


NO_REQUEST = -1
"""Code of a row with null in the request column: the row is a request of its own."""


class _Runs:
    """Numbers requests: each change of the request column's value begins a new one, and so does each null."""

    def __init__(self) -> None:
        self._last: object = _Runs
        self._number = 0

    def numbers(self, array: Any) -> U64:
        """Return (N,) uint64 for the N values of an Arrow array."""
        cells = unwrap_array(array)
        if pa.types.is_nested(cells.type):
            raise BadInput(f"the column of requests is {cells.type}; expected numbers, texts or times")
        coded = cells.dictionary_encode()
        codes = coded.indices.fill_null(NO_REQUEST).to_numpy(zero_copy_only=False)
        first, last = _comparable(cells[0]), _comparable(cells[len(cells) - 1])
        change = np.diff(codes, prepend=codes[0]) != 0
        change[0] = first != self._last
        change |= codes == NO_REQUEST
        numbers = (np.cumsum(change) + self._number).astype(np.uint64)
        self._last, self._number = last, int(numbers[-1])
        return numbers


def _comparable(scalar: Any) -> object:
    """Convert an Arrow scalar to a Python value; times outside Python's range become number and type."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        return scalar.value, str(scalar.type)


class _Reader:
    """Converts batches of one file to samples."""

    def __init__(self, spec: Spec, file: TableFile, schema: Record, request: str | None, runs: _Runs) -> None:
        self._spec, self._file, self._schema, self._request, self._runs = spec, file, schema, request, runs
        self._form = CellFormat(spec.files, cells=file.cells)
        self._encoder = TableEncoder(schema, self._form)

    def convert(self, batch: Batch, first_row: int, share: float) -> SampleRows:
        """Convert one batch. Raises BadInput at the first value that does not fit."""
        spec, rows = self._spec, batch.rows
        time = spec.events.served.time
        labels = {
            label.name: self._convert_column(batch, label.name, partial(_label, label, self._form))
            for label in spec.labels
        }
        times_ms = self._convert_column(batch, time.path, lambda array: _times(array, self._form, time.unit))
        payloads = self._convert_column(batch, "", lambda _: self._encoder.encode(rows))
        if self._request is None:
            requests = np.arange(first_row + 1, first_row + len(rows) + 1, dtype=np.uint64)
        else:
            requests = self._convert_column(batch, self._request, self._number_requests)
        return SampleRows(first_row, self._schema, payloads, times_ms, labels, requests, share)

    def _number_requests(self, array: Any) -> U64:
        words = self._spec.files.text_nulls if self._file.cells else ()
        return self._runs.numbers(null_words(array, words) if words else array)

    def _convert_column(self, batch: Batch, column: str, convert: Callable[[Any], Any]) -> Any:
        try:
            return convert(unwrap_array(find_column(batch.rows, column)) if column else None)
        except Misfit as misfit:
            raise refused(self._file, batch, misfit, misfit.path or column) from None
        except BadInput as error:
            raise BadInput(f"{self._file.path}: {error}") from None


def refused(file: TableFile, batch: Batch, misfit: Misfit, column: str) -> BadInput:
    """Build the error of a value that does not fit, with its place in the file."""
    hint = f"\n  {misfit.hint}" if misfit.hint else ""
    if file.cells and misfit.found == f"'{column}'":
        hint += "\n  is it a header line? take it out, and leave [files] columns out for a file that has one"
    where = file.where(batch.first + misfit.row)
    return BadInput(f"{where}: {column}: expected {misfit.expected}, found {misfit.found}{hint}")


def _fields(spec: Spec) -> list[str]:
    return list(dict.fromkeys(f.field for f in spec.features if f.field is not None))


def _schema(spec: Spec, files: Sequence[TableFile], columns: Sequence[Sequence[str]]) -> Record:
    """Build the schema of samples: the fields of features, each nullable."""
    served = spec.events.served
    if served.schema is not None:
        sample = sample_schema(load_schema(spec, served), served.explode)
        types = {path: _field_type(sample, path) for path in _fields(spec)}
    else:
        types = _infer_types(spec, files, columns)
    return nested(types, "sample")


def _field_type(sample: Record, path: str) -> Type:
    found = field_at(sample, path)
    if found.repeated and not isinstance(found.type, Array):
        return Array(_nullable(found.type) if found.nullable else found.type)
    return found.type


def nested(types: Mapping[str, Type], name: str) -> Record:
    """Build the record with nullable fields at the given paths.

    Raises BadInput if a path is both a field and a record (`user` beside `user.id`).
    """
    return _nested(types, name, "")


def _nested(types: Mapping[str, Type], name: str, prefix: str) -> Record:
    fields: list[AvroField] = []
    seen: set[str] = set()
    for path, type_ in types.items():
        if not path.startswith(prefix):
            continue
        head, _, rest = path[len(prefix) :].partition(".")
        if head in seen:
            continue
        seen.add(head)
        if rest and prefix + head in types:
            raise BadInput(
                f"columns {prefix + head!r} and {path!r}: a column cannot hold a value and have fields too"
            )
        inner: Type = (
            _nested(types, f"{name}_{head}", f"{prefix}{head}.") if rest else _nullable(strip_null(type_)[0])
        )
        fields.append(AvroField(head, inner))
    return Record(name, tuple(fields))


def _nullable(type_: Type) -> Type:
    branches = type_.branches if isinstance(type_, Union) else (type_,)
    return Union((Primitive("null"), *branches))


def _infer_types(spec: Spec, files: Sequence[TableFile], columns: Sequence[Sequence[str]]) -> dict[str, Type]:
    """Infer types of fields without a schema: numbers for dense features, and one type over all files for
    each id."""
    types: dict[str, Type] = {}
    ids: dict[str, Feature] = {}
    for feature in spec.features:
        if feature.field is None:
            continue
        if feature.kind in ("id", "list"):
            ids[feature.field] = feature
        types.setdefault(feature.field, NUMBER)
    if not ids:
        return types
    kinds: dict[str, set[str]] = {path: set() for path in ids}
    separator = spec.files.list_separator
    lists = {path for path, feature in ids.items() if feature.kind == "list" and separator is not None}
    for file, names in zip(files, columns, strict=True):
        _add_kinds(spec, file, names, kinds, lists)
    for path in ids:
        type_ = _common_type(path, kinds[path])
        types[path] = Array(type_) if path in lists else type_
    return types


WHOLE = r"^-?(?:0|[1-9][0-9]{0,17})(?:\.0)?$"
LONG_WHOLE = re.compile(r"-?[1-9][0-9]{18}(\.0)?")


def _add_kinds(
    spec: Spec, file: TableFile, names: Sequence[str], kinds: dict[str, set[str]], lists: set[str]
) -> None:
    """Add the kinds of values in a file's columns to `kinds`, and columns of lists to `lists`."""
    if file.cells:
        open_ = [path for path in kinds if "text" not in kinds[path]]
        for batch in file.batches(file.columns_of(open_)) if open_ else ():
            for path in open_:
                if "text" not in kinds[path]:
                    kinds[path] |= _kinds_of_cells(spec, find_column(batch.rows, path), path in lists)
        return
    for batch in file.batches(names):
        for path in kinds:
            array = unwrap_array(find_column(batch.rows, path))
            while hasattr(array.type, "value_type") and not pa.types.is_dictionary(array.type):
                lists.add(path)
                array = unwrap_array(array.flatten())
            kinds[path] |= _kinds_of_type(file, path, array.type)
        return


def _kinds_of_cells(spec: Spec, cells: Any, is_list: bool) -> set[str]:
    none = pa.array([b"", *(w.encode() for w in spec.files.nulls)], cells.type)
    separator = spec.files.list_separator
    if is_list and separator is not None:
        cells = pc.split_pattern(cells, separator.encode()).flatten()
    cells = pc.unique(cells.drop_null())
    values = cells.filter(pc.invert(pc.is_in(cells, value_set=none)))
    if not len(values):
        return set()
    try:
        texts = values.cast(pa.string())
    except pa.ArrowInvalid:
        return {"text"}
    whole = pc.match_substring_regex(texts, WHOLE)
    others = texts.filter(pc.invert(whole))
    if not len(others):
        return {"whole"}
    for text in others.to_pylist():
        if not (LONG_WHOLE.fullmatch(text) and -(2**63) <= int(text.removesuffix(".0")) < 2**63):
            break
    else:
        return {"whole"}
    if len(others) == len(texts) and set(texts.to_pylist()) <= {"true", "false", "True", "False"}:
        return {"truth"}
    return {"text"}


def _kinds_of_type(file: TableFile, path: str, kind: Any) -> set[str]:
    if pa.types.is_null(kind):
        return set()
    if pa.types.is_boolean(kind):
        return {"truth"}
    if pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale == 0):
        return {"whole"}
    if pa.types.is_floating(kind):
        return {"fraction"}
    if pa.types.is_temporal(kind) or pa.types.is_struct(kind) or pa.types.is_map(kind):
        raise BadInput(
            f"{file.path}: column {path!r} is {kind}; expected integers, fractions, booleans, text or"
            " lists of them\n  a schema says what it means: events.served.schema in the spec"
        )
    return {"text"}


def _common_type(path: str, kinds: set[str]) -> Type:
    """Return the type that holds the values of all files without loss. Raises BadInput if there is none."""
    if not kinds or kinds <= {"truth"}:
        return Primitive("boolean") if kinds else Primitive("string")
    if kinds <= {"whole", "truth"} or kinds == {"whole", "fraction"}:
        return Primitive("long")
    if kinds == {"fraction"}:
        return NUMBER
    if "fraction" in kinds:
        raise BadInput(
            f"column {path!r} holds fractions in one file and texts in another: an id cannot be both\n"
            "  a schema says which it is: events.served.schema in the spec"
        )
    return Primitive("string")


def _label(label: Label, form: CellFormat, array: Any) -> tuple[F32, Bool]:
    """Return (N,) values of a label, and (N,) whether the row has one.

    Raises Misfit if a value does not fit the label's loss or bounds.
    """
    if label.loss == "logloss":
        return _truth_label(label, array, form)
    try:
        values, none = read_floats(array, form, Primitive("float"))
    except Misfit as misfit:
        misfit.expected = f"a finite number, as the loss of label {label.name} is {label.loss}"
        raise
    found, labelled = values.astype(np.float32), np.ones(len(values), np.bool_) if none is None else ~none
    if label.bounds is not None:
        outside = labelled & ~within(label.bounds, found)
        if outside.any():
            row = int(outside.argmax())
            expected = f"{bounds_text(label.bounds)}, as labels.{label.name}.bounds says"
            hint = "leave the cell empty where the value is not known; or state wider bounds in the spec"
            raise Misfit(row, "", expected, f"{values[row]:g}", hint)
    return found, labelled


def _truth_label(label: Label, array: Any, form: CellFormat) -> tuple[F32, Bool]:
    try:
        truth, none = read_booleans(array, form)
    except Misfit as misfit:
        misfit.expected = f"0 or 1 (or false or true), as the loss of label {label.name} is logloss"
        misfit.hint = _label_hint(misfit.found, label)
        raise
    return truth.astype(np.float32), np.ones(len(truth), np.bool_) if none is None else ~none


def _label_hint(found: str, label: Label) -> str:
    text = found.strip("'\"")
    try:
        number = float(text)
    except ValueError:
        return "write 1 where it happened and 0 where it did not; leave the cell empty if it is unknown"
    if number == -1:
        return "labels of -1 and 1 are 0 and 1 here: write 0 for -1"
    return f'a number to predict has a loss of its own: labels.{label.name} = {{ loss = "huber" }} or "mse"'


def _times(array: Any, form: CellFormat, unit: str) -> I64:
    values, none = read_times(array, form, unit, "ms")
    if none is not None and none.any():
        row = int(none.argmax())
        raise Misfit(row, "", "a time: every row needs one", "nothing")
    return values
