"""A flood of new keys: rows stay within their bound, and rows in use are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.spec.layout import layout_of
from freshet.log import EventLog
from freshet.log.topics import ModelContext
from freshet.paramserver import shard as module
from freshet.paramserver.shard import Shard
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.tables import RowsBound, Store, TableOptions, bounds
from freshet.tables import store as tables
from freshet.tables.store import OVERFULL
from freshet.testing.contracts.rowservice import WIDTH, look_up, push_of
from freshet.types import Fence, TimeMs
from tests.fixtures.shards import PARSED

MOST = 2_000
GOOD = [(0, key * 0x9E3779B97F4A7C15 % (1 << 64)) for key in range(1, 101)]


@pytest.fixture
def shard(log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shard]:
    monkeypatch.setattr(bounds, "LEAST_ROWS", 1)
    monkeypatch.setattr(module, "EVICT_ROWS", 64)  # far fewer than a flood creates
    rows = SqliteRowStore(tmp_path / "rows.sqlite")
    sized = Store.of(PARSED, layout_of(PARSED))
    cost = {table: sized.resident_bytes(table) + tables.INDEX_BYTES for table in sized.tables}
    most = sum(MOST * size for size in cost.values())
    context = ModelContext.open(PARSED, "hash", log)
    made = Shard(context, rows, fence=Fence(1), bound=RowsBound(most))
    made.load()
    yield made
    rows.close()


def test_a_flood_of_new_keys_evicts_no_rows_in_use(shard: Shard) -> None:
    chance = np.random.default_rng(7)
    bound = shard.store.max_rows[0]
    assert bound is not None
    for at in range(30):
        flood = [(0, int(key)) for key in chance.integers(1, 1 << 63, 700)]
        batch = dict.fromkeys([*GOOD, *flood], [1.0] * WIDTH)
        push = replace(push_of({0: (at, at + 1)}, batch), clock_ms=TimeMs(1_700_000_000_000 + 10_000 * at))
        assert shard.push(push)
        shard.flush()
        shard.evict()
        assert shard.store.rows()[0] <= OVERFULL * bound + 1
    before = look_up(shard, [*GOOD, (0, 12345)], create=False)

    assert shard.store.evicted()[0] > 15_000
    assert before.pop((0, 12345)) == [0.0] * WIDTH
    assert all(abs(values[0] + 30.0) < 0.1 for values in before.values()), "each has learned from every batch"
    shard.flush()
    assert shard.buckets.count_stored().sum() <= 2 * OVERFULL * bound


@given(
    st.dictionaries(st.integers(0, 9), st.one_of(st.none(), st.integers(1, 10**6)), min_size=1),
    st.integers(50, 5_000),
    st.integers(10**6, 10**11),
)
def test_bounds_of_tables_add_up_to_the_memory(
    given_rows: dict[int, int | None], size: int, most: int
) -> None:
    options = {table: TableOptions(max_rows=rows) for table, rows in given_rows.items()}
    made = bounds.bounded(options, dict.fromkeys(options, size), most)

    own = sum(rows or 0 for rows in given_rows.values()) * size
    shared = sum(made[t].max_rows or 0 for t, rows in given_rows.items() if rows is None)
    assert all(made[t].max_rows == rows for t, rows in given_rows.items() if rows is not None)
    assert all(o.max_rows for o in made.values())
    floor = bounds.LEAST_ROWS * len(options) * size
    assert shared * size <= max(most - own, most // 10) + floor
