"""Rows that serving may hold otherwise: in any order of events, it is near, and equal once all is sent."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.config.spec.layout import Group
from freshet.tables import Published, Store, TableOptions
from freshet.types import F32, U64
from freshet.wires.codecs import RowCodec, RowFormat, format_for, pack_rows, unpack_rows
from tests.fixtures.effort import examples
from tests.fixtures.tables import group, hedge_group, keys_of, look_up, push, rule, store_of

CODECS = {16: RowCodec.BF16, 8: RowCodec.INT8, 4: RowCodec.UINT4}
SCALARS_APART, VECTOR_APART = 0.1, 0.05
"""As in `ServedRows` of the native core."""
ALL = 1 << 40
NUMBERS = list(range(1, 41))


def cross_group() -> Group:
    """Return a layout without a vector: its rows travel as bf16."""
    return group(("cross", 1, rule("sgd", lr=1.0), 0.0))


@dataclass(slots=True)
class World:
    """A store, what a server holds of it, and what is published of it."""

    store: Store
    form: RowFormat
    served: dict[int, F32] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    at: int = 0

    @classmethod
    def of(cls, bits: int, layout: Group) -> World:
        store = store_of(layout, options={0: TableOptions(ttl_ms=10_000)})
        store.native.round_published(bits, [layout.scalars])
        return cls(store, format_for(CODECS[bits], layout.width, layout.scalars))

    def rows(self, keys: U64) -> F32:
        return look_up(self.store, keys, create=False)

    def learns(self, numbers: list[int], share: float) -> None:
        """Change rows by a share of their lengths, or of one."""
        keys = keys_of(*numbers)
        look_up(self.store, keys)
        before = self.rows(keys)
        length = np.maximum(np.linalg.norm(before, axis=1, keepdims=True), 1e-3)
        gradients = np.random.default_rng(self.at).normal(0, 1, before.shape) * share * length
        push(self.store, [(0, self.at, self.at + 1)], keys, gradients.astype(np.float32))
        self.at += 1
        self.changed |= set(keys.tolist())

    def is_sent(self, batch: Published, *, exact: bool) -> None:
        for part in batch.tables:
            values = part.values.copy()
            if not exact:
                unpack_rows(pack_rows(part.values, self.form), self.form, values)
            self.served |= dict(zip(part.keys.tolist(), values, strict=True))
            for key in part.removed.tolist():
                self.served.pop(key, None)

    def removes(self, numbers: list[int]) -> None:
        keys = keys_of(*numbers)
        self.store.remove(0, keys)
        self.changed -= set(keys.tolist())

    def check_near(self) -> None:
        """Everything is published: each row is as near as a codec and a passed change allow."""
        assert set(self.served) == self.changed
        for key, held in self.served.items():
            row, c = self.rows(np.array([key], np.uint64))[0], self.form.scalars
            rounded = np.empty((1, len(row)), np.float32)
            unpack_rows(pack_rows(row[None], self.form), self.form, rounded)
            for part, tolerance in ((slice(c), SCALARS_APART), (slice(c, None), VECTOR_APART)):
                apart = np.linalg.norm(held[part] - row[part])
                rounding = np.linalg.norm(rounded[0][part] - row[part])
                kept = 2**-8 * np.linalg.norm(held[part])  # the store keeps what was sent exactly in bf16
                assert apart <= 1.001 * max(tolerance * np.linalg.norm(row[part]), rounding) + kept

    def check_equal(self) -> None:
        """Everything is sent as it is."""
        assert self.store.inexact() == 0
        assert set(self.served) == self.changed
        keys = np.array(sorted(self.served), np.uint64)
        for key, row in zip(keys.tolist(), self.rows(keys), strict=True):
            np.testing.assert_array_equal(self.served[key], row)


numbers = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=12, unique=True)
learn = st.tuples(st.just("learn"), numbers, st.sampled_from([0.001, 0.02, 0.5]))
send = st.tuples(
    st.sampled_from(["publish", "fails", "exact", "exact_fails"]), st.integers(1, 60), st.just(0.0)
)
remove = st.tuples(st.just("remove"), numbers, st.just(0.0))


@pytest.mark.parametrize("layout", [hedge_group(tables=(0,)), cross_group()], ids=["vector", "scalar"])
@pytest.mark.parametrize("bits", CODECS)
@settings(deadline=None, max_examples=examples(60))
@given(events=st.lists(st.one_of(learn, learn, send, remove), max_size=30))
def test_serving_is_near_and_equal_once_all_is_sent(bits: int, layout: Group, events) -> None:
    w = World.of(bits, layout)
    for what, of, share in events:
        if what == "learn":
            w.learns(of, share)
        elif what == "remove":
            w.removes(of)
        else:
            exact = what.startswith("exact")
            collect = w.store.collect_inexact if exact else w.store.collect_publish
            batch = collect(of)
            if what.endswith("fails"):
                w.store.put_back_published(batch.tables)
            else:
                w.is_sent(batch, exact=exact)
    while w.store.pending_publish():
        w.is_sent(w.store.collect_publish(ALL), exact=False)
    w.is_sent(w.store.collect_publish(ALL), exact=False)  # removals
    w.check_near()

    while len(batch := w.store.collect_inexact(7)):
        w.is_sent(batch, exact=True)
    w.check_equal()


def test_evicted_and_dropped_rows_are_not_sent() -> None:
    w = World.of(8, hedge_group(tables=(0,)))
    w.learns(NUMBERS, 0.5)
    w.store.collect_publish(ALL)
    w.store.collect_flush()
    assert w.store.inexact() == len(NUMBERS)
    for bucket in range(8):
        w.store.drop_bucket(bucket)
    left = w.store.rows()[0]
    assert w.store.inexact() == left > 0

    w.store.evict(10**9)

    assert w.store.inexact() == 0
    assert len(w.store.collect_inexact(ALL)) == 0


def test_what_serving_holds_moves_with_its_row() -> None:
    """A removed row's place is taken by another one of its bucket."""
    w = World.of(8, hedge_group(tables=(0,)))
    w.learns(NUMBERS, 0.5)
    w.is_sent(w.store.collect_publish(ALL), exact=False)
    w.removes(NUMBERS[:20])
    w.learns(NUMBERS[20:], 0.0001)

    batch = w.store.collect_publish(ALL)

    assert (len(batch), batch.passed) == (0, 20)


def test_what_serving_holds_counts_as_memory() -> None:
    plain, kept = store_of(hedge_group()), store_of(hedge_group())
    kept.native.round_published(8, [2])
    look_up(plain, keys_of(*NUMBERS))
    look_up(kept, keys_of(*NUMBERS))

    assert kept.resident_bytes(0) - plain.resident_bytes(0) == 2 * 2 + 2 + 16
    assert kept.memory_bytes > plain.memory_bytes


def test_a_store_without_rounding_owes_nothing() -> None:
    store = store_of(hedge_group())
    look_up(store, keys_of(1, 2))
    push(store, [(0, 0, 1)], keys_of(1, 2), np.ones((2, 18), np.float32))
    store.collect_publish(ALL)

    assert store.inexact() == 0
    assert len(store.collect_inexact(ALL)) == 0
