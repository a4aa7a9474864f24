"""Rows as fields of hashes: commands are a client's, and what is read is what was written."""

from contextlib import nullcontext

import hiredis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import Corrupt
from freshet.tables.hashes import fields_of, hash_writes, runs_of_hashes
from freshet.tables.runs import runs_of, widths_of
from freshet.types import RowRuns, Run

WIDTHS = {0: 3, 200: 12}


def runs(
    rows: dict[int, dict[int, dict[int, bytes]]], removed: dict[int, list[int]] | None = None
) -> RowRuns:
    """Of {bucket: {table: {key: record}}} and {bucket: removed keys of table 0}."""
    made = []
    for bucket, tables in rows.items():
        for table, records in tables.items():
            keys = np.array(list(records), np.uint64)
            gone = np.array((removed or {}).get(bucket, []) if table == 0 else [], np.uint64)
            body = np.frombuffer(b"".join(records.values()), np.uint8).reshape(len(keys), WIDTHS[table])
            made.append(Run(bucket, table, keys, gone, body))
    return runs_of(made, widths_of(WIDTHS))


def commands(data: memoryview) -> list[list[bytes]]:
    """What a Redis would understand."""
    reader = hiredis.Reader()
    reader.feed(bytes(data))
    found = []
    while (one := reader.gets()) is not False:
        found.append(one)
    return found


RECORDS = {table: st.binary(min_size=width, max_size=width) for table, width in WIDTHS.items()}
TABLES = st.fixed_dictionaries(
    {t: st.dictionaries(st.integers(0, 2**64 - 1), RECORDS[t], max_size=9) for t in WIDTHS}
)


@given(st.dictionaries(st.integers(0, 7), TABLES, max_size=4), st.integers(1, 5))
def test_what_is_written_is_read_again(rows, rows_per_command):
    rows = dict(sorted(rows.items()))
    made = runs(rows)
    keys = [b"k%d" % bucket for bucket in rows]
    writes = hash_writes(made, np.array(list(rows), np.int64), keys, rows_per_command=rows_per_command)
    hashes = []
    for i, bucket in enumerate(rows):
        sets = commands(writes.sets_of(i))
        assert len(sets) == writes.set_commands[i]
        assert all(one[:2] == [b"HSET", keys[i]] and len(one) <= 2 + 2 * rows_per_command for one in sets)
        hashes.append((bucket, [item for one in sets for item in one[2:]]))
    again = runs_of_hashes(hashes, ["a bucket"] * len(hashes), widths_of(WIDTHS), most_bytes=1 << 20)
    found = {
        (run.bucket, run.table, key): record.tobytes()
        for run in again
        for key, record in zip(run.keys.tolist(), run.records, strict=True)
    }
    expected = {
        (b, t, k): r
        for b, tables in rows.items()
        for t, records in tables.items()
        for k, r in records.items()
    }
    assert found == expected


@given(st.lists(st.binary(max_size=14), max_size=8))
def test_whatever_a_server_answers_is_rows_or_corrupt(items):
    is_rows = len(items) % 2 == 0 and all(
        len(field) == 9 and WIDTHS.get(field[0]) == len(value)
        for field, value in zip(items[::2], items[1::2], strict=True)
    )
    with nullcontext() if is_rows else pytest.raises(Corrupt, match=r"^bucket 3: "):
        found = runs_of_hashes([(3, items)], ["bucket 3"], widths_of(WIDTHS), most_bytes=64)
        assert found.rows == len(set(items[::2]))


def test_removed_keys_are_fields_too():
    made = runs({2: {0: {1: b"abc"}}}, {2: [7, 9]})
    writes = hash_writes(made, np.array([2]), [b"k"], rows_per_command=5)
    assert writes.removed_fields == [2]
    expected = [field.tobytes() for field in fields_of(0, np.array([7, 9], np.uint64))]
    assert commands(memoryview(b"*2\r\n" + bytes(writes.removed_of(0))))[0] == expected


def test_a_field_is_the_table_and_the_key():
    assert fields_of(200, np.array([258], np.uint64)).tobytes() == b"\xc8\x02\x01\0\0\0\0\0\0"


def test_runs_of_other_buckets_are_refused():
    with pytest.raises(ValueError, match="bucket"):
        hash_writes(runs({2: {0: {1: b"abc"}}}), np.array([1]), [b"k"], rows_per_command=5)
