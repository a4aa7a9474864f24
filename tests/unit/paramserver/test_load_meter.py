"""Rows counted by slice, and lookups while memory is full."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from freshet.errors import Refused, Unavailable
from freshet.paramserver.server import LoadMeter, MeteredRows
from freshet.rows.service import KeyGroup, Push, RowStates
from freshet.tables import KnownPushes
from freshet.types import F32, Bucket, Fence, OffsetRange, TimeMs

BUCKETS, SLICES = 16, 4


def group(*buckets: int) -> KeyGroup:
    """Return a group with one key in each of these rising buckets."""
    starts = np.searchsorted(np.array(buckets), np.arange(BUCKETS + 1)).astype(np.uint32)
    keys = np.arange(1, len(buckets) + 1, dtype=np.uint64)
    return KeyGroup(0, keys, np.zeros(len(buckets), np.uint8), starts)


class Rows:
    """A row service that answers every call, unless `refuses` is set."""

    refuses = False

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        if states is not None:
            states.known = KnownPushes(np.array([[7]]))

    def push(self, push: Push) -> bool:
        if self.refuses:
            raise Refused("not now", {})
        return True

    def applied(self) -> Mapping[int, Sequence[int]]:
        return {0: [1]}

    def owned(self) -> Sequence[Bucket]:
        return [Bucket(3)]


def push(*groups: KeyGroup) -> Push:
    gradients = [np.zeros((len(each.keys), 1), np.float32) for each in groups]
    return Push((OffsetRange(0, 0, 1),), Fence(1), TimeMs(1), list(groups), gradients)


def test_rows_looked_up_and_pushed_are_counted_by_slice():
    meter = LoadMeter(BUCKETS, SLICES)
    rows = MeteredRows(Rows(), meter, lambda: None)
    rows.lookup([group(0, 3, 4, 15), group(4)], [np.zeros((4, 1), np.float32)] * 2)
    assert meter.rows.tolist() == [2, 2, 0, 1]
    rows.push(push(group(8, 8, 9)))
    assert meter.rows.tolist() == [2, 2, 3, 1]
    out, states = [np.zeros((1, 1), np.float32)], [np.zeros((1, 0), np.float32)]
    row_states = RowStates(states)
    rows.lookup([group(1)], out, states=row_states)
    assert row_states.known is not None
    assert row_states.known.offsets.tolist() == [[7]]
    assert meter.rows.tolist() == [3, 2, 3, 1]


def test_rates_cover_the_time_since_the_last_call():
    meter = LoadMeter(BUCKETS, SLICES)
    meter.rates(100.0)
    meter.count(group(0, 0, 5).bucket_starts)
    assert meter.rates(102.0).tolist() == [1.0, 0.5, 0.0, 0.0]
    assert meter.rates(104.0).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_a_model_with_few_buckets_has_one_slice_a_bucket():
    meter = LoadMeter(2, 2)
    meter.count(np.array([0, 3, 10], np.uint32))
    assert meter.rows.tolist() == [3, 7]


def test_refused_calls_are_not_counted():
    inner, meter = Rows(), LoadMeter(BUCKETS, SLICES)
    inner.refuses = True
    with pytest.raises(Refused):
        MeteredRows(inner, meter, lambda: None).push(push(group(1)))
    assert meter.rows.sum() == 0


def test_a_full_shard_refuses_training_lookups_but_no_pushes():
    full: list[str] = ["rows take 11 of 10 bytes"]
    rows = MeteredRows(Rows(), LoadMeter(BUCKETS, SLICES), lambda: full[0] if full else None)
    out = [np.zeros((1, 1), np.float32)]
    with pytest.raises(Unavailable, match="rows take 11 of 10 bytes"):
        rows.lookup([group(1)], out)
    with pytest.raises(Unavailable, match="rows take 11 of 10 bytes"):
        rows.lookup([group(1)], out, states=RowStates(out))
    assert rows.refused == 2
    assert rows.push(push(group(1)))
    rows.lookup([group(1)], out, create=False)
    full.clear()
    rows.lookup([group(1)], out)
    assert rows.refused == 2
    assert (rows.applied(), rows.owned()) == ({0: [1]}, [Bucket(3)])
