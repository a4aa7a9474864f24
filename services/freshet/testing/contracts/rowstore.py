"""What every row store promises; see `freshet.seams.rowstore`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from freshet.errors import Fenced, Mismatch
from freshet.seams.rowstore import FlushOutcome, RowStore, StoreIdentity
from freshet.types import Bucket, BucketDelta, BucketMeta, Fence, PackedRows, TimeMs

__all__ = ["BUCKETS", "RowStoreContract", "delta_of", "identity", "next_meta", "rows_of", "starting"]

BUCKETS = 4
WIDTHS = {0: 8, 1: 12}
"""Table id -> bytes of a record."""


def identity() -> StoreIdentity:
    """Of a small model with two tables."""
    return StoreIdentity("m", "hash", BUCKETS, {"user": 0, "item": 1}, WIDTHS, "log-1")


def starting() -> dict[Bucket, BucketMeta]:
    """Metas of a new model: nothing flushed."""
    meta = BucketMeta(Fence(-1), 0, 0, {0: 100, 1: 200}, 0, TimeMs(0))
    return {Bucket(b): meta for b in range(BUCKETS)}


def next_meta(meta: BucketMeta, fence: int | None = None, rows: int = 0, **changes: object) -> BucketMeta:
    """The meta of the next flush."""
    fence = meta.fence if fence is None else fence
    return replace(meta, fence=Fence(fence), seq=meta.seq + 1, rows=rows, **changes)  # type: ignore[arg-type]


def packed(table: int, rows: Mapping[int, int]) -> PackedRows:
    """Rows whose records are filled with one byte each."""
    records = np.array([[fill] * WIDTHS[table] for fill in rows.values()], np.uint8)
    return PackedRows(table, np.array(list(rows), np.uint64), records.reshape(len(rows), WIDTHS[table]))


def delta_of(
    bucket: int,
    previous: BucketMeta,
    meta: BucketMeta,
    rows: Mapping[int, Mapping[int, int]],
    removed: Mapping[int, Sequence[int]] | None = None,
    *,
    whole: bool = False,
) -> BucketDelta:
    """A delta of {table: {key: fill}} and {table: removed keys}."""
    gone = tuple((table, np.array(keys, np.uint64)) for table, keys in (removed or {}).items())
    changed = [packed(table, of) for table, of in rows.items()]
    return BucketDelta(Bucket(bucket), previous, meta, changed, gone, whole)


def rows_of(store: RowStore, bucket: int) -> dict[tuple[int, int], int]:
    """{(table, key): fill} of a bucket by a scan; each row must come once, and intact."""
    found: dict[tuple[int, int], int] = {}
    for piece in store.scan(Bucket(bucket)):
        assert piece.records.shape == (len(piece.keys), WIDTHS[piece.table])
        assert np.all(piece.records == piece.records[:, :1]), "a record holds bytes of two"
        for key, record in zip(piece.keys.tolist(), piece.records, strict=True):
            assert (piece.table, key) not in found, "a row came twice"
            found[piece.table, key] = int(record[0])
    return found


class RowStoreContract:
    """Subclass it and give the fixture `open_store`."""

    @pytest.fixture
    def open_store(self) -> Callable[[], RowStore]:
        """A function that opens the same, at first empty, store anew each time, as another process would."""
        raise NotImplementedError("give the fixture `open_store`")

    @pytest.fixture
    def store(self, open_store: Callable[[], RowStore]) -> Iterator[RowStore]:
        """A created store of BUCKETS buckets, each claimed with fence 5."""
        store = open_store()
        store.create(identity(), starting())
        store.claim([Bucket(b) for b in range(BUCKETS)], Fence(5))
        yield store
        store.close()

    def flush(
        self,
        store: RowStore,
        bucket: int,
        rows: Mapping[int, Mapping[int, int]],
        removed: Mapping[int, Sequence[int]] | None = None,
        whole: bool = False,
    ) -> FlushOutcome:
        """Flush one bucket as its rightful owner would."""
        meta = store.metas([Bucket(bucket)])[Bucket(bucket)]
        delta = delta_of(bucket, meta, next_meta(meta), rows, removed, whole=whole)
        return store.flush([delta], fence=meta.fence)[Bucket(bucket)]

    # Identity

    def test_a_store_that_was_never_created_has_no_identity(self, open_store: Callable[[], RowStore]) -> None:
        assert open_store().identity() is None

    def test_creating_writes_the_starting_offsets(self, open_store: Callable[[], RowStore]) -> None:
        open_store().create(identity(), starting())
        again = open_store()
        assert again.identity() == identity()
        assert dict(again.metas([Bucket(0), Bucket(3)])) == {
            b: m for b, m in starting().items() if b in (0, 3)
        }

    def test_creating_the_same_again_changes_nothing(self, store: RowStore) -> None:
        self.flush(store, 0, {0: {1: 7}})
        before = dict(store.metas([Bucket(0)]))
        store.create(identity(), starting())
        assert dict(store.metas([Bucket(0)])) == before
        assert rows_of(store, 0) == {(0, 1): 7}

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"spec_hash": "other"}, "spec_hash.*other.*hash"),
            ({"model": "n"}, "model"),
            ({"samples_log_id": "log-2"}, "samples_log_id"),
            ({"tables": {"user": 0, "items": 1}}, "tables.item"),
            ({"record_bytes": {0: 8, 1: 16}}, r"record_bytes\.1.*16.*12"),
        ],
    )
    def test_another_identity_is_a_mismatch_that_names_what_differs(
        self, store: RowStore, change: dict[str, object], named: str
    ) -> None:
        with pytest.raises(Mismatch, match=rf"(?s){named}"):
            store.create(replace(identity(), **change), starting())  # type: ignore[arg-type]
        assert store.identity() == identity()

    # Rows

    def test_what_was_flushed_is_scanned_and_read_by_another_handle(
        self, store: RowStore, open_store: Callable[[], RowStore]
    ) -> None:
        assert self.flush(store, 1, {0: {9: 1, 2**64 - 1: 2, 3: 3}, 1: {9: 4}}) is FlushOutcome.DONE
        other = open_store()
        assert rows_of(other, 1) == {(0, 3): 3, (0, 9): 1, (0, 2**64 - 1): 2, (1, 9): 4}
        there, records = other.read(Bucket(1), 0, np.array([2**64 - 1, 4, 3], np.uint64))
        assert there.tolist() == [True, False, True]
        assert records.tolist() == [[2] * 8, [0] * 8, [3] * 8]
        assert rows_of(other, 0) == {}
        other.close()

    def test_a_later_flush_wins_and_keeps_the_other_rows(self, store: RowStore) -> None:
        self.flush(store, 0, {0: {1: 1, 2: 2}})
        self.flush(store, 0, {0: {2: 22, 3: 3}})
        assert rows_of(store, 0) == {(0, 1): 1, (0, 2): 22, (0, 3): 3}

    def test_a_removed_key_is_absent_until_it_is_written_again(self, store: RowStore) -> None:
        self.flush(store, 0, {0: {1: 1, 2: 2}, 1: {1: 9}})
        self.flush(store, 0, {}, removed={0: [1, 77]})
        assert rows_of(store, 0) == {(0, 2): 2, (1, 1): 9}
        there, _ = store.read(Bucket(0), 0, np.array([1, 2], np.uint64))
        assert there.tolist() == [False, True]
        self.flush(store, 0, {0: {1: 11}})
        assert rows_of(store, 0) == {(0, 1): 11, (0, 2): 2, (1, 1): 9}

    def test_a_key_that_is_changed_and_removed_in_one_flush_is_there(self, store: RowStore) -> None:
        self.flush(store, 0, {0: {1: 5}}, removed={0: [1]})
        assert rows_of(store, 0) == {(0, 1): 5}

    def test_a_whole_bucket_replaces_what_was_stored(self, store: RowStore) -> None:
        self.flush(store, 0, {0: {1: 1, 2: 2}, 1: {5: 5}})
        self.flush(store, 1, {0: {1: 8}})
        assert self.flush(store, 0, {0: {2: 3}}, whole=True) is FlushOutcome.DONE
        assert rows_of(store, 0) == {(0, 2): 3}
        assert rows_of(store, 1) == {(0, 1): 8}
        self.flush(store, 0, {0: {4: 4}})
        assert rows_of(store, 0) == {(0, 2): 3, (0, 4): 4}

    def test_a_flush_without_rows_moves_the_meta(self, store: RowStore) -> None:
        meta = store.metas([Bucket(2)])[Bucket(2)]
        new = next_meta(meta, applied={0: 150, 1: 201}, rows_offset=12, clock_ms=34)
        assert store.flush([delta_of(2, meta, new, {})], fence=Fence(5)) == {Bucket(2): FlushOutcome.DONE}
        assert store.metas([Bucket(2)])[Bucket(2)] == new

    def test_many_buckets_are_flushed_at_once_each_with_its_outcome(self, store: RowStore) -> None:
        metas = store.metas([Bucket(b) for b in range(BUCKETS)])
        deltas = [delta_of(b, m, next_meta(m), {0: {1: b}}) for b, m in metas.items()]
        wrong = replace(metas[Bucket(2)], seq=40)
        deltas[2] = delta_of(2, wrong, next_meta(wrong), {0: {1: 99}})
        outcomes = store.flush(deltas, fence=Fence(5))
        assert [outcomes[Bucket(b)].value for b in range(BUCKETS)] == ["done", "done", "replace", "done"]
        assert [rows_of(store, b) for b in range(BUCKETS)] == [{(0, 1): 0}, {(0, 1): 1}, {}, {(0, 1): 3}]

    def test_hundreds_of_flushes_are_read_as_one(self, store: RowStore) -> None:
        expected: dict[tuple[int, int], int] = {}
        for i in range(300):
            gone = [(i * 7) % 50]
            self.flush(store, 0, {0: {i % 60: i % 251}}, removed={0: gone})
            expected.pop((0, gone[0]), None)
            expected[0, i % 60] = i % 251
        assert rows_of(store, 0) == expected

    # Compare-and-set

    def test_a_flush_repeated_after_a_lost_answer_changes_nothing(self, store: RowStore) -> None:
        meta = store.metas([Bucket(0)])[Bucket(0)]
        delta = delta_of(0, meta, next_meta(meta), {0: {1: 1}})
        for _ in range(2):
            assert store.flush([delta], fence=Fence(5))[Bucket(0)] is FlushOutcome.DONE
        assert store.metas([Bucket(0)])[Bucket(0)] == delta.meta
        assert rows_of(store, 0) == {(0, 1): 1}

    def test_a_flush_onto_something_else_than_the_last_is_to_be_replaced(self, store: RowStore) -> None:
        meta = store.metas([Bucket(0)])[Bucket(0)]
        self.flush(store, 0, {0: {1: 1}})
        ahead = next_meta(next_meta(meta))
        delta = delta_of(0, ahead, next_meta(ahead), {0: {2: 2}})
        assert store.flush([delta], fence=Fence(5))[Bucket(0)] is FlushOutcome.REPLACE
        assert rows_of(store, 0) == {(0, 1): 1}
        whole = replace(delta, whole=True)
        assert store.flush([whole], fence=Fence(5))[Bucket(0)] is FlushOutcome.DONE
        assert rows_of(store, 0) == {(0, 2): 2}

    # Claims

    def test_a_claim_returns_the_metas_and_shuts_out_the_earlier_owner(self, store: RowStore) -> None:
        self.flush(store, 0, {0: {1: 1}})
        before = store.metas([Bucket(0)])[Bucket(0)]
        assert store.claim([Bucket(0)], Fence(9)) == {Bucket(0): replace(before, fence=Fence(9))}
        late = delta_of(0, before, next_meta(before), {0: {1: 2}})
        assert store.flush([late], fence=Fence(5))[Bucket(0)] is FlushOutcome.FENCED
        whole = replace(late, whole=True)
        assert store.flush([whole], fence=Fence(5))[Bucket(0)] is FlushOutcome.FENCED
        assert rows_of(store, 0) == {(0, 1): 1}
        assert self.flush(store, 0, {0: {1: 3}}) is FlushOutcome.DONE
        assert rows_of(store, 0) == {(0, 1): 3}

    def test_a_claim_below_a_fence_claims_nothing(self, store: RowStore) -> None:
        store.claim([Bucket(1)], Fence(9))
        with pytest.raises(Fenced, match="1"):
            store.claim([Bucket(0), Bucket(1)], Fence(8))
        assert store.metas([Bucket(0)])[Bucket(0)].fence == 5

    def test_an_unknown_bucket_is_a_key_error(self, store: RowStore) -> None:
        with pytest.raises(KeyError):
            store.metas([Bucket(BUCKETS)])

    def test_closing_twice_is_once(self, store: RowStore) -> None:
        store.close()
        store.close()
