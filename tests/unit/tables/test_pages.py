"""Rows as pages of hashes: round trips, and the newest of several pages."""

from contextlib import nullcontext

import hiredis
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.errors import Corrupt
from freshet.tables.runs import (
    PAGE,
    PageWrites,
    page_writes,
    pages_of,
    runs_of,
    runs_of_pages,
    which_may_hold,
    widths_of,
)
from freshet.types import RowRuns, Run
from tests.fixtures.effort import examples

WIDTHS = {0: 3, 200: 12}
Rows = dict[int, dict[int, dict[int, bytes]]]


def runs(rows: Rows, removed: dict[int, list[int]] | None = None) -> RowRuns:
    """Return the runs of {bucket: {table: {key: record}}} and {bucket: removed keys of table 0}."""
    made = []
    for bucket, tables in rows.items():
        for table, records in tables.items():
            keys = np.array(list(records), np.uint64)
            gone = np.array((removed or {}).get(bucket, []) if table == 0 else [], np.uint64)
            body = np.frombuffer(b"".join(records.values()), np.uint8).reshape(len(keys), WIDTHS[table])
            made.append(Run(bucket, table, keys, gone, body))
    return runs_of(made, widths_of(WIDTHS))


def items(writes: PageWrites, i: int, most_bytes: int | None = None) -> list[bytes]:
    """Decode the i-th bucket's arguments as Redis does."""
    found: list[bytes] = []
    for pages, arguments in writes.of(i, most_bytes):
        reader = hiredis.Reader()
        reader.feed(b"*%d\r\n" % (2 * pages) + bytes(arguments))
        found += reader.gets()
        assert reader.gets() is False, "more than the pages that were named"
    assert len(found) == 2 * writes.pages_of(i)
    return found


def write(rows: Rows, seq: int = 1, removed: dict[int, list[int]] | None = None, page_bytes: int = 1 << 16):
    """Return (bucket, its pages) of rows."""
    buckets = np.array(list(rows), np.int64)
    writes = page_writes(
        runs(rows, removed), buckets, np.full(len(rows), seq), whole=False, page_bytes=page_bytes
    )
    return [(bucket, items(writes, i)) for i, bucket in enumerate(rows)]


def read(
    pages: list[tuple[int, list[bytes]]], most_bytes: int = 1 << 20
) -> dict[tuple[int, int, int], bytes]:
    where = [f"bucket {bucket}" for bucket, _ in pages]
    found = runs_of_pages(pages, where, widths_of(WIDTHS), most_bytes=most_bytes)
    assert not found.directory["removed"].any()
    return {
        (run.bucket, run.table, key): record.tobytes()
        for run in found
        for key, record in zip(run.keys.tolist(), run.records, strict=True)
    }


def flat(rows: Rows) -> dict[tuple[int, int, int], bytes]:
    return {
        (b, t, k): r
        for b, tables in rows.items()
        for t, records in tables.items()
        for k, r in records.items()
    }


KEYS = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 12))
RECORDS = {table: st.binary(min_size=width, max_size=width) for table, width in WIDTHS.items()}
TABLES = st.fixed_dictionaries({t: st.dictionaries(KEYS, RECORDS[t], max_size=9) for t in WIDTHS})
ROWS = st.dictionaries(st.integers(0, 7), TABLES, max_size=4).map(lambda rows: dict(sorted(rows.items())))


@given(ROWS, st.integers(17, 200), st.integers(1, 200))
def test_pages_decode_to_the_written_rows_at_any_size(rows: Rows, page_bytes: int, most_bytes: int):
    assert read(write(rows, page_bytes=page_bytes), most_bytes) == flat(rows)


@given(st.lists(st.tuples(TABLES, st.lists(KEYS, max_size=5)), max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=examples(40))
def test_the_newest_page_is_valid_in_any_order(flushes, random):
    expected: dict[tuple[int, int, int], bytes] = {}
    pages = []
    for seq, (tables, gone) in enumerate(flushes):
        for key in gone:
            expected.pop((3, 0, key), None)
        expected |= flat({3: tables})
        ((_, found),) = write({3: tables}, seq, {3: gone}, page_bytes=60)
        pages += list(zip(found[::2], found[1::2], strict=True))
    random.shuffle(pages)
    assert read([(3, [part for page in pages for part in page])]) == expected


@given(TABLES, st.lists(KEYS, max_size=5), st.sampled_from(list(WIDTHS)), st.lists(KEYS, max_size=4))
@settings(max_examples=examples(40))
def test_a_page_that_is_not_chosen_lacks_the_key(tables, gone, table: int, keys):
    ((_, found),) = write({3: tables}, removed={3: gone}, page_bytes=60)
    wanted = np.array(keys, np.uint64)
    chosen = which_may_hold(pages_of(found[::2], "bucket 3"), table, wanted)
    kept = [part for i in np.flatnonzero(chosen) for part in found[2 * i : 2 * i + 2]]
    some, whole = read([(3, kept)]), read([(3, found)])
    assert {k: some.get((3, table, k)) for k in keys} == {k: whole.get((3, table, k)) for k in keys}


def test_arguments_are_grouped_by_size():
    rows = {2: {0: dict.fromkeys(range(100), b"abc")}}
    writes = page_writes(runs(rows), np.array([2]), np.array([7]), whole=True, page_bytes=60)
    groups = writes.of(0, 400)
    assert len(groups) > 5
    assert all(pages == 1 or len(arguments) <= 400 for pages, arguments in groups)
    assert items(writes, 0, 400) == items(writes, 0)
    assert sum(len(arguments) for _, arguments in groups) == writes.bytes_of(0)


@given(st.lists(st.binary(max_size=70), max_size=8))
def test_any_answer_of_a_server_is_rows_or_corrupt(answer):
    with nullcontext() if not answer else pytest.raises(Corrupt, match=r"^bucket 3: "):
        found = runs_of_pages([(3, answer)], ["bucket 3"], widths_of(WIDTHS), most_bytes=64)
        assert found.rows == 0


@given(TABLES.filter(lambda t: t[0] or t[200]), st.data())
@settings(max_examples=examples(40))
def test_a_page_with_a_changed_byte_is_corrupt(tables, data):
    ((_, found),) = write({3: tables})
    i = data.draw(st.sampled_from(range(1, len(found), 2)))
    at = data.draw(st.integers(0, len(found[i]) - 1))
    value = bytearray(found[i])
    value[at] ^= data.draw(st.integers(1, 255))
    found[i] = bytes(value)
    with pytest.raises(Corrupt, match=r"^bucket 3: "):
        read([(3, found)])


def test_a_malformed_field_is_corrupt():
    with pytest.raises(Corrupt, match="bucket 3"):
        pages_of([b"a note"], "bucket 3")
    with pytest.raises(Corrupt, match=f"6 bytes, expected {PAGE.itemsize}"):
        read([(3, [b"a note", b"to myself"])])


def test_runs_of_other_buckets_are_refused():
    with pytest.raises(ValueError, match="bucket"):
        page_writes(runs({2: {0: {1: b"abc"}}}), np.array([1]), np.array([1]), whole=False)
