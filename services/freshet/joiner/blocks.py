"""Samples to blocks: where they are cut, and their bytes (schemas/README.md, "Samples: blocks")."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np

from freshet.joiner.core import Samples

__all__ = ["BLOCK_SAMPLES", "cuts", "encode"]

BLOCK_SAMPLES = 256
"""A block closes at this many samples; more only where one request alone has more."""

MAGIC = 0xB1
VERSION = 1
_HEADER = struct.Struct("<BBHIII")


def encode(samples: Samples) -> list[bytes]:
    """Blocks in order. A block holds one schema id and never splits the samples of a request."""
    return [_block(samples, start, stop) for start, stop in cuts(samples)]


def cuts(samples: Samples) -> Iterator[tuple[int, int]]:
    """[start, stop) of each block."""
    n = len(samples)
    if not n:
        return
    new_schema = np.flatnonzero(samples.schemas[1:] != samples.schemas[:-1]) + 1
    new_request = np.flatnonzero(samples.requests[1:] != samples.requests[:-1]) + 1
    schema_ends = np.append(new_schema, n)
    group_ends = np.append(np.union1d(new_schema, new_request), n)
    start = 0
    while start < n:
        limit = min(
            start + BLOCK_SAMPLES, int(schema_ends[np.searchsorted(schema_ends, start, side="right")])
        )
        fits = int(np.searchsorted(group_ends, limit, side="right")) - 1
        first = int(np.searchsorted(group_ends, start, side="right"))
        stop = int(group_ends[max(fits, first)])
        yield start, stop
        start = stop


def _block(samples: Samples, start: int, stop: int) -> bytes:
    n = stop - start
    payloads = samples.payloads.slice(start, stop)
    columns = b"".join(
        (
            samples.ids[start:stop].astype("<i8").tobytes(),
            samples.times_ms[start:stop].astype("<i8").tobytes(),
            samples.requests[start:stop].astype("<u8").tobytes(),
            samples.values[start:stop].astype("<f4").tobytes(),
            samples.weights[start:stop].astype("<f4").tobytes(),
            payloads.ends.astype("<u4").tobytes(),
            samples.labels[start:stop].tobytes(),
        )
    )
    padding = bytes(-len(columns) % 8)  # the header's 16 bytes are a multiple already
    body = b"".join((columns, padding, payloads.data.tobytes()))
    return _HEADER.pack(MAGIC, VERSION, 0, int(samples.schemas[start]), n, zlib.crc32(body)) + body
