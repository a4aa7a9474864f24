"""Unsupported file formats by their first bytes, so that an error can name the format."""

from __future__ import annotations

__all__ = ["other_format"]

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
