import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freshet.batches.read_my_writes import LookupResult, ReadMyWrites
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.embedder.push_queue import PushQueue
from freshet.errors import Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.log.topics import ensure_topics
from freshet.rows.grpc.handles import KeptKeys
from freshet.rows.service import KeyGroup, Push, RowService, RowStates
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.rpc.channel import MIB
from freshet.rpc.pieces import MIN_LIMIT_BYTES
from freshet.tables import NO_BOUND, RowsBound, RowSteps
from freshet.testing.contracts.rowservice import (
    BUCKETS,
    PARTITIONS,
    WIDTH,
    RowServiceContract,
    keys_of,
    look_up,
    push_of,
    push_of_steps,
)
from freshet.testing.reference import ReferenceRowService
from freshet.types import F32, Bool, OffsetRange, bucket_of
from freshet.wires.link_codecs import AUTO, CodecChoice
from tests.fixtures.shards import SPEC, TRANSPORT, loaded, served
from tests.fixtures.tables import disk_folder

A_ROW = (0, 3)


class TestReference(RowServiceContract):
    @pytest.fixture
    def service(self) -> RowService:
        return ReferenceRowService([WIDTH], dict.fromkeys(range(PARTITIONS), 0))


class TestShard(RowServiceContract):
    bound = NO_BOUND

    @pytest.fixture
    def service(self, tmp_path: Path) -> Iterator[RowService]:
        spec = parse_spec(SPEC)
        log, rows = SqliteEventLog(tmp_path / "log"), SqliteRowStore(tmp_path / "rows.sqlite")
        ensure_topics(log, spec)
        yield loaded(log, rows, 10, spec=spec, bound=self.bound)
        rows.close()
        log.close()


class TestShardWithRowsOnDisk(TestShard):
    """No row stays in memory that is not in use."""

    bound = RowsBound(1, str(disk_folder()))


class Remote(RowServiceContract):
    """Behind a link."""

    shards = 1
    transport = TRANSPORT

    @pytest.fixture
    def service(self, tmp_path: Path) -> Iterator[RowService]:
        with served(tmp_path, parse_spec(SPEC), self.shards, self.transport) as (remote, _):
            yield remote


class TestOneRemoteShard(Remote):
    pass


class TestTwoRemoteShards(Remote):
    shards = 2


@pytest.mark.slow
class TestTwoRemoteShardsInPieces(Remote):
    """Nearly every message is longer than one may be."""

    shards = 2
    transport = replace(TRANSPORT, max_message_bytes=MIN_LIMIT_BYTES)


del Remote  # not a suite of its own


@pytest.mark.parametrize("shards", [1, 2])
def test_keys_of_a_lookup_are_not_sent_again(tmp_path: Path, shards: int) -> None:
    rows = [(0, (k << 56) + k) for k in range(1, 200)]
    with served(tmp_path, parse_spec(SPEC), shards) as (remote, _):

        def sent_by(push: Push) -> int:
            before = remote.total().sent_bytes
            assert remote.push(push)
            return remote.total().sent_bytes - before

        gradients = {row: [1.0, 0.0] for row in rows}
        with_keys = sent_by(push_of({0: (0, 1)}, gradients))
        look_up(remote, rows, create=True)
        by_handle = sent_by(push_of({0: (1, 2)}, gradients))
        assert with_keys - by_handle > 8 * len(rows) - 64 * shards
        keys = 8 * len(rows)
        steps = sent_by(push_of_steps({0: (2, 3)}, {row: [[1.0, 0.0]] * 3 for row in rows}))
        assert steps - by_handle < 2 * 8 * len(rows) + keys / 2, "counts are sent, no keys"


def test_keys_are_sent_where_bytes_cost_nothing(tmp_path: Path) -> None:
    """A link that chooses its codecs hashes no keys for a shard on its host."""
    rows = [(0, (k << 56) + k) for k in range(1, 200)]
    choice = CodecChoice(rows=AUTO, gradients=AUTO)
    with served(tmp_path, parse_spec(SPEC), 1, choice=choice) as (remote, _):
        look_up(remote, rows, create=True)
        before = remote.total().sent_bytes
        assert remote.push(push_of({0: (0, 1)}, {row: [1.0, 0.0] for row in rows}))
        assert remote.total().sent_bytes - before > (8 + 4 * WIDTH) * len(rows)


@pytest.mark.parametrize("shards", [1, 2])
def test_forgotten_keys_are_sent_again_in_order(
    tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the pushes in flight are applied, some meet a gap, some are not decoded."""
    rows = [(0, (k << 56) + k) for k in range(1, 200)]
    pushes, first_lost = 30, 7
    done = threading.Event()
    asked = itertools.count()
    find = KeptKeys.find

    def forgetful(kept: KeptKeys, handle: bytes) -> Sequence[KeyGroup] | None:
        return None if next(asked) >= first_lost else find(kept, handle)

    monkeypatch.setattr(KeptKeys, "find", forgetful)
    with served(tmp_path, parse_spec(SPEC), shards) as (remote, made):
        before = look_up(remote, rows, create=True)
        failed: list[BaseException] = []
        queue = PushQueue[int](
            remote,
            name="pushes",
            acknowledged=lambda tag: done.set() if tag == pushes - 1 else None,
            dropped=lambda _: None,
            moved=lambda: None,
            refused=failed.append,
            failed=failed.append,
        )
        for i in range(pushes):
            queue.add(push_of({0: (i, i + 1)}, {row: [1.0, float(i)] for row in rows}), i)
        assert done.wait(60), failed
        assert queue.close(5.0)
        after = look_up(remote, rows, create=True)
        assert failed == []
        assert first_lost < next(asked) < first_lost + 2 * pushes * shards, (
            "keys are sent after the first loss"
        )
        assert remote.applied() == {0: [pushes], 1: [0]}
        assert [shard.counts.pushes - shard.counts.skipped for shard in made] == [pushes] * shards
    for row in rows:
        steps = np.subtract(before[row], after[row])
        np.testing.assert_allclose(steps, [pushes, sum(range(pushes))], rtol=1e-5)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_lookup_waits_for_the_pushes_it_names(
    tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freshet.paramserver.server.AFTER_S", 60.0)
    rows = [(0, (k << 56) + k) for k in range(1, 60)]
    group, ordered = keys_of(rows)
    with served(tmp_path, parse_spec(SPEC), shards) as (remote, _):
        before = look_up(remote, rows, create=True)
        out: F32 = np.empty((len(rows), WIDTH), np.float32)
        answered = threading.Event()

        def look_up_after() -> None:
            remote.lookup_after([OffsetRange(0, 3, 5), OffsetRange(1, 0, 1)], [group], [out])
            answered.set()

        waiting = threading.Thread(target=look_up_after)
        waiting.start()
        for ranges in ({0: (0, 4)}, {0: (4, 5)}):
            assert remote.push(push_of(ranges, {row: [1.0, 0.0] for row in rows}))
            assert not answered.wait(0.1)
        assert remote.push(push_of({1: (0, 1)}, {row: [1.0, 0.0] for row in rows}))
        assert answered.wait(60.0)
        waiting.join()
        steps = [before[row][0] - value for row, value in zip(ordered, out[:, 0].tolist(), strict=True)]
        np.testing.assert_allclose(steps, [3.0] * len(rows), rtol=1e-5)


def test_a_lookup_after_a_lost_push_fails_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freshet.paramserver.server.AFTER_S", 0.05)
    group, _ = keys_of([A_ROW])
    with served(tmp_path, parse_spec(SPEC), 1) as (remote, _):
        out: F32 = np.empty((1, WIDTH), np.float32)
        with pytest.raises(Unavailable, match="not applied within"):
            remote.lookup_after([OffsetRange(0, 0, 1)], [group], [out])
        remote.lookup_after([], [group], [out])
        assert out[0].tolist() == look_up(remote, [A_ROW], create=False)[A_ROW]


LIMITS = (MIN_LIMIT_BYTES, 1000, 4096, MIB)
"""Limits of a message, between the sizes of lookups, their answers with states, and pushes of 118 rows."""


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("shards", [1, 2])
def test_rows_come_with_the_state_that_steps_them(tmp_path: Path, shards: int, limit: int) -> None:
    """A copy that takes a push's gradients itself equals what the shards then say, over the wire."""
    spec = parse_spec(SPEC.replace('"sgd", lr = 1.0', '"adam", lr = 0.1'))
    (group,) = layout_of(spec).groups
    rows = [(t, (k << 56) + k) for t in (0, 1) for k in range(1, 60)]
    keys, _ = keys_of(rows)
    transport = replace(TRANSPORT, max_message_bytes=limit)
    with served(tmp_path, spec, shards, transport) as (remote, _):

        def told(pushed: dict[int, int]) -> tuple[F32, F32]:
            values = np.full((len(rows), group.width), 77, np.float32)
            states = np.full((len(rows), group.state_floats), 77, np.float32)
            beside = RowStates([states])
            remote.lookup([keys], [values], states=beside)
            assert beside.known is not None
            assert beside.known.offsets.tolist() == [list(pushed.values())]
            return values, states

        values, states = told({0: 0, 1: 0})
        for step in range(3):
            push = push_of({0: (step, step + 1)}, {row: [step + 1.0, row[1] % 7] for row in rows[::2]})
            assert remote.push(push)
            RowSteps(group).step(keys, values, states, push.groups[0], push.gradients[0])
        for copy, row in zip((values, states), told({0: 3, 1: 0}), strict=True):
            np.testing.assert_array_equal(copy, row)
        assert np.ptp(values) > 0.1, "nothing was stepped"


@pytest.mark.parametrize("shards", [1, 2])
def test_rows_know_a_push_only_if_their_bucket_has_it(tmp_path: Path, shards: int) -> None:
    """What a lookup meets that runs beside a push, which goes from bucket to bucket, and to every shard."""
    spec = parse_spec(SPEC)
    rows = [(t, (k << 56) + k) for t in (0, 1) for k in range(1, 60)]
    keys, _ = keys_of(rows)
    with served(tmp_path, spec, shards) as (remote, made):
        looked = [LookupResult([keys], RowStates([np.empty((len(rows), 0), np.float32)])) for _ in range(3)]
        values = [np.zeros((len(rows), WIDTH), np.float32) for _ in looked]
        push = push_of({0: (0, 1)}, {row: [1.0, row[1] % 7] for row in rows})
        own = ReadMyWrites(layout_of(spec))
        own.add(push.ranges, push.groups, push.gradients)
        for at in range(3):
            if at:  # first the even buckets of each shard, then the odd ones
                for shard in made:
                    mine = np.isin(np.arange(BUCKETS), shard.owned()) & (np.arange(BUCKETS) % 2 == at - 1)
                    assert shard.push(only(push, mine))
            remote.lookup([keys], [values[at]], states=looked[at].states)
        known = [one.states.known for one in looked]
        assert [len(one.offsets) for one in known if one is not None] == [1, 2, 1]
        for one, copies in zip(looked, values, strict=True):
            own.apply_pending(one, [copies])
        np.testing.assert_array_equal(values[0], values[2])
        np.testing.assert_array_equal(values[1], values[2])


def only(push: Push, buckets: Bool) -> Push:
    """The same for these buckets (B,) alone."""
    (group,), (gradients,) = push.groups, push.gradients
    rows = buckets[bucket_of(group.keys, BUCKETS)]
    of = bucket_of(group.keys[rows], BUCKETS)
    starts = np.searchsorted(of, np.arange(BUCKETS + 1)).astype(np.uint32)
    part = KeyGroup(group.group, group.keys[rows], group.tables[rows], starts)
    return replace(push, groups=[part], gradients=[gradients[rows]], owned=buckets)
