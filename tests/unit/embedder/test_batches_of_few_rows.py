"""Batches have at most `train.batch.rows` rows, unless a single request has more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.apps.sample_files import block_ends
from freshet.config.spec.model import Train
from freshet.config.spec.parse import load_spec
from freshet.embedder.core import Assembler
from freshet.embedder.partition_reader import BatchSizes, PartitionReader
from freshet.features.blocks import MAX_SAMPLES, block_samples
from freshet.joiner.core import Samples, encode_samples
from freshet.joiner.plan import join_plan
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.testing.clock import SettableClock
from freshet.types import Append, BytesColumn, Records

LONG = 50_000
REQUESTS = st.lists(st.integers(1, 90), min_size=1, max_size=40)
"""Samples of each request."""


def samples_of(requests: list[int]) -> Samples:
    n = sum(requests)
    return Samples(
        np.arange(n),
        np.arange(n),
        np.repeat(np.arange(len(requests), dtype=np.uint64), requests),
        np.zeros(n, np.float32),
        np.ones(n, np.float32),
        np.zeros(n, np.uint8),
        np.ones(n, np.uint32),
        BytesColumn.of([b"x"] * n),
    )


def records_of(blocks: BytesColumn) -> Records:
    n = len(blocks)
    empty = BytesColumn(np.empty(0, np.uint8), np.zeros(n, np.int64))
    return Records(np.arange(n), np.zeros(n, np.int64), empty, blocks, n)


@given(REQUESTS, REQUESTS, st.integers(1, 300))
def test_batch_has_at_most_the_rows_of_the_spec(here: list[int], there: list[int], rows: int) -> None:
    assembler = Assembler({0: 0, 1: 0})
    for partition, requests in enumerate((here, there)):
        blocks = encode_samples(samples_of(requests), max_samples=block_samples(rows))
        assembler.add(partition, records_of(blocks))
    seen = 0
    while (plan := assembler.next(rows)) is not None:
        seen += plan.rows
        alone = len(plan.blocks) == 1 and plan.rows in (here if plan.ranges[0].partition == 0 else there)
        assert plan.rows <= rows or alone
    assert seen == sum(here) + sum(there)


@given(REQUESTS, st.integers(1, 300))
def test_backtest_and_joiner_cut_the_same_blocks(requests: list[int], rows: int) -> None:
    samples = samples_of(requests)
    ends = block_ends(samples.requests, rows, before=rows)
    cut = np.diff(ends, prepend=0)

    assert ends[-1] == sum(requests)
    assert all(size <= rows or size in requests for size in cut.tolist())
    blocks = encode_samples(samples, max_samples=rows)
    assert len(blocks) == len(ends)


def test_joiner_closes_blocks_at_the_rows_of_a_batch() -> None:
    spec = load_spec(Path(__file__).parents[3] / "examples" / "quickstart" / "freshet.toml")
    for rows, most in ((16, 16), (64, 64), (4_096, MAX_SAMPLES)):
        assert join_plan(replace(spec, train=replace(spec.train, batch_rows=rows))).block_samples == most


@pytest.mark.parametrize(
    ("train", "native", "others"),
    [
        (Train(), 64, 256),
        (Train(batch_rows=1_024), 1_024, 1_024),
        (Train(batch_behind_rows=128), 128, 128),
    ],
)
def test_python_models_take_larger_batches_when_behind(train: Train, native: int, others: int) -> None:
    assert train.behind_rows(native_loop=True) == native
    assert train.behind_rows(native_loop=False) == others


@pytest.fixture
def long_log(tmp_path: Path) -> Iterator[SqliteEventLog]:
    """Write 50,000 samples, one a request, in blocks of 64."""
    log = SqliteEventLog(tmp_path)
    log.create_topic("samples", partitions=1)
    writer = log.writer()
    writer.append([Append("samples", 0, encode_samples(samples_of([1] * LONG), max_samples=64))])
    writer.close()
    yield log
    log.close()


@pytest.mark.parametrize("behind", [64, 256, 20_000])
def test_lane_far_behind_takes_the_largest_batches(long_log: SqliteEventLog, behind: int) -> None:
    clock = SettableClock()
    source = PartitionReader(long_log, "samples", [0], BatchSizes(64, behind, 0), clock)
    source.rewind([{0: (0,)}])

    sizes = []
    while (plan := source.assemble(clock.monotonic())) is not None:
        sizes.append(plan.rows)

    assert sum(sizes) == LONG
    assert sizes[0] == behind // 64 * 64
    assert set(sizes[:-1]) <= {64, behind // 64 * 64}
    source.close()


def test_new_model_begins_with_short_batches(long_log: SqliteEventLog) -> None:
    clock = SettableClock()
    source = PartitionReader(long_log, "samples", [0], BatchSizes(256, 256, 0, warms_up=True), clock)
    sizes = []
    for start in (0, 1):
        source.rewind([{0: (start,)}])
        sizes.append([plan.rows for plan in source.assemble_run(clock.monotonic(), 1_000, 1_000)])

    assert sizes[0][:4] == [64, 64, 128, 256]  # whole blocks, at most one row more than before
    assert sizes[1][:2] == [256, 256]
    source.close()


def test_run_has_the_requested_length_until_the_log_ends(long_log: SqliteEventLog) -> None:
    clock = SettableClock()
    source = PartitionReader(long_log, "samples", [0], BatchSizes(64, 64, 0), clock)
    source.rewind([{0: (0,)}])

    runs = []
    while plans := source.assemble_run(clock.monotonic(), 3_000, 1_000):
        runs.append([plan.rows for plan in plans])

    assert sum(map(sum, runs)) == LONG
    assert all(sum(run) == 47 * 64 for run in runs[:-2])
    assert all(rows <= 64 for run in runs for rows in run)
    source.close()
