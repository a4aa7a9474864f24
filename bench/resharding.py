"""A shard joins two others and leaves again while rows are looked up and pushed: the longest wait.

    python -m bench.resharding [--quick] [--json] [--rows 1000000]

The shards are `freshet run paramserver` on a SQLite run folder. Threads of the process that measures work as
embedders, each on a partition of its own: they look the rows of a batch up, push gradients of one at learning
rate 1, and resume at the applied offset when owners change (PROTOCOL 7). So in the end each row shows how
often it was pushed: `rows_wrong` counts the rows with a lost or doubled push. `stall` is the longest time
between two acknowledged pushes of a partition, `lookup` the longest lookup; both include retries, and count
for the phase in which they end. `moved` is the time from a shard's membership lease, or from the signal to
stop, until all slices have their new owners.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.report import Figures, command
from freshet.adapters import open_eventlog
from freshet.apps.local import with_absolute_paths
from freshet.config.settings import load_settings
from freshet.config.spec import load_spec
from freshet.config.spec.identity import identity_hash, render
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import load_schemas
from freshet.coordination.assignment import SHARD_LEASES, ShardMap, lease_of, slices_of
from freshet.coordination.claims import Claims
from freshet.errors import Refused, Unavailable
from freshet.log.topics import ensure_topics
from freshet.rows.grpc.client import RemoteRows, Served
from freshet.rows.service import KeyGroup, Push
from freshet.rpc.channel import MIB, Transport
from freshet.testing.conditions import wait_until
from freshet.types import I64, U64, Fence, OffsetRange, TimeMs, bucket_of
from tests.servers.processes import Process

LEDGER = Path(__file__).parents[1] / "tests" / "system" / "ledger" / "freshet.toml"
DIM, PARTITIONS = 16, 2
CHUNK = 20_000  # rows of a push while the model is filled
BATCH = 4_096  # unique rows of a batch: about those of 256 samples of 26 ids
STEADY_S, START_S = 5.0, 120.0
RETRY_S = 0.005  # between two requests for the owners, while slices move


@dataclass(slots=True)
class Phase:
    """The figures of pushing in one phase."""

    name: str
    began_s: float
    batches: int = 0
    repeated: int = 0  # of these, pushed before
    stall_s: float = 0.0
    lookup_s: float = 0.0


class Embedding:
    """Partitions of a log that never ends, each on a thread."""

    def __init__(self, spec: Spec, spec_hash: str, owners: ShardMap, keys: U64) -> None:
        self._group, self._spec, self._keys = layout_of(spec).groups[0], spec, keys
        self._buckets = bucket_of(keys, spec.buckets)
        self._vector = next(slot for slot in self._group.slots if slot.name == "vector").start
        self.rows = RemoteRows(Served(spec.name, spec_hash), owners, Transport(max_message_bytes=64 * MIB))
        self.phases: list[Phase] = []
        self._tops = [0] * PARTITIONS  # highest acknowledged batch of each partition, plus one
        self._acknowledged = [0] * PARTITIONS
        self._stop = threading.Event()
        self._failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(p,)) for p in range(PARTITIONS)]

    def start(self) -> None:
        """Fill the rows, then push until `stop`."""
        self.phase("steady")
        for thread in self._threads:
            thread.start()

    def phase(self, name: str) -> None:
        """Begin a phase: later figures are of it."""
        self.phases.append(Phase(name, time.monotonic()))

    def filled(self) -> bool:
        """Whether every row was pushed. Raises the error of a thread that has failed."""
        self.check()
        return min(self._tops) > self._chunks

    def goes_on(self) -> Callable[[], bool]:
        """Return whether each partition has had a push that began after this call, as a function."""
        before = list(self._acknowledged)
        return lambda: all(now > was + 1 for now, was in zip(self._acknowledged, before, strict=True))

    def check(self) -> None:
        """Raise the error of a thread that has failed."""
        if self._failed:
            raise self._failed[0]

    def begin_stop(self) -> None:
        """End after the current batches, without a wait for them."""
        self._stop.set()

    def stop(self) -> None:
        """End after the current batches."""
        self.begin_stop()
        for thread in self._threads:
            thread.join()
        self.check()

    def wrong_rows(self) -> int:
        """Count the rows that differ from their pushes, after `stop`."""
        self._catch_up()
        expected = np.zeros(len(self._keys))
        for p, top in enumerate(self._tops):
            for at in range(top):
                expected[self._chosen(p, at)] -= 1
        wrong = 0
        for first in range(0, len(self._keys), CHUNK):
            chosen = np.arange(first, min(first + CHUNK, len(self._keys)))
            group = self._keys_of(chosen)
            out = np.empty((len(chosen), self._group.width), np.float32)
            self.rows.lookup([group], [out], create=False)
            wrong += int((out[:, self._vector :] != expected[chosen, None]).any(axis=1).sum())
        return wrong

    @property
    def _chunks(self) -> int:
        return -(-len(self._keys) // CHUNK // PARTITIONS)

    def _chosen(self, partition: int, at: int) -> I64:
        """Return the rows of a batch, always the same: first all of them in turn, then random ones."""
        if at < self._chunks:
            mine = np.arange(partition, len(self._keys), PARTITIONS)
            return mine[at * CHUNK : (at + 1) * CHUNK]
        rng = np.random.default_rng((partition, at))
        return np.unique(rng.integers(0, len(self._keys), BATCH))

    def _keys_of(self, chosen: I64) -> KeyGroup:
        starts = np.searchsorted(self._buckets[chosen], np.arange(self._spec.buckets + 1)).astype(np.uint32)
        return KeyGroup(0, self._keys[chosen], np.zeros(len(chosen), np.uint8), starts)

    def _push_of(self, partition: int, at: int, group: KeyGroup) -> Push:
        ones = np.zeros((len(group.keys), self._group.width), np.float32)
        ones[:, self._vector :] = 1
        return Push((OffsetRange(partition, at, at + 1),), Fence(1), TimeMs(1000), [group], [ones])

    def _run(self, partition: int) -> None:
        try:
            at, number, acknowledged = 0, -1, time.monotonic()
            while not self._stop.is_set():
                try:
                    if (now := self.rows.ownership()) != number:
                        at, number = self.rows.applied()[partition][0], now
                    group = self._keys_of(self._chosen(partition, at))
                    self._look_up(group)
                    self.rows.push(self._push_of(partition, at, group))
                except (Refused, Unavailable):
                    number = -1
                    self._stop.wait(RETRY_S)
                    continue
                phase, waited = self.phases[-1], time.monotonic() - acknowledged
                acknowledged += waited
                phase.batches += 1
                self._acknowledged[partition] += 1
                phase.repeated += at < self._tops[partition]
                phase.stall_s = max(phase.stall_s, waited)
                at += 1
                self._tops[partition] = max(self._tops[partition], at)
        except BaseException as error:
            self._failed.append(error)

    def _look_up(self, group: KeyGroup) -> None:
        out = np.empty((len(group.keys), self._group.width), np.float32)
        began = time.monotonic()
        self.rows.lookup([group], [out])
        self.phases[-1].lookup_s = max(self.phases[-1].lookup_s, time.monotonic() - began)

    def _catch_up(self) -> None:
        """Repeat the pushes that were lost with the memory of former owners."""
        for p, offsets in self.rows.applied().items():
            for at in range(offsets[0], self._tops[p] if p < PARTITIONS else 0):
                self.rows.push(self._push_of(p, at, self._keys_of(self._chosen(p, at))))


def measure(quick: bool = False, rows: int = 1_000_000) -> Figures:
    """Measure each phase: before, while a shard joins, between, while it leaves, after."""
    rows = min(rows, 100_000) if quick else rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec, file = _spec_in(folder)
        settings = load_settings({}, run_folder=folder).common
        settings.run.create()
        log = open_eventlog(settings.log_url)
        claims = Claims(log, ensure_topics(log, spec).control)
        owners = ShardMap(claims, spec.buckets)
        shards: list[Process] = []
        slices = slices_of(spec.buckets)

        def start(number: int) -> Process:
            shards.append(_shard(number, file, folder))
            lease = f"{SHARD_LEASES}{number}"
            wait_until(
                "its membership lease",
                lambda: lease in {c.thing for c in claims.alive(SHARD_LEASES)},
                within_s=START_S,
            )
            return shards[-1]

        def shared(by: int) -> Callable[[], bool]:
            def is_so() -> bool:
                plan, claimed = claims.plan(), claims.owners()
                if plan is None or len(set(plan.owners)) != by or not all(what in claimed for what in slices):
                    return False
                owned = [(lease_of(claimed[what].owner), claimed[what].released) for what in slices]
                return owned == [(seat, False) for seat in plan.owners]

            return is_so

        keys = np.random.default_rng(3).integers(1, 2**64, rows, dtype=np.uint64)
        keys = keys[np.argsort(bucket_of(keys, spec.buckets), kind="stable")]
        embedding = Embedding(spec, identity_hash(spec, load_schemas(spec)), owners, keys)
        moved: dict[str, float] = {}
        try:
            for number in (0, 1):
                start(number)
            wait_until("two shards have all", shared(2), within_s=START_S)
            embedding.start()
            _until("every row is there", embedding.filled, embedding)
            embedding.phase("before")
            _go_on(embedding)
            embedding.phase("joining")  # the start of the new one included: it needs the cores, too
            third = start(2)
            moved["joining"] = _until("three shards have all", shared(3), embedding)
            _until("pushes go on", embedding.goes_on(), embedding)
            embedding.phase("between")
            _go_on(embedding)
            embedding.phase("leaving")
            os.kill(third.pid, signal.SIGTERM)
            moved["leaving"] = _until("two shards have all", shared(2), embedding)
            _until("pushes go on", embedding.goes_on(), embedding)
            embedding.phase("after")
            _go_on(embedding)
            ended = time.monotonic()
            embedding.stop()
            wrong = embedding.wrong_rows()
        finally:
            embedding.begin_stop()
            embedding.rows.close()
            claims.close()
            log.close()
            for shard in shards:
                shard.stop()
    ends = [phase.began_s for phase in embedding.phases[1:]] + [ended]
    figures: Figures = {"rows": rows, "rows_wrong": wrong}
    for phase, end in zip(embedding.phases, ends, strict=True):
        figures[phase.name] = {
            "batches_per_s": phase.batches / (end - phase.began_s),
            "batches_again": phase.repeated,
            "stall_ms": 1e3 * phase.stall_s,
            "lookup_ms": 1e3 * phase.lookup_s,
        } | ({"moved_s": moved[phase.name]} if phase.name in moved else {})
    return figures


def _spec_in(folder: Path) -> tuple[Spec, Path]:
    """Write the ledger's spec, with rows of a usual size, where processes can read it."""
    (folder / "model").mkdir()
    text = LEDGER.read_text().replace("dim = 2", f"dim = {DIM}").replace('flush_interval = "500ms"\n', "")
    made = folder / "model" / LEDGER.name
    made.write_text(text, encoding="utf-8")
    spec = with_absolute_paths(replace(load_spec(made), folder=str(LEDGER.parent)))
    made.write_text(render(spec), encoding="utf-8")
    return spec, made


def _shard(number: int, file: Path, folder: Path) -> Process:
    words = [sys.executable, "-m", "freshet", "run", "paramserver", str(file), "--folder", str(folder)]
    own = {"NAME": str(number), "PORT": "0", "ADMIN_PORT": "0"}
    env = os.environ | {f"FRESHET_PARAMSERVER_{name}": value for name, value in own.items()}
    process = Process(words, folder / f"shard-{number}.log", env)
    process.start(lambda _: True, within_s=START_S)
    return process


def _until(what: str, holds: Callable[[], bool], embedding: Embedding) -> float:
    def is_so() -> bool:
        embedding.check()
        return holds()

    return wait_until(what, is_so, within_s=START_S)


def _go_on(embedding: Embedding) -> None:
    until = time.monotonic() + STEADY_S
    _until("some seconds are over", lambda: time.monotonic() >= until, embedding)


if __name__ == "__main__":
    command(measure, __doc__)
