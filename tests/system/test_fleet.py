"""The production shape: several of each service on a real Kafka and a real Redis Cluster. Members of every
role, a Redis master and the broker are killed, or stand still for longer than their lease and return; a
master has no memory left; links to shards and embedders are cut; disks are full; wall clocks jump by an
hour. Everything acknowledged counts once, everywhere.

`FRESHET_TEST_FAULTS` faults (12 by default, one of each role), of all roles or of those that are
named, as in `FRESHET_TEST_FAULTS_OF="joiner clock"`; `FRESHET_TEST_SEED` repeats a run's traffic and choice
of victims, not its timing. `FRESHET_TEST_ROWS` rows (10,000) are there from the start, without requests
for them: shards load them as they start. `pytest -s` shows how long the work stood still.

Lossy sums of dense gradients, and averages, get a smaller fleet, whose two ranks and embedder are struck:
`FRESHET_TEST_SUMS="int8 async"` names them, int8 by default, each with a fifth of the faults. Rows are
published in int8 there, and are served exactly once nothing has changed for 10 s. The ledger's model has no
Adam, which dct and 1bit-adam need: `tests/integration/ranks` kills ranks with dct, and with the signs of
1bit-adam.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from freshet.adapters import open_rowstore
from freshet.config.spec import Spec, load_spec
from freshet.config.spec.topics import topics_of
from freshet.errors import Unavailable
from freshet.log import EventLog
from freshet.testing.conditions import wait_until, wait_until_nothing_differs
from freshet.types import Bucket
from tests.fixtures import audit
from tests.fixtures.commands import LEDGER
from tests.fixtures.fleet import Fleet
from tests.fixtures.members import read_to
from tests.fixtures.seeding import seed_rows
from tests.fixtures.traffic import Asker, Traffic
from tests.servers.kafka import Kafka
from tests.servers.redis_cluster import RedisCluster
from tests.system.faults import ROUND, Way
from tests.system.storm import Fault, Progress, Storm
from tests.system.watching import Watch

COUNTS = {"joiner": 2, "paramserver": 2, "embedder": 2, "trainer": 2, "inference": 2, "gateway": 2}
FAULTS = int(os.environ.get("FRESHET_TEST_FAULTS", "12"))
ROWS = int(os.environ.get("FRESHET_TEST_ROWS", "10000"))
GAP_S = float(os.environ.get("FRESHET_TEST_FAULT_GAP", "1.0"))
ONLY = os.environ.get("FRESHET_TEST_FAULTS_OF", "").split()
FEW = {"joiner": 1, "paramserver": 1, "embedder": 1, "trainer": 2, "inference": 1, "gateway": 1}
OF_RANKS: Sequence[tuple[str, Way]] = (
    ("trainer", "kill"),
    ("trainer", "kill"),
    ("trainer", "pause"),
    ("embedder", "kill"),
)
KINDS = [(role, way) for role, way in ROUND if not ONLY or role in ONLY]
SEED = int(os.environ.get("FRESHET_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(300 + 60 * FAULTS)]


@pytest.fixture
def stores(
    kafka: Kafka, redis_cluster: RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Mapping[str, str]:
    """Settings of a model's stores of its own; the test's own process reads the same."""
    life = uuid.uuid4().hex[:8]
    stores = {
        "FRESHET_COMMON_LOG_URL": f"kafka://{kafka.bootstrap}/{life}?replication=1",
        "FRESHET_COMMON_ROWS_URL": f"redis://{redis_cluster.addresses}/{life}",
        "FRESHET_COMMON_VERSIONS_URL": f"file:{tmp_path / 'versions'}",
    }
    for name, value in stores.items():
        monkeypatch.setenv(name, value)
    return stores


@pytest.fixture
def run(stores: Mapping[str, str], kafka: Kafka, redis_cluster: RedisCluster, tmp_path: Path) -> Run:
    """What a run has that is not chosen by its test."""
    return Run(kafka, redis_cluster, stores, tmp_path)


@pytest.fixture
def healed(kafka: Kafka, redis_cluster: RedisCluster) -> Iterator[None]:
    """Redis replaces a silent master soon; then the servers are as other tests want them."""
    redis_cluster.fail_over_soon()
    yield
    if not kafka.alive:
        kafka.start()
    kafka.resume()
    redis_cluster.heal()


@pytest.mark.usefixtures("healed")
def test_kills_and_pauses_lose_or_double_no_acknowledged_event(run: Run) -> None:
    print(f"\nFRESHET_TEST_SEED={SEED} FRESHET_TEST_FAULTS={FAULTS} FRESHET_TEST_ROWS={ROWS}")

    run.survives(LEDGER, COUNTS, KINDS, FAULTS, rows=ROWS)


@pytest.mark.usefixtures("healed")
@pytest.mark.parametrize("name", os.environ.get("FRESHET_TEST_SUMS", "int8").split())
def test_faults_keep_lossy_sums_of_dense_gradients_exact(run: Run, name: str) -> None:
    print(f"\nFRESHET_TEST_SEED={SEED} FRESHET_TEST_FAULTS={FAULTS} FRESHET_TEST_SUMS={name}")
    folder = shutil.copytree(LEDGER.parent, run.folder / "spec")
    lines = LEDGER.read_text().splitlines()
    how = 'mode = "async"\naverage_every = 8' if name == "async" else f'reduce = "{name}"'
    lines.insert(lines.index("[train]") + 1, how + '\npublish_codec = "int8"')
    (folder / LEDGER.name).write_text("\n".join(lines))

    run.survives(folder / LEDGER.name, FEW, OF_RANKS, math.ceil(FAULTS / 5), lossy=name != "async")


@dataclass
class Run:
    """A fleet in a storm of faults, and its audit."""

    kafka: Kafka
    redis: RedisCluster
    stores: Mapping[str, str]
    folder: Path

    def survives(
        self,
        spec_file: Path,
        counts: Mapping[str, int],
        kinds: Sequence[tuple[str, Way]],
        faults: int,
        *,
        rows: int = 0,
        lossy: bool = False,
    ) -> None:
        """Start a fleet, strike it while events come, let it come to rest, and audit it.

        Args:
            spec_file: of the ledger model.
            counts: {role: processes}.
            kinds: faults of a round.
            faults: how often it is struck.
            rows: rows that are there before it starts.
            lossy: sums of dense gradients have a carry, so that the weights that are served are not all.
        """
        spec = load_spec(spec_file)
        untouched = seed_rows(spec, self.folder, rows, SEED) if rows else 0
        fleet = Fleet(spec_file, self.folder, self.stores, counts)
        try:
            self._run(fleet, spec, kinds, faults, untouched, lossy=lossy)
        finally:
            fleet.kill()

    def _run(
        self,
        fleet: Fleet,
        spec: Spec,
        kinds: Sequence[tuple[str, Way]],
        faults: int,
        untouched: int,
        *,
        lossy: bool,
    ) -> None:
        folder, topics = self.folder, topics_of(spec)
        fleet.start()
        log = audit.open_log(folder)
        traffic = Traffic([fleet.url(name) for name in fleet.of("gateway")], SEED)
        askers = {name: Asker(fleet.url(name)) for name in fleet.of("inference")}
        ends_now = Watch([partial(_ends, log, topics.samples)])
        dense = Watch([partial(fleet.applied_by, name) for name in fleet.of("trainer")])
        stored = Watch([_Stored(self.stores["FRESHET_COMMON_ROWS_URL"], spec)])
        versions = Watch([partial(audit.applied_by_newest_version, folder)])
        progress = Progress(ends_now, dense, versions, stored, traffic, askers)
        storm = Storm(fleet, self.kafka, self.redis, progress, random.Random(SEED), GAP_S, kinds)
        traffic.start()
        try:
            wait_until("samples are trained on", lambda: sum(fleet.applied().values()) > 200, within_s=120)
            wait_until(
                "every replica serves", lambda: all(a.ask() == "200" for a in askers.values()), within_s=120
            )
            for asker in askers.values():
                asker.start()
            with ends_now, dense, versions, stored:
                storm.run(faults)
        finally:
            traffic.stop()
            for asker in askers.values():
                asker.stop()
            print(storm.report())
        assert not traffic.errors
        fleet.drain(log, topics, folder, len(traffic.impressions))
        books = audit.read_books(log, topics)
        for name in askers:
            wait_until_nothing_differs(partial(self._served, books, fleet.url(name), lossy), within_s=60)
        joined: dict[str, Any] = {}
        wait_until(
            "the joiners say how they are",
            lambda: bool(joined.update(fleet.joined()) or joined),
            within_s=60,
        )
        ledger, ends = joined["ledger"], read_to(log, topics.samples)
        log.close()
        fleet.stop()
        print(_summary(traffic, askers, storm, books))
        late = ledger["events"]
        in_time = len(traffic.impressions) - late["impressions_late"]
        assert list(audit.against_joiner(books, ledger, in_time)) == []
        excused = late["actions_late"] + late["actions_orphan"] + late["impressions_late"]
        labels = tuple(label.name for label in spec.labels)
        wrong = audit.against_acknowledged(
            books, traffic.impressions, traffic.actions, labels, excused=excused
        )
        assert list(wrong) == []
        assert list(audit.against_offsets(ends, folder, spec)) == []
        assert list(audit.against_rows(books, folder, spec, untouched)) == []
        assert list(audit.against_dense(books, folder, lossy=lossy)) == []
        assert _errors(askers, storm) == {}
        assert _held_up_training(storm) == []
        unexplained = [end for end in storm.ended if "Unavailable" not in end]
        assert unexplained == [], "a process may end by itself only at its start, for want of a server"

    def _served(self, books: audit.Books, inference: str, lossy: bool) -> Iterator[str]:
        count, hashes = audit.dense_of(self.folder)[1].tolist()
        return audit.against_serving(books, inference, (round(count), round(hashes)) if lossy else None)


def _ends(log: EventLog, topic: str) -> Mapping[int, int]:
    try:
        return audit.ends_of(log, topic)
    except Unavailable:
        return {}


class _Stored:
    """{partition: the smallest offset that a bucket in the row store has applied}, of a bucket of each
    slice."""

    def __init__(self, url: str, spec: Spec) -> None:
        self._rows = open_rowstore(url)
        self._buckets = [Bucket(b) for b in range(0, spec.buckets, spec.buckets // 64)]

    def __call__(self) -> Mapping[int, int]:
        try:
            metas = self._rows.metas(self._buckets).values()
        except Unavailable:
            return {}
        found = [meta.applied for meta in metas]
        return {p: min(applied.get(p, 0) for applied in found) for p in found[0]}


def _held_up_training(storm: Storm) -> list[Fault]:
    """Full disks that nothing else came upon, under which training has stood still."""
    full = [fault for fault in storm.faults if fault.role == "disk" and fault.alone]
    return [f for f in full if f.trained_s is None or f.at + f.trained_s > f.back_at]


def _errors(askers: Mapping[str, Asker], storm: Storm) -> dict[str, int]:
    """Answers of serving that were none, but for those of a process that was away."""
    errors: Counter[str] = Counter()
    for name, asker in askers.items():
        away = storm.away(name)
        errors.update(
            f"{name}: {outcome}"
            for began, ended, outcome in asker.answers
            if outcome != "200" and not any(a <= ended and began <= b + 0.5 for a, b in away)
        )
    return dict(errors)


def _summary(traffic: Traffic, askers: Mapping[str, Asker], storm: Storm, books: audit.Books) -> str:
    answered = sorted(t for asker in askers.values() for _, t, outcome in asker.answers if outcome == "200")
    gap = max((b - a for a, b in pairwise(answered)), default=0.0)
    outcomes = Counter(outcome for asker in askers.values() for _, _, outcome in asker.answers)
    return "\n".join(
        (
            f"acknowledged: {len(traffic.impressions)} impressions, "
            f"{sum(map(len, traffic.actions.values()))} actions; "
            f"the longest wait for an acknowledgement was {traffic.longest_wait_s:.1f} s",
            f"samples in the log: {len(books.samples)}, late: {len(books.late)}; dense: {books.dense}",
            f"rank requests: {dict(outcomes)}; the longest time without an answer of any replica: "
            f"{gap:.2f} s; not 200 from a replica that was there: {_errors(askers, storm)}",
        )
    )
