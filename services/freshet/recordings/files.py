"""Files of ready samples, csv(.gz) or parquet, as columns of Avro-encodable values. Needs the extra `replay`
(pyarrow)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from freshet.errors import BadInput, ConfigError
from freshet.features.columns import FileColumn
from freshet.spec.model import Spec
from freshet.types import F32, I64, U64, Bool, BytesColumn

__all__ = ["SampleRows", "batches", "needed_columns", "read_samples"]

CHUNK_ROWS = 65_536
CSV_BLOCK_BYTES = 1 << 23
"""Parsed at once by one of Arrow's threads, and a batch is no longer than it: some 100,000 rows."""

UNIT_MS = {"s": 1000.0, "ms": 1.0, "us": 0.001}


@dataclass(frozen=True, slots=True, eq=False)
class SampleRows:
    """N consecutive rows of a file."""

    first_row: int  # of the first of them in all files together
    columns: Mapping[str, FileColumn]  # by path of the spec's fields
    times_ms: I64  # (N,) event time
    labels: Mapping[str, tuple[F32, Bool]]  # label -> values (N,), and where there is one
    requests: U64  # (N,) equal for rows that were served together
    share: float = 1.0  # of all files' rows that ends with these, about: files count alike

    def __len__(self) -> int:
        return len(self.times_ms)


def needed_columns(spec: Spec) -> list[str]:
    """Columns that a file must have for this spec: fields of features, the event time, the labels."""
    fields = [f.field for f in spec.features if f.field is not None]
    return list(
        dict.fromkeys([*fields, spec.events.served.time.path, *(label.name for label in spec.labels)])
    )


def read_samples(spec: Spec, paths: Sequence[Path], request: str | None = None) -> Iterator[SampleRows]:
    """Rows of the files, in their order.

    Args:
        request: column whose equal values mark rows that were served together, in runs; such rows are all
        scored
            before any of them trains. Without it every row stands for itself.

    Raises:
        ConfigError: a column is missing. BadInput: a file cannot be read, or a column has another type than
        is needed.
    """
    row = 0
    for number, path in enumerate(paths):
        wanted = [*needed_columns(spec), *([request] if request else [])]
        for batch, share in _parts(path, wanted):
            missing = [c for c in wanted if c not in batch.schema.names]
            if missing:
                near = get_close_matches(missing[0], batch.schema.names, 1)
                raise ConfigError(
                    str(path),
                    "",
                    f"no column {missing[0]!r}",
                    f"the columns {', '.join(needed_columns(spec))}",
                    f"did you mean {near[0]!r}?" if near else f"it has {', '.join(batch.schema.names)}",
                )
            made = _rows(spec, path, batch, request, row, (number + share) / len(paths))
            row += len(made)
            yield made


def batches(path: Path) -> Iterator[Any]:
    """Record batches of a csv, csv.gz or parquet file. Raises BadInput if it cannot be read."""
    for batch, _ in _parts(path):
        yield batch


def _parts(path: Path, wanted: Sequence[str] = ()) -> Iterator[tuple[Any, float]]:
    """Record batches and the share of the file that ends with each.

    Columns beside the `wanted` ones are not read, unless one of these is missing: then all are there, to be
    named. A csv is read as a whole before its first batch comes: only then are the columns' types known.
    """
    import pyarrow as pa  # noqa: PLC0415 - slow to import, and only needed here
    import pyarrow.csv  # noqa: PLC0415
    import pyarrow.parquet  # noqa: PLC0415

    try:
        if path.suffix == ".parquet":
            file = pa.parquet.ParquetFile(path)
            chosen = list(wanted) if set(wanted) <= set(file.schema_arrow.names) else None
            total, made = file.metadata.num_rows, file.iter_batches(CHUNK_ROWS, columns=chosen or None)
        else:
            table = _csv(path, wanted)
            total, made = table.num_rows, iter(table.to_batches(CHUNK_ROWS))
        rows = 0
        for batch in made:
            rows += len(batch)
            yield batch, rows / total
    except (OSError, pa.ArrowInvalid) as error:
        raise BadInput(f"{path}: expected a csv, csv.gz or parquet file: {_printable(error)}") from error


def _csv(path: Path, wanted: Sequence[str]) -> Any:
    import pyarrow.csv as pa_csv  # noqa: PLC0415

    nulls = {"strings_can_be_null": True, "null_values": ["", "NA", "null"]}
    read = pa_csv.ReadOptions(block_size=CSV_BLOCK_BYTES)
    try:
        chosen = pa_csv.ConvertOptions(**nulls, include_columns=list(wanted))
        return pa_csv.read_csv(path, read, convert_options=chosen)
    except KeyError:  # a column is missing: the caller names it
        return pa_csv.read_csv(path, read, convert_options=pa_csv.ConvertOptions(**nulls))


def _rows(spec: Spec, path: Path, batch: Any, request: str | None, row: int, share: float) -> SampleRows:
    fields = dict.fromkeys(f.field for f in spec.features if f.field is not None)
    columns = {name: _column(path, name, batch.column(name)) for name in fields}
    time = spec.events.served.time
    labels = {label.name: _label(path, label.name, batch.column(label.name)) for label in spec.labels}
    count = len(batch)
    if request is None:
        requests = np.arange(row + 1, row + count + 1, dtype=np.uint64)
    else:
        texts = batch.column(request).cast("string").fill_null("")
        codes = texts.dictionary_encode().indices.to_numpy(zero_copy_only=False)
        requests = np.cumsum(np.diff(codes, prepend=-1) != 0).astype(np.uint64) + np.uint64(row)
    times_ms = _times(path, time.path, time.unit, batch.column(time.path))
    return SampleRows(row, columns, times_ms, labels, requests, share)


def _column(path: Path, name: str, array: Any) -> FileColumn:
    import pyarrow as pa  # noqa: PLC0415

    kind = array.type
    # Never left out: a file's records are of one schema, whichever of its pieces hold nulls.
    valid: Bool = np.asarray(array.is_valid()) if array.null_count else np.ones(len(array), bool)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _column(path, name, array.flatten())
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        if inner.valid is not None and not inner.valid.all():
            raise BadInput(f"{path}: column {name!r} has lists that hold nulls; leave them out")
        return FileColumn(
            inner.type,
            integers=inner.integers,
            reals=inner.reals,
            truths=inner.truths,
            text=inner.text,
            valid=valid,
            list_ends=np.cumsum(lengths, dtype=np.int64),
        )
    if pa.types.is_boolean(kind):
        truths = _filled(array, False).cast("uint8").to_numpy(zero_copy_only=False)
        return FileColumn("truth", truths=np.ascontiguousarray(truths), valid=valid)
    if pa.types.is_integer(kind):
        integers = _filled(array, 0).cast("int64").to_numpy(zero_copy_only=False)
        return FileColumn("integer", integers=np.ascontiguousarray(integers), valid=valid)
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        reals = _filled(array.cast("float64"), 0.0).to_numpy(zero_copy_only=False)
        return FileColumn("real", reals=np.ascontiguousarray(reals), valid=valid & ~np.isnan(reals))
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return FileColumn("text", text=_text(array), valid=valid)
    if pa.types.is_null(kind):
        return FileColumn(
            "text", text=BytesColumn(np.empty(0, np.uint8), np.zeros(len(array), np.int64)), valid=valid
        )
    raise BadInput(
        f"{path}: column {name!r} is {kind}; expected integers, fractions, booleans, text or lists of them"
    )


def _filled(array: Any, value: Any) -> Any:
    """Arrow copies to fill in nothing, too."""
    return array.fill_null(value) if array.null_count else array


def _text(array: Any) -> BytesColumn:
    import pyarrow as pa  # noqa: PLC0415

    plain = _filled(array.cast(pa.large_string()), "")
    offsets = np.frombuffer(plain.buffers()[1], np.int64, len(plain) + 1, plain.offset * 8)
    data = np.frombuffer(plain.buffers()[2] or b"", np.uint8)
    return BytesColumn(data[offsets[0] : offsets[-1]], offsets[1:] - offsets[0])


def _label(path: Path, name: str, array: Any) -> tuple[F32, Bool]:
    import pyarrow as pa  # noqa: PLC0415

    if not (
        pa.types.is_integer(array.type) or pa.types.is_floating(array.type) or pa.types.is_boolean(array.type)
    ):
        raise BadInput(f"{path}: label column {name!r} is {array.type}; expected numbers or booleans")
    values = array.cast("float32").to_numpy(zero_copy_only=False)
    known: Bool = np.asarray(array.is_valid()) & ~np.isnan(values)
    return np.nan_to_num(values).astype(np.float32), known


def _times(path: Path, name: str, unit: str, array: Any) -> I64:
    import pyarrow as pa  # noqa: PLC0415

    if array.null_count:
        raise BadInput(
            f"{path}: the event time {name!r} is null in {array.null_count} rows; every row needs one"
        )
    if pa.types.is_timestamp(array.type):
        return np.ascontiguousarray(
            array.cast(pa.timestamp("ms", "UTC"), safe=False).cast("int64").to_numpy()
        )
    if unit == "iso" or not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        raise BadInput(
            f"{path}: the event time {name!r} is {array.type}; expected ISO 8601 texts "
            "such as 2026-01-31T09:00:00Z, or a number with its unit in the spec (ts:ms)"
        )
    times: I64 = (array.cast("float64").to_numpy(zero_copy_only=False) * UNIT_MS[unit]).astype(np.int64)
    return times


def _printable(error: Exception, most: int = 200) -> str:
    """An error that may quote the file's bytes, fit for a terminal."""
    text = "".join(c if c.isprintable() else "?" for c in str(error))
    return text if len(text) <= most else f"{text[:most]} ..."
