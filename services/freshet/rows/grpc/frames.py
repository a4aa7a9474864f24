"""Frames of the gRPC service `Rows`: lookups, pushes and their answers. Without I/O; used by both ends.

| method | request | answer |
|---|---|---|
| `Lookup` (stream) | LOOKUP: KEYS and TABLES of each group; the codec of the answer; flag 1: create; flag 2:
states; flag 4: keep the keys for a push; RANGES, if any: answer once these pushes are applied | ROWS: VALUES
of each group; with flag 2 STATES of groups that have any, MOMENTS and, if there are several, MOMENT_OF of
each group (the pushes that its rows contain) |
| | LOOKUP_LISTS: a LOOKUP without flag 2; groups with lists have BESIDE, LIST_COUNTS, POSITIONS | ROWS: of
these groups VALUES are the rows of BESIDE, then the sum of each list |
| `Push` (stream) | PUSH: RANGES, NUMBERS (fence, clock in ms), OWNED (buckets that the sender assumes the
receiver to own), of each group with rows KEYS, TABLES, VALUES and, if rows have several gradients, COUNTS;
HANDLE instead of KEYS and TABLES: those of a lookup with flag 4 | PUSHED: flag 1: applied, 0: applied before;
flag 2: nothing was done, as the keys of HANDLE are not kept; they must be sent |
| | PUSH_LISTS: a PUSH; without HANDLE groups with lists have BESIDE, LIST_COUNTS and POSITIONS; VALUES as in
the answer to LOOKUP_LISTS, and no COUNTS | PUSHED |
| `Applied` | REQUEST | `RESPONSE`: APPLIED (each distinct offset of a partition), NUMBERS (owned buckets) |

U unique keys of a group, S floats of a row, T floats of its optimiser state, B buckets of the model,
M moments at which buckets were read, P partitions, G gradients of a group, R rows beside its K lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.observability.tracing import Context
from freshet.rows.grpc.handles import HANDLE_BYTES, KeysForgottenError
from freshet.rows.service import KeyGroup, Push
from freshet.rpc.frames import (
    BadFrame,
    Frame,
    Kind,
    NewSections,
    Part,
    add_beside,
    add_owned,
    add_positions,
    add_tables,
    add_values,
    encode_frame,
    read_beside,
    read_owned,
    read_positions,
    read_tables,
    read_values,
    rows_in,
)
from freshet.tables.changes import KnownPushes
from freshet.tables.plan import PooledLists
from freshet.types import F32, I64, U8, U32, U64, Bool, Fence, OffsetRange, TimeMs, bucket_of
from freshet.wires.codecs import RowCodec
from freshet.wires.row_wire import RowWire

_CREATE = 1
_STATES = 2
_KEEP = 4
_APPLIED = 1
_FORGOTTEN = 2

MOST_COUNTED = 65535
"""The most gradients of a row that COUNTS can give; of more, KEYS are repeated."""


@dataclass(frozen=True, slots=True, eq=False)
class PushedGroup:
    """The gradients of a store group for the buckets of one shard."""

    group: int
    keys: U64  # (U,)
    tables: U8  # (U,)
    gradients: F32  # (G, S); with lists (R + K, S)
    counts: U32 | None = None  # (U,) consecutive gradients of each key; None: one each
    lists: PooledLists | None = None

    @classmethod
    def of(cls, group: int, keys: U64, tables: U8, gradients: F32) -> PushedGroup:
        """Count adjacent equal keys: keys (G,) uint64, tables (G,) uint8, gradients (G, S) float32."""
        first = np.ones(len(keys), np.bool_)
        np.logical_or(keys[1:] != keys[:-1], tables[1:] != tables[:-1], out=first[1:])
        starts = np.flatnonzero(first)
        if len(starts) < len(keys):
            counts = np.diff(starts, append=len(keys)).astype(np.uint32)
            if int(counts.max()) <= MOST_COUNTED:
                return cls(group, keys[starts], tables[starts], gradients, counts)
        return cls(group, keys, tables, gradients)


def lookup_frame(
    frame_id: int,
    groups: Sequence[tuple[int, U64, U8]],
    codec: RowCodec,
    *,
    create: bool,
    states: bool = False,
    keep: bool = False,
    after: Sequence[OffsetRange] = (),
    span: Context | None = None,
    lists: Mapping[int, PooledLists] | None = None,
) -> bytes:
    """Encode a lookup.

    Args:
        frame_id: id of the request.
        groups: (store group, keys (U,) uint64, table ids (U,) uint8), keys sorted by bucket.
        codec: encoding of the rows in the answer.
        create: create absent rows.
        states: return optimiser state, too.
        keep: keep the keys, as a push may name them by `handle_of(groups, lists)`.
        after: pushes that the rows must contain.
        span: parent span, if the lookup is traced.
        lists: of each store group whose lists are pooled; not with `states`.
    """
    sections: dict[tuple[Part, int], NDArray[Any]] = {}
    if span is not None:
        sections[Part.SPAN, 0] = _span_numbers(span)
    if after:
        sections[Part.RANGES, 0] = _ranges_array(after)
    for group, keys, tables in groups:
        sections[Part.KEYS, group] = keys
        add_tables(sections, group, tables)
        if lists and group in lists:
            _add_lists(sections, group, lists[group], len(keys))
    flags = (_CREATE if create else 0) | (_STATES if states else 0) | (_KEEP if keep else 0)
    kind = Kind.LOOKUP_LISTS if lists else Kind.LOOKUP
    return encode_frame(Frame(kind, frame_id, codec, flags, sections))


def span_of(frame: Frame) -> Context | None:
    """Return the parent span of a traced lookup or push, or None. Raises BadFrame if it is malformed."""
    if (Part.SPAN, 0) not in frame.sections:
        return None
    high, low, span_id = frame.array(Part.SPAN, np.uint64, (3,)).tolist()
    return Context((high << 64) | low, span_id) if span_id and (high or low) else None


def _span_numbers(span: Context) -> U64:
    return np.array([span.trace_id >> 64, span.trace_id & (1 << 64) - 1, span.span_id], np.uint64)


def _ranges_array(ranges: Sequence[OffsetRange]) -> I64:
    return np.array([(r.partition, r.start, r.stop) for r in ranges], np.int64).reshape(-1, 3)


def lookup_of(frame: Frame, buckets: int) -> tuple[list[KeyGroup], bool, bool]:
    """Decode a lookup into (groups, create, states). Raises BadFrame if it is malformed."""
    _expect(frame, Kind.LOOKUP, Kind.LOOKUP_LISTS)
    create, states = bool(frame.flags & _CREATE), bool(frame.flags & _STATES)
    if states and frame.kind == Kind.LOOKUP_LISTS:
        raise BadFrame("lookup: optimiser states cannot be looked up with sums of lists", "shape")
    return _groups_of(frame, buckets), create, states


def after_of(frame: Frame) -> list[OffsetRange]:
    """Return the pushes that a lookup waits for. Raises BadFrame, and ValueError if a range is empty."""
    if not frame.has(Part.RANGES):
        return []
    return [OffsetRange(*r) for r in frame.array(Part.RANGES, np.int64, (None, 3)).tolist()]


def keeps_keys(frame: Frame) -> bool:
    """Return whether the client of a lookup may name its keys by their handle."""
    return bool(frame.flags & _KEEP)


def rows_frame(
    frame_id: int,
    rows: Mapping[int, F32],
    wire: RowWire,
    codec: RowCodec,
    states: Mapping[int, F32] | None = None,
    known: KnownPushes | None = None,
) -> bytes:
    """Encode the answer to a lookup.

    Args:
        frame_id: id of the request.
        rows: {store group: (U, S) float32}.
        wire: encodes the rows.
        codec: the encoding that the lookup requests.
        states: {store group: (U, T) float32}, sent as float32 in any codec.
        known: the pushes that the rows contain.
    """
    sections: dict[tuple[Part, int], NDArray[Any]] = {}
    for group, values in rows.items():
        add_values(sections, group, values, wire, codec)
    for group, floats in (states or {}).items():
        if floats.shape[1]:
            sections[Part.STATES, group] = floats
    if known is not None:
        add_known(sections, known)
    return encode_frame(Frame(Kind.ROWS, frame_id, codec, sections=sections))


def add_known(sections: NewSections, known: KnownPushes) -> None:
    """Add the pushes that a frame's rows contain to its sections: (M, P) int64, and (B,) uint32 a group."""
    sections[Part.MOMENTS, 0] = known.offsets
    for group, moments in known.moment_of.items():
        sections[Part.MOMENT_OF, group] = moments


def known_of(frame: Frame, groups: Sequence[int], buckets: int) -> KnownPushes:
    """Return the pushes that a frame's rows of these groups contain. Raises BadFrame if malformed."""
    offsets = frame.array(Part.MOMENTS, np.int64, (None, None))
    if len(offsets) <= 1:
        return KnownPushes(offsets)
    moment_of = {g: frame.array(Part.MOMENT_OF, np.uint32, (buckets,), group=g) for g in groups}
    for group, moments in moment_of.items():
        if int(moments.max()) >= len(offsets):
            raise BadFrame(f"group {group}: moment {moments.max()}, but there are {len(offsets)}", "shape")
    return KnownPushes(offsets, moment_of)


def rows_into(frame: Frame, out: Mapping[int, F32], wire: RowWire) -> None:
    """Copy an answer's rows into `out`, (U, S) float32 for each group. Raises BadFrame if shapes differ."""
    _expect(frame, Kind.ROWS)
    for group, rows in out.items():
        read_values(frame, group, rows, wire)


def states_into(frame: Frame, out: Mapping[int, F32]) -> None:
    """Copy an answer's states into `out`, (U, T) float32 for each group with T > 0. Raises BadFrame."""
    for group, states in out.items():
        if states.shape[1]:
            states[...] = frame.array(Part.STATES, np.float32, states.shape, group=group)
            if not np.isfinite(states).all():
                raise BadFrame(f"rows: states of group {group} are not all finite", "shape")


def push_frame(
    frame_id: int,
    push: Push,
    groups: Sequence[PushedGroup],
    wire: RowWire,
    codec: RowCodec,
    owned: Bool,
    handle: bytes | None = None,
) -> bytes:
    """Encode a push for one shard.

    Args:
        frame_id: id of the request.
        push: its ranges, fence, clock and span.
        groups: gradients of the shard's rows.
        wire: encodes the gradients.
        codec: their encoding.
        owned: (B,) bool, buckets that the sender assumes the receiver to own.
        handle: of the groups' keys, if the receiver keeps them; None: they are sent.
    """
    sections: dict[tuple[Part, int], NDArray[Any]] = {
        (Part.RANGES, 0): _ranges_array(push.ranges),
        (Part.NUMBERS, 0): np.array([push.fence, push.clock_ms], np.int64),
    }
    add_owned(sections, owned)
    if handle is not None:
        sections[Part.HANDLE, 0] = np.frombuffer(handle, np.uint8)
    for group in groups:
        if handle is None:
            sections[Part.KEYS, group.group] = group.keys
            add_tables(sections, group.group, group.tables)
            if group.lists is not None:
                _add_lists(sections, group.group, group.lists, len(group.keys))
        if group.counts is not None:
            sections[Part.COUNTS, group.group] = group.counts.astype(np.uint16)
        add_values(sections, group.group, group.gradients, wire, codec)
    if push.span is not None:
        sections[Part.SPAN, 0] = _span_numbers(push.span)
    kind = Kind.PUSH if all(group.lists is None for group in groups) else Kind.PUSH_LISTS
    return encode_frame(Frame(kind, frame_id, codec, sections=sections))


def push_of(
    frame: Frame,
    buckets: int,
    widths: Sequence[int],
    wire: RowWire,
    kept: Callable[[bytes], Sequence[KeyGroup] | None] = lambda _: None,
) -> Push:
    """Decode a push; of a group with lists the gradients are (R + K, S).

    Args:
        frame: the message.
        buckets: of the model.
        widths: S of each store group.
        wire: decodes the gradients.
        kept: returns the keys of a handle; None: they are not kept.

    Raises:
        BadFrame: it is malformed.
        KeysForgottenError: the keys of its handle are not kept.
        ValueError: a range is empty.
    """
    _expect(frame, Kind.PUSH, Kind.PUSH_LISTS)
    ranges = frame.array(Part.RANGES, np.int64, (None, 3)).tolist()
    fence, clock_ms = frame.array(Part.NUMBERS, np.int64, (2,)).tolist()
    owned = read_owned(frame, buckets)
    groups, gradients = [], []
    for group in _keys_of_push(frame, buckets, kept):
        if group.group >= len(widths):
            raise BadFrame(f"push: expected a store group below {len(widths)}, found {group.group}", "shape")
        found = _repeated(frame, group)  # no more than the gradients that the frame holds
        width, values = widths[group.group], len(found.keys) if found.lists is None else len(found.lists)
        if found.lists is not None and rows_in(frame, group.group, width, wire) != values:
            raise BadFrame(f"push: expected {values} gradients of group {group.group}", "shape")
        rows = np.empty((values, width), np.float32)
        read_values(frame, group.group, rows, wire)
        groups.append(found)
        gradients.append(rows)
    decoded = tuple(OffsetRange(*r) for r in ranges)
    return Push(decoded, Fence(fence), TimeMs(clock_ms), groups, gradients, owned, span_of(frame))


def pushed_frame(frame_id: int, applied: bool) -> bytes:
    """Encode the answer to a push."""
    return encode_frame(Frame(Kind.PUSHED, frame_id, flags=_APPLIED if applied else 0))


def forgotten_frame(frame_id: int) -> bytes:
    """Encode the answer to a push of which the keys are not kept."""
    return encode_frame(Frame(Kind.PUSHED, frame_id, flags=_FORGOTTEN))


def pushed_of(frame: Frame) -> bool:
    """Decode the answer to a push: whether a bucket applied it.

    Raises BadFrame if it is another one, KeysForgottenError if nothing was done for want of its keys.
    """
    _expect(frame, Kind.PUSHED)
    if frame.flags & _FORGOTTEN:
        raise KeysForgottenError("keys of a push are not kept")
    return bool(frame.flags & _APPLIED)


def applied_frame(frame_id: int, applied: Mapping[int, Sequence[int]], held: Sequence[int]) -> bytes:
    """Encode the applied offsets and the owned buckets of a shard."""
    pairs = [(p, offset) for p, offsets in applied.items() for offset in offsets]
    sections = {
        (Part.APPLIED, 0): np.array(pairs, np.int64).reshape(-1, 2),
        (Part.NUMBERS, 0): np.array(held, np.int64),
    }
    return encode_frame(Frame(Kind.RESPONSE, frame_id, sections=sections))


def applied_of(frame: Frame) -> tuple[dict[int, list[int]], I64]:
    """Decode ({partition: distinct offsets}, (K,) int64 owned buckets). Raises BadFrame if malformed."""
    _expect(frame, Kind.RESPONSE)
    applied: dict[int, list[int]] = {}
    for partition, offset in frame.array(Part.APPLIED, np.int64, (None, 2)).tolist():
        applied.setdefault(partition, []).append(offset)
    return applied, frame.array(Part.NUMBERS, np.int64)


def _expect(frame: Frame, *kinds: Kind) -> None:
    if frame.kind not in kinds:
        expected = " or ".join(kind.name for kind in kinds)
        raise BadFrame(f"expected a frame {expected}, found kind {frame.kind}", "shape")


def _groups_of(frame: Frame, buckets: int) -> list[KeyGroup]:
    groups = []
    for group in sorted(group for part, group in frame.sections if part == Part.KEYS):
        keys = frame.array(Part.KEYS, np.uint64, group=group)
        found = key_group(group, keys, read_tables(frame, group, len(keys)), buckets)
        if frame.has(Part.LIST_COUNTS, group):
            found = replace(found, lists=_lists_of(frame, group, len(keys)))
        groups.append(found)
    return groups


def _add_lists(sections: NewSections, group: int, lists: PooledLists, rows: int) -> None:
    add_beside(sections, group, lists.rows, rows)
    sections[Part.LIST_COUNTS, group] = lists.counts.astype(np.uint16)
    add_positions(sections, group, lists.positions, rows)


def _lists_of(frame: Frame, group: int, rows: int) -> PooledLists:
    """Decode the lists of a group of `rows` keys. Raises BadFrame if they are malformed."""
    if frame.kind not in (Kind.LOOKUP_LISTS, Kind.PUSH_LISTS):
        raise BadFrame(f"group {group} has lists, which a frame of kind {frame.kind} cannot have", "shape")
    counts = frame.array(Part.LIST_COUNTS, np.uint16, group=group).astype(np.uint32)
    positions = read_positions(frame, group, rows)
    if not counts.all() or int(counts.sum(dtype=np.uint64)) != len(positions):
        raise BadFrame(f"group {group}: counts of lists do not fit {len(positions)} positions", "shape")
    if len(positions) and int(positions.min()) < 0:
        raise BadFrame(f"group {group}: an element of a list has no row", "shape")
    return PooledLists(read_beside(frame, group, rows), positions, counts)


def key_group(group: int, keys: U64, tables: U8, buckets: int) -> KeyGroup:
    """Return the group of keys (U,) and tables (U,), which the native store checks to be sorted by bucket."""
    counts = np.bincount(bucket_of(keys, buckets), minlength=buckets)
    starts = np.zeros(buckets + 1, np.uint32)
    np.cumsum(counts, out=starts[1:])
    return KeyGroup(group, keys, tables, starts)


def _keys_of_push(
    frame: Frame, buckets: int, kept: Callable[[bytes], Sequence[KeyGroup] | None]
) -> Sequence[KeyGroup]:
    if not frame.has(Part.HANDLE):
        return _groups_of(frame, buckets)
    found = kept(frame.array(Part.HANDLE, np.uint8, (HANDLE_BYTES,)).tobytes())
    if found is None:
        raise KeysForgottenError("keys of a push are not kept")
    if frame.kind == Kind.PUSH and any(group.lists is not None for group in found):
        raise BadFrame("push: its handle is of a lookup with lists, expected a frame PUSH_LISTS", "shape")
    return found


def _repeated(frame: Frame, group: KeyGroup) -> KeyGroup:
    """Repeat the keys of a group by its COUNTS, if it has any, of as many gradients as the frame has."""
    if not frame.has(Part.COUNTS, group.group):
        return group
    if group.lists is not None:
        raise BadFrame(f"push: group {group.group} has lists, and several gradients of a row", "shape")
    counts = frame.array(Part.COUNTS, np.uint16, (len(group.keys),), group=group.group)
    values = frame.sections.get((Part.VALUES, group.group))
    if values is None or not counts.all() or int(counts.sum(dtype=np.uint64)) != len(values):
        raise BadFrame(f"push: counts of group {group.group} do not fit its gradients", "shape")
    return group.repeated(counts.astype(np.uint32))
