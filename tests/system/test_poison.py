"""Poison: bad records of every kind end nothing, and lose nothing that is good.

Each service is given one bad record of each kind between good ones, on every topic and listener that it
reads. Afterwards no process has started again, the books of the ledger's model are exact, and each bad record
lies in dead letters or among the refused with its reason, and is counted. `pytest -s` prints the table.
`FRESHET_TEST_POISON` adds so many random records of each topic; on Kafka there are tombstones, too.
"""

from __future__ import annotations

import os
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import httpx
import pytest
from confluent_kafka import Producer
from prometheus_client.parser import text_string_to_metric_families

from freshet.apps.local import local
from freshet.config.spec import load_spec
from freshet.config.spec.topics import topics_of
from freshet.testing.conditions import wait_until, wait_until_nothing_differs
from tests.fixtures import audit
from tests.fixtures.commands import LEDGER, applied, drain, told_by, url_of
from tests.fixtures.fleet import Fleet
from tests.fixtures.members import read_to
from tests.fixtures.traffic import Traffic
from tests.servers.kafka import Kafka
from tests.servers.redis_cluster import RedisCluster
from tests.system.poison import BODIES, RANK_BODIES, Found, Poisoner, short_spec

MORE = int(os.environ.get("FRESHET_TEST_POISON", "0"))
SEED = int(os.environ.get("FRESHET_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
GOOD_BLOCKS = 12
"""Trained on between two doses."""

COUNTS = {"joiner": 1, "paramserver": 1, "embedder": 1, "trainer": 1, "inference": 1, "gateway": 1}

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(300 + MORE)]


def test_bad_records_end_nothing_embedded(tmp_path: Path) -> None:
    print(f"\nFRESHET_TEST_SEED={SEED} FRESHET_TEST_POISON={MORE}")
    spec, folder = load_spec(short_spec(tmp_path)), tmp_path / "run"
    topics = topics_of(spec)
    with local(spec, folder=folder, ready_s=120, console=True) as system:
        log = audit.open_log(folder)
        poisoner = Poisoner(spec, log, topics, SEED)
        births = {name: one["pid"] for name, one in system.status()["services"].items()}
        traffic = Traffic([url_of(system, "gateway")], SEED)
        feed(
            poisoner,
            traffic,
            url_of(system, "gateway"),
            url_of(system, "inference"),
            learned=lambda: sum(applied(system).values()),
        )
        drain(system, folder, log, topics, len(traffic.impressions))
        joined = told_by(system, "joiner")["ledger"]
        metrics = Metrics([f"{url_of(system, role)}/metrics" for role in system.ports])
        found = poisoner.found()
        books = audit.read_books(log, topics, poisoner.places(topics.samples))
        wait_until_nothing_differs(
            lambda: audit.against_serving(books, url_of(system, "inference")), within_s=60
        )
        ends = audit.ends_of(log, topics.samples)
        wait_until_nothing_differs(
            lambda: [
                f"{name}: {one['reason']}"
                for name, one in system.status()["services"].items()
                if one["state"] != "ready"
            ],
            within_s=60,
        )
        now = system.status()["services"]
        assert {name: one["restarts"] for name, one in now.items()} == dict.fromkeys(births, 0)
        assert {name: one["pid"] for name, one in now.items()} == births
        poisoner.close()
        log.close()
    print(table(found, metrics))
    check(traffic, books, joined, found, metrics, folder, ends, "trainer")


@pytest.fixture
def fleet(
    kafka: Kafka, redis_cluster: RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Fleet, str]]:
    """One of each service on stores of their own, not started, and the prefix of the topics."""
    life = uuid.uuid4().hex[:8]
    stores = {
        "FRESHET_COMMON_LOG_URL": f"kafka://{kafka.bootstrap}/{life}?replication=1",
        "FRESHET_COMMON_ROWS_URL": f"redis://{redis_cluster.addresses}/{life}",
        "FRESHET_COMMON_VERSIONS_URL": f"file:{tmp_path / 'versions'}",
    }
    for name, value in stores.items():
        monkeypatch.setenv(name, value)
    made = Fleet(short_spec(tmp_path), tmp_path, stores, COUNTS)
    yield made, life
    made.kill()


@pytest.mark.skipif(not MORE, reason="the long form: FRESHET_TEST_POISON=1 or more")
def test_bad_records_end_nothing_on_kafka(fleet: tuple[Fleet, str], kafka: Kafka, tmp_path: Path) -> None:
    print(f"\nFRESHET_TEST_SEED={SEED} FRESHET_TEST_POISON={MORE}")
    spec, (members, prefix) = load_spec(LEDGER), fleet
    topics = topics_of(spec)
    members.start()
    births = {name: process.pid for name, process in members.processes.items()}
    log = audit.open_log(tmp_path)
    poisoner = Poisoner(spec, log, topics, SEED)
    gateway, inference = members.url("gateway-0"), members.url("inference-0")
    traffic = Traffic([gateway], SEED)
    nulls = [
        *(topics.served, topics.action, topics.samples, topics.rows),
        *(topics.control, topics.versions, topics.measures, topics.joiner, topics.refused, "schemas"),
    ]
    feed(
        poisoner,
        traffic,
        gateway,
        inference,
        learned=lambda: sum(members.applied().values()),
        also=partial(send_nulls, kafka, [f"{prefix}.{topic}" for topic in nulls]),
    )
    wait_until("all windows are decided", partial(decided, members, traffic), within_s=60)
    wait_until(
        "all samples are trained on", lambda: members.applied() == read_to(log, topics.samples), within_s=60
    )
    wait_until(
        "a version has learned from all samples",
        lambda: audit.applied_by_newest_version(tmp_path) == read_to(log, topics.samples),
        within_s=60,
    )
    joined = members.joined()["ledger"]
    metrics = Metrics([f"{members.url(name)}/metrics" for name in members.names])
    found = poisoner.found()
    books = audit.read_books(log, topics, poisoner.places(topics.samples))
    wait_until_nothing_differs(partial(audit.against_serving, books, inference), within_s=60)
    ends = read_to(log, topics.samples)
    said = {name: process.pid for name, process in members.processes.items() if process.alive}
    assert said == births
    poisoner.close()
    log.close()
    members.stop()
    print(table(found, metrics))
    check(traffic, books, joined, found, metrics, tmp_path, ends, "embedder")
    for topic in (topics.served, topics.action, topics.samples, topics.rows, topics.control):
        assert metrics.sum("freshet_log_tombstones_total", topic=topic) > 0, f"nulls of {topic} are counted"


def feed(
    poisoner: Poisoner,
    traffic: Traffic,
    gateway: str,
    inference: str,
    *,
    learned: Callable[[], int],
    also: Callable[[], None] = lambda: None,
) -> None:
    """Two doses of poison, with good events before, between and after them."""
    traffic.start()
    try:
        for dose in range(2):
            before = learned() + GOOD_BLOCKS
            wait_until("good samples are learned", lambda b=before: learned() > b, within_s=60)  # type: ignore[misc]
            poisoner.write(MORE if dose else 0)
            also()
            knock(gateway, inference)
        after = learned() + GOOD_BLOCKS
        wait_until("good samples are learned after poison", lambda: learned() > after, within_s=120)
    finally:
        traffic.stop()
    assert not traffic.errors


def knock(gateway: str, inference: str) -> None:
    """Send bad requests to both listeners: each is answered, and blamed on the client."""
    with httpx.Client(timeout=20) as client:
        answers = {
            f"{route}: {kind}": client.post(
                f"{gateway}{route}", content=body, headers={"content-type": content_type}
            ).status_code
            for route in ("/v1/impressions", "/v1/actions")
            for kind, (content_type, body) in BODIES.items()
        }
        answers |= {
            f"rank: {kind}": client.post(
                f"{inference}/v1/rank", content=body, headers={"content-type": "application/json"}
            ).status_code
            for kind, body in RANK_BODIES.items()
        }
    assert {kind: status for kind, status in answers.items() if not 400 <= status < 500} == {}


def send_nulls(kafka: Kafka, topics: list[str]) -> None:
    """A record without a value, with and without a key, on each topic."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for topic in topics:
        producer.produce(topic, key=b"k", value=None, partition=0)
        producer.produce(topic, key=None, value=None, partition=0)
    assert producer.flush(30) == 0


def decided(members: Fleet, traffic: Traffic) -> bool:
    """Are all windows of what was sent closed?"""
    said = members.joined()
    if not said:
        return False
    events = said["ledger"]["events"]
    if events["impressions"] + events["impressions_late"] < len(traffic.impressions):
        return False
    return not any(counts["pending"] for counts in said["ledger"]["labels"].values())


class Metrics:
    """What all services expose, read once."""

    def __init__(self, urls: list[str]) -> None:
        self._samples: list[tuple[str, Mapping[str, str], float]] = []
        for url in urls:
            text = httpx.get(url, timeout=10).text
            for family in text_string_to_metric_families(text):
                self._samples += [(s.name, s.labels, s.value) for s in family.samples]

    def sum(self, name: str, **labels: str) -> int:
        """Over all services, of samples with these labels."""
        return int(sum(value for n, ls, value in self._samples if n == name and labels.items() <= ls.items()))

    def by(self, name: str, label: str) -> dict[str, int]:
        """{value of the label: sum}, without zeros."""
        found: Counter[str] = Counter()
        for n, labels, value in self._samples:
            if n == name and value:
                found[labels.get(label, "all")] += int(value)
        return dict(found)


def check(
    traffic: Traffic,
    books: audit.Books,
    joined: Mapping[str, object],
    found: list[Found],
    metrics: Metrics,
    folder: Path,
    ends: Mapping[int, int],
    decodes: str,
) -> None:
    """Everything good is learned once, everything bad is set aside with its reason and counted."""
    spec = load_spec(LEDGER)
    topics = topics_of(spec)
    with_letters = [one for one in found if one.bad.letters]
    assert [one for one in with_letters if not one.reason] == []
    events: Mapping[str, int] = joined["events"]  # type: ignore[assignment]
    excused = events["actions_late"] + events["actions_orphan"] + events["impressions_late"]
    of_events = [one for one in found if one.bad.topic in (topics.served, topics.action)]
    clean = {**joined, "refused": 0}
    assert joined["refused"] == len(of_events)
    assert list(audit.against_joiner(books, clean, len(traffic.impressions))) == []
    labels = tuple(label.name for label in spec.labels)
    wrong = audit.against_acknowledged(books, traffic.impressions, traffic.actions, labels, excused=excused)
    assert list(wrong) == []
    assert list(audit.against_offsets(ends, folder, spec)) == []
    assert list(audit.against_rows(books, folder, spec)) == []
    assert list(audit.against_dense(books, folder)) == []
    for role, topic in (("served", topics.served), ("action", topics.action)):
        expected = Counter(one.bad.why for one in of_events if one.bad.topic == topic)
        counted = {
            why: metrics.sum("freshet_joiner_dead_letters_total", stream=role, reason=why) for why in expected
        }
        assert counted == dict(expected)
    expected = Counter(one.bad.why for one in found if one.bad.topic == topics.samples)
    counted = {why: metrics.sum(f"freshet_{decodes}_refused_total", reason=why) for why in expected}
    assert all(counted[why] >= n for why, n in expected.items()), (counted, expected)


def table(found: list[Found], metrics: Metrics) -> str:
    """What became of each kind."""
    rows: Counter[tuple[str, str, str, str]] = Counter()
    for one in found:
        where = one.bad.letters or "left out"
        rows[one.bad.topic, one.bad.kind, where, (one.reason or "").split("\n")[0][:90]] += 1
    lines = [
        f"{topic:18} | {kind:26} | {n:5} | {where:20} | {why}"
        for (topic, kind, where, why), n in rows.items()
    ]
    counts = {
        name: metrics.by(name, label)
        for name, label in (
            ("freshet_joiner_dead_letters_total", "reason"),
            ("freshet_trainer_refused_total", "reason"),
            ("freshet_embedder_refused_total", "reason"),
            ("freshet_gateway_events_total", "outcome"),
            ("freshet_skipped_state_total", "of"),
            ("freshet_inference_corrupt_deltas", ""),
            ("freshet_log_tombstones_total", "topic"),
        )
    }
    return "\n".join([*lines, *(f"{name}: {values}" for name, values in counts.items() if values)])
