"""The SQLite row store compared with a dict: flushes, replacements, claims, merges, reopening, SIGKILL."""

import gc
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freshet.errors import Corrupt, Mismatch, Unavailable
from freshet.observability.skipped_state import skipped
from freshet.rows.sqlite import row_store
from freshet.rows.sqlite.file import NO_STAMP, parse_directory, parts_of, write_directory
from freshet.rows.sqlite.row_store import BLOBS_A_CONNECTION, SqliteRowStore, decide
from freshet.rows.store import FlushOutcome
from freshet.sqlite import BlobCounting
from freshet.tables.runs import merge_runs, runs_of, widths_of
from freshet.testing.contracts.rowstore import (
    BUCKETS,
    WIDTHS,
    Change,
    flush_of,
    identity,
    next_meta,
    outcomes_of,
    rows_of,
    run_of,
    starting,
)
from freshet.types import Bucket, Fence, RowRuns
from tests.fixtures.bucket_owner import KEYS, Owner
from tests.fixtures.connections import fill_disk, kept_connections, set_all
from tests.fixtures.effort import examples


@pytest.fixture
def eager_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge and compact small stores as if they were large."""
    monkeypatch.setattr(row_store, "SMALLEST_BYTES", 100)
    monkeypatch.setattr(row_store, "FAN_IN", 3)


Changes = tuple[dict[int, dict[int, int]], dict[int, list[int]]]

keys = st.integers(0, 12)
tables = st.integers(0, 1)
changes = st.tuples(
    st.dictionaries(tables, st.dictionaries(keys, st.integers(0, 255), max_size=6), max_size=2),
    st.dictionaries(tables, st.lists(keys, max_size=4, unique=True), max_size=2),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("flush"), st.dictionaries(st.integers(0, BUCKETS - 1), changes, min_size=1)),
        st.tuples(st.just("whole"), st.dictionaries(st.integers(0, BUCKETS - 1), changes, min_size=1)),
        st.tuples(st.sampled_from(["claim", "reopen"]), st.just({})),
    ),
    max_size=25,
)


@pytest.mark.usefixtures("eager_compaction")
@settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps)
def test_any_sequence_of_flushes_equals_a_dict(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, dict[int, Changes]]]
) -> None:
    path = tmp_path_factory.mktemp("store") / "rows.sqlite"
    store = SqliteRowStore(path)
    store.create(identity(), starting())
    metas, fence = starting(), Fence(0)
    metas = dict(store.claim([Bucket(b) for b in range(BUCKETS)], fence))
    oracle: dict[int, dict[tuple[int, int], int]] = {b: {} for b in range(BUCKETS)}
    for what, by_bucket in steps:
        if what == "claim":
            fence = Fence(fence + 1)
            metas = dict(store.claim([Bucket(b) for b in range(BUCKETS)], fence))
        elif what == "reopen":
            store.close()
            store = SqliteRowStore(path)
        changes = []
        for bucket, (rows, removed) in by_bucket.items():
            metas[Bucket(bucket)] = next_meta(metas[Bucket(bucket)], rows=len(oracle[bucket]))
            changes.append(Change(bucket, metas[Bucket(bucket)], rows, removed))
            if what == "whole":
                oracle[bucket].clear()
            else:
                for table, gone in removed.items():
                    for key in gone:
                        oracle[bucket].pop((table, key), None)
            oracle[bucket].update({(t, k): v for t, of in rows.items() for k, v in of.items()})
        if changes:
            outcomes = outcomes_of(store, flush_of(*changes, whole=what == "whole"))
            assert set(outcomes.values()) == {FlushOutcome.DONE}
    for bucket, expected in oracle.items():
        assert rows_of(store, bucket) == expected
        for table in (0, 1):
            there, records = store.read(Bucket(bucket), table, np.arange(13, dtype=np.uint64))
            assert {(table, k): int(records[k, 0]) for k in range(13) if there[k]} == {
                of: v for of, v in expected.items() if of[0] == table
            }
    assert dict(store.metas([Bucket(b) for b in range(BUCKETS)])) == metas
    store.close()


@pytest.mark.usefixtures("eager_compaction")
def test_segments_do_not_pile_up(tmp_path: Path) -> None:
    store = SqliteRowStore(tmp_path / "rows.sqlite")
    store.create(identity(), starting())
    metas = dict(store.claim([Bucket(0)], Fence(1)))
    for i in range(200):
        metas[Bucket(0)] = next_meta(metas[Bucket(0)])
        store.flush(flush_of(Change(0, metas[Bucket(0)], {0: {i % 20: 1}})))
    store.close()
    with sqlite3.connect(tmp_path / "rows.sqlite") as db:
        ((segments,),) = db.execute("SELECT count(*) FROM segments").fetchall()
    db.close()
    assert segments < 20


@pytest.mark.usefixtures("eager_compaction")
def test_a_small_compaction_budget_does_not_shorten_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store, "LEAST_COMPACTION_BYTES", 150)
    monkeypatch.setattr(row_store, "COMPACTION_PER_FLUSHED_BYTE", 0)
    store = SqliteRowStore(tmp_path / "rows.sqlite")
    store.create(identity(), starting())
    metas = store.claim([Bucket(0), Bucket(1)], Fence(1))
    rows = {key * 3: key % 256 for key in range(3000)}
    store.flush(flush_of(*(Change(bucket, next_meta(meta), {0: rows}) for bucket, meta in metas.items())))
    db = sqlite3.connect(tmp_path / "rows.sqlite")
    bases = db.execute("SELECT bucket, directory FROM bases").fetchall()
    db.close()
    assert [(bucket, len(parse_directory(directory, "here"))) for bucket, directory in bases] == [(0, 1)]
    for bucket in metas:
        assert rows_of(store, bucket) == {(0, key): fill for key, fill in rows.items()}
    store.close()


def test_a_flush_beyond_a_part_is_split_and_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freshet.rows.sqlite.file.PART_BYTES", 1000)
    monkeypatch.setattr("freshet.rows.sqlite.row_store.SCAN_BYTES", 500)
    store = SqliteRowStore(tmp_path / "rows.sqlite")
    store.create(identity(), starting())
    metas = store.claim([Bucket(0), Bucket(1)], Fence(1))
    rows = {key * 3: key % 256 for key in range(500)}
    for bucket, whole in ((0, False), (1, True)):
        store.flush(flush_of(Change(bucket, next_meta(metas[Bucket(bucket)]), {0: rows}), whole=whole))
        assert rows_of(store, bucket) == {(0, key): fill for key, fill in rows.items()}
        there, _ = store.read(Bucket(bucket), 0, np.arange(1500, dtype=np.uint64))
        assert np.flatnonzero(there).tolist() == list(rows)
        assert len(list(store.scan([Bucket(bucket)]))) > 1
    store.close()


@pytest.mark.parametrize(
    ("stored", "fence", "whole", "expected"),
    [
        ((-1, 0), 7, False, (FlushOutcome.REPLACE, False)),
        ((7, 3), 7, False, (FlushOutcome.DONE, True)),
        ((7, 4), 7, False, (FlushOutcome.DONE, False)),
        ((7, 2), 7, False, (FlushOutcome.REPLACE, False)),
        ((7, 2), 7, True, (FlushOutcome.DONE, True)),
        ((8, 3), 7, True, (FlushOutcome.FENCED, False)),
        (None, 7, False, (FlushOutcome.REPLACE, False)),
        (None, 7, True, (FlushOutcome.DONE, True)),
    ],
)
def test_a_flush_is_compared_by_fence_and_seq(
    stored: tuple[int, int] | None, fence: int, whole: bool, expected: tuple[FlushOutcome, bool]
) -> None:
    previous = replace(starting()[Bucket(0)], fence=Fence(7), seq=3)
    flush = flush_of(Change(0, replace(next_meta(previous), fence=Fence(fence)), {}), whole=whole)
    outcomes, written = decide(np.array([stored or (NO_STAMP, NO_STAMP)], np.int64), flush)
    assert (FlushOutcome(outcomes[0]), bool(written[0])) == expected


def merged(*newest_first: RowRuns, keep_removed: bool, most_bytes: int = 1 << 20) -> RowRuns:
    where = [f"source {i}" for i in range(len(newest_first))]
    widths = widths_of(WIDTHS)
    return merge_runs(newest_first, where, widths, keep_removed=keep_removed, most_bytes=most_bytes)


def a_run(bucket: int, table: int, rows: dict[int, int], removed: list[int]) -> RowRuns:
    return runs_of([run_of(bucket, table, rows, removed)], widths_of(WIDTHS))


def test_a_merge_keeps_the_newest_state_of_each_key() -> None:
    old, new = a_run(0, 0, {1: 1, 2: 1, 3: 1}, [9]), a_run(0, 0, {9: 5, 2: 6}, [3])
    (kept,) = merged(new, old, keep_removed=True)
    assert (kept.keys.tolist(), kept.removed.tolist()) == ([1, 2, 9], [3])
    assert kept.records[:, 0].tolist() == [1, 6, 5]
    (left,) = merged(new, old, keep_removed=False)
    assert left.removed.tolist() == []


merging = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            tables,
            st.dictionaries(st.integers(0, 2**64 - 1) | keys, st.integers(0, 255), max_size=60),
            st.lists(keys, max_size=4, unique=True),
        ),
        max_size=4,
        unique_by=lambda run: run[:2],
    ),
    max_size=5,
)


@settings(deadline=None)
@given(merging, st.booleans(), st.sampled_from([64, 500, 1 << 20]))
def test_merged_runs_equal_their_sources_together(
    sources: list[list[tuple[int, int, dict[int, int], list[int]]]], keep_removed: bool, most_bytes: int
) -> None:
    widths = widths_of(WIDTHS)
    newest_first = [runs_of([run_of(*run) for run in source], widths) for source in sources]
    expected: dict[tuple[int, int], dict[int, int | None]] = {}
    for source in reversed(sources):
        for bucket, table, rows, removed in source:
            known = expected.setdefault((bucket, table), {})
            known.update(dict.fromkeys(removed))
            known.update(rows)
    found: dict[tuple[int, int], dict[int, int | None]] = {}
    together = merged(*newest_first, keep_removed=keep_removed, most_bytes=most_bytes)
    for run in together:
        assert (np.diff(run.keys.astype(object)) > 0).all()
        said = {
            **dict.fromkeys(run.removed.tolist()),
            **dict(zip(run.keys.tolist(), run.records[:, 0].tolist(), strict=True)),
        }
        known = found.setdefault((run.bucket, run.table), {})
        assert not known.keys() & said.keys()
        known.update(said)
    if not keep_removed:
        expected = {of: {k: v for k, v in known.items() if v is not None} for of, known in expected.items()}
    assert found == {of: known for of, known in expected.items() if known}
    parts = list(parts_of(together, 100))
    for of in ("keys", "removed", "records"):
        in_parts = [value for part in parts for run in part for value in getattr(run, of).tolist()]
        assert in_parts == [value for run in together for value in getattr(run, of).tolist()]


def test_a_key_given_twice_is_refused() -> None:
    run = run_of(0, 0, {4: 1, 5: 1}, [])
    with pytest.raises(ValueError, match="twice"):
        runs_of([replace(run, keys=np.array([4, 4], np.uint64))], widths_of(WIDTHS))


@given(st.binary(max_size=100))
def test_any_bytes_are_a_directory_or_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        parse_directory(data + b"x", "here")


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_of_a_directory_is_corrupt(at: int, change: int) -> None:
    data = bytearray(write_directory(a_run(1, 0, {1: 1}, [])))
    data[at % len(data)] ^= change
    with pytest.raises(Corrupt):
        parse_directory(bytes(data), "here")


@given(st.data())
def test_changed_bytes_of_runs_are_corrupt_when_they_are_merged(data: st.DataObject) -> None:
    runs = [a_run(0, 0, {1: 1, 5: 2, 9: 3}, [7]), a_run(0, 0, {5: 4, 6: 5}, [1])]
    which = data.draw(st.integers(0, 1))
    body = runs[which].body.copy()
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    runs[which] = replace(runs[which], body=body)
    with pytest.raises(Corrupt, match=f"source {which}: (keys|rows) of table 0, bucket 0 fail their CRC"):
        merged(*runs, keep_removed=True)


@given(
    st.sampled_from(["bucket", "table", "rows", "removed", "at"]), st.integers(0, 2**32 - 1), st.booleans()
)
def test_a_wrong_directory_is_corrupt_or_reads_within_bounds(field: str, value: int, first: bool) -> None:
    runs = runs_of([run_of(0, 0, {1: 1, 5: 2}, [7]), run_of(1, 1, {5: 4}, [])], widths_of(WIDTHS))
    directory = runs.directory.copy()
    directory[field][0 if first else 1] = value
    try:
        together = merged(replace(runs, directory=directory), keep_removed=True)
    except Corrupt:
        return
    assert together.rows <= runs.rows


@pytest.mark.parametrize("column", ["body", "directory"])
def test_changed_bytes_in_the_file_are_corrupt_not_rows(tmp_path: Path, column: str) -> None:
    path = tmp_path / "rows.sqlite"
    store = SqliteRowStore(path)
    store.create(identity(), starting())
    old = store.claim([Bucket(0)], Fence(1))[Bucket(0)]
    store.flush(flush_of(Change(0, next_meta(old), {0: {1: 1}})))
    db = sqlite3.connect(path)
    with db:
        db.execute(f"UPDATE segments SET {column} = zeroblob(length({column}))")
    db.close()
    with pytest.raises(Corrupt, match=r"rows\.sqlite: segments 1"):
        rows_of(store, 0)
    store.close()


def test_repeated_reads_by_key_keep_no_memory(tmp_path: Path) -> None:
    store = SqliteRowStore(tmp_path / "rows.sqlite")
    store.create(identity(), starting())
    meta = store.claim([Bucket(0)], Fence(1))[Bucket(0)]
    store.flush(flush_of(Change(0, next_meta(meta), {0: dict.fromkeys(range(100), 7)})))
    wanted = np.array([3, 50], np.uint64)

    def blocks_after(reads: int) -> int:
        for _ in range(reads):
            assert store.read(Bucket(0), 0, wanted)[0].all()
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks_after(10)
    assert blocks_after(3 * BLOBS_A_CONNECTION) - before < 2 * BLOBS_A_CONNECTION
    store.close()


@pytest.mark.usefixtures("eager_compaction")
def test_connections_with_many_blobs_are_replaced_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store, "BLOBS_A_CONNECTION", 3)
    connections = kept_connections(monkeypatch, row_store)
    store = SqliteRowStore(tmp_path / "rows.sqlite")
    store.create(identity(), starting())
    metas = dict(store.claim([Bucket(0), Bucket(1)], Fence(1)))
    for i in range(30):
        metas = {bucket: next_meta(meta) for bucket, meta in metas.items()}
        changes = [Change(bucket, meta, {0: {i % 7: i, 9: i}}) for bucket, meta in metas.items()]
        assert set(outcomes_of(store, flush_of(*changes)).values()) == {FlushOutcome.DONE}
        there, records = store.read(Bucket(1), 0, np.array([9], np.uint64))
        assert (there.tolist(), records[0, 0]) == ([True], i)
    for first in connections[:2]:  # of the writer and of the reader
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            first.execute("SELECT 1")
    store.close()


def execute(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement)


def test_blobs_with_large_ids_are_read_without_blobopen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OverflowError("Python int too large to convert to C int")

    monkeypatch.setattr(BlobCounting, "blobopen", refuses)
    path = tmp_path / "rows.sqlite"
    store = SqliteRowStore(path)
    store.create(identity(), starting())
    execute(path, f"UPDATE last_segment SET id = {2**33}")
    meta = store.claim([Bucket(0)], Fence(1))[Bucket(0)]
    store.flush(flush_of(Change(0, next_meta(meta), {0: {1: 5, 8: 6}})))
    there, records = store.read(Bucket(0), 0, np.array([1, 2, 8], np.uint64))
    assert (there.tolist(), records[:, 0].tolist()) == ([True, False, True], [5, 0, 6])
    assert rows_of(store, 0) == {(0, 1): 5, (0, 8): 6}
    execute(path, "UPDATE segments SET body = substr(body, 1, 20)")
    with pytest.raises(Corrupt, match=r"expected at least \d+ bytes, found 20"):
        store.read(Bucket(0), 0, np.array([1], np.uint64))
    store.close()


def test_a_foreign_database_is_a_mismatch_and_garbage_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    db = sqlite3.connect(path)
    with db:
        db.execute("CREATE TABLE t (x)")
    db.close()
    with pytest.raises(Mismatch, match="another program"):
        SqliteRowStore(path)
    path.write_bytes(b"not a database at all" * 1000)
    with pytest.raises(Corrupt, match=r"other\.sqlite"):
        SqliteRowStore(path)


def test_a_flush_on_a_full_disk_succeeds_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = kept_connections(monkeypatch, row_store)
    store = SqliteRowStore(tmp_path / "rows.sqlite")
    store.create(identity(), starting())
    old = store.claim([Bucket(0)], Fence(1))[Bucket(0)]
    flush = flush_of(Change(0, next_meta(old), {0: dict.fromkeys(range(20000), 1)}))
    fill_disk(connections)
    with pytest.raises(Unavailable, match="disk is full"):
        store.flush(flush)
    assert store.metas([Bucket(0)])[Bucket(0)] == old
    set_all(connections, "max_page_count=1000000")
    assert outcomes_of(store, flush) == {0: FlushOutcome.DONE}
    assert len(rows_of(store, 0)) == 20_000
    store.close()


@pytest.mark.usefixtures("eager_compaction")
def test_a_concurrent_reader_sees_each_bucket_as_of_one_flush(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    store, reader = SqliteRowStore(path), SqliteRowStore(path)
    store.create(identity(), starting())
    metas = dict(store.claim([Bucket(0), Bucket(1)], Fence(1)))
    stop = threading.Event()
    seen: set[int] = set()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                rows = rows_of(reader, 0)
                assert len(set(rows.values())) <= 1, "rows of two flushes"
                assert len(rows) in {0, 300}
                seen.update(rows.values())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    i = 0
    while i < 60 or (len(seen) < 2 and not errors and i < 5_000):  # a reader that had no turn gets one
        metas = {bucket: next_meta(meta) for bucket, meta in metas.items()}
        rows = {0: dict.fromkeys(range(300), i)}
        changes = [Change(bucket, meta, rows) for bucket, meta in metas.items()]
        store.flush(flush_of(*changes, whole=i % 9 == 8))
        i += 1
    stop.set()
    thread.join()
    reader.close()
    store.close()
    assert errors == []
    assert len(seen) > 1


def flush_for_ever(path: str) -> None:
    """Flush in the child of the crash test; every row of a bucket is filled with the flush's seq.

    It says "ready", and the seq of each flush once that is answered.
    """
    row_store.SMALLEST_BYTES, row_store.FAN_IN = 100, 3  # so that kills hit merges and compactions too
    store = SqliteRowStore(Path(path))
    store.create(identity(), starting())
    fence = Fence(store.metas([Bucket(0)])[Bucket(0)].fence + 1)
    metas = dict(store.claim([Bucket(b) for b in range(BUCKETS)], fence))
    print("ready", flush=True)
    while True:
        metas = {bucket: next_meta(meta, rows=200) for bucket, meta in metas.items()}
        changes = [
            Change(bucket, meta, {0: dict.fromkeys(range(200), meta.seq % 251)})
            for bucket, meta in metas.items()
        ]
        store.flush(flush_of(*changes, whole=metas[Bucket(0)].seq % 7 == 0))
        print(metas[Bucket(0)].seq, flush=True)


@pytest.mark.slow
def test_after_a_kill_each_bucket_is_old_or_new(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    chance = random.Random(7)
    program = f"import {__name__} as t; t.flush_for_ever({str(path)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            answered = [child.stdout.readline() for _ in range(chance.randint(1, 12))]
            threading.Event().wait(chance.random() * 0.01)  # somewhere into one of the next flushes
            child.send_signal(signal.SIGKILL)
            answered += child.stdout.readlines()
        last = max(int(line) for line in answered if line.endswith(b"\n"))
        store = SqliteRowStore(path)
        for bucket, stored in store.metas([Bucket(b) for b in range(BUCKETS)]).items():
            assert stored.seq >= last, "an acknowledged flush was lost"
            assert rows_of(store, bucket) == {(0, key): stored.seq % 251 for key in range(200)}
        store.close()


@pytest.mark.parametrize("change", ["body = x''", "directory = x'00'"])
def test_damage_found_by_a_merge_is_repaired_by_the_owner(tmp_path: Path, change: str) -> None:
    store = SqliteRowStore(tmp_path / "rows.sqlite")
    owner = Owner(store, 5)
    owner.flush()
    with closing(sqlite3.connect(tmp_path / "rows.sqlite")) as db, db:
        db.execute(f"UPDATE segments SET {change} WHERE id = 1")
    with pytest.raises(Corrupt):
        list(store.scan([Bucket(b) for b in range(BUCKETS)]))

    for _ in range(40):  # some merge of these comes upon it
        owner.flush()

    assert owner.replaced > 0
    assert all(len(rows_of(store, bucket)) == len(KEYS) for bucket in range(BUCKETS))
    assert skipped()["row_page"] > 0
    store.close()
