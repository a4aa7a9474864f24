"""Shards as real processes: one dies, is paused and comes back, leaves, or joins; every row's sum stays
exact.

A small embedder pushes ones at rows that start at zero (learning rate 1), so that a row is minus the number
of pushes that held it: one lost or doubled shows.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from freshet.adapters import open_eventlog, open_rowstore
from freshet.config.settings import load_settings
from freshet.config.spec import load_spec
from freshet.config.spec.identity import identity_hash
from freshet.config.spec.layout import layout_of
from freshet.config.spec.schemas import load_schemas
from freshet.coordination.assignment import ShardMap, lease_of, slices_of
from freshet.coordination.claims import Claims
from freshet.errors import Refused, Unavailable
from freshet.log.topics import ensure_topics
from freshet.paramserver.shard import Shard, ShardContext
from freshet.rows.grpc.client import RemoteRows, Served
from freshet.rows.service import KeyGroup, Push
from freshet.rpc.channel import MIB, Transport
from freshet.testing.waiting import wait_until
from freshet.types import I64, U64, Bucket, Fence, OffsetRange, TimeMs, bucket_of
from tests.fixtures.zombies import stop_between_transactions
from tests.servers.processes import Process, lasting_ports

SPEC_FILE = Path(__file__).parents[1] / "system" / "ledger" / "freshet.toml"
SPEC = load_spec(SPEC_FILE)
HASH = identity_hash(SPEC, load_schemas(SPEC))
GROUP = layout_of(SPEC).groups[0]
VECTOR = next(slot for slot in GROUP.slots if slot.name == "vector").start
"""Where the two floats are that are stepped by the learning rate 1; those before it stay as they are."""
KEYS = np.sort(np.random.default_rng(3).integers(1, 2**64, 300, dtype=np.uint64))
BUCKETS_OF_KEYS = bucket_of(KEYS, SPEC.buckets)
TOKEN = "sesame-of-the-shards"
DEADLINE_S = 60.0


class Run:
    """A run folder, shards of it as processes, and a client of them."""

    def __init__(self, folder: Path, *, rows_url: str = "", log_url: str = "") -> None:
        """`rows_url`, `log_url`: another row store, or event log, than the run folder's."""
        given = {"FRESHET_COMMON_ROWS_URL": rows_url, "FRESHET_COMMON_LOG_URL": log_url}
        self.settings = load_settings({k: url for k, url in given.items() if url}, run_folder=folder)
        self.settings.common.run.create()
        self.folder = folder
        (folder / "token").write_text(TOKEN)
        self.log = open_eventlog(self.settings.common.log_url)
        self.topics = ensure_topics(self.log, SPEC)
        self.claims = Claims(self.log, self.topics.control)
        self.owners = ShardMap(self.claims, SPEC.buckets)
        self.shards: dict[str, Process] = {}
        self.clients: list[RemoteRows] = []
        self.rows = self.client()

    def client(self, deadline_s: float = 10.0) -> RemoteRows:
        """A client of its own."""
        transport = Transport(token=TOKEN, max_message_bytes=MIB)
        served = Served(SPEC.name, HASH)
        made = RemoteRows(served, self.owners, transport, deadline_s=deadline_s, attempt_s=2.0)
        self.clients.append(made)
        return self.clients[-1]

    def start(
        self,
        name: str,
        *,
        port: int = 0,
        advertised: str = "127.0.0.1",
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> Process:
        """A shard; it takes what the plan gives it."""
        command = [sys.executable, "-m", "freshet", "run", "paramserver", str(SPEC_FILE)]
        env = os.environ | {
            "FRESHET_PARAMSERVER_NAME": name,
            "FRESHET_PARAMSERVER_PORT": str(port),
            "FRESHET_PARAMSERVER_ADVERTISED_HOST": advertised,
            "FRESHET_PARAMSERVER_ADMIN_PORT": "0",
            "FRESHET_GRPC_TOKEN_FILE": str(self.folder / "token"),
            "FRESHET_COMMON_ROWS_URL": self.settings.common.rows_url,
            "FRESHET_COMMON_LOG_URL": self.settings.common.log_url,
            **settings,
        }
        made = Process([*command, "--folder", str(self.folder)], self.folder / f"{name}.log", env)
        made.start(lambda _: f"shard:{name}" in self.claims.owners(), within_s=DEADLINE_S)
        self.shards[name] = made
        return made

    def wait_for_owners(self, shards: int, *, least: int | None = None) -> None:
        """Until so many shards own all buckets between them, as the last plan says, and each at least so
        many, or half an equal share: it is load that is dealt evenly."""
        wanted = SPEC.buckets // shards // 2 if least is None else least

        def balanced() -> bool:
            counts = np.bincount(self.owners().of_bucket + 1, minlength=shards + 1)
            return len(counts) == 1 + shards and counts[1:].min() >= wanted and self.is_as_planned()

        wait_for(balanced, f"{shards} shards own all buckets")

    def is_as_planned(self) -> bool:
        """Whether every slice belongs to its owner by the last plan."""
        plan, owners = self.claims.plan(), self.claims.owners()
        claims = [owners[what] for what in slices_of(SPEC.buckets) if what in owners]
        members = [None if claim.released else lease_of(claim.owner) for claim in claims]
        return plan is not None and list(plan.owners) == members

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.claims.close()
        self.log.close()
        for process in self.shards.values():
            process.kill()


class Pushing:
    """An embedder of one partition after another, from the applied offsets on, and again on request."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rng = np.random.default_rng(11)
        self._chosen: dict[tuple[int, int], np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
        self._next: dict[int, int] = {}
        self._number = -1
        self.longest_wait_s = 0.0

    def go_on(self, upto: int, held_up: Callable[[], None] = lambda: None) -> None:
        """Push until every partition has applied so many samples; calls `held_up` after each Unavailable."""
        deadline = time.monotonic() + DEADLINE_S
        acknowledged = time.monotonic()
        while not self._next or min(self._next.values()) < upto or self._run.rows.ownership() != self._number:
            assert time.monotonic() < deadline, f"stuck at {self._next}"
            try:
                self._one(upto)
            except (Refused, Unavailable) as error:
                self._number = -1
                if isinstance(error, Unavailable):
                    held_up()
                continue
            self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - acknowledged)
            acknowledged = time.monotonic()

    def _one(self, upto: int) -> None:
        rows = self._run.rows
        if (number := rows.ownership()) != self._number:  # PROTOCOL 7
            self._next = {p: offsets[0] for p, offsets in rows.applied().items()}
            self._number = number
        partition = min(self._next, key=lambda p: self._next[p])
        if (at := self._next[partition]) >= upto:
            return
        rows.push(self._push(partition, at))
        self._next[partition] = at + 1

    def _push(self, partition: int, at: int) -> Push:
        """Always the same for the same range, as a log would have it."""
        if (partition, at) not in self._chosen:
            self._chosen[partition, at] = self._choice()
        return push_of_ones(self._chosen[partition, at], partition, at)

    def _choice(self) -> I64:
        return np.sort(self._rng.choice(len(KEYS), 40, replace=False))

    def expected(self):
        """(keys,) what each row must be."""
        sums = np.zeros(len(KEYS))
        for chosen in self._chosen.values():
            sums[chosen] -= 1
        return sums


def push_of_ones(chosen: I64, partition: int, at: int) -> Push:
    """One more for these of KEYS."""
    starts = np.searchsorted(BUCKETS_OF_KEYS[chosen], np.arange(SPEC.buckets + 1)).astype(np.uint32)
    group = KeyGroup(0, KEYS[chosen], np.zeros(len(chosen), np.uint8), starts)
    ones = np.zeros((len(chosen), GROUP.width), np.float32)
    ones[:, VECTOR:] = 1
    return Push((OffsetRange(partition, at, at + 1),), Fence(1), TimeMs(1000), [group], [ones])


def wait_for(condition: Callable[[], bool], what: str) -> None:
    wait_until(what, condition, within_s=DEADLINE_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def stored(run: Run):
    """(keys,) the rows in the row store, read after all shards have gone."""
    store = open_rowstore(run.settings.common.rows_url)
    try:
        end = run.log.bounds(run.claims._partition).end
        shard = Shard(ShardContext(SPEC, HASH, run.log, store), fence=Fence(end + 1_000_000))
        shard.load()
        out = np.empty((len(KEYS), GROUP.width), np.float32)
        starts = np.searchsorted(BUCKETS_OF_KEYS, np.arange(SPEC.buckets + 1)).astype(np.uint32)
        shard.lookup([KeyGroup(0, KEYS, np.zeros(len(KEYS), np.uint8), starts)], [out], create=False)
        assert (out[:, VECTOR] == out[:, -1]).all()
        return out[:, VECTOR]
    finally:
        store.close()


def killed(run: Run) -> None:
    run.shards["a"].kill()


def paused(run: Run) -> None:
    """Frozen for longer than its lease; afterwards its slices belong to another shard."""
    stop_between_transactions(run.shards["a"].pid, run.folder)


def ended(run: Run) -> None:
    run.shards["a"].stop()


@pytest.mark.parametrize("what_happens", [killed, paused, ended])
def test_a_shard_that_goes_is_replaced_and_every_sum_is_exact(run: Run, what_happens) -> None:
    run.start("a")
    run.start("b")
    run.wait_for_owners(2)
    pushing = Pushing(run)
    pushing.go_on(50)

    what_happens(run)
    pushing.go_on(100)
    if what_happens is paused:
        run.shards["a"].resume()
        run.wait_for_owners(2)
        pushing.go_on(150)
    print(f"{what_happens.__name__}: the longest wait of a push was {pushing.longest_wait_s:.1f} s")

    for process in run.shards.values():
        process.stop()
    np.testing.assert_array_equal(stored(run), pushing.expected())


@pytest.mark.parametrize("cut", [Process.pause, Process.kill], ids=["silent", "refused"])
def test_sums_are_exact_after_a_reset_link_to_a_shard(
    run: Run, tmp_path: Path, cut: Callable[[Process], None]
) -> None:
    (port,) = lasting_ports(1)
    addresses = [f"127.0.0.2:{port}", f"127.0.0.1:{port}"]  # the shard is known by the first one
    link = Process([sys.executable, "-m", "tests.servers.slow_link", *addresses], tmp_path / "link.log")
    joined: list[bool] = []

    def join() -> None:
        if link.alive:
            link.resume()
        else:
            link.start(lambda said: "ready" in said, within_s=DEADLINE_S)
        joined.append(True)

    join()
    try:
        run.start("a", port=port, advertised="127.0.0.2")
        run.start("b")
        run.wait_for_owners(2)
        pushing = Pushing(run)
        pushing.go_on(50)
        joined.clear()
        cut(link)
        pushing.go_on(100, held_up=join)
        assert joined, "no push was held up: the link carried none of them"
    finally:
        link.kill()
    print(f"the longest wait of a push was {pushing.longest_wait_s:.1f} s")
    for process in run.shards.values():
        process.stop()
    np.testing.assert_array_equal(stored(run), pushing.expected())


def test_eight_writers_at_the_same_rows_lose_and_double_nothing(run: Run) -> None:
    """Two of each partition push the same, as an embedder and one that was thought dead do."""
    pushes, writers_of_each = 100, 2
    run.start("a")
    run.start("b")
    run.wait_for_owners(2, least=SPEC.buckets // 2)  # no slice moves any more: no client here calls `applied`
    everything = np.arange(len(KEYS))

    def write(rows: RemoteRows, partition: int) -> int:
        return sum(rows.push(push_of_ones(everything, partition, at)) for at in range(pushes))

    with ThreadPoolExecutor(writers_of_each * SPEC.partitions) as threads:
        partitions = [*range(SPEC.partitions)] * writers_of_each
        applied = list(threads.map(write, [run.client() for _ in partitions], partitions))
    assert sum(applied) >= pushes * SPEC.partitions  # in full, or in one shard's part

    for process in run.shards.values():
        process.stop()
    np.testing.assert_array_equal(stored(run), np.full(len(KEYS), -float(pushes * SPEC.partitions)))


def test_a_shard_joins_and_leaves_while_rows_are_pushed(run: Run) -> None:
    run.start("a")
    run.start("b")
    run.wait_for_owners(2)
    pushing = Pushing(run)
    pushing.go_on(50)
    run.start("c")
    for upto in range(60, 200, 10):
        pushing.go_on(upto)
    run.wait_for_owners(3)
    pushing.go_on(250)
    run.shards["c"].stop()
    pushing.go_on(300)
    run.wait_for_owners(2)
    print(f"joined and left: the longest wait of a push was {pushing.longest_wait_s:.1f} s")

    for process in run.shards.values():
        process.stop()
    np.testing.assert_array_equal(stored(run), pushing.expected())


def test_a_bounded_shard_evicts_the_least_recently_used_rows(run: Run) -> None:
    run.start("a", settings={"FRESHET_PARAMSERVER_EVICT_BYTES": "1000000"})  # a table may have 10,000 rows
    run.wait_for_owners(1, least=SPEC.buckets)
    chance = np.random.default_rng(5)
    pushed = [_by_bucket(chance.integers(1, 2**64, 2_500, dtype=np.uint64)) for _ in range(12)]

    def all_are_pushed() -> bool:
        try:
            for at in range(run.rows.applied()[0][0], len(pushed)):
                ones = np.ones((len(pushed[at].keys), GROUP.width), np.float32)
                time_ms = TimeMs(1_700_000_000_000 + 10_000 * at)
                run.rows.push(Push((OffsetRange(0, at, at + 1),), Fence(1), time_ms, [pushed[at]], [ones]))
            return run.rows.applied()[0] == [len(pushed)]
        except (Refused, Unavailable):  # slices came meanwhile: PROTOCOL 6
            return False

    wait_for(all_are_pushed, "all is pushed")

    wait_for(lambda: sum(_found(run, group) for group in pushed) <= 10_500, "rows are within the bound")

    assert _found(run, pushed[-1]) == len(pushed[-1].keys)
    assert _found(run, pushed[0]) == 0
    run.shards["a"].stop()
    store = open_rowstore(run.settings.common.rows_url)
    try:
        metas = store.metas([Bucket(b) for b in range(SPEC.buckets)])
        assert sum(meta.rows for meta in metas.values()) <= 10_500
    finally:
        store.close()


def _by_bucket(keys: U64) -> KeyGroup:
    keys = keys[np.argsort(bucket_of(keys, SPEC.buckets), kind="stable")]
    starts = np.searchsorted(bucket_of(keys, SPEC.buckets), np.arange(SPEC.buckets + 1)).astype(np.uint32)
    return KeyGroup(0, keys, np.zeros(len(keys), np.uint8), starts)


def _found(run: Run, group: KeyGroup) -> int:
    """How many of the keys have rows."""
    out = np.empty((len(group.keys), GROUP.width), np.float32)
    run.rows.lookup([group], [out], create=False)
    return int(out.any(axis=1).sum())
