"""Rows of a shard on a local disk: flushes in parts, and settings that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freshet.apps.row_memory import shard_rows_bound
from freshet.config.settings import load_settings
from freshet.config.spec.layout import layout_of
from freshet.errors import ConfigError
from freshet.log import EventLog
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.tables import RowsBound, Store
from freshet.testing.conditions import wait_until
from freshet.testing.contracts.rowservice import WIDTH, look_up, push_of
from freshet.types import U8, Flush
from tests.fixtures.shards import PARSED, loaded
from tests.fixtures.tables import disk_folder


def bound_of(memory_bytes: int) -> RowsBound:
    return RowsBound(memory_bytes, str(disk_folder()))


def test_changed_rows_on_disk_are_flushed_in_parts(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    shard = loaded(log, rows, 10, bound=bound_of(100_000))
    keys = [(0, key * 0x9E3779B97F4A7C15 % (1 << 64)) for key in range(1, 4_001)]
    for at in range(20):
        part = keys[200 * at : 200 * (at + 1)]
        assert shard.push(push_of({0: (at, at + 1)}, dict.fromkeys(part, [1.0] * WIDTH)))
        shard.publish()
    wait_until("rows have left memory", lambda: shard.store.ssd_rows().rows > 1_000, within_s=30)
    flushes: list[int] = []
    write = rows.flush

    def counted(flush: Flush) -> U8:
        flushes.append(flush.runs.rows)
        return write(flush)

    monkeypatch.setattr(rows, "flush", counted)
    shard.flush()

    assert len(flushes) > 2
    assert max(flushes) < len(keys) / 2
    assert sum(flushes) == len(keys)
    assert shard.buckets.count_stored().sum() == len(keys)
    shard.stop(flush=False)
    again = loaded(log, rows, 11)
    read = np.array(list(look_up(again, keys, create=False).values()))
    assert read.shape == (len(keys), WIDTH)
    assert np.abs(read + 1.0).max() < 0.1
    rows.close()


def test_bucket_that_is_dropped_leaves_nothing_on_disk(log: EventLog, tmp_path: Path) -> None:
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    shard = loaded(log, rows, 10, bound=bound_of(1))
    keys = [(0, key * 0x9E3779B97F4A7C15 % (1 << 64)) for key in range(1, 501)]
    shard.push(push_of({0: (0, 1)}, dict.fromkeys(keys, [1.0] * WIDTH)))
    shard.publish()
    wait_until("all rows have left memory", lambda: shard.store.ssd_rows().rows == len(keys), within_s=30)
    for bucket in shard.owned():
        shard.store.drop_bucket(bucket)
    left = shard.store.ssd_rows()
    assert (left.rows, left.bytes_in_use, shard.store.rows()[0]) == (0, 0, 0)
    rows.close()


@pytest.mark.parametrize("folder", ["/nowhere", "/proc"])
def test_folder_that_cannot_hold_rows_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="expected a folder on a local disk"):
        Store.of(PARSED, layout_of(PARSED), bound=RowsBound(1, folder))


def test_rows_that_are_published_rounded_are_refused() -> None:
    spec = replace(PARSED, train=replace(PARSED.train, publish_codec="int8"))
    with pytest.raises(ConfigError, match="expected fp32 where rows move to a local disk"):
        Store.of(spec, layout_of(spec), bound=bound_of(1))


def test_shard_needs_a_bound_beyond_which_rows_go_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_PARAMSERVER_SSD_FOLDER", str(disk_folder()))
    with pytest.raises(ConfigError, match="EVICT_BYTES = 0\n  expected bytes of memory"):
        shard_rows_bound(load_settings())
    monkeypatch.setenv("FRESHET_PARAMSERVER_EVICT_BYTES", "1000000")
    assert shard_rows_bound(load_settings()) == bound_of(1_000_000)


def test_fetch_brings_rows_of_a_later_batch(log: EventLog, tmp_path: Path) -> None:
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    shard = loaded(log, rows, 10, bound=bound_of(1))
    push = push_of({0: (0, 1)}, {(0, 7): [1.0] * WIDTH})
    shard.push(push)
    shard.publish()
    wait_until("the row has left memory", lambda: shard.store.ssd_rows().rows == 1, within_s=30)
    before = shard.store.ssd_rows().fetched
    shard.store.fetch(push.groups)
    assert shard.store.ssd_rows().fetched > before
    assert look_up(shard, [(0, 7)], create=False)[(0, 7)] == pytest.approx([-1.0] * WIDTH, abs=0.1)
    rows.close()
