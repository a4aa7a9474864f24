"""Arrow tables (csv and parquet as pyarrow reads them) to the columns that `ColumnEncoder` takes, and to
a schema.

pyarrow is imported by whoever has a table; this module only asks the arrays for their buffers through numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from freshet.errors import ConfigError
from freshet.features.encoder import Column
from freshet.spec.avro import Array, AvroField, Primitive, Record, Type, Union
from freshet.types import BytesColumn

__all__ = ["arrow_columns", "arrow_schema"]


def arrow_columns(table: Any) -> dict[str, Column]:
    """Columns of a `pyarrow.Table` (or RecordBatch) by path; structs and lists become the columns of
    their parts.

    A column named `user.id` is the field `id` of the record `user`, as is the field of a struct `user`.
    Timestamps are milliseconds.
    """
    out: dict[str, Column] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
        if hasattr(array, "num_chunks"):  # combine_chunks of a Table's column may stay chunked
            array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
        _add(out, name, array)
    return out


def arrow_schema(table: Any, name: str = "Row") -> Record:
    """The schema whose records hold a table's rows: every field may be null, dots in names are records."""
    tree: dict[str, Any] = {}
    for column in table.schema:
        node = tree
        *parents, leaf = column.name.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = _avro_type(column.type, f"{name}_{column.name.replace('.', '_')}")
    return _record(tree, name)


def _record(tree: dict[str, Any], name: str) -> Record:
    fields = []
    for part, inside in tree.items():
        made: Type = _record(inside, f"{name}_{part}") if isinstance(inside, dict) else inside
        is_plain = isinstance(made, Primitive)
        fields.append(AvroField(part, Union((Primitive("null"), made)) if is_plain else made, is_plain, None))
    return Record(name, tuple(fields))


def _avro_type(arrow: Any, name: str) -> Type:
    text = str(arrow)
    if text.startswith("dictionary"):
        return _avro_type(arrow.value_type, name)
    if text.startswith(("list", "large_list")):
        return Array(_avro_type(arrow.value_type, name))
    if text.startswith("struct"):
        return _record({f.name: _avro_type(f.type, f"{name}_{f.name}") for f in arrow}, name)
    if text.startswith(("int", "uint", "timestamp", "date")):
        return Primitive("long")
    known: dict[str, Type] = {
        "bool": Primitive("boolean"),
        "float": Primitive("float"),
        "halffloat": Primitive("float"),
        "double": Primitive("double"),
        "string": Primitive("string"),
        "large_string": Primitive("string"),
        "binary": Primitive("bytes"),
        "large_binary": Primitive("bytes"),
        "null": Primitive("string"),
    }
    if text not in known:
        raise ConfigError(
            "table", name, text, "numbers, booleans, strings, timestamps, lists or structs of them"
        )
    return known[text]


def _add(out: dict[str, Column], path: str, array: Any) -> None:
    text = str(array.type)
    nulls = np.asarray(array.is_null().to_numpy(zero_copy_only=False), np.bool_) if array.null_count else None
    if text.startswith("dictionary"):
        _add(out, path, array.dictionary_decode())
    elif text.startswith("struct"):
        for i, f in enumerate(array.type):
            _add(out, f"{path}.{f.name}", array.field(i) if not array.null_count else array.flatten()[i])
    elif text.startswith(("list", "large_list")):
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        out[path] = Column(None, nulls, np.cumsum(lengths, dtype=np.int64))
        _add(out, f"{path}[]", array.flatten())
    elif text in ("string", "large_string", "binary", "large_binary", "null"):
        out[path] = Column(_bytes(array, text), nulls)
    elif text.startswith(("timestamp", "date")):
        out[path] = Column(array.cast("timestamp[ms]").cast("int64").fill_null(0).to_numpy(), nulls)
    elif text == "bool" or text.startswith(("int", "uint")):
        filled = array.fill_null(False if text == "bool" else 0)
        out[path] = Column(filled.to_numpy(zero_copy_only=False), nulls)
    else:
        out[path] = Column(array.cast("float64").fill_null(np.nan).to_numpy(zero_copy_only=False), nulls)


def _bytes(array: Any, text: str) -> BytesColumn:
    """Strings of an Arrow array, whose offsets and data are used as they are."""
    if text == "null":
        return BytesColumn(np.empty(0, np.uint8), np.zeros(len(array), np.int64))
    wide = array.cast("large_binary" if "binary" in text else "large_string").fill_null(
        b"" if "binary" in text else ""
    )
    _, offsets, data = wide.buffers()
    at = np.frombuffer(offsets, np.int64)[wide.offset : wide.offset + len(wide) + 1]
    if not len(at):
        return BytesColumn.of([])
    raw = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return BytesColumn(raw[at[0] : at[-1]], at[1:] - at[0])
