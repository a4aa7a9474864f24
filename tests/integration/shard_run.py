"""Shards as processes, a client of them, and pushes whose sum every row shows."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from freshet.adapters import open_eventlog, open_rowstore
from freshet.config.settings import load_settings
from freshet.config.spec import load_spec
from freshet.config.spec.identity import identity_hash
from freshet.config.spec.layout import layout_of
from freshet.config.spec.schemas import load_schemas
from freshet.coordination.assignment import ShardMap, lease_of, slices_of
from freshet.coordination.claims import Claims
from freshet.errors import Refused, Unavailable
from freshet.log.topics import ModelContext, ensure_topics
from freshet.paramserver.shard import Shard
from freshet.rows.grpc.client import RemoteRows, Served
from freshet.rows.service import KeyGroup, Push
from freshet.rpc.channel import MIB, Transport
from freshet.testing.conditions import wait_until
from freshet.types import I64, Fence, OffsetRange, TimeMs, TopicPartition, bucket_of
from tests.servers.processes import Process

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
        """Does every slice belong to whom the last plan gives it."""
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
    """An embedder of one partition after another: begins at the applied offsets, and anew on
    demand."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rng = np.random.default_rng(11)
        self._chosen: dict[tuple[int, int], np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
        self._next: dict[int, int] = {}
        self._number = -1
        self.longest_wait_s = 0.0

    def go_on(self, upto: int, held_up: Callable[[], None] = lambda: None) -> None:
        """Push until every partition has applied so many samples; `held_up` is called for each push that was
        Unavailable."""
        acknowledged = time.monotonic()
        while not self._next or min(self._next.values()) < upto or self._run.rows.ownership() != self._number:
            assert time.monotonic() < acknowledged + DEADLINE_S, f"stuck at {self._next}"
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

    def expected(self, applied: I64 | None = None):
        """(keys,) what each row must be: after pushes below `applied` (keys, partitions), or after all."""
        sums = np.zeros(len(KEYS))
        for (partition, at), chosen in self._chosen.items():
            sums[chosen] -= 1 if applied is None else at < applied[chosen, partition]
        return sums


def push_of_ones(chosen: I64, partition: int, at: int) -> Push:
    """One more for these of KEYS."""
    starts = np.searchsorted(BUCKETS_OF_KEYS[chosen], np.arange(SPEC.buckets + 1)).astype(np.uint32)
    group = KeyGroup(0, KEYS[chosen], np.zeros(len(chosen), np.uint8), starts)
    ones = np.zeros((len(chosen), GROUP.width), np.float32)
    ones[:, VECTOR:] = 1
    return Push((OffsetRange(partition, at, at + 1),), Fence(1), TimeMs(1000), [group], [ones])


def push_again(rows: RemoteRows, push: Push) -> bool:
    """Push until it is applied or skipped: a shard refuses a bucket that it has claimed but does not
    hold yet, or has just revoked."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return rows.push(push)
        except Refused:
            if time.monotonic() > deadline:
                raise


def wait_for(condition: Callable[[], bool], what: str) -> None:
    wait_until(what, condition, within_s=DEADLINE_S)


def check_stored(run: Run, pushing: Pushing) -> None:
    """After all shards have gone: rows are what their offsets say, and no push is missing."""
    rows, applied = stored(run)
    np.testing.assert_array_equal(rows, pushing.expected(applied), "rows are not what their offsets say")
    logs = "\n".join((run.folder / f"{name}.log").read_text() for name in run.shards)
    np.testing.assert_array_equal(rows, pushing.expected(), f"the last pushes were not flushed\n{logs}")


def stored(run: Run):
    """(keys,) the rows in the row store, and (keys, partitions) the offsets of their buckets."""
    store = open_rowstore(run.settings.common.rows_url)
    try:
        end = run.log.bounds(TopicPartition(run.topics.control, 0)).end
        shard = Shard(ModelContext.open(SPEC, HASH, run.log), store, fence=Fence(end + 1_000_000))
        shard.load()
        out = np.empty((len(KEYS), GROUP.width), np.float32)
        starts = np.searchsorted(BUCKETS_OF_KEYS, np.arange(SPEC.buckets + 1)).astype(np.uint32)
        shard.lookup([KeyGroup(0, KEYS, np.zeros(len(KEYS), np.uint8), starts)], [out], create=False)
        assert (out[:, VECTOR] == out[:, -1]).all()
        applied = [list(shard.store.applied_of(int(bucket)).values()) for bucket in BUCKETS_OF_KEYS]
        return out[:, VECTOR], np.array(applied, np.int64)
    finally:
        store.close()
