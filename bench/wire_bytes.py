"""Bytes of a sample between trainer, embedder and shards by codec, and messages of a push by shards.

    python -m bench.wire_bytes [--quick] [--json]

Frames of synthetic batches, without a network. A sample has 26 ids of tables of its own with 16 floats a row;
ids are Zipf(1.05) of `ids` values. `wires`: of 4,096 samples the lookup, its answer, the batch to the rank,
its gradients, and the push, with one shard; read-my-writes is off. Without codecs and without unique rows the
same needs PLAIN_BYTES. `pushes`: by shards and samples of a batch, how many shards have rows of it, and the
bytes of its push to all, in int8. `lists`: of 4,096 samples with one list of 50 such ids, by
ids, shards and codec: bytes of a sample on all wires with a row for each distinct id and with a sum for each
list; PLAIN_LIST_BYTES, which is fp32 without unique rows, divided by either; and the milliseconds in which a
shard adds its rows up, and spreads gradients over them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from bench.codecs import GOLDEN
from bench.report import Figures, command
from freshet.batches.frames import Names, RequestHeader, batch_frame, gradients_frame
from freshet.batches.stream import TrainBatch
from freshet.coordination.assignment import SLICES
from freshet.embedder.batch_builder import GroupPlaces, pooled
from freshet.model.inputs import GroupInputs, Labels, ModelInputs
from freshet.rows.grpc.frames import PushedGroup, lookup_frame, push_frame, rows_frame
from freshet.rows.grpc.handles import handle_of
from freshet.rows.service import KeyGroup, Push
from freshet.tables import Plan
from freshet.tables.plan import PooledLists, lists_of_shard
from freshet.types import F32, I64, U64, Fence, OffsetRange, TimeMs, bucket_of
from freshet.wires.codecs import RowCodec, gradients_codec, rows_codec
from freshet.wires.row_wire import RowWire

IDS, DIM, SAMPLES, BUCKETS = 26, 16, 4096, 1024
EXPONENT = 1.05
PLAIN_BYTES = 4 * IDS * DIM * 4 + 2 * IDS * 8
"""Rows and gradients of each id in fp32 on both wires, and its key with the lookup and the push."""

LIST, TIMED = 50, 5
PLAIN_LIST_BYTES = LIST * (4 * DIM * 4 + 2 * 8)

CODECS = ("fp32", "bf16", "int8", "int4")
NAMES = Names((), ("label",), (DIM,), (0,), BUCKETS)
RANGE = OffsetRange(0, 0, 16)
WIRE = RowWire((0,), seed=1)
PUSH = Push((RANGE,), Fence(1), TimeMs(1), (), ())


class Batches:
    """Keys of synthetic batches."""

    def __init__(self, ids: int, seed: int = 1) -> None:
        """Draw from `ids` values of each feature."""
        weights = np.arange(1, ids + 1) ** -EXPONENT
        self._share, self._ids = np.cumsum(weights) / weights.sum(), ids
        self._rng = np.random.default_rng(seed)

    def keys(self, samples: int, features: int = IDS) -> tuple[KeyGroup, GroupInputs]:
        """Return the unique keys of a batch, and its positions with (U, DIM) rows."""
        drawn = [np.searchsorted(self._share, self._rng.random(samples)) for _ in range(features)]
        keys: U64 = (np.concatenate([one + 1 + f * self._ids for f, one in enumerate(drawn)])).astype(
            np.uint64
        )
        starts = np.arange(0, (features + 1) * samples, samples, dtype=np.uint32)
        plan = Plan(tables=np.arange(features, dtype=np.uint8), buckets=BUCKETS)
        plan.build(keys * GOLDEN, starts)
        rows: F32 = self._rng.normal(0, 0.05, (len(plan.keys), DIM)).astype(np.float32)
        group = KeyGroup(0, plan.keys.copy(), plan.tables.copy(), plan.bucket_starts.copy())
        return group, GroupInputs(rows, plan.positions.copy(), starts, [None] * features)


def train_batch(inputs: GroupInputs, samples: int) -> TrainBatch:
    """Return a batch of these rows, with ids and times."""
    ones = np.ones(samples, np.float32)
    numbers = np.arange(samples, dtype=np.int64)
    labels = Labels(np.zeros(samples, np.uint8), ones, ones)
    whole = ModelInputs(samples, [inputs], np.empty((samples, 0), np.float32), labels)
    return TrainBatch((RANGE,), Fence(1), whole, numbers, numbers.astype(np.uint64), numbers, {}, {})


def wires(ids: int, codec: str) -> Figures:
    """Return the bytes of a sample on each wire."""
    group, inputs = Batches(ids).keys(SAMPLES)
    rows, gradients = rows_codec(codec), gradients_codec(codec)
    header = RequestHeader(1, Fence(1), 0, 1, 1, 0)
    sent = {
        "lookup": lookup_frame(1, [(0, group.keys, group.tables)], rows, create=True),
        "rows": rows_frame(1, {0: inputs.rows}, WIRE, rows),
        "batch": batch_frame(1, 1, train_batch(inputs, SAMPLES), NAMES, WIRE, rows),
        "gradients": gradients_frame(1, header, {0: 1}, 1, [inputs.rows], WIRE, gradients),
        "push": pushes(group, inputs.rows, np.zeros(BUCKETS, np.int64), gradients)[0],
    }
    figures: Figures = {name: len(data) / SAMPLES for name, data in sent.items()}
    total = sum(len(data) for data in sent.values()) / SAMPLES
    return figures | {
        "unique_share": len(group.keys) / (SAMPLES * IDS),
        "all": total,
        "of_plain": PLAIN_BYTES / total,
    }


def pushes(group: KeyGroup, gradients: F32, owner: I64, codec: RowCodec) -> list[bytes]:
    """Return the frames of a push to each shard; owner: (B,) of each bucket, gradients: (U, DIM)."""
    of = owner[bucket_of(group.keys, BUCKETS)]
    frames = []
    for shard in range(int(owner.max()) + 1):
        mine = of == shard
        keys, tables, own = group.keys[mine], group.tables[mine], owner == shard
        if len(keys):
            part = [PushedGroup(0, keys, tables, gradients[mine])]
            frames.append(push_frame(1, PUSH, part, WIRE, codec, own, handle_of([(0, keys, tables)])))
        else:
            frames.append(push_frame(1, PUSH, [], WIRE, codec, own))
    return frames


def fan_out(samples: int, features: int, shards: int, batches: int) -> Figures:
    """Return shards with rows, and bytes, of the mean push of a batch."""
    made = Batches(1_000_000)
    owner = np.repeat(np.arange(SLICES) % shards, BUCKETS // SLICES)
    with_rows = sent = 0
    for _ in range(batches):
        group, inputs = made.keys(samples, features)
        with_rows += len(np.unique(owner[bucket_of(group.keys, BUCKETS)]))
        sent += sum(map(len, pushes(group, inputs.rows, owner, RowCodec.INT8)))
    return {"shards_with_rows": with_rows / batches, "bytes": sent / batches}


def lists(ids: int, shards: int, codec: str) -> Figures:
    """Return the bytes of a sample with a list, by rows and by sums, and times of one shard's part."""
    group, inputs = Batches(ids).keys(SAMPLES * LIST, 1)
    ends = np.arange(LIST, (SAMPLES + 1) * LIST, LIST, dtype=np.uint32)
    starts = np.array([0, SAMPLES * LIST], np.uint32)
    places = GroupPlaces(inputs.positions, starts, [ends])
    found = pooled(places, len(group.keys), ["mean"], shards)
    by_rows = _list_bytes(group, None, places, shards, codec)
    if found is None:
        return {"rows": by_rows, "rows_of_plain": PLAIN_LIST_BYTES / by_rows}
    by_sums = _list_bytes(group, found.lists, found.places, shards, codec)
    owner = np.repeat(np.arange(SLICES) % shards, BUCKETS // SLICES)
    mine = np.flatnonzero(owner[bucket_of(group.keys, BUCKETS)] == 0)
    part = lists_of_shard(found.lists, mine, len(group.keys)).lists
    rows = inputs.rows[mine]
    sums = part.looked_up(rows)
    return {
        "rows": by_rows,
        "sums": by_sums,
        "rows_of_plain": PLAIN_LIST_BYTES / by_rows,
        "sums_of_plain": PLAIN_LIST_BYTES / by_sums,
        "sums_of_rows": by_rows / by_sums,
        "unique_share": len(group.keys) / (SAMPLES * LIST),
        "sum_ms": _milliseconds(lambda: part.looked_up(rows)),
        "spread_ms": _milliseconds(lambda: part.row_gradients(sums, len(rows))),
    }


def _list_bytes(
    group: KeyGroup, pooled_lists: PooledLists | None, places: GroupPlaces, shards: int, codec: str
) -> float:
    """Return the bytes of a sample on both wires: lookups, answers, batch, gradients and pushes."""
    owner = np.repeat(np.arange(SLICES) % shards, BUCKETS // SLICES)
    of = owner[bucket_of(group.keys, BUCKETS)]
    rows, gradients = rows_codec(codec), gradients_codec(codec)
    count = len(group.keys) if pooled_lists is None else len(pooled_lists)
    values: F32 = np.random.default_rng(1).normal(0, 0.05, (count, DIM)).astype(np.float32)
    inputs = GroupInputs(values, places.positions, places.feature_starts, places.list_ends)
    header = RequestHeader(1, Fence(1), 0, 1, 1, 0)
    total = len(batch_frame(1, 1, train_batch(inputs, SAMPLES), NAMES, WIRE, rows))
    total += len(gradients_frame(1, header, {0: 1}, 1, [values], WIRE, gradients))
    for shard in range(shards):
        mine = np.flatnonzero(of == shard)
        keys, tables = group.keys[mine], group.tables[mine]
        part, sent = None, values[: len(mine)]
        if pooled_lists is not None:
            part = lists_of_shard(pooled_lists, mine, len(group.keys)).lists
            sent = values[: len(part)]
        kept = {} if part is None else {0: part}
        total += len(lookup_frame(1, [(0, keys, tables)], rows, create=True, keep=True, lists=kept))
        total += len(rows_frame(1, {0: sent}, WIRE, rows))
        pushed = [PushedGroup(0, keys, tables, sent, lists=part)]
        handle = handle_of([(0, keys, tables)], kept)
        total += len(push_frame(1, PUSH, pushed, WIRE, gradients, owner == shard, handle))
    return total / SAMPLES


def _milliseconds(work: Callable[[], object]) -> float:
    """Return the shortest of TIMED runs."""
    took = []
    for _ in range(TIMED):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return 1000 * min(took)


def measure(quick: bool = False, ids: Sequence[int] = (20_000, 1_000_000)) -> Figures:
    """Measure all three."""
    batches = 20 if quick else 200
    return {
        "wires": {str(n): {codec: wires(n, codec) for codec in CODECS} for n in ids},
        "pushes": {
            f"{features} ids": {
                str(shards): {str(n): fan_out(n, features, shards, batches) for n in (1, 8, 64, 512)}
                for shards in (2, 8, 32)
            }
            for features in (5, IDS)
        },
        "lists": {
            f"{n} ids": {
                str(shards): {codec: lists(n, shards, codec) for codec in ("fp32", "int8")}
                for shards in (1, 2, 4, 8)
            }
            for n in ids
        },
    }


if __name__ == "__main__":
    command(measure, __doc__)
