"""Columns of files to Avro records, so that csv and parquet reach the same keys as events do.

A column is named by the path of its field (`items.price`); the schema's records nest by these paths. Integers
become long, fractions double, truths boolean, text string; a column with nulls becomes a union with null.
Letters: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from freshet.errors import BadInput
from freshet.features.encoder import Column, ColumnEncoder
from freshet.spec.avro import Array, AvroField, Primitive, Record, Type, Union
from freshet.types import F64, I64, U8, Bool, BytesColumn

__all__ = ["FileColumn", "encode_columns", "schema_of_columns"]

ColumnType = Literal["integer", "real", "truth", "text"]
_AVRO: Mapping[str, Any] = {"integer": "long", "real": "double", "truth": "boolean", "text": "string"}


@dataclass(frozen=True, slots=True, eq=False)
class FileColumn:
    """One column of N rows. Exactly one of the value arrays is given, as `type` says."""

    type: ColumnType
    integers: I64 | None = None  # (V,); V is N, or for lists the sum of their lengths
    reals: F64 | None = None  # (V,)
    truths: U8 | None = None  # (V,) 0 or 1
    text: BytesColumn | None = None  # (V,) UTF-8
    valid: Bool | None = None  # (N,) false: null; None: no nulls
    list_ends: I64 | None = None  # (N,) ends of each row's values; None: one value a row


def schema_of_columns(columns: Mapping[str, FileColumn], name: str) -> Record:
    """The record that these columns make, nested by their paths; fields in the order of first appearance.

    Raises BadInput if a path is both a field and a record (`user` beside `user.id`).
    """
    return _record(columns, name, "")


def encode_columns(columns: Mapping[str, FileColumn], schema: Record, rows: int) -> BytesColumn:
    """(N,) Avro records of `schema_of_columns(columns)`, without framing.

    Raises ValueError if columns' lengths do not agree, BadInput for text that is not UTF-8.
    """
    made: dict[str, Column] = {}
    for path, column in columns.items():
        nulls = None if column.valid is None else ~np.asarray(column.valid, np.bool_)
        given = (column.text, column.integers, column.reals, column.truths)
        values = next(v for v in given if v is not None)
        if column.list_ends is None:
            made[path] = Column(values, nulls)
        else:
            made[path] = Column(None, nulls, column.list_ends)
            made[f"{path}[]"] = Column(values)
    encoded = ColumnEncoder(schema, list(made)).encode(made, rows)
    if encoded.bad:
        raise BadInput(f"row {encoded.bad[0]}")
    return encoded.records


def _record(columns: Mapping[str, FileColumn], name: str, prefix: str) -> Record:
    fields: list[AvroField] = []
    seen: set[str] = set()
    for path in columns:
        if not path.startswith(prefix):
            continue
        head, _, rest = path[len(prefix) :].partition(".")
        if head in seen:
            continue
        seen.add(head)
        if rest and prefix + head in columns:
            raise BadInput(
                f"columns {prefix + head!r} and {path!r}: a column cannot hold a value and have fields too"
            )
        nested = _record(columns, f"{name}_{head}", f"{prefix}{head}.") if rest else None
        fields.append(AvroField(head, nested or _type(columns[path])))
    return Record(name, tuple(fields))


def _type(column: FileColumn) -> Type:
    bare: Type = Primitive(_AVRO[column.type])
    if column.list_ends is not None:
        bare = Array(bare)
    return bare if column.valid is None else Union((Primitive("null"), bare))
