"""Wall clocks that are set by an hour or a day and set right again, of one process after the other, of the
client, and of all together: nothing that happens after the correction is late, nothing starts again, and the
model goes on learning (PROTOCOL 19).

The long form alone: `FRESHET_TEST_CLOCKS=1 pytest -s tests/system/test_clocks.py` takes about 15 minutes for
each form and prints a table. `FRESHET_TEST_CLOCKS_OF="joiner client"` picks parts,
`FRESHET_TEST_JUMPS="+1 h,-1 day"` jumps.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from freshet.apps.local import Local, local
from freshet.config.spec import load_spec
from freshet.config.spec.topics import Topics, topics_of
from freshet.log import EventLog
from freshet.testing.conditions import wait_until
from tests.fixtures import audit
from tests.fixtures.commands import LEDGER, applied, status, url_of
from tests.fixtures.fleet import Fleet
from tests.servers.jumping_clock import JumpingClock, JumpingClocks, build_clock
from tests.servers.kafka import Kafka
from tests.servers.redis_cluster import RedisCluster
from tests.system.clocking import JUMPS_S, Case, Clicker, Clocked, fates_of, rows_of, run_case, table
from tests.system.poison import short_spec

ONLY = os.environ.get("FRESHET_TEST_CLOCKS_OF", "").split()
JUMPS = [j.strip() for j in os.environ.get("FRESHET_TEST_JUMPS", ",".join(JUMPS_S)).split(",")]
COUNTS = {"joiner": 1, "paramserver": 1, "embedder": 1, "trainer": 1, "inference": 1, "gateway": 1}

pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.timeout(3_600),
    pytest.mark.skipif(
        not int(os.environ.get("FRESHET_TEST_CLOCKS", "0")), reason="the long form: FRESHET_TEST_CLOCKS=1"
    ),
]


class Embedded:
    """The processes of `freshet up`, and the supervisor."""

    def __init__(self, system: Local, clocks: JumpingClocks) -> None:
        self._system, self._clocks = system, clocks
        said = system.status()
        self._pids = {name: one["pid"] for name, one in said["services"].items()}
        self._pids["supervisor"] = said["supervisor"]["pid"]
        self.parts: Sequence[str] = (*self._pids, "client", "all")

    def jump(self, part: str, seconds: float) -> None:
        for pid in self._pids.values() if part == "all" else [self._pids[part]]:
            self._clocks.jump(pid, seconds)

    def joiner(self) -> dict[str, Any]:
        return status(self._system, "joiner")

    def applied(self) -> int:
        return sum(applied(self._system).values())

    def births(self) -> Mapping[str, int]:
        return {name: one["pid"] for name, one in self._system.status()["services"].items()}


class Distributed:
    """One of each service on Kafka and a Redis Cluster, and the broker."""

    def __init__(self, fleet: Fleet, broker: JumpingClock) -> None:
        self._fleet = fleet
        self._clocks = {name.rpartition("-")[0]: clock for name, clock in fleet.clocks.items()}
        self._clocks["broker"] = broker
        self.parts: Sequence[str] = (*self._clocks, "client", "all")

    def jump(self, part: str, seconds: float) -> None:
        for clock in self._clocks.values() if part == "all" else [self._clocks[part]]:
            clock.jump(seconds)

    def joiner(self) -> dict[str, Any]:
        return self._fleet.status("joiner-0")

    def applied(self) -> int:
        return sum(self._fleet.applied().values())

    def births(self) -> Mapping[str, int]:
        return {name: process.pid for name, process in self._fleet.processes.items() if process.alive}


def spec_file(folder: Path) -> Path:
    """The ledger's model with short windows, which takes what was ranked for an impression."""
    path = short_spec(folder)
    text = path.read_text()
    assert "log_served = false" in text
    path.write_text(text.replace("log_served = false", "log_served = true"))
    return path


def test_clocks_set_wrong_and_right_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = JumpingClocks(build_clock(tmp_path), tmp_path / "clocks")
    for name, value in clocks.environment.items():
        monkeypatch.setenv(name, value)
    spec, folder = load_spec(spec_file(tmp_path)), tmp_path / "run"
    with local(spec, folder=folder, ready_s=120, console=True) as system:
        log = audit.open_log(folder)
        parts = Embedded(system, clocks)
        clicker = Clicker(url_of(system, "gateway"), url_of(system, "inference"))
        jump_and_check("embedded", parts, clicker, log, topics_of(spec))
        log.close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[tuple[Kafka, JumpingClock]]:
    """A broker of this test's own, whose clock can be set."""
    clock = JumpingClock(build_clock(tmp_path), tmp_path / "broker.clock")
    with Kafka(tmp_path / "kafka", environment=clock.environment) as kafka:
        yield kafka, clock


def test_clocks_set_wrong_and_right_on_kafka(
    broker: tuple[Kafka, JumpingClock],
    redis_cluster: RedisCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kafka, clock = broker
    path = spec_file(tmp_path)
    with running(kafka, redis_cluster, uuid.uuid4().hex[:8], path, tmp_path, monkeypatch) as fleet:
        log = audit.open_log(tmp_path)
        clicker = Clicker(fleet.url("gateway-0"), fleet.url("inference-0"))
        jump_and_check("kafka", Distributed(fleet, clock), clicker, log, topics_of(load_spec(path)))
        log.close()


@contextmanager
def running(
    kafka: Kafka,
    redis_cluster: RedisCluster,
    prefix: str,
    spec: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Fleet]:
    """One of each service on stores of their own."""
    stores = {
        "FRESHET_COMMON_LOG_URL": f"kafka://{kafka.bootstrap}/{prefix}?replication=1",
        "FRESHET_COMMON_ROWS_URL": f"redis://{redis_cluster.addresses}/{prefix}",
        "FRESHET_COMMON_VERSIONS_URL": f"file:{folder / 'versions'}",
    }
    for name, value in stores.items():
        monkeypatch.setenv(name, value)
    fleet = Fleet(spec, folder, stores, COUNTS)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.kill()


class Writer(Distributed):
    """A writer of others' programs beside the fleet: while its clock is wrong, it writes an impression and an
    action into each partition, whose records carry its time."""

    def __init__(self, fleet: Fleet, broker: JumpingClock, bootstrap: str, prefix: str) -> None:
        super().__init__(fleet, broker)
        self.parts = ("writer",)
        self._producer = Producer({"bootstrap.servers": bootstrap})
        self._prefix = prefix

    def jump(self, part: str, seconds: float) -> None:
        ts = round((time.time() + seconds) * 1_000)
        page = {"request_id": "other", "ts": ts, "user": "u", "items": [{"item": 1, "seq": 1.0}]}
        action = {"event_id": "o", "request_id": "other", "item": 1, "type": "click", "ts": ts}
        for topic, event in (("impressions", page), ("actions", action)) if seconds else ():
            for partition in range(load_spec(LEDGER).partitions):
                value = orjson.dumps({**event, "event_id": f"o{partition}"} if topic == "actions" else event)
                self._producer.produce(
                    f"{self._prefix}.{topic}", value, f"other-{partition}", partition, timestamp=ts
                )
        self._producer.flush(30)


def test_a_writer_ahead_on_a_topic_of_its_own_time(
    broker: tuple[Kafka, JumpingClock],
    redis_cluster: RedisCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kafka's `message.timestamp.type=CreateTime`: the log's time is what writers say."""
    kafka, clock = broker
    prefix = uuid.uuid4().hex[:8]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    by_writers = {"message.timestamp.type": "CreateTime", "message.timestamp.after.max.ms": str(2**62)}
    topics = [
        NewTopic(f"{prefix}.{name}", load_spec(LEDGER).partitions, 1, config=by_writers)
        for name in ("impressions", "actions")
    ]
    for made in admin.create_topics(topics).values():
        made.result(30)
    path = spec_file(tmp_path)
    text = path.read_text()
    for schema in ("impressions.avsc", "actions.avsc"):
        text = text.replace(f'schema = "{schema}"', f'schema = "{schema}", format = "json"')
    path.write_text(text)
    with running(kafka, redis_cluster, prefix, path, tmp_path, monkeypatch) as fleet:
        log = audit.open_log(tmp_path)
        clicker = Clicker(fleet.url("gateway-0"), fleet.url("inference-0"))
        system = Writer(fleet, clock, kafka.bootstrap, prefix)
        jump_and_check("kafka, CreateTime", system, clicker, log, topics_of(load_spec(path)))
        log.close()


def jump_and_check(form: str, system: Clocked, clicker: Clicker, log: EventLog, topics: Topics) -> None:
    """Set every clock wrong in every way; nothing that was sent with right clocks is late or lost."""
    births = system.births()
    cases: list[Case] = []
    clicker.start()
    try:
        wait_until("samples are learned", lambda: system.applied() > 12, within_s=90)
        for part in system.parts:
            for jump in JUMPS if not ONLY or part in ONLY else ():
                cases.append(run_case(system, clicker, part, jump))
                print(f"{part} {jump}: {dict(cases[-1].figures[2] - cases[-1].figures[0])}", flush=True)
    finally:
        clicker.stop()
    assert not clicker.errors
    wait_until("all windows are decided", partial(decided, system), within_s=60)
    fates = fates_of(clicker.requests, log, topics, audit.read_books(log, topics))
    rows = rows_of(cases, fates)
    print("\n" + table(form, rows))
    assert [f"{row.case.part} {row.case.jump}: {row.right}" for row in rows if row.late_after] == []
    assert [f for f in fates.values() if f.what.isupper() or f.what.startswith("DOUBLED")] == []
    assert system.births() == births, "nothing started again"
    assert [c for c in cases if c.applied[1] - c.applied[0] < 20] == [], (
        "training goes on after the correction"
    )


def decided(system: Clocked) -> bool:
    """Whether no label waits."""
    said = system.joiner()
    return "ledger" in said and not any(c["pending"] for c in said["ledger"]["labels"].values())
