"""Text of csv files: encodings, delimiters and quotes; and other formats by their first bytes."""

from __future__ import annotations

import codecs
import gzip
import io
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

from freshet.config.spec.inputs import Files
from freshet.errors import BadInput

READ_BYTES = 1 << 20
UNIT = "\x1f"
"""Replaces a delimiter of several characters, because Arrow and Python's reader take single ones only."""

OTHERS = {
    b"PARE": "an encrypted Parquet file: write it without encryption",
    b"\xff\xff\xff\xff": "an Arrow stream: write an Arrow file (Feather of version 2) or Parquet",
    b"FEA1": "Feather of version 1: write version 2 or Parquet",
    b"\xff\x06\x00\x00sNaPpY": "snappy: decompress it first, or use gzip",
    b"\x04\x22\x4d\x18": "lz4: decompress it first, or use gzip",
    b"\x1f\x8b": "gzip within gzip: decompress it once",
    b"\xd0\xcf\x11\xe0": "a spreadsheet of Excel: save it as csv",
    b"\x93NUMPY": "a NumPy array: write csv or Parquet",
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself: git lfs pull",
    b"<!DOCTYPE": "an HTML page, such as a log-in page",
    b"<!doctype": "an HTML page, such as a log-in page",
    b"<html": "an HTML page, such as a log-in page",
    b"PK\x03\x04": "a zip archive (or a spreadsheet): write csv or Parquet",
    b"\x28\xb5\x2f\xfd": "zstd: decompress it first",
    b"\xfd7zXZ": "xz: decompress it first, or use gzip",
    b"ORC": "ORC: write Parquet",
    b"Obj\x01": "an Avro container file: write Parquet or JSON lines",
    b"SQLite format 3\0": "an SQLite database: write csv or Parquet",
    **{b"BZh%d1AY&SY" % level: "bzip2: decompress it first, or use gzip" for level in range(1, 10)},
}


TEXT_LIKE = frozenset({b"PARE", b"FEA1", b"ORC"})
"""The magic numbers with which a text may begin, such as a csv with the column PARENT_ID or ORCID."""


def other_format(head: bytes) -> str | None:
    """Return the unsupported format of a file with these first bytes, with the remedy; None if it has none.

    A magic number that may begin a text counts only if the head holds a zero byte.
    """
    for magic, name in OTHERS.items():
        if head.startswith(magic) and (magic not in TEXT_LIKE or b"\0" in head):
            return name
    return None


def printable(text: str, most: int = 200) -> str:
    """Shorten text and replace characters that a terminal could interpret."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= most else f"{shown[:most]} ..."


class _Quotes:
    """Refuses quotes after a backslash, which Arrow would not read as an escape."""

    def __init__(self, path: Path, files: Files, reopen: Callable[[], CsvText]) -> None:
        """`reopen` opens the text from its start, to count lines for an error."""
        self._path, self._reopen = path, reopen
        delimiter = files.delimiter if len(files.delimiter) == 1 else UNIT
        # valid: \" at the end of a cell, before a delimiter or line end; \" before a second quote
        end = re.escape(delimiter.encode())
        self._escaped = re.compile(rb'\\"(?!%s)[^\r\n"]' % end)
        self._tail = b""
        self._bytes = 0  # before the tail

    def check(self, data: bytes) -> None:
        """Check the next bytes. Raises BadInput, with the line, at an escaped quote."""
        text = self._tail + data if self._tail else data
        found = self._escaped.search(text) if b'\\"' in text else None
        if found is not None:
            line = self._line(self._bytes + found.start())
            start = text.rfind(b"\n", 0, found.start()) + 1
            near = text[max(start, found.start() - 30) : found.end() + 30].decode(errors="replace")
            raise BadInput(
                f'{self._path}, line {line}: expected a quote in a quoted cell as two (""), found one after'
                f" a backslash: {printable(near.splitlines()[0], 80)}\n"
                "  write it as two (Spark: .option('escape', '\"')); if quotes are characters like others:"
                " [files] quotes = false"
            )
        kept = 2 if text.endswith(b'\\"') else int(text.endswith(b"\\"))
        self._tail = text[len(text) - kept :]
        self._bytes += len(text) - kept

    def _line(self, at: int) -> int:
        with closing(self._reopen()) as text:
            ends = 0
            while at > 0 and (data := text.read(min(at, READ_BYTES))):
                ends += data.count(b"\n")
                at -= len(data)
        return ends + 1


class CsvText(io.RawIOBase):
    """A csv's bytes, converted to UTF-8 and to delimiters of one character."""

    def __init__(
        self, path: Path, at: Path, zipped: bool, size: int, files: Files, *, quotes: bool = True
    ) -> None:
        super().__init__()
        self._path, self._size = path, size
        self._file: BinaryIO = at.open("rb")
        self._bytes: Any = gzip.GzipFile(fileobj=self._file) if zipped else self._file
        self._decoder = (
            None if files.encoding == "utf-8" else codecs.getincrementaldecoder(files.encoding)("strict")
        )
        self._encoding = files.encoding
        self._delimiter = b"" if len(files.delimiter) == 1 else files.delimiter.encode()
        self._ready = memoryview(b"")
        self._tail = b""
        self._lines = 0
        self._quotes = (
            _Quotes(path, files, lambda: CsvText(path, at, zipped, size, files, quotes=False))
            if quotes and files.quotes
            else None
        )
        self._ended = False

    @property
    def share(self) -> float:
        """The progress in the file."""
        return self._file.tell() / max(self._size, 1)

    def readable(self) -> bool:
        """Return True, as `io.RawIOBase` requires."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, possibly in part; return the number of bytes, 0 at the end."""
        if self._decoder is None and not self._delimiter:
            read: int = self._bytes.readinto(buffer)
            if self._quotes is not None:
                self._quotes.check(bytes(memoryview(buffer)[:read]))
            return read
        while not self._ready and not self._ended:
            more = self._convert_more()
            if self._quotes is not None:
                self._quotes.check(more)
            self._ready = memoryview(more)
        copied = min(len(buffer), len(self._ready))
        buffer[:copied] = self._ready[:copied]
        self._ready = self._ready[copied:]
        return copied

    def read(self, size: int = -1) -> bytes:
        """Return exactly `size` bytes, or fewer at the end, because a short read means the end to Arrow."""
        if self._decoder is None and not self._delimiter:
            whole: bytes = self._bytes.read(size)
            if self._quotes is not None:
                self._quotes.check(whole)
            return whole
        parts: list[bytes] = []
        left = size
        while left:
            part = bytearray(min(left, READ_BYTES) if left > 0 else READ_BYTES)
            got = self.readinto(part)
            if not got:
                break
            parts.append(bytes(part[:got]))
            left -= got if left > 0 else 0
        return b"".join(parts)

    def _convert_more(self) -> bytes:
        raw: bytes = self._bytes.read(READ_BYTES)
        self._ended = not raw
        if self._decoder is not None:
            try:
                raw = self._decoder.decode(raw, final=self._ended).encode()
            except UnicodeDecodeError as error:
                line = self._lines + error.object[: error.start].count(b"\n") + 1
                raise BadInput(
                    f"{self._path}, line {line}: expected text in {self._encoding}, found the byte"
                    f" 0x{error.object[error.start]:02x}, which it does not have\n"
                    "  another encoding? [files] encoding"
                ) from None
            except UnicodeError as error:  # without a place: UTF-16 lacks its byte order mark
                raise BadInput(
                    f"{self._path}: expected text in {self._encoding}, found other bytes: {error}\n"
                    "  another encoding? [files] encoding"
                ) from None
        self._lines += raw.count(b"\n")
        if not self._delimiter:
            return raw
        if UNIT.encode() in raw:
            raise BadInput(
                f"{self._path}: holds the character U+001F, which cannot be read where the delimiter is"
                f" {self._delimiter.decode()!r}; take it out"
            )
        text = (self._tail + raw).replace(self._delimiter, UNIT.encode())
        kept = 0  # bytes of an incomplete delimiter at the end
        if not self._ended:
            starts = range(len(self._delimiter) - 1, 0, -1)
            kept = next((n for n in starts if text.endswith(self._delimiter[:n])), 0)
        self._tail = text[len(text) - kept :]
        return bytes(text[: len(text) - kept])

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._bytes.close()
            self._file.close()
        super().close()
