"""Columns of byte strings: Confluent frames, and picking values; whole columns at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from freshet import _native
from freshet.types import I64, BytesColumn

__all__ = ["FRAME_BYTES", "add_frames", "frame_ids", "rows_by_id", "strip_frames", "take"]

FRAME_BYTES = 5
"""A zero byte and the schema id, u32 big-endian."""


def frame_ids(values: BytesColumn) -> I64:
    """(N,) schema id of each framed record; -1 where there is no frame."""
    starts, lengths = values.starts, np.diff(values.ends, prepend=0)
    whole = lengths >= FRAME_BYTES
    ids = np.full(len(values), -1, np.int64)
    at = starts[whole]
    head = values.data[at[:, None] + np.arange(FRAME_BYTES)].astype(np.int64)
    ids[whole] = np.where(head[:, 0] == 0, head[:, 1:] @ np.array([1 << 24, 1 << 16, 1 << 8, 1]), -1)
    return ids


def rows_by_id(ids: I64) -> Iterator[tuple[int, I64]]:
    """Each id with its rows, ascending both; in one pass, as all of thousands of records may differ."""
    order = np.argsort(ids, kind="stable")
    found, begins = np.unique(ids[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, begins[1:]), strict=True) if len(ids) else ()


def take(values: BytesColumn, indexes: I64, skip: int = 0) -> BytesColumn:
    """Values at these indexes, in this order, without their first `skip` bytes (each must have as many)."""
    starts = values.starts[indexes] + skip
    ends = values.ends[indexes]
    spans = np.zeros((len(starts), 6), np.int64)
    spans[:, 0], spans[:, 1] = starts, ends
    return BytesColumn(*_native.splice(values.data, spans))


def strip_frames(values: BytesColumn) -> BytesColumn:
    """Framed records without their frames; each must have one (`frame_ids` says)."""
    return take(values, np.arange(len(values)), FRAME_BYTES)


def add_frames(values: BytesColumn, schema_id: int) -> BytesColumn:
    """Records with a frame of this schema id before each."""
    frame = np.frombuffer(b"\x00" + schema_id.to_bytes(4, "big"), np.uint8)
    ends = values.ends + FRAME_BYTES * np.arange(1, len(values) + 1)
    framed = np.empty(len(values.data) + FRAME_BYTES * len(values), np.uint8)
    at = ends - np.diff(values.ends, prepend=0) - FRAME_BYTES
    heads = (at[:, None] + np.arange(FRAME_BYTES)).ravel()
    framed[heads] = np.tile(frame, len(values))
    body = np.ones(len(framed), np.bool_)
    body[heads] = False
    framed[body] = values.data
    return BytesColumn(framed, ends)
