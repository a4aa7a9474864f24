"""Frames: the messages between our services, which are arrays with a header.

The layout is in `schemas/README.md`: a header, a directory with part, group, type and shape of each array,
then the arrays, padded to 8 bytes. Decoding checks every length before it is used; the arrays of a decoded
frame are read-only views of the message. `Frame.array` checks that an array has the type and shape that a
message of its kind needs.

Four parts that name rows travel in fewer bytes than their arrays; since native code trusts decoded frames,
reading them checks lengths and ranges:

| part | as it travels |
|---|---|
| TABLES | u8: bits of a table's id (0, 1, 2, 4 or 8), then the ids, the lowest bits first; 0: one id, of all rows |
| POSITIONS | u16 with 65535 for none if there are fewer than 65,536 rows, else i32 with -1 |
| BESIDE | a bit for each key, the lowest first: 1: its row travels beside sums of lists; empty: none does |
| OWNED | a bit for each run of B / bits buckets, the lowest first: the fewest bits that can say it |

Letters: N rows or occurrences, S floats of a row, U rows of a group, B buckets of the model.
"""  # noqa: E501  the table

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from freshet import _native
from freshet.errors import Corrupt, Mismatch, TooLarge
from freshet.types import F32, I32, U8, Bool
from freshet.wires.codecs import RowCodec
from freshet.wires.row_wire import RowWire

MAGIC = 0xB5
VERSION = 2
_HEAD = struct.Struct("<BBHI")  # magic, version, 0, crc of all that follows
_REST = struct.Struct("<BBHIQ")  # kind, codec, sections, flags, id
HEADER_BYTES = _HEAD.size + _REST.size
_CRC_FROM = _HEAD.size
_ENTRY = np.dtype(
    [("part", "u1"), ("group", "u1"), ("type", "u1"), ("dims", "u1"), ("columns", "<u4"), ("rows", "<u8")]
)
_ALIGN = 8

Reason = Literal["truncated", "oversized", "magic", "version", "crc", "shape"]
"""Reason for which a frame was refused: the label of the counters."""


class BadFrame(Corrupt):
    """A message that is not a frame, or lacks data of its kind."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class LargeFrame(TooLarge):
    """A frame above the size limit of its receiver."""

    reason: Reason = "oversized"


class OtherFrame(Mismatch):
    """A frame of a version that this release cannot read."""

    reason: Reason = "version"


class Kind(enum.IntEnum):
    """Kinds of messages. An answer carries the id of its request."""

    FAILURE = 1  # answer to a failed request: see `freshet.rpc.errors`
    LOOKUP = 2  # keys → ROWS
    ROWS = 3
    PUSH = 4  # gradients → PUSHED
    PUSHED = 5
    NEXT_BATCH = 6  # permits of a trainer's lane → BATCH, once one is ready
    BATCH = 7  # samples to train on
    GRADIENTS = 8  # of a batch → ACCEPTED
    ACCEPTED = 9
    REQUEST = 10  # a call without arguments → RESPONSE
    RESPONSE = 11
    PIECE = 12  # of a message above the size limit: see `freshet.rpc.pieces`
    PROBE = 13  # bytes each way, by which a client measures its link → RESPONSE
    LOOKUP_LISTS = 14  # a LOOKUP that asks for sums of lists in place of their rows
    PUSH_LISTS = 15  # a PUSH with gradients of sums of lists


class Part(enum.IntEnum):
    """Meanings of a frame's arrays. Letters: U unique rows, S floats of a row, N elements by the message."""

    TEXT = 1  # (N,) u8: UTF-8
    APPLIED = 2  # (N, 2) i64: partition, offset
    RANGES = 3  # (N, 3) i64: partition, start, stop
    NUMBERS = 4  # (N,) i64: fences, clocks, by the message
    REALS = 5  # (N,) f64
    KEYS = 6  # (U,) u64, of a store group
    TABLES = 7  # table ids of KEYS, packed as above
    VALUES = 8  # (U, columns) rows or gradients, in the frame's codec: see `freshet.wires.codecs`
    POSITIONS = 10  # (N,) row of each occurrence, packed as above
    FEATURE_STARTS = 11  # (features + 1,) start of each feature's occurrences
    LIST_ENDS = 12  # (lists, B): end of each sample's occurrences
    DENSE = 13  # (B, D) f32
    LABEL_INDEX = 14
    LABEL_VALUE = 15
    WEIGHTS = 16
    SAMPLE_IDS = 17
    REQUEST_IDS = 18
    EVENT_TIMES = 19
    SEGMENT = 20  # one a group
    SERVED = 21  # one a group
    EXPLORED = 22
    ITEMS = 23
    LISTS = 24  # (features,) u8: 1 for features that are lists
    STATES = 25  # (U, T) f32: optimiser state of rows
    OWNED = 26  # bits of buckets, packed as above
    BYTES = 27  # (N,) u8: of another message
    MOMENTS = 28  # (M, P) i64: offsets that buckets had applied when their rows were read
    MOMENT_OF = 29  # (B,) u32: index into MOMENTS for each bucket of a store group, if M > 1
    SPAN = 30  # (3,) u64: upper and lower half of the trace id, and the span id of the request
    COUNTS = 31  # (U,) u16: number of consecutive gradients of each row of a store group
    HANDLE = 32  # (16,) u8: digest of the KEYS, TABLES and lists of an earlier lookup
    BESIDE = 33  # (U,) bits of the KEYS whose rows travel beside sums of lists; empty: none
    LIST_COUNTS = 34  # (K,) u16: number of POSITIONS of each list whose sum travels


_TYPES: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    3: np.dtype("<u4"),
    4: np.dtype("<u8"),
    5: np.dtype("i1"),
    6: np.dtype("<i4"),
    7: np.dtype("<i8"),
    8: np.dtype("<f2"),
    9: np.dtype("<f4"),
    10: np.dtype("<f8"),
    11: np.dtype("?"),
}
_TYPE_IDS = {dtype: number for number, dtype in _TYPES.items()}

Sections = Mapping[tuple[Any, int], NDArray[Any]]
"""{(part, group): array of one or two dimensions}."""

NewSections = MutableMapping[tuple[Any, int], NDArray[Any]]
"""The sections of a frame that is not complete yet."""

_NONE = 65535
"""The position of an occurrence without a row, as u16."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One message."""

    kind: int  # a Kind; receivers refuse unknown ones
    id: int = 0  # chosen by the client, repeated in the answer
    codec: RowCodec = RowCodec.FP32  # of VALUES
    flags: int = 0  # their meaning depends on the kind
    sections: Sections = field(default_factory=dict)

    def has(self, part: Part, group: int = 0) -> bool:
        """Return whether the frame has this array."""
        return (part, group) in self.sections

    def array(
        self, part: Part, dtype: Any, shape: Sequence[int | None] = (None,), *, group: int = 0
    ) -> NDArray[Any]:
        """Return the array of a part and group; None in `shape` accepts any length.

        Raises BadFrame if it is missing, or of another type or shape.
        """
        found = self.sections.get((part, group))
        expected = np.dtype(dtype)
        if found is None:
            raise BadFrame(f"{self._name()}: expected an array {part.name}[{group}], found none", "shape")
        fits = found.dtype == expected and found.ndim == len(shape)
        if not fits or any(want not in {None, has} for want, has in zip(shape, found.shape, strict=True)):
            wanted = ", ".join("any" if n is None else str(n) for n in shape)
            raise BadFrame(
                f"{self._name()}: expected {part.name}[{group}] of {expected} and shape ({wanted}), "
                f"found {found.dtype} {found.shape}",
                "shape",
            )
        return found

    def text(self) -> str:
        """Return the text of the frame. Raises BadFrame if it is missing or not UTF-8."""
        try:
            return self.array(Part.TEXT, np.uint8).tobytes().decode()
        except UnicodeDecodeError as error:
            raise BadFrame(f"{self._name()}: TEXT is no UTF-8: {error}", "shape") from error

    def _name(self) -> str:
        return f"frame {_kind_name(self.kind)} {self.id}"


def encoded_bytes(sections: Sections) -> int:
    """Return the length of a frame of these arrays."""
    return HEADER_BYTES + len(sections) * _ENTRY.itemsize + sum(_padded(a.nbytes) for a in sections.values())


def encode_frame(frame: Frame) -> bytes:
    """Encode a frame; each array is copied once.

    Raises ValueError for an array of an unsupported type, or not of one or two dimensions.
    """
    directory = np.empty(len(frame.sections), _ENTRY)
    pieces: list[NDArray[np.uint8]] = []
    for i, ((part, group), given) in enumerate(frame.sections.items()):
        number = _TYPE_IDS.get(given.dtype)
        if number is None or given.ndim not in {1, 2} or (given.ndim == 2 and not given.shape[1]):
            raise ValueError(
                f"a frame holds arrays of one or two dimensions; found {given.dtype} {given.shape}"
            )
        array = np.ascontiguousarray(given)
        columns = array.shape[1] if array.ndim == 2 else 1
        directory[i] = (part, group, number, array.ndim, columns, len(array))
        pieces.append(array.reshape(-1).view(np.uint8))
        if pad := -array.nbytes % _ALIGN:
            pieces.append(_ZEROS[:pad])
    rest = _REST.pack(frame.kind, frame.codec, len(directory), frame.flags, frame.id) + directory.tobytes()
    crc = _native.crc32(np.frombuffer(rest, np.uint8), 0)
    for piece in pieces:
        crc = _native.crc32(piece, crc)
    return b"".join([_HEAD.pack(MAGIC, VERSION, 0, crc), rest, *(piece.data for piece in pieces)])


_ZEROS = np.zeros(_ALIGN, np.uint8)


def decode_frame(data: bytes, *, max_bytes: int) -> Frame:
    """Decode a message; the arrays are read-only views of it.

    Raises:
        LargeFrame: it is longer than `max_bytes`.
        OtherFrame: it has another version.
        BadFrame: its magic number, lengths, types or checksum are wrong.
    """
    size = len(data)
    if size > max_bytes:
        raise LargeFrame(
            f"frame: expected at most {max_bytes} bytes, found {size}; send it in smaller pieces"
        )
    if size < HEADER_BYTES:
        raise BadFrame(f"frame: expected a header of {HEADER_BYTES} bytes, found {size}", "truncated")
    magic, version, zero, crc = _HEAD.unpack_from(data)
    if magic != MAGIC or zero:
        raise BadFrame(
            f"frame: expected magic {MAGIC:#x} and two zero bytes, found {magic:#x} and {zero}", "magic"
        )
    if version != VERSION:
        raise OtherFrame(
            f"frame: expected version {VERSION}, found {version}; "
            "both ends must be of releases that speak the same"
        )
    kind, codec, count, flags, frame_id = _REST.unpack_from(data, _CRC_FROM)
    if size < HEADER_BYTES + count * _ENTRY.itemsize:
        raise BadFrame(f"frame: its directory of {count} arrays does not fit in {size} bytes", "truncated")
    sections = _sections(data, count)
    found = _native.crc32(np.frombuffer(data, np.uint8, offset=_CRC_FROM), 0)
    if found != crc:
        raise BadFrame(f"frame {_kind_name(kind)}: expected checksum {crc:#010x}, found {found:#010x}", "crc")
    if codec not in RowCodec.__members__.values():
        raise BadFrame(
            f"frame {_kind_name(kind)}: expected a codec from 0 to {max(RowCodec)}, found {codec}", "shape"
        )
    return Frame(kind, frame_id, RowCodec(codec), flags, sections)


def frame_id_of(data: bytes) -> int:
    """Return the id of a message of `encode_frame`."""
    return int(_REST.unpack_from(data, _CRC_FROM)[-1])


def add_values(sections: NewSections, group: int, values: F32, wire: RowWire, codec: RowCodec) -> None:
    """Add values (N, S) of a group to the sections of a frame of `codec`."""
    sections[Part.VALUES, group] = wire.pack(group, values, codec)


def rows_in(frame: Frame, group: int, width: int, wire: RowWire) -> int:
    """Return the number of a group's rows, which have `width` floats. Raises BadFrame."""
    form = wire.form(frame.codec, group, width)
    return len(frame.array(Part.VALUES, form.dtype, (None, form.columns), group=group))


def read_values(frame: Frame, group: int, out: F32, wire: RowWire) -> None:
    """Read the values of a group into `out` (N, S). Raises BadFrame."""
    form = wire.form(frame.codec, group, out.shape[1])
    packed = frame.array(Part.VALUES, form.dtype, (len(out), form.columns), group=group)
    wire.unpack(frame.codec, group, packed, out)


def add_tables(sections: NewSections, group: int, tables: U8) -> None:
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


def add_positions(sections: NewSections, group: int, positions: I32, rows: int) -> None:
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


def add_beside(sections: NewSections, group: int, beside: I32, rows: int) -> None:
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


def add_owned(sections: NewSections, owned: Bool) -> None:
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


def _sections(data: bytes, count: int) -> dict[tuple[int, int], NDArray[Any]]:
    sections: dict[tuple[int, int], NDArray[Any]] = {}
    at = HEADER_BYTES + count * _ENTRY.itemsize
    for part, group, number, dims, columns, rows in np.frombuffer(data, _ENTRY, count, HEADER_BYTES).tolist():
        dtype = _TYPES.get(number)
        if dtype is None or dims not in {1, 2} or not columns or (dims == 1 and columns != 1):
            raise BadFrame(
                f"frame: array {part}[{group}] of type {number}, {dims} dimensions and {columns} columns "
                "is none that we know",
                "shape",
            )
        if (part, group) in sections:
            raise BadFrame(f"frame: array {part}[{group}] is there twice", "shape")
        length = rows * columns * dtype.itemsize  # Python integers: cannot overflow
        if at + _padded(length) > len(data):
            raise BadFrame(
                f"frame: array {part}[{group}] of {length} bytes at {at} does not fit in {len(data)} bytes",
                "truncated",
            )
        array = np.frombuffer(data, dtype, rows * columns, at)
        sections[part, group] = array.reshape(rows, columns) if dims == 2 else array
        at += _padded(length)
    if at != len(data):
        raise BadFrame(f"frame: expected {at} bytes, found {len(data)}", "truncated")
    return sections


def _padded(length: int) -> int:
    return length + (-length % _ALIGN)


def _kind_name(kind: int) -> str:
    return Kind(kind).name if kind in Kind.__members__.values() else str(kind)
