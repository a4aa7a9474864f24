"""Arrays of a frame that name rows, in few bytes: tables of keys, positions of occurrences, owned buckets.

| part | as it travels |
|---|---|
| TABLES | u8: bits of a table's id (0, 1, 2, 4 or 8), then the ids, the lowest bits first; 0: one id, of all rows |
| POSITIONS | u16 with 65535 for none if there are fewer than 65,536 rows, else i32 with -1 |
| BESIDE | a bit for each key, the lowest first: 1: its row travels beside sums of lists; empty: none does |
| OWNED | a bit for each run of B / bits buckets, the lowest first: the fewest bits that can say it |

Decoding checks lengths and ranges, since native code trusts decoded frames.

Letters: U rows of a group, N occurrences, B buckets of the model.
"""  # noqa: E501  the table

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.rpc.frames import BadFrame, Frame, Part
from freshet.types import I32, U8, Bool

Sections = MutableMapping[tuple[Any, int], NDArray[Any]]

_NONE = 65535
"""The position of an occurrence without a row, as u16."""


def add_tables(sections: Sections, group: int, tables: U8) -> None:
    """Add the table ids (U,) uint8 of a group's keys to a frame's sections."""
    largest = int(tables.max(initial=0))
    if not len(tables) or int(tables.min()) == largest:
        sections[Part.TABLES, group] = np.array([0, largest], np.uint8)
        return
    bits = next(bits for bits in (1, 2, 4, 8) if largest < 1 << bits)
    each = 8 // bits
    packed = np.zeros(1 + -(-len(tables) // each), np.uint8)
    packed[0] = bits
    for i in range(each):
        part = tables[i::each]
        packed[1 : 1 + len(part)] |= part << (i * bits)
    sections[Part.TABLES, group] = packed


def read_tables(frame: Frame, group: int, rows: int) -> U8:
    """Return the table ids (U,) uint8 of a group of `rows` keys. Raises BadFrame if there are others."""
    packed: U8 = frame.array(Part.TABLES, np.uint8, group=group)
    bits = int(packed[0]) if len(packed) else -1
    each = 8 // bits if bits in {1, 2, 4, 8} else 0
    if bits == 0 and len(packed) == 2:
        return np.full(rows, packed[1], np.uint8)
    if not each or len(packed) != 1 + -(-rows // each):
        raise BadFrame(
            f"tables of group {group}: expected the ids of {rows} rows, found {len(packed)} bytes of {bits} "
            "bits an id",
            "shape",
        )
    if each == 1:
        return packed[1:]
    tables = np.empty((len(packed) - 1, each), np.uint8)
    for i in range(each):
        np.bitwise_and(packed[1:] >> (i * bits), (1 << bits) - 1, out=tables[:, i])
    return tables.reshape(-1)[:rows]


def add_positions(sections: Sections, group: int, positions: I32, rows: int) -> None:
    """Add a group's positions (N,) int32, -1: none, among `rows` rows to a frame's sections."""
    short = rows <= _NONE
    sections[Part.POSITIONS, group] = positions.astype(np.uint16) if short else positions


def read_positions(frame: Frame, group: int, rows: int) -> I32:
    """Return a group's positions (N,) int32, -1: none. Raises BadFrame if one is not below `rows`."""
    positions: I32
    if rows <= _NONE:
        short = frame.array(Part.POSITIONS, np.uint16, group=group)
        positions = (short + np.uint16(1)).astype(np.int32) - 1  # 65535 wraps around to none
    else:
        positions = frame.array(Part.POSITIONS, np.int32, group=group)
    if len(positions) and not -1 <= int(positions.min()) <= int(positions.max()) < rows:
        raise BadFrame(f"positions of group {group} reach beyond its {rows} rows", "shape")
    return positions


def add_beside(sections: Sections, group: int, beside: I32, rows: int) -> None:
    """Add the rows (R,) int32 that travel beside sums of lists, of `rows` keys, to a frame's sections."""
    bits = np.zeros(rows if len(beside) else 0, np.bool_)
    bits[beside] = True
    sections[Part.BESIDE, group] = np.packbits(bits, bitorder="little")


def read_beside(frame: Frame, group: int, rows: int) -> I32:
    """Return the rows (R,) int32, rising, that travel beside sums of lists. Raises BadFrame if malformed."""
    packed = frame.array(Part.BESIDE, np.uint8, group=group)
    if not len(packed):
        return np.empty(0, np.int32)
    if len(packed) != -(-rows // 8):
        raise BadFrame(
            f"group {group}: expected a bit of each of {rows} rows, found {len(packed)} bytes", "shape"
        )
    return np.flatnonzero(np.unpackbits(packed, count=rows, bitorder="little")).astype(np.int32)


def add_owned(sections: Sections, owned: Bool) -> None:
    """Add the owned buckets (B,) bool to a frame's sections."""
    buckets = len(owned)
    run = int(np.gcd.reduce(np.append(np.flatnonzero(owned[1:] != owned[:-1]) + 1, buckets)))
    bits = min(buckets, max(8, buckets // run))
    sections[Part.OWNED, 0] = np.packbits(owned[:: buckets // bits], bitorder="little")


def read_owned(frame: Frame, buckets: int) -> Bool:
    """Return the owned buckets (B,) bool. Raises BadFrame if their bits are not a part of `buckets`."""
    packed = frame.array(Part.OWNED, np.uint8)
    bits = min(buckets, 8 * len(packed))
    if not bits or buckets % bits or len(packed) != -(-bits // 8):
        raise BadFrame(f"owned: found {len(packed)} bytes for {buckets} buckets", "shape")
    of = np.unpackbits(packed, count=bits, bitorder="little").view(np.bool_)
    return np.repeat(of, buckets // bits)
