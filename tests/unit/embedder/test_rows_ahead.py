"""Rows of the next batch come from disk while the lane trains on the one before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freshet.embedder.core import Assembler
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.tables import RowsBound
from freshet.testing.conditions import wait_until
from freshet.testing.contracts.batches import await_batch, gradients_of, train
from freshet.testing.contracts.rowservice import WIDTH, push_of
from tests.fixtures.blocks import records
from tests.fixtures.embedder import LocalScene
from tests.fixtures.shards import loaded
from tests.fixtures.tables import disk_folder

BATCH = 8


def keys_of(sample_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return the rows that the scene's decoder gives samples."""
    return [(0, (i + 1) * 0x9E3779B97F4A7C15 % (1 << 64)) for i in sample_ids]


def test_rows_of_next_batch_are_fetched_during_this_one(tmp_path: Path) -> None:
    log = SqliteEventLog(tmp_path)
    scene = LocalScene(log)
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    bound = RowsBound(1, str(disk_folder()))
    scene.rows = shard = loaded(log, rows, 10, spec=scene.spec, bound=bound)
    ids = range(4 * BATCH)
    scene.append(1, [len(ids)])  # offset 0 of partition 1, which the push has
    assert shard.push(push_of({1: (0, 1)}, dict.fromkeys(keys_of(ids), [1.0] * WIDTH)))
    shard.publish()
    wait_until("all rows are on disk", lambda: shard.store.ssd_rows().rows == len(ids), within_s=60)
    for first in range(0, len(ids), BATCH):
        scene.append(0, ids[first : first + BATCH])
    stream = scene.stream(batch_rows=BATCH)

    batch = await_batch(stream)
    wait_until("the next is fetched", lambda: shard.store.ssd_rows().fetched >= 2 * BATCH, within_s=60)
    stream.push_gradients(0, batch, gradients_of(batch))
    batches = [batch, *train(stream, 3 * BATCH)]

    assert [r.stop for batch in batches for r in batch.ranges] == [1, 2, 3, 4]
    assert np.abs(batches[-1].inputs.groups[0].rows + 1.0).max() < 0.1
    stream.close()
    shard.stop(flush=False)
    rows.close()
    log.close()


@given(st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=3), st.integers(1, 20))
def test_blocks_ahead_are_those_of_the_next_batch(rows: list[list[int]], size: int) -> None:
    assembler = Assembler(dict.fromkeys(range(len(rows)), 0))
    for partition, blocks in enumerate(rows):
        assembler.add(partition, records(list(range(len(blocks))), blocks))
    while True:
        ahead = assembler.next_blocks(size)
        plan = assembler.next(size)
        if plan is None:
            assert len(ahead) == 0
            break
        assert sorted(plan.blocks) == sorted(list(ahead)[: len(plan.blocks)])
