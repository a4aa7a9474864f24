"""Encoder from Arrow record batches of csv, Parquet and Arrow files to Avro records of the user's schema.

The schema decides the type of a column, never the file. A value that does not fit its field exactly is
refused with its row. A column belongs to the field of the path that is its name (`user.id`), or to the field
of a struct (`id` of the struct `user`). Needs the extra `replay` (pyarrow). Letters: N rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from freshet.config.avro.schema import (
    Array,
    AvroField,
    Enum,
    Fixed,
    Map,
    Primitive,
    Record,
    Type,
    Union,
    is_null,
    spell,
)
from freshet.config.avro.types import time_unit
from freshet.config.spec.inputs import UNIT_OF_NS
from freshet.errors import BadInput
from freshet.features.arrow_arrays import (
    CellFormat,
    Misfit,
    is_binary,
    is_list,
    is_text,
    nulls_of,
    unwrap_array,
)
from freshet.features.cell_times import read_integers, read_times
from freshet.features.cells import is_raw, read_booleans, read_floats, read_texts
from freshet.features.encoder import WHY, Column, ColumnEncoder
from freshet.features.writer import UNFIT, encode_value
from freshet.types import BytesColumn

__all__ = ["CellFormat", "Misfit", "TableEncoder"]

ROWS_OF_ITEMS = (
    "\n  an event has its list in one row: a column of lists in Parquet, or JSON lines; a row for each item"
    " is a sample, as `freshet backtest` reads them"
)
PRINTED_LIST = re.compile(rb"\[(|[^\[\]]*[,\s'\"][^\[\]]*|[\d.+-]+)\]|\{(|[^{}]*[,\"][^{}]*)\}")
"""A list as pandas, NumPy, DuckDB or PostgreSQL prints it. `[sale]` does not match: it may be a value."""


class TableEncoder:
    """Encodes record batches by one schema. Not thread-safe."""

    def __init__(
        self,
        schema: Record,
        form: CellFormat,
        *,
        time_units: Mapping[str, str] | None = None,
        every_column: bool = False,
    ) -> None:
        """Create an encoder.

        Args:
            schema: Schema of the records to write.
            form: Notation of cells; batches of csv hold binary columns (`form.cells`).
            time_units: Unit (s, ms, us, ns, days, iso) by path, for fields that are an event's time; times
                round down to it.
            every_column: Refuse a column without a field in the schema, and a null struct where the schema's
                record is never null. If false, the former is ignored, and the fields of the latter are null.
        """
        self._schema, self._form, self._every_column = schema, form, every_column
        self._time_units = dict(time_units or {})
        self._encoders: dict[tuple[str, ...], ColumnEncoder] = {}

    def columns(self, batch: Any) -> dict[str, Column]:
        """Return the columns of a `pyarrow.RecordBatch` by path, as `ColumnEncoder` expects them.

        Raises:
            Misfit: A value does not fit its field; names the first, with its row in the batch.
            BadInput: A required field has no column.
        """
        tree = _tree(batch)
        if self._every_column:
            self._refuse_unknown(tree, self._schema, "")
        builder = _ColumnBuilder(self._form, self._time_units, strict=self._every_column)
        builder.record(self._schema, "", tree)
        return builder.out

    def encode(self, batch: Any) -> BytesColumn:
        """Encode a batch's rows to (N,) Avro records without framing. Raises the errors of `columns`."""
        columns = self.columns(batch)
        names = tuple(columns)
        if names not in self._encoders:
            self._encoders[names] = ColumnEncoder(self._schema, names)
        encoded = self._encoders[names].encode(columns, len(batch))
        if encoded.bad:
            first = encoded.bad[0]
            raise self._refused(batch, columns, first.index, first.path, first.expected)
        return encoded.records

    def _refused(self, batch: Any, columns: Mapping[str, Column], row: int, path: str, why: str) -> Misfit:
        """Return the error for a value that the native encoder refused."""
        type_ = _type_at(self._schema, path)
        found = "another value" if "[]" in path else _shown_at(columns.get(path), row)
        hint = ""
        if isinstance(type_, Enum):
            why = f"one of {', '.join(type_.symbols)}"
        elif isinstance(type_, Fixed):
            why = f"{type_.size} bytes"
        elif why == WHY[1]:
            found = "nothing"
            why = f"a value: the schema never lets {path} be null"
            hint = f'write one, or let the field be null: "type": ["null", {_quoted(type_)}]'
            if isinstance(type_, Primitive) and type_.name == "string" and self._form.cells:
                hint += '; an empty text is written ""'
        elif why == WHY[4]:
            why = "text in UTF-8"
            hint = 'bytes that are no text have a field of type "bytes" in the schema'
            if self._form.cells:
                hint = 'if the file is in another encoding, the spec says which: [files] encoding = "latin-1"'
        elif type_ is not None:
            why = f"{why} ({spell(type_)})"
        return Misfit(row, path.replace("[]", ""), why, found, hint)

    def _refuse_unknown(self, node: _Node, record: Record, path: str) -> None:
        for name, inner in node.inner.items():
            at = f"{path}.{name}" if path else name
            found = record.field(name)
            if found is None:
                raise _unknown(at, record)
            type_ = strip_null(found.type)[0]
            if isinstance(type_, Record):
                self._refuse_unknown(inner, type_, at)
            if inner.array is not None:
                self._refuse_unknown_parts(inner.array.type, type_, at)

    def _refuse_unknown_parts(self, kind: Any, type_: Type, at: str) -> None:
        """Refuse fields of a struct that the schema's record lacks."""
        if isinstance(type_, Array) and is_list(kind):
            self._refuse_unknown_parts(kind.value_type, strip_null(type_.items)[0], at)
        if not isinstance(type_, Record) or not pa.types.is_struct(kind):
            return
        for i in range(kind.num_fields):
            part, path = kind.field(i), f"{at}.{kind.field(i).name}"
            found = type_.field(part.name)
            if found is None:
                raise _unknown(path, type_)
            self._refuse_unknown_parts(part.type, strip_null(found.type)[0], path)


@dataclass(slots=True)
class _Node:
    """A path of a batch: a column, or the columns below it."""

    array: Any = None
    inner: dict[str, _Node] = field(default_factory=dict)

    def child(self, name: str) -> _Node | None:
        """Return the node of a field; None if there is none."""
        return self.inner.get(name) or (None if self.array is None else _child(self.array, name))


def _unknown(path: str, record: Record) -> BadInput:
    known = ", ".join(f.name for f in record.fields)
    return BadInput(
        f"column {path!r}: no field of the schema {record.name}, which has {known}\n"
        "  leave the column out, or add the field to the schema"
    )


def _twice(path: str, many: int) -> BadInput:
    return BadInput(f"expected one column {path!r}, found {many}\n  rename the others, or leave them out")


def _empty_struct(record: Record, array: Any) -> Any:
    """Return null structs, as many as the array has values."""
    return pa.nulls(len(array), pa.struct([(f.name, pa.null()) for f in record.fields]))


def find_column(batch: Any, path: str) -> Any:
    """Return the column at a path of a batch; None if there is none."""
    node: _Node | None = _tree(batch)
    for part in path.split("."):
        node = node.child(part) if node is not None else None
    return None if node is None else node.array


def _tree(batch: Any) -> _Node:
    root = _Node()
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        node = root
        for part in name.split("."):
            node = node.inner.setdefault(part, _Node())
        if node.array is not None:
            raise _twice(name, batch.schema.names.count(name))
        node.array = array
    _check_tree(root, "")
    return root


def _check_tree(node: _Node, path: str) -> None:
    for name, inner in node.inner.items():
        at = f"{path}.{name}" if path else name
        if inner.inner and inner.array is not None:
            kind, below = inner.array.type, next(iter(inner.inner))
            if not pa.types.is_struct(kind):
                both = f"columns {at!r} and {f'{at}.{below}'!r}"
                raise BadInput(f"{both}: a column cannot hold a value and have fields too")
            for part in inner.inner:
                if kind.get_all_field_indices(part):
                    raise _twice(f"{at}.{part}", 2)
        _check_tree(inner, at)


def _child(array: Any, name: str) -> _Node | None:
    kind = array.type
    if pa.types.is_struct(kind):
        if kind.get_field_index(name) < 0:
            many = len(kind.get_all_field_indices(name))
            if many:
                raise _twice(name, many)
            return None
        return _Node(pc.struct_field(array, name))
    if pa.types.is_map(kind) and is_text(kind.key_type):
        return _Node(pc.map_lookup(array, pa.scalar(name, kind.key_type), "first"))
    if is_list(kind) and pa.types.is_struct(kind.value_type):
        inner = _child(array.flatten(), name)
        if inner is None:
            return None
        offsets = np.concatenate([[0], _list_ends(array)])
        nulls = nulls_of(array)
        mask = None if nulls is None else pa.array(nulls)
        return _Node(pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), inner.array, mask=mask))
    return None


class _ColumnBuilder:
    """Builder of the columns of one batch, by path in `out`."""

    def __init__(self, form: CellFormat, time_units: Mapping[str, str], *, strict: bool) -> None:
        self.form, self.time_units, self.strict = form, time_units, strict
        self.out: dict[str, Column] = {}

    def record(self, record: Record, path: str, node: _Node) -> None:
        """Add the columns of a record's fields."""
        for f in record.fields:
            at = f"{path}.{f.name}" if path else f.name
            self._field(f, at, node.child(f.name))

    def _field(self, f: AvroField, path: str, node: _Node | None) -> None:
        type_, nullable = strip_null(f.type)
        if node is None:
            if not self.strict:
                raise BadInput(f"no column {path!r}, which a feature needs")
            if not (nullable or f.has_default):
                if isinstance(type_, Record) and self._all_optional(type_):
                    return self.record(type_, path, _Node())
                raise BadInput(f"no column {path!r}, and by the schema it has no default and is never null")
            return None
        if isinstance(type_, Record):
            if node.array is not None and not pa.types.is_struct(node.array.type):
                parts = not self.strict and (pa.types.is_map(node.array.type) or is_list(node.array.type))
                if not parts and not pa.types.is_null(node.array.type):
                    raise BadInput(
                        f"column {path!r} is {node.array.type}; expected a struct, or columns "
                        + ", ".join(f"{path}.{x.name}" for x in type_.fields[:3])
                    )
                if pa.types.is_null(node.array.type):
                    if nullable:
                        return None
                    node = _Node(_empty_struct(type_, node.array))
            self._struct(type_, path, node, nullable)
            return None
        if node.array is None:
            raise BadInput(
                f"no column {path!r}: it is {spell(f.type)}, and the file has {path}.{next(iter(node.inner))}"
                + (ROWS_OF_ITEMS if isinstance(type_, Array) else "")
            )
        self.value(type_, path, node.array, f)
        return None

    def _all_optional(self, record: Record) -> bool:
        return all(
            f.has_default
            or strip_null(f.type)[1]
            or (isinstance(f.type, Record) and self._all_optional(f.type))
            for f in record.fields
        )

    def _struct(self, record: Record, path: str, node: _Node, nullable: bool) -> None:
        array = node.array
        if array is not None and array.null_count and (nullable or self.strict):
            nulls = nulls_of(array)
            self.out[path] = Column(np.zeros(len(array), np.int64), nulls)
        elif nullable:
            self.out[path] = Column(np.zeros(self._length(node), np.int64))
        self.record(record, path, node)

    def _length(self, node: _Node) -> int:
        while node.array is None:
            node = next(iter(node.inner.values()))
        return len(node.array)

    def value(self, type_: Type, path: str, array: Any, f: AvroField | None = None) -> None:
        """Add the column of a field that is no record; `f` has its default."""
        array = unwrap_array(array)
        if isinstance(type_, Union):
            type_ = self._branch(type_, array, path)
        if isinstance(type_, Array):
            self._list(type_, path, array, f)
            return
        if isinstance(type_, Map):
            raise BadInput(
                f"column {path!r}: a column cannot be read as a {spell(type_)}; write JSON lines instead"
            )
        try:
            self.out[path] = _defaulted(self._leaf(type_, path, array), type_, f)
        except Misfit as misfit:
            misfit.path = path.replace("[]", "")
            raise

    def _branch(self, union: Union, array: Any, path: str) -> Type:
        """Return the branch of the column's type; refuse csv cells, which have no type."""
        kind = array.type
        wanted: tuple[str, ...] = ()
        if pa.types.is_boolean(kind):
            wanted = ("boolean",)
        elif pa.types.is_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            wanted = ("long", "int")
        elif pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            wanted = ("double", "float")
        elif is_text(kind) and not self.form.cells:
            wanted = ("string",)
        elif is_binary(kind) and not self.form.cells:
            wanted = ("bytes", "string")
        for name in wanted:
            for branch in union.others:
                if isinstance(branch, Primitive) and branch.name == name:
                    return branch
        if pa.types.is_null(kind):
            return union.others[0]
        raise BadInput(
            f"column {path!r}: expected a column of one of {spell(union)}, found {self.form.kind(kind)}\n"
            "  write Parquet with a type that is one of these, or JSON lines, where a value says what it is"
        )

    def _list(self, type_: Array, path: str, array: Any, f: AvroField | None) -> None:
        kind = array.type
        if self.form.cells or is_text(kind):
            array = self._split(path, array, type_)
        elif pa.types.is_null(kind):
            array = pa.nulls(len(array), pa.large_list(pa.null()))
        elif not is_list(kind):
            raise BadInput(f"column {path!r} is {kind}; expected lists ({spell(type_)})")
        nulls = nulls_of(array)
        if f is not None and f.has_default and f.default == [] and not strip_null(f.type)[1]:
            nulls = None
        ends = _list_ends(array)
        values = array.flatten()
        self.out[path] = Column(None, nulls, ends)
        inner, _ = strip_null(type_.items)
        below = f"{path}[]"
        try:
            if isinstance(inner, Record):
                if not pa.types.is_struct(values.type) and not pa.types.is_null(values.type):
                    raise BadInput(f"column {path!r} is {kind}; expected lists of structs ({spell(type_)})")
                self._struct(inner, below, _Node(values), strip_null(type_.items)[1])
            else:
                self.value(inner, below, values)
        except Misfit as misfit:
            misfit.row = int(np.searchsorted(ends, misfit.row, side="right"))
            raise

    def _split(self, path: str, array: Any, type_: Array) -> Any:
        """Split cells into lists; an empty cell is an empty list."""
        separator = self.form.files.list_separator
        filled = array.fill_null(b"" if is_binary(array.type) else "")
        self._refuse_brackets(path, filled, type_)
        if separator is None:
            row = next((i for i, cell in enumerate(filled) if cell.as_py()), None)
            if row is None:
                return pa.array([[]] * len(array), pa.large_list(pa.large_binary()))
            raise Misfit(
                row,
                path,
                f"a list ({spell(type_)})",
                repr(filled[row].as_py())[:60].removeprefix("b"),
                'lists in cells need the separator of their values: [files] list_separator = "|"',
            )
        data = filled.cast(pa.large_binary())
        parts = pc.split_pattern(data, separator.encode())
        empty = np.asarray(pc.equal(pc.binary_length(data), 0).to_numpy(zero_copy_only=False))
        if not empty.any():
            return parts
        ends = np.cumsum(np.where(empty, 0, parts.value_lengths().to_numpy(zero_copy_only=False)))
        kept = np.repeat(~empty, parts.value_lengths().to_numpy(zero_copy_only=False))
        offsets = pa.array(np.concatenate([[0], ends]), pa.int64())
        return pa.LargeListArray.from_arrays(
            offsets, parts.flatten().filter(pa.array(kept)).cast(pa.large_binary())
        )

    def _refuse_brackets(self, path: str, cells: Any, type_: Array) -> None:
        """Refuse printed lists (`['a', 'b']`, `{a,b}`): their parts would be wrong values."""
        data = cells.cast(pa.large_binary())
        open_ = pc.or_(pc.starts_with(data, "["), pc.starts_with(data, "{"))
        for row in np.flatnonzero(open_.to_numpy(zero_copy_only=False)).tolist():
            if PRINTED_LIST.fullmatch(data[row].as_py()):
                mark = self.form.files.list_separator or "|"
                raise Misfit(
                    row,
                    path,
                    f"a list ({spell(type_)}) of values with {mark!r} between them",
                    repr(data[row].as_py())[1:61],
                    "write the values alone, without brackets and quotes around them, and"
                    f' [files] list_separator = "{mark}"; or a Parquet file, which has lists',
                )

    def _leaf(self, type_: Type, path: str, array: Any) -> Column:  # noqa: PLR0911 - one a type
        unit = self.time_units.get(path)
        match type_:
            case Primitive("int" | "long"):
                if unit is None:
                    return Column(*read_integers(array, self.form, type_, _unit_of(type_)))
                return Column(*read_times(array, self.form, unit, unit))
            case Primitive("float" | "double"):
                if unit is not None and (pa.types.is_timestamp(array.type) or pa.types.is_date(array.type)):
                    values, nulls = read_times(array, self.form, unit, unit)
                    return Column(values.astype(np.float64), nulls)
                return Column(*read_floats(array, self.form, type_))
            case Primitive("boolean"):
                return Column(*read_booleans(array, self.form))
            case Primitive("null"):
                return Column(np.zeros(len(array), np.int64), np.ones(len(array), np.bool_))
            case _:
                return Column(*read_texts(array, self.form, type_))


def _unit_of(type_: Primitive) -> str | None:
    """Return the unit of a logical type as `read_integers` has it; None for a plain number."""
    unit = time_unit(type_)
    return None if unit is None else "time " * unit.of_day + UNIT_OF_NS[unit.ns]


def strip_null(type_: Type) -> tuple[Type, bool]:
    """Return a type without its null branch, and whether it has one."""
    if not isinstance(type_, Union):
        return type_, is_null(type_)
    others = type_.others
    if not others:
        return Primitive("null"), True
    return (others[0] if len(others) == 1 else Union(others)), type_.nullable


def _defaulted(column: Column, type_: Type, f: AvroField | None) -> Column:
    """Replace nulls by the field's default where the field is never null, as in JSON."""
    if (
        f is None
        or not f.has_default
        or column.nulls is None
        or strip_null(f.type)[1]
        or not column.nulls.any()
    ):
        return column
    try:
        encode_value(type_, f.default)
    except UNFIT:  # a default of another branch, or a wrong one: the encoder refuses the row, or the schema
        return column
    if isinstance(column.values, BytesColumn):
        default = f.default.encode("latin-1" if is_raw(type_) else "utf-8")
        values = zip(column.values, column.nulls.tolist(), strict=True)
        return Column(BytesColumn.of([default if none else value for value, none in values]))
    assert column.values is not None, "a leaf has values"
    return Column(np.where(column.nulls, f.default, column.values).astype(column.values.dtype))


def _list_ends(array: Any) -> Any:
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return np.cumsum(lengths, dtype=np.int64)


def _type_at(schema: Record, path: str) -> Type | None:
    here: Type = schema
    for part in path.replace("[]", ".[]").split("."):
        here, _ = strip_null(here)
        if part == "[]":
            if not isinstance(here, Array):
                return None
            here = here.items
        elif part:
            found = here.field(part) if isinstance(here, Record) else None
            if found is None:
                return None
            here = found.type
    return strip_null(here)[0]


def _quoted(type_: Type | None) -> str:
    return f'"{type_.name}"' if isinstance(type_, Primitive) else "..."


def _shown_at(column: Column | None, row: int) -> str:
    if column is None or column.values is None or row >= len(column.values):
        return "another value"
    value = column.values[row]
    return repr(value)[:60].removeprefix("b") if isinstance(value, bytes) else str(value)
