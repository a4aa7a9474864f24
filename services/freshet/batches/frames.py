"""The frames of the gRPC service `Batches`, between trainer and embedder (`freshet.rpc.frames`).

| stream | request | answer |
|---|---|---|
| `Take` | NEXT_BATCH: NUMBERS (feed, fence, rank, ranks, lanes, lane, wait in ms), APPLIED (the dense vector) | BATCH, empty if none came |
| `Give` | GRADIENTS, id of the batch: NUMBERS as above, APPLIED, VALUES of each group unless it was not used; with flag 4 COUNTS | ACCEPTED, flag 1 |

A BATCH holds RANGES, NUMBERS (id, fence), and the columns of the batch; for each store group VALUES,
POSITIONS, FEATURE_STARTS, LISTS (u8, a feature: whether it is a list) and LIST_ENDS (lists × samples). If the
rank applies read-my-writes, it also holds MOMENTS (and MOMENT_OF: which pushes rows contain), and for each
group KEYS, TABLES and STATES. Flag 4 of a BATCH: its embedder accepts several gradients a row, one for each
step within the batch, for which the rank needs STATES. Only for such a batch may GRADIENTS have flag 4: VALUES
are then (G, S), and COUNTS (U,) give the gradients of each row, which are adjacent. Native code trusts decoded
frames, so this module validates them: positions lie within the rows, ends rise, keys are sorted.

Letters: B samples of a batch, U rows of a group, G gradients of a group, S floats of a row.
"""  # noqa: E501  the table

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.batches.read_my_writes import LookupResult
from freshet.batches.stream import TrainBatch
from freshet.config.spec.layout import Layout, layout_of
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError
from freshet.model.inputs import GroupInputs, Labels, ModelInputs
from freshet.rows.grpc.frames import add_known, known_of
from freshet.rows.service import KeyGroup, RowStates
from freshet.rpc.channel import Transport
from freshet.rpc.frames import (
    BadFrame,
    Frame,
    Kind,
    Part,
    add_positions,
    add_tables,
    add_values,
    encode_frame,
    read_positions,
    read_tables,
    read_values,
    rows_in,
)
from freshet.rpc.pieces import MAX_PIECES, MIN_LIMIT_BYTES
from freshet.types import F32, U32, Fence, OffsetRange, bucket_of
from freshet.wires.codecs import RowCodec
from freshet.wires.row_wire import RowWire

BLOCK_ROWS = 256
"""Samples of a block of an earlier release; a batch contains it whole, even if `batch_rows` is smaller."""

SAMPLE_BYTES = 8 + 8 + 8 + 1 + 4 + 4 + 1 + 8
"""Ids of sample and request, time, label, value, weight, explored, item."""

KEY_BYTES = 8 + 1 + 4 + 4
"""Key and table of a row, its head in an integer codec, and the position of an occurrence."""

AROUND_BYTES = 1 << 16
"""Header, directory, ranges and offsets of 256 partitions."""

MOMENTS = 256
"""The most moments of one lookup, each with the offsets of all partitions; a shard has several."""


def largest_batch_bytes(spec: Spec, layout: Layout) -> int:
    """Return the bytes of the largest BATCH: all lists have their maximal length, all keys are distinct.

    No GRADIENTS are longer: a row has at most one gradient for each of its occurrences. Only a block that
    has more samples than a batch has rows can exceed this size.
    """
    train = spec.train
    known = 8 * MOMENTS * spec.partitions + 4 * spec.buckets * len(layout.groups)
    sample = SAMPLE_BYTES + 8 * len(spec.train.segments) + 4 * len(spec.labels) + 8 * len(layout.dense)
    for group in layout.groups:
        features = [spec.features[f] for f in group.features]
        keys = sum(feature.max or 1 for feature in features)
        lists = sum(feature.kind == "list" for feature in features)
        sample += 4 * lists + keys * (KEY_BYTES + 4 * (group.width + group.state_floats))
    return AROUND_BYTES + known + max(train.behind_rows(native_loop=False), BLOCK_ROWS) * sample


def check_messages(spec: Spec, transport: Transport) -> None:
    """Raise ConfigError if the largest batch of the spec exceeds the size of a message in pieces."""
    largest = largest_batch_bytes(spec, layout_of(spec))
    needed = max(MIN_LIMIT_BYTES, -(-largest // MAX_PIECES))
    if transport.max_message_bytes < needed:
        raise ConfigError(
            "grpc",
            "max_message_bytes",
            transport.max_message_bytes,
            f"at least {needed}: a batch of {spec.name} may have {largest} bytes, and goes in {MAX_PIECES} "
            "messages at most",
            f"raise FRESHET_GRPC_MAX_MESSAGE_BYTES to {needed} on every service of the model, or take fewer "
            "rows in a batch (train.batch.rows, train.batch.behind) or shorter lists (max)",
        )


def streams(spec: Spec, at_least: int) -> int:
    """Return the concurrent streams that an embedder or shard must accept, at least `at_least`.

    Each client (a lane or an embedder) keeps two streams, and there are at most as many clients as
    partitions. The limit is twice that, since a client may reconnect before its old streams end.
    """
    return max(at_least, 4 * spec.partitions)


def work_bytes(spec: Spec, at_least: int) -> int:
    """Return the memory budget of concurrent requests at an embedder or shard, at least `at_least` bytes.

    It lets an embedder accept the gradients of every batch in flight, which permits bound. A lane sends one
    message of gradients at a time, no longer than its batch, and there are at most as many lanes as
    partitions. The limit is twice that, since a lane may reconnect.
    """
    return max(at_least, 2 * spec.partitions * largest_batch_bytes(spec, layout_of(spec)))


Sections = dict[tuple[Any, int], NDArray[Any]]

MOST_COUNTED = 65535

USED, FLUSH, COUNTED = 1, 2, 4
"""Flags of GRADIENTS: the batch was trained on; a flush without gradients, answered when all earlier pushes
are acknowledged; rows have several gradients, as COUNTS give."""
DONE = 1
"""Flag of ACCEPTED: the gradients were accepted, or the flush is complete."""
EMPTY, REPLAYED, IN_STEPS = 1, 2, 4
"""Flags of BATCH: no batch; partly applied before; its gradients may be COUNTED."""


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """The header of every request: the lane that it is for, and the connection."""

    feed: int  # id of the lane's connection; a new one voids the batches of the last
    fence: Fence  # of the rank's quorum or lease; an embedder refuses replaced ranks
    rank: int
    ranks: int
    lanes: int  # of each rank
    lane: int  # of this rank
    wait_ms: int = 0

    @property
    def global_lane(self) -> int:
        """The lane's index over all ranks; it owns the partitions p with p % (ranks * lanes) == place."""
        return self.rank * self.lanes + self.lane


MAX_COLUMNS = 255
"""Segments, labels or store groups: a frame numbers them by a byte."""


@dataclass(frozen=True, slots=True)
class Names:
    """The columns of a batch by the spec, which both sides share."""

    segments: tuple[str, ...]
    labels: tuple[str, ...]
    widths: tuple[int, ...]  # floats of a row, by store group
    states: tuple[int, ...]  # floats of its optimiser state
    buckets: int  # of the model
    scalars: tuple[int, ...] = ()  # floats of a row before its vector, by store group

    @classmethod
    def of(cls, spec: Spec, layout: Layout) -> Names:
        """Return the columns of a batch of this spec."""
        return cls(
            tuple(spec.train.segments),
            tuple(label.name for label in spec.labels),
            tuple(group.width for group in layout.groups),
            tuple(group.state_floats for group in layout.groups),
            spec.buckets,
            layout.scalars,
        )

    def __post_init__(self) -> None:
        """Compare the numbers of columns with the byte that a frame has for each."""
        for key, names in (
            ("train.segments", self.segments),
            ("labels", self.labels),
            ("tables", self.widths),
        ):
            if len(names) > MAX_COLUMNS:
                raise ConfigError(
                    "freshet.toml",
                    key,
                    f"{len(names)} names",
                    f"at most {MAX_COLUMNS} where embedders are processes of their own",
                    "use fewer, or embed the rows in the trainer (`freshet up`)",
                )


def take_frame(
    frame_id: int, header: RequestHeader, applied: Mapping[int, int], codec: RowCodec = RowCodec.FP32
) -> bytes:
    """Encode a request for a batch.

    `applied` is the dense vector {partition: next offset}, `codec` the encoding in which its rows are wanted.
    """
    return encode_frame(Frame(Kind.NEXT_BATCH, frame_id, codec, sections=_header_sections(header, applied)))


def gradients_frame(
    frame_id: int,
    header: RequestHeader,
    applied: Mapping[int, int],
    batch_id: int,
    gradients: Sequence[F32] | None,
    wire: RowWire,
    codec: RowCodec,
    counts: Sequence[U32] | None = None,
) -> bytes:
    """Encode the gradients of a batch, (G, S) float32 a group; None: it was not used.

    `counts` holds the gradients of each row, (U,) uint32 a group; None: one each. Raises ValueError if a row
    has more than 65,535.
    """
    sections = _header_sections(header, applied)
    sections[Part.RANGES, 0] = np.array([[batch_id, 0, 0]], np.int64)
    for g, values in enumerate(gradients or ()):
        add_values(sections, g, values, wire, codec)
    flags = 0 if gradients is None else USED
    if gradients is not None and counts is not None:
        flags |= COUNTED
        for g, of in enumerate(counts):
            if int(of.max(initial=0)) > MOST_COUNTED:
                raise ValueError(f"a row has {of.max()} gradients of one batch, at most {MOST_COUNTED}")
            sections[Part.COUNTS, g] = of.astype(np.uint16)
    return encode_frame(Frame(Kind.GRADIENTS, frame_id, codec, flags, sections))


def flush_frame(frame_id: int, header: RequestHeader, applied: Mapping[int, int]) -> bytes:
    """Encode a flush: a request answered when all earlier pushes are acknowledged."""
    return encode_frame(
        Frame(Kind.GRADIENTS, frame_id, flags=FLUSH, sections=_header_sections(header, applied))
    )


def decode_header(frame: Frame, kind: Kind) -> tuple[RequestHeader, dict[int, int]]:
    """Decode a request's header and dense vector {partition: next offset}. Raises BadFrame if invalid."""
    if frame.kind != kind:
        raise BadFrame(f"expected a frame {kind.name}, found kind {frame.kind}", "shape")
    feed, fence, rank, ranks, lanes, lane, wait_ms = frame.array(Part.NUMBERS, np.int64, (7,)).tolist()
    if not (0 <= rank < ranks <= 1 << 16 and 0 <= lane < lanes <= 1 << 10 and 0 <= wait_ms <= 60_000):
        raise BadFrame(
            f"header: expected rank below ranks, lane below lanes and a wait of a minute at most, found rank "
            f"{rank} of {ranks}, lane {lane} of {lanes}, {wait_ms} ms",
            "shape",
        )
    applied = frame.array(Part.APPLIED, np.int64, (None, 2)).tolist()
    return RequestHeader(feed, Fence(fence), rank, ranks, lanes, lane, wait_ms), dict(applied)


def gradients_of(frame: Frame, batch: TrainBatch, wire: RowWire) -> tuple[list[F32], list[U32] | None]:
    """Decode gradients, (G, S) float32 a group, and counts, (U,) uint32 a group; None: one each.

    Raises BadFrame if they do not fit the batch: a row has one gradient at least, and one a sample at most.
    """
    counted = bool(frame.flags & COUNTED)
    if counted and batch.states is None:
        raise BadFrame("gradients: several a row, but the batch was sent without states of rows", "shape")
    gradients, counts = list[F32](), list[U32]()
    for g, group in enumerate(batch.inputs.groups):
        rows, width = group.rows.shape
        if counted:
            of = frame.array(Part.COUNTS, np.uint16, (rows,), group=g).astype(np.uint32)
            if rows and not 1 <= int(of.min()) <= int(of.max()) <= max(len(batch), 1):
                raise BadFrame(
                    f"gradients: rows of group {g} have {of.min()} to {of.max()} gradients; expected 1 to "
                    f"{len(batch)}, the samples of the batch",
                    "shape",
                )
            rows = int(of.sum())
            counts.append(of)
        if (found := rows_in(frame, g, width, wire)) != rows:  # before the allocation
            raise BadFrame(f"gradients: expected {rows} of group {g}, found {found}", "shape")
        out = np.empty((rows, width), np.float32)
        read_values(frame, g, out, wire)
        gradients.append(out)
    return gradients, counts if counted else None


def batch_id_of(frame: Frame) -> int:
    """Decode the id of a returned batch. Raises BadFrame if it is missing."""
    return int(frame.array(Part.RANGES, np.int64, (1, 3))[0, 0])


def given_frame(frame_id: int, *, done: bool = True) -> bytes:
    """Encode the answer to GRADIENTS."""
    return encode_frame(Frame(Kind.ACCEPTED, frame_id, flags=DONE if done else 0))


def empty_frame(frame_id: int) -> bytes:
    """Encode the answer to NEXT_BATCH without a batch."""
    return encode_frame(Frame(Kind.BATCH, frame_id, flags=EMPTY))


def batch_frame(
    frame_id: int, batch_id: int, batch: TrainBatch, names: Names, wire: RowWire, codec: RowCodec
) -> bytes:
    """Encode a batch; copies its arrays once. Raises ValueError if it has no labels, or no lookup yet."""
    sections: Sections = {
        (Part.RANGES, 0): np.array([(r.partition, r.start, r.stop) for r in batch.ranges], np.int64),
        (Part.NUMBERS, 0): np.array([batch_id, batch.fence], np.int64),
        (Part.SAMPLE_IDS, 0): batch.sample_ids,
        (Part.REQUEST_IDS, 0): batch.request_ids,
        (Part.EVENT_TIMES, 0): batch.event_times_ms,
    }
    for i, name in enumerate(names.segments):
        sections[Part.SEGMENT, i] = batch.segments[name]
    for i, label in enumerate(names.labels):
        if label in batch.served:
            sections[Part.SERVED, i] = batch.served[label]
    if batch.explored is not None:
        sections[Part.EXPLORED, 0] = batch.explored
    if batch.items is not None:
        sections[Part.ITEMS, 0] = batch.items
    _add_inputs(sections, batch.inputs, wire, codec)
    if batch.looked is not None:
        _add_looked(sections, batch.looked)
    in_steps = batch.states is not None and batch.looked is not None
    flags = (REPLAYED if batch.replayed else 0) | (IN_STEPS if in_steps else 0)
    return encode_frame(Frame(Kind.BATCH, frame_id, codec, flags, sections))


def batch_of(
    frame: Frame, names: Names, wire: RowWire, memory: Sequence[F32] | None = None
) -> tuple[int, TrainBatch] | None:
    """Decode a batch and its id; None for an empty answer.

    Args:
        frame: the answer; the batch's columns are views of it.
        names: the columns of the spec.
        wire: decodes the rows.
        memory: per group (N, S) float32 to hold the rows; used if N >= U.

    Raises:
        BadFrame: it is no BATCH, or its columns do not fit each other.
    """
    if frame.kind != Kind.BATCH:
        raise BadFrame(f"expected a frame BATCH, found kind {frame.kind}", "shape")
    if frame.flags & EMPTY:
        return None
    batch_id, fence = frame.array(Part.NUMBERS, np.int64, (2,)).tolist()
    ids = frame.array(Part.SAMPLE_IDS, np.int64)
    b = (len(ids),)
    explored = frame.array(Part.EXPLORED, np.bool_, b) if frame.has(Part.EXPLORED) else None
    items = frame.array(Part.ITEMS, np.uint64, b) if frame.has(Part.ITEMS) else None
    served = {
        label: frame.array(Part.SERVED, np.float32, b, group=i)
        for i, label in enumerate(names.labels)
        if frame.has(Part.SERVED, i)
    }
    inputs = _inputs(frame, len(ids), names, wire, memory)
    looked = _looked(frame, inputs, names) if frame.has(Part.MOMENTS) else None
    in_steps = looked is not None and frame.flags & IN_STEPS
    return batch_id, TrainBatch(
        ranges=_ranges(frame),
        fence=Fence(fence),
        inputs=inputs,
        sample_ids=ids,
        request_ids=frame.array(Part.REQUEST_IDS, np.uint64, b),
        event_times_ms=frame.array(Part.EVENT_TIMES, np.int64, b),
        segments={n: frame.array(Part.SEGMENT, np.uint64, b, group=i) for i, n in enumerate(names.segments)},
        served=served,
        replayed=bool(frame.flags & REPLAYED),
        explored=explored,
        items=items,
        looked=looked,
        states=looked.states.floats if looked is not None and in_steps else None,
    )


def _header_sections(header: RequestHeader, applied: Mapping[int, int]) -> Sections:
    numbers = (
        header.feed,
        header.fence,
        header.rank,
        header.ranks,
        header.lanes,
        header.lane,
        header.wait_ms,
    )
    return {
        (Part.NUMBERS, 0): np.array(numbers, np.int64),
        (Part.APPLIED, 0): np.array(sorted(applied.items()), np.int64).reshape(-1, 2),
    }


def _ranges(frame: Frame) -> tuple[OffsetRange, ...]:
    try:
        return tuple(OffsetRange(*r) for r in frame.array(Part.RANGES, np.int64, (None, 3)).tolist())
    except ValueError as error:
        raise BadFrame(f"batch: {error}", "shape") from error


def _add_inputs(sections: Sections, inputs: ModelInputs, wire: RowWire, codec: RowCodec) -> None:
    labels = inputs.labels
    if labels is None:
        raise ValueError("a batch to train on has labels")
    sections[Part.LABEL_INDEX, 0], sections[Part.LABEL_VALUE, 0] = labels.index, labels.value
    sections[Part.WEIGHTS, 0] = labels.weight
    if inputs.dense.shape[1]:
        sections[Part.DENSE, 0] = inputs.dense
    for g, group in enumerate(inputs.groups):
        add_values(sections, g, group.rows, wire, codec)
        add_positions(sections, g, group.positions, len(group.rows))
        sections[Part.FEATURE_STARTS, g] = group.feature_starts
        lists = [ends for ends in group.list_ends if ends is not None]
        sections[Part.LISTS, g] = np.array([ends is not None for ends in group.list_ends], np.uint8)
        if lists and inputs.size:
            sections[Part.LIST_ENDS, g] = np.stack(lists)


def _add_looked(sections: Sections, looked: LookupResult) -> None:
    if looked.states.known is None:
        raise ValueError("a batch is sent after its lookup")
    add_known(sections, looked.states.known)
    for g, (keys, states) in enumerate(zip(looked.groups, looked.states.floats, strict=True)):
        sections[Part.KEYS, g] = keys.keys
        add_tables(sections, g, keys.tables)
        if states.shape[1]:
            sections[Part.STATES, g] = states


def _looked(frame: Frame, inputs: ModelInputs, names: Names) -> LookupResult:
    groups, states = [], []
    for g, floats in enumerate(names.states):
        u = len(inputs.groups[g].rows)
        keys = frame.array(Part.KEYS, np.uint64, (u,), group=g)
        of = bucket_of(keys, names.buckets)
        if (np.diff(of.astype(np.int64)) < 0).any():
            raise BadFrame(f"batch: keys of group {g} are not sorted by bucket", "shape")
        starts = np.searchsorted(of, np.arange(names.buckets + 1)).astype(np.uint32)
        groups.append(KeyGroup(g, keys, read_tables(frame, g, u), starts))
        state: F32 = np.empty((u, 0), np.float32)
        if floats:
            state = frame.array(Part.STATES, np.float32, (u, floats), group=g).copy()
            if not np.isfinite(state).all():
                raise BadFrame(f"batch: states of group {g} are not all finite", "shape")
        states.append(state)
    known = known_of(frame, range(len(groups)), names.buckets)
    return LookupResult(groups, RowStates(states, known))


def _inputs(
    frame: Frame, size: int, names: Names, wire: RowWire, memory: Sequence[F32] | None
) -> ModelInputs:
    b = (size,)
    index = frame.array(Part.LABEL_INDEX, np.uint8, b)
    if int(index.max(initial=0)) >= len(names.labels):
        raise BadFrame(f"batch: label {index.max()}, but the spec has {len(names.labels)}", "shape")
    labels = Labels(
        index, frame.array(Part.LABEL_VALUE, np.float32, b), frame.array(Part.WEIGHTS, np.float32, b)
    )
    dense: F32 = np.empty((size, 0), np.float32)
    if frame.has(Part.DENSE):
        dense = frame.array(Part.DENSE, np.float32, (size, None))
    groups = []
    for g, width in enumerate(names.widths):
        n = rows_in(frame, g, width, wire)
        fits = memory is not None and len(memory[g]) >= n
        rows = memory[g][:n] if memory is not None and fits else np.empty((n, width), np.float32)
        read_values(frame, g, rows, wire)
        groups.append(_group(frame, g, rows, size))
    return ModelInputs(size, groups, dense, labels)


def _group(frame: Frame, g: int, rows: F32, size: int) -> GroupInputs:
    positions = read_positions(frame, g, len(rows))
    starts: U32 = frame.array(Part.FEATURE_STARTS, np.uint32, group=g)
    is_list = frame.array(Part.LISTS, np.uint8, (max(len(starts) - 1, 0),), group=g)
    counts = np.diff(starts.astype(np.int64))
    if not len(starts) or starts[0] or starts[-1] != len(positions) or (counts < 0).any():
        raise BadFrame(
            f"batch: features of group {g} must start at 0 and end at {len(positions)}, rising", "shape"
        )
    lists = int(np.count_nonzero(is_list))
    ends = np.zeros((lists, size), np.uint32)
    if lists and size:
        ends = frame.array(Part.LIST_ENDS, np.uint32, (lists, size), group=g)
    plain = counts[is_list == 0]
    last = ends[:, -1] if size else np.zeros(lists, np.uint32)
    if (
        (plain != size).any()
        or (last != counts[is_list != 0]).any()
        or (np.diff(ends.astype(np.int64)) < 0).any()
    ):
        raise BadFrame(f"batch: occurrences of group {g} do not fit its {size} samples", "shape")
    rest = iter(ends)
    return GroupInputs(rows, positions, starts, [next(rest) if one else None for one in is_list.tolist()])
