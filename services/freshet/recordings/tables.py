"""Readers of csv (as the spec's `[files]` describes it), Parquet and Arrow, plain or gzipped.

A csv is read in blocks, so its size is not limited, and its cells stay bytes, which `freshet.features.arrow`
converts by the schema. Needs the extra `replay`.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import shutil
import sys
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from freshet.config.spec.inputs import Files
from freshet.errors import BadInput, ConfigError
from freshet.recordings.csv_text import READ_BYTES, UNIT, CsvText, other_format, printable

CHUNK_ROWS = 65_536
CSV_BLOCK_BYTES = 1 << 23
"""Block of a csv, some 100,000 rows: the limit of a cell."""

UNREADABLE = (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError)
"""Errors of a damaged Parquet or Arrow file, or of column names that are not UTF-8."""

CONTROLS = bytes([0, *range(4, 9), *range(14, 32)])
"""Control characters that are rare in text; 1 to 3 are excluded as delimiters of Hive."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Consecutive rows of a file."""

    rows: Any  # pyarrow.RecordBatch; columns of csv are binary
    first: int  # number of the first row in the file, from 0
    share: float  # progress in the file at their end, estimated


class TableFile:
    """One file with columns; `batches` may be called several times."""

    def __init__(self, path: Path, files: Files) -> None:
        """Detect the format and read the names of the columns.

        Raises BadInput if the file is missing, empty or of an unsupported format.
        """
        self.path, self.files = path, files
        self._at = self._seekable_path()
        head = self._head()
        self.cells = False
        if head.startswith(b"PAR1"):
            self.kind = "parquet"
        elif head.startswith(b"ARROW1"):
            self.kind = "arrow"
        else:
            self.kind, self.cells = "csv", True
            self._require_text(head)
        self.names: Sequence[str] = self._names()

    def batches(self, wanted: Sequence[str] = ()) -> Iterator[Batch]:
        """Read the file's rows, with the `wanted` columns or all.

        Raises BadInput, with the row if it is known, if the file is damaged.
        """
        readers = {"parquet": self._parquet, "arrow": self._arrow, "csv": self._csv}
        row = 0
        for rows, share in readers[self.kind](list(wanted)):
            if len(rows):
                yield Batch(rows, row, share)
            row += len(rows)

    def columns_of(self, paths: Sequence[str]) -> list[str]:
        """Return the names of the columns that hold these paths, as themselves or in a struct.

        Raises ConfigError if a path has no column, BadInput if several columns have its name.
        """
        found = []
        for path in paths:
            parts = path.split(".")
            starts = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
            name = next((s for s in starts if s in self.names), None)
            if name is None or (name != path and self.cells):
                raise self._missing(path, paths)
            if self.names.count(name) > 1:
                raise BadInput(
                    f"{self.path}: expected one column {name!r}, found {self.names.count(name)}\n"
                    "  rename the others"
                )
            found.append(name)
        return list(dict.fromkeys(found))

    def where(self, row: int) -> str:
        """Return the place of a row, numbered from 0, for messages; in a csv with its first line."""
        number = row + 1
        line = self._line(row) if self.cells else None
        return f"{self.path}, row {number}" if line is None else f"{self.path}, line {line} (row {number})"

    def _seekable_path(self) -> Path:
        """Return the path, or a temporary copy of a pipe, which can be read only once."""
        try:
            self.path.stat()
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be read: {error.strerror}") from error
        if self.path.is_file() or self.path.is_dir():
            return self.path
        self._copy = NamedTemporaryFile(prefix="freshet-", suffix=self.path.suffix)  # noqa: SIM115 - used by `batches`
        try:
            with self.path.open("rb") as pipe:
                shutil.copyfileobj(pipe, self._copy, READ_BYTES)
            self._copy.flush()
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be read: {error.strerror}") from error
        return Path(self._copy.name)

    def _head(self) -> bytes:
        path = self.path
        try:
            if path.is_dir():
                raise BadInput(
                    f"{path} is a folder; expected a csv, csv.gz, Parquet or Arrow file\n"
                    f"  name the files in it, in order of time: {path}/part-*.parquet"
                )
            with self._at.open("rb") as file:
                head = file.read(4096)
                self.size = file.seek(0, io.SEEK_END)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
        self.zipped = head.startswith(b"\x1f\x8b")
        if path.suffix == ".gz" and not self.zipped and head:
            raise BadInput(
                f"{path}: expected gzip, as its name ends in .gz; found other bytes\n  rename it, or gzip it"
            )
        if self.zipped:
            try:
                with gzip.open(self._at) as unzipped:
                    head = unzipped.read(4096)
            except (OSError, EOFError, zlib.error) as error:
                raise self._unreadable(error) from error
        if not head:
            raise BadInput(f"{path} is empty; expected a header line and rows, or a Parquet or Arrow file")
        return head

    def _require_text(self, head: bytes) -> None:
        path = self.path
        found = other_format(head)
        if found is not None:
            raise BadInput(f"{path}: expected csv, Parquet or Arrow, found {found}")
        inner = path.name.lower().removesuffix(".gz")
        if inner.endswith((".parquet", ".pq", ".arrow", ".feather")):
            raise BadInput(
                f"{path}: expected a csv, csv.gz or parquet file that is what its name says; "
                f"found other bytes: {printable(repr(head[:16])[1:])}\n  a csv has a name that ends in .csv"
            )
        if head[:2] in (b"\xff\xfe", b"\xfe\xff") and self.files.encoding != "utf-16":
            raise BadInput(
                f"{path}: expected text in {self.files.encoding}, found UTF-16\n"
                '  the spec says so: [files] encoding = "utf-16"'
            )
        if (
            len(head) - len(head.translate(None, CONTROLS)) > len(head) / 20
            and self.files.encoding != "utf-16"
        ):
            raise BadInput(f"{path}: expected a csv, csv.gz, Parquet or Arrow file, found binary data")
        start = b"".join(head[:200].split())
        if start.startswith((b"{", b"[{")) and not self.files.columns:
            raise BadInput(
                f"{path}: expected columns, found JSON objects\n"
                "  events as JSON lines are what `freshet replay files` reads, from a file named .jsonl"
            )

    def _names(self) -> Sequence[str]:
        try:
            if self.kind == "parquet":
                with pq.ParquetFile(self._source()) as file:
                    return list(file.schema_arrow.names)
            if self.kind == "arrow":
                with pa.ipc.open_file(self._source()) as file:
                    return list(file.schema.names)
        except UNREADABLE as error:
            raise self._unreadable(error) from error
        if self.files.columns:
            return list(self.files.columns)
        return self._header()

    def _header(self) -> Sequence[str]:
        _, names = next(self._numbered(), (0, []))
        if not names:
            raise BadInput(f"{self.path} has no text; expected a header line and rows")
        if names[0].startswith("sep=") and not any(names[1:]):
            raise BadInput(
                f"{self.path}, line 1: expected the names of columns, found {printable(names[0])!r}, which"
                " is for Excel\n  take the line out"
            )
        if len(names) == 1 and self.files.delimiter == ",":
            for other, spelt in (("\t", "\\t"), (";", ";"), ("|", "|"), ("::", "::")):
                if other in names[0]:
                    raise BadInput(
                        f"{self.path}, line 1: expected the names of columns with ',' between them, found"
                        f" {printable(names[0])!r}\n"
                        f'  the spec says which other mark stands there: [files] delimiter = "{spelt}"'
                    )
        return list(names)

    def _missing(self, path: str, wanted: Sequence[str]) -> ConfigError:
        near = [n for n in self.names if n.strip().casefold() == path.casefold()]
        near = near or get_close_matches(path, self.names, 1)
        has = ", ".join(printable(n, 40) for n in self.names[:40])
        hint = f"did you mean {near[0]!r}?" if near else f"it has {has}"
        parent = path.rpartition(".")[0]
        if self.cells and parent in self.names:
            hint = f"a csv has a column for each field, named {path!r}: {parent!r} is not read as a record"
        if any(part.startswith(f"{path}=") for part in self.path.absolute().parts):
            hint = "the folder's name has its value, which is not read: write the column into the file, too"
        if self.cells and self.files.columns:
            hint += "\n  the names are those of [files] columns"
        elif self.cells and any(n and not n.strip("0123456789.-+ ") for n in self.names):
            hint += (
                '\n  if the file has no header line, the spec names its columns: [files] columns = ["..."]'
            )
        return ConfigError(
            str(self.path), "", f"no column {path!r}", f"the columns {', '.join(wanted)}", hint
        )

    def _source(self) -> Any:
        if not self.zipped:
            return str(self._at)
        with gzip.open(self._at) as file:
            return pa.BufferReader(file.read())

    def _parquet(self, wanted: list[str]) -> Iterator[tuple[Any, float]]:
        try:
            unit = self._unit_of_96_bits(wanted)
            with pq.ParquetFile(self._source(), coerce_int96_timestamp_unit=unit) as file:
                total, rows = file.metadata.num_rows, 0
                for batch in file.iter_batches(CHUNK_ROWS, columns=wanted or None):
                    rows += len(batch)
                    yield batch, rows / total
        except UNREADABLE as error:
            raise self._unreadable(error) from error

    def _unit_of_96_bits(self, wanted: list[str]) -> str | None:
        """Return the unit for 96-bit timestamps; None if the file has none.

        Arrow's nanoseconds overflow silently outside the years 1677 to 2262, as Spark's sentinels do
        (9999-12-31). A file with such times is read in microseconds.
        """
        with pq.ParquetFile(self._source()) as fine:
            columns = [fine.schema.column(i) for i in range(len(fine.schema))]
            tops = {c.path.partition(".")[0] for c in columns if c.physical_type == "INT96"}
            names = sorted(tops & set(wanted) if wanted else tops)
            if not names:
                return None
            with pq.ParquetFile(self._source(), coerce_int96_timestamp_unit="us") as coarse:
                pairs = zip(
                    fine.iter_batches(CHUNK_ROWS, columns=names),
                    coarse.iter_batches(CHUNK_ROWS, columns=names),
                    strict=True,
                )
                same = all(a.cast(b.schema, safe=False).equals(b) for a, b in pairs)
        return "ns" if same else "us"

    def _arrow(self, wanted: list[str]) -> Iterator[tuple[Any, float]]:
        try:
            with pa.ipc.open_file(self._source()) as file:
                for i in range(file.num_record_batches):
                    batch = file.get_batch(i)
                    batch = batch.select(wanted) if wanted else batch
                    batch.validate(full=True)  # damaged offsets would crash the process within Arrow
                    for start in range(0, len(batch), CHUNK_ROWS):
                        share = (i + min(1.0, (start + CHUNK_ROWS) / len(batch))) / file.num_record_batches
                        yield batch.slice(start, CHUNK_ROWS), share
        except UNREADABLE as error:
            raise self._unreadable(error) from error

    def _csv(self, wanted: list[str]) -> Iterator[tuple[Any, float]]:
        columns = wanted or list(self.names)
        delimiter = self.files.delimiter if len(self.files.delimiter) == 1 else UNIT
        text = self._text()
        pending: tuple[Any, float] | None = None
        try:
            with closing(text):
                read = pa_csv.ReadOptions(
                    block_size=CSV_BLOCK_BYTES,
                    column_names=list(self.files.columns) or None,
                )
                parse = pa_csv.ParseOptions(
                    delimiter=delimiter,
                    quote_char='"' if self.files.quotes else False,
                    newlines_in_values=self.files.quotes,
                )
                convert = pa_csv.ConvertOptions(
                    check_utf8=False,
                    column_types=dict.fromkeys(columns, pa.binary()),
                    include_columns=columns,
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                    null_values=[""],
                )
                with pa_csv.open_csv(pa.PythonFile(text, "r"), read, parse, convert) as reader:
                    for read_block in reader:
                        block = self._restore_delimiters(read_block)
                        for start in range(0, len(block), CHUNK_ROWS):
                            if pending is not None:
                                yield pending
                            pending = block.slice(start, CHUNK_ROWS), min(text.share, 0.999)
        except pa.ArrowInvalid as error:
            if self._has_rows():
                raise self._bad_row(error) from error
        except pa.ArrowKeyError as error:
            raise self._bad_name(error) from error
        except (OSError, EOFError, zlib.error) as error:
            raise self._unreadable(error) from error
        if pending is not None:
            yield pending[0], 1.0

    def _bad_name(self, error: Exception) -> BadInput:
        """Build the error of a column that Arrow could not find by its name: the name is not UTF-8."""
        broken = next((name for name in self.names if "\ufffd" in name), None)
        if broken is None:
            return self._unreadable(error)
        return BadInput(
            f"{self.path}, line {next(self._numbered())[0]}: expected names of columns in UTF-8, found"
            f" {printable(broken)!r}\n"
            '  a csv in another encoding has it in the spec: [files] encoding = "cp1252"'
        )

    def _has_rows(self) -> bool:
        """Report whether rows follow the header: for Arrow, a header without a line end is an error."""
        records = self._numbered()
        try:
            return sum(1 for _ in itertools.islice(records, 2)) > (0 if self.files.columns else 1)
        finally:
            records.close()

    def _restore_delimiters(self, block: Any) -> Any:
        """Replace `UNIT` in cells, where it was a quoted delimiter."""
        if len(self.files.delimiter) == 1:
            return block
        mark, delimiter = UNIT.encode(), self.files.delimiter.encode()
        columns = [pc.replace_substring(c, mark, delimiter) for c in block.columns]
        return pa.RecordBatch.from_arrays(columns, schema=block.schema)

    def _text(self) -> CsvText:
        return CsvText(self.path, self._at, self.zipped, self.size, self.files)

    def _numbered(self) -> Generator[tuple[int, list[str]], None, None]:
        """Yield the non-empty records with their first line, by Python's csv reader, which counts lines."""
        delimiter = self.files.delimiter if len(self.files.delimiter) == 1 else UNIT
        limit = csv.field_size_limit(sys.maxsize)
        try:
            with closing(self._text()) as raw:
                buffered = io.BufferedReader(raw, READ_BYTES)
                lines = io.TextIOWrapper(buffered, "utf-8-sig", errors="replace", newline="")
                quoting: Any = csv.QUOTE_MINIMAL if self.files.quotes else csv.QUOTE_NONE
                reader = csv.reader(lines, delimiter=delimiter, quoting=quoting)
                line = 1
                for record in reader:
                    if record:
                        yield line, record
                    line = reader.line_num + 1
        except (OSError, EOFError, zlib.error) as error:
            raise self._unreadable(error) from error
        except csv.Error:
            return
        finally:
            csv.field_size_limit(limit)

    def _line(self, row: int) -> int | None:
        """Return the line on which a row starts."""
        skipped = 0 if self.files.columns else 1
        for number, (line, _) in enumerate(self._numbered()):
            if number == row + skipped:
                return line
        return None

    def _bad_row(self, error: Exception) -> BadInput:
        """Build the error of the row that Arrow could not read."""
        skipped = 0 if self.files.columns else 1
        wanted = len(self.names)
        for number, (line, record) in enumerate(self._numbered(), 1 - skipped):
            if len(record) != wanted:
                hint = "a cell that holds the delimiter or a line end stands in quotes"
                if not self.files.quotes:
                    hint = "with quotes = false a cell holds neither the delimiter nor a line end"
                elif self.files.columns and len(record) == 1:
                    hint = f"is the delimiter {self.files.delimiter!r} the file's?"
                elif any('"' in cell and not cell.startswith('"') for cell in record) or any(
                    cell.count("\n") > 3 for cell in record
                ):
                    hint = "is a quote never closed? if quotes are plain characters: [files] quotes = false"
                return BadInput(
                    f"{self.path}, line {line} (row {number}): expected {wanted} cells, as the"
                    f" {'spec names' if self.files.columns else 'header has'}, found {len(record)}:"
                    f" {printable(self.files.delimiter.join(record), 80)}\n  {hint}"
                )
            if any(len(cell) > CSV_BLOCK_BYTES // 2 for cell in record):
                return BadInput(
                    f"{self.path}, line {line} (row {number}): expected cells of at most"
                    f" {CSV_BLOCK_BYTES >> 20} MiB, found a longer one\n"
                    "  is a quote never closed? if quotes are characters like others: [files] quotes = false"
                )
        return BadInput(f"{self.path}: expected a csv, csv.gz or parquet file: {printable(str(error))}")

    def _unreadable(self, error: Exception) -> BadInput:
        if self.zipped and isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
            return BadInput(
                f"{self.path}: expected whole gzip data, found an end or damage on the way: is it cut?"
            )
        expected = {"parquet": "a whole Parquet file", "arrow": "a whole Arrow file"}.get(
            getattr(self, "kind", ""), "a csv, csv.gz or parquet file"
        )
        return BadInput(f"{self.path}: expected {expected}: {printable(str(error))}")
