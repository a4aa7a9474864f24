"""Encoder from columns of csv and Parquet to Avro records, so that keys are computed as for events.

Letters: N rows, G rows that fit the schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet import _native
from freshet.config.avro.schema import Array, Map, Record, Type, Union, spell
from freshet.errors import ConfigError
from freshet.features.transcode import RefusedEvent
from freshet.features.writer import compile_writer, op_of
from freshet.types import I64, Bool, BytesColumn

INTS, DOUBLES, BYTES, LIST = range(4)  # SourceColumn::Kind in avro_columns.hpp
ON_PATH, NONE = -1, -2
WHY = (
    "",
    "a value, as the field is never null",
    "a number in range",
    "a whole number",
    "UTF-8",
    "one of the enum's symbols",
    "as many bytes as the fixed has",
    "0 or 1",
)
"""Expected values, by the number of `ColumnWhy` in avro_columns.hpp."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """Numbers or byte strings, with a mask of nulls if there are any.

    A nullable record has a column of integers, of which only the mask is used. A list has `ends` instead of
    values: the items of row r are rows [ends[r-1], ends[r]) of the columns below it.
    """

    values: NDArray[Any] | BytesColumn | None
    """(N,) integers, booleans, floats (NaN is null in a nullable field) or byte strings."""
    nulls: Bool | None = None  # (N,) True where null
    ends: I64 | None = None  # (N,) end of each list


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRows:
    """Rows as Avro records, and the rows that do not fit."""

    records: BytesColumn  # (G,)
    rows: I64  # (G,) row of each record
    bad: Sequence[RefusedEvent]


class ColumnEncoder:
    """Encoder of columns by one schema. Thread-safe."""

    def __init__(self, schema: Record, columns: Sequence[str]) -> None:
        """Compile the schema.

        Args:
            schema: Schema of the records to write.
            columns: Paths, such as `user.id`. The ends of a list have its path (`items`); its items have
                `items[]`, or `items[].id` if they are records.

        Raises:
            ConfigError: The schema lacks a path, or the list around a path has no column.
        """
        self._writer = compile_writer(schema)
        self._columns = tuple(columns)
        self._schema = schema
        for path in columns:
            if path not in self._writer.nodes:
                known = ", ".join(dict.fromkeys(p for p in self._writer.places if p))
                raise ConfigError(f"schema {schema.name!r}", path, "a column", f"one of its fields: {known}")
        self._source_of = self._sources()

    def encode(self, columns: Mapping[str, Column], rows: int) -> EncodedRows:
        """Encode N = `rows` rows.

        Raises:
            ConfigError: A column's type does not fit its field.
            ValueError: Columns of one level have different lengths, or a field without default or null has no
                column.
        """
        sources = [_source(columns[path], path) for path in self._columns]
        for path, source in zip(self._columns, sources, strict=True):
            _check_kind(self._writer.types[self._writer.nodes[path]], source[0], path)
        records, good, bad = _native.encode_columns(self._writer.native, sources, self._source_of, rows)
        refused = [
            RefusedEvent(row, self._writer.places[node], WHY[why], "another value")
            for row, why, node in bad.tolist()
        ]
        return EncodedRows(BytesColumn(*records), good, refused)

    def _sources(self) -> NDArray[np.int32]:
        """Return each node's column: an index, ON_PATH for a record above a column, or NONE."""
        out = np.full(len(self._writer.places), NONE, np.int32)
        out[0] = ON_PATH
        for c, path in enumerate(self._columns):
            out[self._writer.nodes[path]] = c
        for path in self._columns:
            for parent in _parents(path):
                node = self._writer.nodes[parent]
                inner = self._writer.types[node]
                is_record = isinstance(inner, Record) or (
                    isinstance(inner, Union)
                    and len(inner.others) == 1
                    and isinstance(inner.others[0], Record)
                )
                if out[node] == NONE and not is_record:
                    raise ConfigError(
                        f"schema {self._schema.name!r}",
                        parent,
                        spell(inner),
                        f"a column of its own, with ends, for {path}",
                    )
                if out[node] == NONE:
                    out[node] = ON_PATH
        return out


def _parents(path: str) -> list[str]:
    """Return the paths above a path: for `items[].tag.name`, `items[].tag`, `items[]` and `items`."""
    out: list[str] = []
    while True:
        path = path.removesuffix("[]") if path.endswith("[]") else path.rpartition(".")[0]
        if not path:
            return out
        out.append(path)


def _source(column: Column, path: str) -> _native.ColumnTuple:
    none: Any = np.empty(0, np.int64)
    nulls = (
        np.empty(0, np.uint8)
        if column.nulls is None
        else np.ascontiguousarray(column.nulls, np.bool_).view(np.uint8)
    )
    if column.ends is not None:
        return LIST, none, np.ascontiguousarray(column.ends, np.int64), nulls
    if isinstance(column.values, BytesColumn):
        return BYTES, column.values.data, column.values.ends, nulls
    values = column.values
    if values is not None and values.dtype.kind in "iub":
        if values.dtype == np.uint64 and len(values) and values.max() > np.iinfo(np.int64).max:
            raise ConfigError(
                "columns", path, int(values.max()), "integers of 63 bits and a sign", "as Avro's long"
            )
        return INTS, np.ascontiguousarray(values, np.int64), none, nulls
    if values is not None and values.dtype.kind == "f":
        return DOUBLES, np.ascontiguousarray(values, np.float64), none, nulls
    found = None if values is None else str(values.dtype)
    raise ConfigError("columns", path, found, "integers, booleans, floats, or a BytesColumn of strings")


def _check_kind(type_: Type, kind: int, path: str) -> None:
    branches = type_.others if isinstance(type_, Union) else (type_,)
    names = {op_of(b) for b in branches}
    takes = {
        INTS: {"boolean", "int", "long", "float", "double", "record"},
        DOUBLES: {"boolean", "int", "long", "float", "double"},
        BYTES: {"string", "bytes", "fixed", "enum"},
        LIST: {"array"},
    }[kind]
    if (
        not names & takes
        or any(isinstance(b, Map) for b in branches)
        or (kind != LIST and isinstance(type_, Array))
    ):
        found = ("integers", "floats", "strings", "a list")[kind]
        raise ConfigError("columns", path, found, f"a column for {spell(type_)}")
