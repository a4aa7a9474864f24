"""Promises of every row store; see `freshet.rows.store`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from freshet.errors import Fenced, Mismatch
from freshet.rows.store import FlushOutcome, RowStore, StoreIdentity
from freshet.tables.runs import runs_of, widths_of
from freshet.types import Bucket, BucketMeta, Fence, Flush, Run, TimeMs

__all__ = [
    "BUCKETS",
    "Change",
    "RowStoreContract",
    "flush_of",
    "identity",
    "next_meta",
    "outcomes_of",
    "rows_of",
    "run_of",
    "starting",
]

BUCKETS = 4
WIDTHS = {0: 8, 1: 12}
"""Table id -> bytes of a record."""


def identity() -> StoreIdentity:
    """Return the identity of a small model with two tables."""
    return StoreIdentity("m", "hash", BUCKETS, {"user": 0, "item": 1}, WIDTHS, "log-1")


def starting() -> dict[Bucket, BucketMeta]:
    """Return the metas of a new model without a flush."""
    meta = BucketMeta(Fence(-1), 0, 0, {0: 100, 1: 200}, 0, TimeMs(0))
    return {Bucket(b): meta for b in range(BUCKETS)}


def next_meta(meta: BucketMeta, fence: int | None = None, rows: int = 0, **changes: object) -> BucketMeta:
    """Return the meta of the next flush."""
    fence = meta.fence if fence is None else fence
    return replace(meta, fence=Fence(fence), seq=meta.seq + 1, rows=rows, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Change:
    """One bucket's part of a flush."""

    bucket: int
    meta: BucketMeta  # of the bucket after the flush
    rows: Mapping[int, Mapping[int, int]]  # {table: {key: byte that fills its record}}
    removed: Mapping[int, Sequence[int]] = field(default_factory=dict)  # {table: keys}


def run_of(bucket: int, table: int, rows: Mapping[int, int], removed: Sequence[int] = ()) -> Run:
    """Return rows with records of one repeated byte each."""
    records = np.array([[fill] * WIDTHS[table] for fill in rows.values()], np.uint8)
    keys, gone = np.array(list(rows), np.uint64), np.array(removed, np.uint64)
    return Run(bucket, table, keys, gone, records.reshape(len(rows), WIDTHS[table]))


def flush_of(*changes: Change, whole: bool = False) -> Flush:
    """Return a flush of these buckets; their metas must have the same partitions."""
    ordered = sorted(changes, key=lambda change: change.bucket)
    metas = [change.meta for change in ordered]
    runs = [
        run_of(
            change.bucket, table, change.rows.get(table, {}), () if whole else change.removed.get(table, ())
        )
        for change in ordered
        for table in sorted({*change.rows, *change.removed})
    ]
    return Flush(
        buckets=np.array([change.bucket for change in ordered], np.int64),
        fences=np.array([meta.fence for meta in metas], np.int64),
        seqs=np.array([meta.seq for meta in metas], np.int64),
        rows=np.array([meta.rows for meta in metas], np.int64),
        applied=np.array([[meta.applied[p] for p in range(len(meta.applied))] for meta in metas], np.int64),
        rows_offsets=np.array([meta.rows_offset for meta in metas], np.int64),
        clocks_ms=np.array([meta.clock_ms for meta in metas], np.int64),
        runs=runs_of(runs, widths_of(WIDTHS)),
        whole=whole,
    )


def outcomes_of(store: RowStore, flush: Flush) -> dict[int, FlushOutcome]:
    """Return {bucket: outcome}."""
    outcomes = store.flush(flush)
    return dict(zip(flush.buckets.tolist(), map(FlushOutcome, outcomes.tolist()), strict=True))


def rows_of(store: RowStore, bucket: int) -> dict[tuple[int, int], int]:
    """Scan a bucket; return {(table, key): fill} and check that each row came once and intact."""
    found: dict[tuple[int, int], int] = {}
    for run in (run for piece in store.scan([Bucket(bucket)]) for run in piece):
        assert run.bucket == bucket
        assert not len(run.removed), "a scan holds rows alone"
        assert run.records.shape == (len(run.keys), WIDTHS[run.table])
        assert np.all(run.records == run.records[:, :1]), "a record holds bytes of two"
        for key, record in zip(run.keys.tolist(), run.records, strict=True):
            assert (run.table, key) not in found, "a row came twice"
            found[run.table, key] = int(record[0])
    return found


class RowStoreContract:
    """Subclass it and define the fixture `open_store`."""

    @pytest.fixture
    def open_store(self) -> Callable[[], RowStore]:
        """Return a function that opens the same, initially empty, store, as another process would."""
        raise NotImplementedError("give the fixture `open_store`")

    @pytest.fixture
    def store(self, open_store: Callable[[], RowStore]) -> Iterator[RowStore]:
        """Return a created store of BUCKETS buckets, each claimed with fence 5."""
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
        """Flush one bucket as its owner."""
        meta = store.metas([Bucket(bucket)])[Bucket(bucket)]
        flush = flush_of(Change(bucket, next_meta(meta), rows, removed or {}), whole=whole)
        return outcomes_of(store, flush)[bucket]

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
    def test_another_identity_is_a_named_mismatch(
        self, store: RowStore, change: dict[str, object], named: str
    ) -> None:
        with pytest.raises(Mismatch, match=rf"(?s){named}"):
            store.create(replace(identity(), **change), starting())  # type: ignore[arg-type]
        assert store.identity() == identity()

    # Rows

    def test_another_handle_scans_and_reads_flushed_rows(
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

    def test_a_whole_bucket_replaces_the_stored_rows(self, store: RowStore) -> None:
        self.flush(store, 0, {0: {1: 1, 2: 2}, 1: {5: 5}})
        self.flush(store, 1, {0: {1: 8}})
        assert self.flush(store, 0, {0: {2: 3}}, whole=True) is FlushOutcome.DONE
        assert rows_of(store, 0) == {(0, 2): 3}
        assert rows_of(store, 1) == {(0, 1): 8}
        self.flush(store, 0, {0: {4: 4}})
        assert rows_of(store, 0) == {(0, 2): 3, (0, 4): 4}

    def test_a_whole_bucket_may_leave_numbers_out(self, store: RowStore) -> None:
        """Its owner gives it a number above all sent before, with any outcome."""
        meta = store.metas([Bucket(0)])[Bucket(0)]
        ahead = next_meta(replace(meta, seq=meta.seq + 3), applied={0: 150, 1: 201})
        whole = flush_of(Change(0, ahead, {0: {2: 3}}), whole=True)
        self.flush(store, 0, {0: {1: 1}})
        for _ in range(2):  # the answer may be lost
            assert outcomes_of(store, whole) == {0: FlushOutcome.DONE}
            assert (rows_of(store, 0), store.metas([Bucket(0)])[Bucket(0)]) == ({(0, 2): 3}, ahead)
        self.flush(store, 0, {0: {4: 4}})
        assert rows_of(store, 0) == {(0, 2): 3, (0, 4): 4}

    def test_a_flush_without_rows_moves_the_meta(self, store: RowStore) -> None:
        meta = store.metas([Bucket(2)])[Bucket(2)]
        new = next_meta(meta, applied={0: 150, 1: 201}, rows_offset=12, clock_ms=34)
        assert outcomes_of(store, flush_of(Change(2, new, {}))) == {2: FlushOutcome.DONE}
        assert store.metas([Bucket(2)])[Bucket(2)] == new

    def test_many_buckets_are_flushed_at_once_each_with_its_outcome(self, store: RowStore) -> None:
        metas = store.metas([Bucket(b) for b in range(BUCKETS)])
        changes = [Change(b, next_meta(m), {0: {1: b}}) for b, m in metas.items()]
        wrong = replace(metas[Bucket(2)], seq=40)
        changes[2] = Change(2, next_meta(wrong), {0: {1: 99}})
        done, again = FlushOutcome.DONE, FlushOutcome.REPLACE
        assert outcomes_of(store, flush_of(*changes)) == {0: done, 1: done, 2: again, 3: done}
        assert [rows_of(store, b) for b in range(BUCKETS)] == [{(0, 1): 0}, {(0, 1): 1}, {}, {(0, 1): 3}]

    def test_whole_buckets_without_rows_become_empty(self, store: RowStore) -> None:
        metas = store.metas([Bucket(b) for b in range(BUCKETS)])
        store.flush(flush_of(*(Change(b, next_meta(m), {0: {1: b, 2: b}}) for b, m in metas.items())))
        metas = store.metas([Bucket(b) for b in range(BUCKETS)])
        changes = [Change(b, next_meta(m), {1: {7: b}} if b % 2 else {}) for b, m in metas.items()]
        assert set(outcomes_of(store, flush_of(*changes, whole=True)).values()) == {FlushOutcome.DONE}
        assert [rows_of(store, b) for b in range(BUCKETS)] == [{}, {(1, 7): 1}, {}, {(1, 7): 3}]

    def test_a_scan_of_many_buckets_yields_the_rows_of_each(self, store: RowStore) -> None:
        for bucket in (3, 0, 2):
            self.flush(store, bucket, {0: {10 + bucket: bucket}, 1: {1: bucket}})
        self.flush(store, 2, {}, removed={1: [1]})
        found = [
            (run.bucket, run.table, run.keys.tolist())
            for piece in store.scan([Bucket(2), Bucket(3), Bucket(1)])
            for run in piece
        ]
        assert sorted(found) == [(2, 0, [12]), (3, 0, [13]), (3, 1, [1])]

    def read_many(
        self, store: RowStore, wanted: Sequence[tuple[int, int, int]]
    ) -> dict[tuple[int, int, int], int]:
        """Read keys; return {(bucket, table, key): fill} and check that each row came once and intact."""
        buckets, tables, keys = (list(column) for column in zip(*wanted, strict=True))
        found: dict[tuple[int, int, int], int] = {}
        pieces = store.read_many(
            np.array(buckets, np.int64), np.array(tables, np.uint8), np.array(keys, np.uint64)
        )
        for run in (run for piece in pieces for run in piece):
            assert not len(run.removed), "what is read by key holds rows alone"
            assert np.all(run.records == run.records[:, :1]), "a record holds bytes of two"
            for key, record in zip(run.keys.tolist(), run.records, strict=True):
                assert (run.bucket, run.table, key) not in found, "a row came twice"
                found[run.bucket, run.table, key] = int(record[0])
        return found

    def test_rows_of_many_buckets_are_read_by_key_at_once(self, store: RowStore) -> None:
        for bucket in (0, 2, 3):
            self.flush(store, bucket, {0: {1: 10 + bucket, 9: 20 + bucket}, 1: {9: 30 + bucket, 5: 99}})
        self.flush(store, 2, {0: {9: 77}}, removed={1: [9]})
        wanted = [
            (3, 1, 9),
            (2, 0, 9),
            (0, 0, 1),
            (2, 1, 9),
            (1, 0, 1),
            (0, 0, 2**64 - 1),
            (2, 0, 1),
            (0, 1, 9),
        ]
        assert self.read_many(store, wanted) == {
            (0, 0, 1): 10,
            (0, 1, 9): 30,
            (2, 0, 1): 12,
            (2, 0, 9): 77,
            (3, 1, 9): 33,
        }

    def test_no_keys_are_no_rows(self, store: RowStore) -> None:
        none = np.zeros(0, np.int64)
        assert not list(store.read_many(none, none.astype(np.uint8), none.astype(np.uint64)))

    def test_rows_read_by_key_are_the_sum_of_many_flushes(self, store: RowStore) -> None:
        expected: dict[tuple[int, int, int], int] = {}
        for i in range(200):
            bucket, gone = i % BUCKETS, (i * 7) % 50
            self.flush(store, bucket, {i % 2: {i % 60: i % 251, 1000 + i: 1}}, removed={i % 2: [gone]})
            expected.pop((bucket, i % 2, gone), None)
            expected |= {(bucket, i % 2, i % 60): i % 251, (bucket, i % 2, 1000 + i): 1}
        wanted = [(b, t, key) for b in range(BUCKETS) for t in (0, 1) for key in (*range(60), 1000, 1199)]
        kept = {place: fill for place, fill in expected.items() if place in set(wanted)}
        assert self.read_many(store, wanted) == kept

    def test_hundreds_of_flushes_are_read_as_one(self, store: RowStore) -> None:
        expected: dict[tuple[int, int], int] = {}
        for i in range(300):
            gone = [(i * 7) % 50]
            self.flush(store, 0, {0: {i % 60: i % 251}}, removed={0: gone})
            expected.pop((0, gone[0]), None)
            expected[0, i % 60] = i % 251
        assert rows_of(store, 0) == expected

    def test_a_flush_with_unequal_columns_writes_nothing(self, store: RowStore) -> None:
        metas = store.metas([Bucket(0), Bucket(1)])
        changes = [Change(b, next_meta(m), {0: {1: 1, 2: 2}}) for b, m in metas.items()]
        good = flush_of(*changes)
        runs = good.runs
        far = runs.directory.copy()
        far["rows"][1] += 1
        wrong = [
            replace(good, seqs=good.seqs[:1]),
            replace(good, buckets=good.buckets[::-1].copy()),
            replace(good, buckets=good.buckets + BUCKETS - 1),
            replace(good, runs=flush_of(Change(2, metas[Bucket(0)], {0: {1: 1}})).runs),
            replace(good, runs=replace(runs, directory=far)),
            replace(good, runs=replace(runs, body=runs.body[:-1])),
            replace(good, runs=replace(runs, directory=runs.directory[::-1].copy())),
            replace(good, runs=replace(runs, widths=widths_of({0: 9, 1: 12}))),
        ]
        for flush in wrong:
            with pytest.raises(ValueError, match=r"flush|runs?|columns"):
                store.flush(flush)
        assert store.metas([Bucket(0), Bucket(1)]) == metas

    # Compare-and-set

    def test_a_flush_repeated_after_a_lost_answer_changes_nothing(self, store: RowStore) -> None:
        meta = store.metas([Bucket(0)])[Bucket(0)]
        flush = flush_of(Change(0, next_meta(meta), {0: {1: 1}}))
        for _ in range(2):
            assert outcomes_of(store, flush) == {0: FlushOutcome.DONE}
        assert store.metas([Bucket(0)])[Bucket(0)] == flush.meta(0) == next_meta(meta)
        assert rows_of(store, 0) == {(0, 1): 1}

    def test_a_flush_onto_an_unexpected_state_must_replace_it(self, store: RowStore) -> None:
        meta = store.metas([Bucket(0)])[Bucket(0)]
        self.flush(store, 0, {0: {1: 1}})
        ahead = next_meta(next_meta(meta))
        flush = flush_of(Change(0, next_meta(ahead), {0: {2: 2}}))
        assert outcomes_of(store, flush) == {0: FlushOutcome.REPLACE}
        assert rows_of(store, 0) == {(0, 1): 1}
        assert outcomes_of(store, replace(flush, whole=True)) == {0: FlushOutcome.DONE}
        assert rows_of(store, 0) == {(0, 2): 2}

    # Claims

    def test_a_claim_returns_the_metas_and_fences_the_former_owner(self, store: RowStore) -> None:
        self.flush(store, 0, {0: {1: 1}})
        before = store.metas([Bucket(0)])[Bucket(0)]
        assert store.claim([Bucket(0)], Fence(9)) == {Bucket(0): replace(before, fence=Fence(9))}
        late = flush_of(Change(0, next_meta(before), {0: {1: 2}}))
        assert outcomes_of(store, late) == {0: FlushOutcome.FENCED}
        assert outcomes_of(store, replace(late, whole=True)) == {0: FlushOutcome.FENCED}
        assert rows_of(store, 0) == {(0, 1): 1}
        assert self.flush(store, 0, {0: {1: 3}}) is FlushOutcome.DONE
        assert rows_of(store, 0) == {(0, 1): 3}

    def test_a_claim_keeps_the_fence_of_the_last_flush(self, store: RowStore) -> None:
        """None: a store that loses no claim may leave it out."""
        self.flush(store, 0, {0: {1: 1}})
        before = 5
        for fence, rows, whole in ((9, {0: {1: 2}}, False), (11, {0: {1: 3}}, True), (13, {}, False)):
            assert store.claim([Bucket(0)], Fence(fence))[Bucket(0)].writer in (None, before)
            assert store.metas([Bucket(0)])[Bucket(0)].writer in (None, before)
            self.flush(store, 0, rows, whole=whole)
            assert store.metas([Bucket(0)])[Bucket(0)].writer in (None, fence)
            before = fence

    def test_one_flush_writes_buckets_of_different_claims(self, store: RowStore) -> None:
        store.claim([Bucket(1)], Fence(9))
        metas = store.metas([Bucket(0), Bucket(1)])
        assert [metas[Bucket(b)].fence for b in (0, 1)] == [5, 9]
        flush = flush_of(*(Change(b, next_meta(metas[Bucket(b)]), {0: {1: 1}}) for b in (0, 1)))
        assert outcomes_of(store, flush) == {0: FlushOutcome.DONE, 1: FlushOutcome.DONE}
        under_old = replace(flush, fences=np.array([5, 5]), seqs=flush.seqs + 1)
        assert outcomes_of(store, under_old) == {0: FlushOutcome.DONE, 1: FlushOutcome.FENCED}

    def test_a_claim_below_a_fence_claims_nothing(self, store: RowStore) -> None:
        store.claim([Bucket(1)], Fence(9))
        with pytest.raises(Fenced, match="1"):
            store.claim([Bucket(0), Bucket(1)], Fence(8))
        assert store.metas([Bucket(0)])[Bucket(0)].fence == 5

    def test_the_number_of_rows_is_kept_with_them(
        self, store: RowStore, open_store: Callable[[], RowStore]
    ) -> None:
        """A shard that takes a bucket over compares it with what it read, and waits while they differ."""
        meta = store.metas([Bucket(1)])[Bucket(1)]
        for rows in ({0: {7: 1, 8: 1}, 1: {9: 1}}, {0: {10: 1}}):
            total = meta.rows + sum(map(len, rows.values()))
            meta = next_meta(meta, rows=total)
            assert outcomes_of(store, flush_of(Change(1, meta, rows)))[1] == FlushOutcome.DONE
            assert open_store().metas([Bucket(1)])[Bucket(1)].rows == total == len(rows_of(store, 1))
        assert store.claim([Bucket(1)], Fence(6))[Bucket(1)].rows == 4

    def test_threads_share_a_store(self, store: RowStore) -> None:
        def work(bucket: int) -> None:
            for fill in range(1, 9):
                self.flush(store, bucket, {0: {fill: fill}})
                found = rows_of(store, bucket)
                assert found == {(0, key): key for key in range(1, fill + 1)}

        with ThreadPoolExecutor(BUCKETS) as pool:
            list(pool.map(work, range(BUCKETS)))

    def test_an_unknown_bucket_is_a_key_error(self, store: RowStore) -> None:
        with pytest.raises(KeyError):
            store.metas([Bucket(BUCKETS)])

    def test_closing_twice_is_once(self, store: RowStore) -> None:
        store.close()
        store.close()
