import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freshet.embedder.service import BatchServer
from freshet.errors import DataLost, Fenced, Overloaded
from freshet.http.token_files import CHECK_S
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.rpc.channel import PeerTokens
from freshet.rpc.frames import Frame
from freshet.testing.clock import SettableClock
from freshet.testing.conditions import wait_for
from freshet.testing.contracts.batches import await_any_batch, await_batch, flush, gradients_of, spans
from freshet.testing.contracts.rowservice import PARTITIONS, WIDTH, push_of
from freshet.testing.faults import Faulty
from freshet.testing.reference import ReferenceRowService
from freshet.types import Fence
from tests.fixtures.embedder import RemoteScene

DEADLINE_S = 60.0


@pytest.fixture
def scene(tmp_path: Path):
    log = SqliteEventLog(tmp_path)
    scene = RemoteScene(log)
    yield scene
    scene.close()
    log.close()


def reference(scene: RemoteScene) -> ReferenceRowService:
    assert isinstance(scene.rows, ReferenceRowService)
    return scene.rows


def owning(scene: RemoteScene, *, batch_rows: int = 1):
    """Start two embedders with one partition each."""
    return [scene.embedder([p], batch_rows) for p in range(PARTITIONS)]


def drain(scene: RemoteScene, stream, applied: dict[int, int]) -> list[int]:
    """Train until the rows have applied these offsets; returns the samples."""
    seen: list[int] = []
    deadline = time.monotonic() + DEADLINE_S
    while {p: o[0] for p, o in scene.rows.applied().items()} != applied:
        assert time.monotonic() < deadline, f"rows stand at {scene.rows.applied()}"
        batch = stream.next_batch(0, 0.02)
        if batch is not None:
            seen += batch.sample_ids.tolist()
            stream.push_gradients(0, batch, gradients_of(batch))
    return seen


@pytest.mark.slow
def test_lane_takes_batches_from_its_embedders_round_robin(scene):
    many = 200
    embedders = owning(scene)
    stream = scene.rank(lambda: {p: e.address for p, e in enumerate(embedders)})

    def connected() -> bool:  # one embedder must not finish before the other is connected
        assert stream.next_batch(0, 0.01) is None
        return all(embedder.server.counts.frames["Take"] for embedder in embedders)

    wait_for(connected, DEADLINE_S)
    for i in range(2 * many):
        scene.append(i % 2, [i])
    order = []
    for _ in range(2 * many):
        batch = await_batch(stream)
        order.append(next(iter(spans(batch))))
        stream.push_gradients(0, batch, gradients_of(batch))
    flush(stream)
    assert scene.rows.applied() == {0: [many], 1: [many]}
    assert order.count(0) == order.count(1) == many
    assert order not in ([0] * many + [1] * many, [1] * many + [0] * many), "one waited for the other"


def test_batches_of_a_lost_rank_are_issued_again(scene):
    for i in range(6):
        scene.append(0, [i])
    embedder = scene.embedder(range(PARTITIONS), 1, 1)
    owners = dict.fromkeys(range(PARTITIONS), embedder.address)
    first = scene.rank(lambda: owners, fence=Fence(10))
    held = [await_batch(first), await_batch(first)]
    assert [batch.sample_ids.tolist() for batch in held] == [[0], [1]]

    first.close()

    second = scene.rank(lambda: owners, fence=Fence(11))
    assert set(drain(scene, second, {0: 6, 1: 0})) == set(range(6))
    flush(second)
    wait_for(lambda: embedder.batches.stream().limiter.batches() == 0, DEADLINE_S)


def test_replaced_rank_gets_no_batches(scene):
    scene.append(0, [1])
    embedder = scene.embedder(range(PARTITIONS))
    owners = dict.fromkeys(range(PARTITIONS), embedder.address)
    new = scene.rank(lambda: owners, fence=Fence(11))
    batch = await_batch(new)
    zombie = scene.rank(lambda: owners, fence=Fence(10))
    scene.append(0, [2])
    assert zombie.next_batch(0, 0.3) is None
    new.push_gradients(0, batch, gradients_of(batch))
    assert await_batch(new).sample_ids.tolist() == [2]


def test_batches_of_a_replaced_embedder_are_refused(scene):
    for i in range(3):
        scene.append(0, [i])
    zombie = scene.embedder([0], 1, 0, fence=Fence(10))
    heir = scene.embedder([0], 1, 0, fence=Fence(20))
    owner = [heir.address]
    stream = scene.rank(lambda: {0: owner[0]})
    batch = await_batch(stream)
    assert batch.fence == 20
    stream.push_gradients(0, batch, gradients_of(batch))
    flush(stream)

    owner[0] = zombie.address
    wait_for(lambda: stream.next_batch(0, 0.01) is None and stream.counts.fenced, DEADLINE_S)
    owner[0] = heir.address

    assert drain(scene, stream, {0: 3, 1: 0}) == [1, 2]


def test_rank_continues_once_the_embedder_knows_its_token(scene, tmp_path):
    clock, ours, theirs = SettableClock(), tmp_path / "rank", tmp_path / "embedder"
    theirs.write_text("old\n")
    ours.write_text("new\n")
    scene.append(0, [7])
    scene.transport = replace(scene.transport, tokens=PeerTokens(str(theirs), clock))
    embedder = scene.embedder(range(PARTITIONS))
    scene.transport = replace(scene.transport, tokens=PeerTokens(str(ours), clock))
    stream = scene.rank(lambda: dict.fromkeys(range(PARTITIONS), embedder.address))

    wait_for(
        lambda: stream.next_batch(0, 0.01) is None and embedder.server.counts.refused["token"] > 1, DEADLINE_S
    )
    theirs.write_text("new\nold\n")
    clock.advance(CHECK_S)

    assert drain(scene, stream, {0: 1, 1: 0}) == [7]


def test_moved_partitions_lose_and_repeat_no_sample(scene):
    for i in range(40):
        scene.append(i % 2, [i])
    first, second = owning(scene)
    owners = {0: first.address, 1: second.address}
    stream = scene.rank(lambda: owners)
    for _ in range(5):
        batch = await_batch(stream)
        stream.push_gradients(0, batch, gradients_of(batch, 1.0))
    second.own([])
    first.own([0, 1])
    owners = dict.fromkeys(range(PARTITIONS), first.address)
    drain(scene, stream, {0: 20, 1: 20})
    assert stream.next_batch(0, 0.05) is None


def test_rank_finds_another_embedder_while_one_stops(scene):
    """Its server answers for a while after it has closed its batches, and owns the partitions until then."""
    scene.append(0, [1])
    first, second = scene.embedder([0]), scene.embedder([0])
    owners = {0: first.address}
    stream = scene.rank(lambda: owners)
    first.batches.close()
    wait_for(lambda: stream.next_batch(0, 0.01) is None and stream.counts.broken > 1, DEADLINE_S)
    assert first.batches.stream() is None, "nothing would close it"

    owners = {0: second.address}
    assert await_batch(stream).sample_ids.tolist() == [1]


def test_rank_waits_for_an_unreachable_embedder(scene):
    scene.append(0, [1])
    embedder = scene.embedder([0])
    owners = {0: "127.0.0.1:9"}  # no server listens there
    stream = scene.rank(lambda: owners)
    assert stream.next_batch(0, 0.5) is None
    owners = {0: embedder.address}
    assert await_batch(stream).sample_ids.tolist() == [1]


def test_gradients_refused_as_overload_are_sent_again(scene):
    """The embedder's memory budget is below any single request."""
    scene.append(0, [1])
    embedder = scene.embedder(range(PARTITIONS), work_bytes=1)
    owners = dict.fromkeys(range(PARTITIONS), embedder.address)
    stream = scene.rank(lambda: owners)
    batch = await_batch(stream)
    refused = embedder.server.counts.refused
    wait_for(lambda: embedder.server.counts.frames["Take"] > 1, DEADLINE_S)  # the only request waits
    stream.push_gradients(0, batch, gradients_of(batch))
    wait_for(lambda: refused["overloaded"], DEADLINE_S)

    assert drain(scene, stream, {0: 1, 1: 0}) == []
    assert stream.flush(DEADLINE_S)
    assert stream.counts.broken == 0


def test_overload_keeps_batches_that_are_out(scene, monkeypatch):
    left, take = [1, 1], BatchServer.take

    def refuse_twice(self: BatchServer, frame: Frame, feeds: set[tuple[int, int]]) -> bytes:
        if left:
            left.pop()
            raise Overloaded("too much is in work", 0.01)
        return take(self, frame, feeds)

    monkeypatch.setattr(BatchServer, "take", refuse_twice)
    for i in range(4):
        scene.append(0, [i])
    embedder = scene.embedder(range(PARTITIONS))
    owners = dict.fromkeys(range(PARTITIONS), embedder.address)
    stream = scene.rank(lambda: owners)
    assert drain(scene, stream, {0: 4, 1: 0}) == [0, 1, 2, 3]
    assert (left, stream.counts.broken) == ([], 0)


def test_gradients_keep_their_order_after_an_overload(scene, monkeypatch):
    """In the other order the shards would refuse the later batch, and both would be issued again."""
    left, give = [1], BatchServer.give

    def refuse_first(self: BatchServer, frame: Frame) -> bytes:
        if left:
            left.pop()
            raise Overloaded("too much is in work", 0.01)
        return give(self, frame)

    monkeypatch.setattr(BatchServer, "give", refuse_first)
    for i in range(2):
        scene.append(0, [i])
    embedder = scene.embedder(range(PARTITIONS), 1)
    owners = dict.fromkeys(range(PARTITIONS), embedder.address)
    stream = scene.rank(lambda: owners)
    first, second = await_batch(stream), await_batch(stream)
    stream.push_gradients(0, first, gradients_of(first))
    (feed,) = stream._feeds.values()
    wait_for(lambda: feed._refused, DEADLINE_S)
    stream.push_gradients(0, second, gradients_of(second))

    assert stream.flush(DEADLINE_S)
    assert {p: o[0] for p, o in scene.rows.applied().items()} == {0: 2, 1: 0}
    assert drain(scene, stream, {0: 2, 1: 0}) == []


@pytest.mark.parametrize(
    ("codec", "within"),
    [("fp32", 0.0), ("fp16", 1e-3), ("bf16", 1e-2), ("int8", 2e-2), ("int4", 0.3)],
)
def test_rows_and_gradients_are_as_exact_as_their_codec(tmp_path, codec, within):
    log = SqliteEventLog(tmp_path)
    scene = RemoteScene(log, codec=codec)
    for _ in range(2):
        scene.append(0, [1, 2, 3])
    stream = scene.stream(batch_rows=3, staleness_rows=0)
    batch = await_batch(stream)
    sent = sorted(values for values in reference(scene).rows().values())
    got = sorted(batch.inputs.groups[0].rows.tolist())
    np.testing.assert_allclose(got, sent, rtol=within, atol=within * 0.01)
    stream.push_gradients(0, batch, gradients_of(batch, 0.5))
    flush(stream)
    after = sorted(values for values in reference(scene).rows().values())
    np.testing.assert_allclose(np.subtract(sent, after), 0.5, rtol=max(within, 1e-5))
    scene.close()
    log.close()


def test_lanes_of_a_rank_have_disjoint_partitions(scene):
    for i in range(8):
        scene.append(i % 2, [i])
    embedders = owning(scene)
    stream = scene.rank(lambda: {p: e.address for p, e in enumerate(embedders)}, lanes=2)
    seen: dict[int, set[int]] = {0: set(), 1: set()}
    for _ in range(8):
        lane, batch = await_any_batch(stream, (0, 1))
        seen[lane] |= spans(batch).keys()
        stream.push_gradients(lane, batch, gradients_of(batch))
    assert seen == {0: {0}, 1: {1}}


def test_embedder_recovers_from_a_refused_push(scene):
    for i in range(4):
        scene.append(0, [i])
    stream = scene.stream(batch_rows=1)
    batch = await_batch(stream)
    scene.rows.push(push_of({0: (0, 1)}, {}))
    stream.push_gradients(0, batch, gradients_of(batch))
    assert set(drain(scene, stream, {0: 4, 1: 0})) <= {1, 2, 3}


def test_fatal_error_ends_embedder_and_reaches_the_rank(scene):
    scene.rows = ReferenceRowService([WIDTH], {0: 7, 1: 0})  # the log holds no offset 7
    embedder = scene.embedder([0])
    stream = scene.rank(lambda: {0: embedder.address})
    with pytest.raises(DataLost):
        await_batch(stream)
    assert isinstance(embedder.batches.failed, DataLost)


def test_fenced_push_ends_the_stream_but_not_the_embedder(scene):
    scene.append(0, [1])
    scene.rows = Faulty(scene.rows)
    scene.rows.script("push", nth=1, error=Fenced("a higher fence"))
    embedder = scene.embedder([0])
    stream = scene.rank(lambda: {0: embedder.address})
    batch = await_batch(stream)
    stream.push_gradients(0, batch, gradients_of(batch))
    assert drain(scene, stream, {0: 1, 1: 0})[-1:] == [1]
    assert embedder.batches.failed is None


def test_a_defect_of_a_lane_ends_its_embedder(scene, monkeypatch):
    """A failed lane answers each request with its error: only a new process makes a new lane."""
    embedder = scene.embedder(range(PARTITIONS))
    stream = scene.rank(lambda: dict.fromkeys(range(PARTITIONS), embedder.address))
    monkeypatch.setattr(scene.rows, "applied", lambda: 1 // 0)

    def failed() -> bool:
        stream.next_batch(0, 0.01)
        return embedder.batches.failed is not None

    wait_for(failed, DEADLINE_S)

    assert isinstance(embedder.batches.failed, ZeroDivisionError)
