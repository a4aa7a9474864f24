import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freshet.batches.read_my_writes import LookupResult, ReadMyWrites
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.coordination.assignment import Owners
from freshet.embedder.push_queue import PushQueue
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.log.topics import ensure_topics
from freshet.paramserver.server import identity_of, serve_rows
from freshet.paramserver.shard import Shard
from freshet.rows.grpc.client import RemoteRows, Served
from freshet.rows.grpc.frames import Described
from freshet.rows.grpc.handles import KeptKeys
from freshet.rows.service import KeyGroup, Push, RowService, RowStates
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.rpc.channel import MIB, Transport
from freshet.rpc.pieces import MIN_LIMIT_BYTES
from freshet.rpc.server import FrameServer
from freshet.tables import RowSteps
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
from freshet.types import F32, Bool, bucket_of
from tests.fixtures.shards import SPEC, loaded

TRANSPORT = Transport(token="sesame-of-the-suite", max_message_bytes=MIB)


class TestReference(RowServiceContract):
    @pytest.fixture
    def service(self) -> RowService:
        return ReferenceRowService([WIDTH], dict.fromkeys(range(PARTITIONS), 0))


class TestShard(RowServiceContract):
    @pytest.fixture
    def service(self, tmp_path: Path) -> Iterator[RowService]:
        spec = parse_spec(SPEC)
        log, rows = SqliteEventLog(tmp_path / "log"), SqliteRowStore(tmp_path / "rows.sqlite")
        ensure_topics(log, spec)
        yield loaded(log, rows, 10, spec=spec)
        rows.close()
        log.close()


@contextmanager
def served(
    folder: Path, spec: Spec, shards: int, transport: Transport = TRANSPORT
) -> Iterator[tuple[RemoteRows, list[Shard]]]:
    """Shards in this process, reached over gRPC on the loopback, each with its share of the buckets."""
    groups = layout_of(spec).groups
    widths, states = tuple(g.width for g in groups), tuple(g.state_floats for g in groups)
    log = SqliteEventLog(folder / "log")
    ensure_topics(log, spec)
    share = BUCKETS // shards
    owned: dict[str, range] = {}
    made: list[Shard] = []
    with ExitStack() as stack:
        stack.callback(log.close)
        for i in range(shards):
            rows = SqliteRowStore(folder / f"rows-{i}.sqlite")
            stack.callback(rows.close)
            shard = loaded(log, rows, 10, spec=spec)
            mine = range(i * share, (i + 1) * share)
            for bucket in set(range(BUCKETS)) - set(mine):
                shard.store.drop_bucket(bucket)
            server = FrameServer("127.0.0.1:0", transport, identity=identity_of("contract", "hash"))
            described = Described(f"shard-{i}", "contract", "hash", BUCKETS, PARTITIONS, widths, states)
            serve_rows(server, shard, described)
            server.start()
            stack.callback(server.stop, 0.0)
            owned[f"127.0.0.1:{server.port}"] = mine
            made.append(shard)
        owners = Owners.of(owned, buckets=BUCKETS)
        remote = RemoteRows(Served("contract", "hash"), lambda: owners, transport)
        stack.callback(remote.close)
        yield remote, made


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


@pytest.mark.parametrize("shards", [1, 2])
def test_forgotten_keys_are_sent_again_in_order(
    tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the pushes in flight are applied, some meet a gap, some are not decoded."""
    rows = [(0, (k << 56) + k) for k in range(1, 200)]
    pushes, lost = 30, {7, 8, 11}
    done = threading.Event()
    asked = itertools.count()
    find = KeptKeys.find

    def forgetful(kept: KeptKeys, handle: bytes) -> Sequence[KeyGroup] | None:
        return None if next(asked) in lost else find(kept, handle)

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
        assert done.wait(30.0), failed
        assert queue.close(5.0)
        after = look_up(remote, rows, create=True)
        assert failed == []
        assert next(asked) > min(lost), "no push named a handle"
        assert remote.applied() == {0: [pushes], 1: [0]}
        assert [shard.counts.pushes - shard.counts.skipped for shard in made] == [pushes] * shards
    for row in rows:
        steps = np.subtract(before[row], after[row])
        np.testing.assert_allclose(steps, [pushes, sum(range(pushes))], rtol=1e-5)


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
