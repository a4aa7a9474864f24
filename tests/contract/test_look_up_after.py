"""Lookups beside the push before them, in mode `sync` over gRPC: equal to lookups after its answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet.config.spec.parse import parse_spec
from freshet.embedder.pipeline import BatchPipeline
from freshet.errors import Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.paramserver.shard import Shard
from freshet.rows.grpc.client import RemoteRows
from freshet.rows.service import KeyGroup, LookupsAfter, Push, RowStates
from freshet.testing.contracts.batches import await_batch
from freshet.testing.contracts.rowservice import PARTITIONS
from freshet.types import F32, OffsetRange
from tests.fixtures.embedder import SPEC, PipelinedScene
from tests.fixtures.shards import served

pytestmark = pytest.mark.slow

ADAM = SPEC.replace('"sgd", lr = 1.0', '"adam", lr = 0.1')
BATCHES, ROWS, IDS = 60, 6, 14


class Plain:
    """Remote rows without `lookup_after`."""

    def __init__(self, rows: RemoteRows) -> None:
        self.rows = rows
        self.lookups = 0

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        self.lookups += 1
        self.rows.lookup(groups, out, create=create, states=states)

    def push(self, push: Push) -> bool:
        return self.rows.push(push)

    def push_soon(self, push: Push) -> Future[bool]:
        return self.rows.push_soon(push)

    def applied(self) -> Mapping[int, Sequence[int]]:
        return self.rows.applied()

    def ownership(self) -> int:
        return self.rows.ownership()


class Beside(Plain):
    """Remote rows with it."""

    def __init__(self, rows: RemoteRows) -> None:
        super().__init__(rows)
        self.after: list[int] = []

    def lookup_after(
        self,
        ranges: Sequence[OffsetRange],
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        states: RowStates | None = None,
    ) -> None:
        self.rows.lookup_after(ranges, groups, out, states=states)
        self.after.append(len(ranges))


def trained(folder: Path, kind: type[Plain], shards: int, text: str = ADAM) -> tuple[Plain, list[Any]]:
    """Train on batches that share most of their rows; returns the rows of each batch, as they came."""
    folder.mkdir()
    log = SqliteEventLog(folder / "samples")
    rng = np.random.default_rng(5)
    seen: list[Any] = []
    with served(folder, parse_spec(text), shards) as (remote, _):
        rows = kind(remote)
        scene = PipelinedScene(log, text, rows)
        for i in range(BATCHES):
            scene.append(i % PARTITIONS, rng.integers(0, IDS, ROWS).tolist())
        stream = scene.stream(batch_rows=ROWS, mode="sync")
        for _ in range(BATCHES):
            batch = await_batch(stream)
            values = [group.rows.copy() for group in batch.inputs.groups]
            seen.append((batch.ranges, [value.tolist() for value in values]))
            stream.push_gradients(0, batch, [value * np.float32(0.3) + np.float32(1) for value in values])
        assert stream.flush(60)
        stream.close()
        seen.append(remote.applied())
    log.close()
    return rows, seen


@pytest.mark.parametrize("shards", [1, 2])
def test_rows_beside_a_push_are_those_after_it(
    tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_pushes(monkeypatch, 0.003)
    monkeypatch.setattr("freshet.paramserver.server.AFTER_S", 60.0)
    plain, expected = trained(tmp_path / "plain", Plain, shards)
    beside, found = trained(tmp_path / "beside", Beside, shards)
    assert isinstance(beside, Beside)
    assert found == expected
    assert plain.lookups == BATCHES
    assert (beside.lookups, len(beside.after)) == (0, BATCHES)
    assert sum(map(bool, beside.after)) >= BATCHES - 1


def test_rows_are_those_after_pushes_that_take_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = trained(tmp_path / "plain", Plain, 1)
    given_up, pushes, push = threading.Semaphore(0), itertools.count(1), Shard.push

    class GivenUp(Beside):
        def lookup_after(self, *args: Any, **named: Any) -> None:
            try:
                super().lookup_after(*args, **named)
            except Unavailable:
                given_up.release()
                raise

    def held(shard: Shard, pushed: Push) -> bool:
        """Push once the lookup after this push has given up; there is none after the last one."""
        assert next(pushes) == BATCHES or given_up.acquire(timeout=60)
        return push(shard, pushed)

    monkeypatch.setattr(Shard, "push", held)
    monkeypatch.setattr("freshet.paramserver.server.AFTER_S", 0.005)
    beside, found = trained(tmp_path / "beside", GivenUp, 1)
    assert found == expected
    assert beside.lookups == BATCHES - 1


@pytest.mark.parametrize(
    ("text", "lanes", "mode", "looks_after"),
    [
        (SPEC, 1, "sync", True),
        (SPEC, 2, "sync", False),
        (SPEC, 1, "hybrid", False),
        (SPEC.replace("lr = 1.0 }", "lr = 1.0 }, admission = 2"), 1, "sync", False),
    ],
)
def test_only_a_lane_that_pushes_alone_looks_up_beside(
    tmp_path: Path, text: str, lanes: int, mode: str, looks_after: bool
) -> None:
    log = SqliteEventLog(tmp_path / "samples")
    with served(tmp_path, parse_spec(text), 1) as (remote, _):
        rows = Beside(remote)
        assert isinstance(rows, LookupsAfter)
        scene = PipelinedScene(log, text, rows)
        scene.append(0, [1, 2])
        stream = scene.stream(batch_rows=2, lanes=lanes, mode=mode)
        assert isinstance(stream, BatchPipeline)
        await_batch(stream, 0)
        stream.close()
        assert (len(rows.after), rows.lookups) == ((1, 0) if looks_after else (0, 1))
    log.close()


def slow_pushes(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    """Delay pushes at the shard: a lookup that does not wait for them misses them."""
    push = Shard.push

    def slow(shard: Shard, pushed: Push) -> bool:
        time.sleep(delay_s)
        return push(shard, pushed)

    monkeypatch.setattr(Shard, "push", slow)
