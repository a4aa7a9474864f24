"""A deployment of an earlier release goes on with this one: nothing is lost, nothing is counted twice.

The archives in `tests/system/recorded` hold the state at commit 358e9ba when every process was killed:
undecided windows, unflushed rows, open transactions, leases. `defaults = 1` is the line that
docs/operations.md requires when such a model is upgraded.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from freshet.apps.local import local
from freshet.config.spec import Spec, load_spec
from freshet.config.spec.topics import topics_of
from freshet.testing.conditions import wait_until, wait_until_nothing_differs
from tests.fixtures import audit
from tests.fixtures.commands import drain, told_by, url_of
from tests.fixtures.fleet import Fleet
from tests.fixtures.members import read_to
from tests.fixtures.traffic import Impression, Traffic
from tests.servers.kafka import Kafka
from tests.servers.redis_cluster import RedisCluster
from tests.system.recorded.record import COUNTS, PREFIX

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

RECORDED = Path(__file__).parent / "recorded"
NEW_IMPRESSIONS = 200


@dataclass(frozen=True, slots=True)
class Recording:
    """An archive, unpacked: what its gateways had acknowledged, and the spec as an upgrade asks for it."""

    state: Path
    impressions: dict[tuple[str, int], Impression]
    actions: dict[tuple[str, int], set[str]]

    @property
    def spec_file(self) -> Path:
        """With the generation of defaults that the model began with."""
        return self.state / "spec" / "freshet.toml"

    def traffic_after(self, gateway: str) -> Traffic:
        """Return traffic with new events; those acknowledged before stand in its books."""
        traffic = Traffic([gateway], 11, life="after-", first_seq=len(self.impressions))
        traffic.impressions.update(self.impressions)
        traffic.actions.update(self.actions)
        return traffic


def unpack(archive: Path, to: Path) -> Recording:
    """Unpack an archive of `tests.system.recorded.record`."""
    with tarfile.open(archive) as packed:
        packed.extractall(to, filter="data")
    told = json.loads((to / "acknowledged.json").read_text())
    spec_file = to / "spec" / "freshet.toml"
    spec_file.write_text("defaults = 1\n" + spec_file.read_text())
    return Recording(
        to,
        {(request, item): Impression(seq, user, ts) for request, item, seq, user, ts in told["impressions"]},
        {(request, item): set(types) for request, item, types in told["actions"]},
    )


def test_embedded_deployment_of_358e9ba_goes_on(tmp_path: Path) -> None:
    recording = unpack(RECORDED / "embedded-358e9ba.tar.xz", tmp_path / "state")
    spec, folder = load_spec(recording.spec_file), recording.state / "run"
    topics = topics_of(spec)
    log = audit.open_log(folder)
    assert len(audit.read_books(log, topics).samples) < len(recording.impressions), "windows were undecided"
    with local(spec, folder=folder, ready_s=120) as system:
        traffic = recording.traffic_after(url_of(system, "gateway"))
        send_more(traffic)
        drain(system, folder, log, topics, len(traffic.impressions))
        books = audit.read_books(log, topics)
        wait_until_nothing_differs(
            lambda: audit.against_serving(books, url_of(system, "inference")), within_s=60
        )
        ledger = told_by(system, "joiner")["ledger"]
        ends = audit.ends_of(log, topics.samples)
        log.close()
    assert list(audit.against_joiner(books, ledger, len(traffic.impressions))) == []
    assert differences(books, traffic, ledger, ends, folder, spec) == []


@pytest.fixture
def cluster_recording(tmp_path: Path) -> Recording:
    """The deployment on Kafka and Redis Cluster."""
    return unpack(RECORDED / "cluster-358e9ba.tar.xz", tmp_path / "state")


@pytest.fixture
def recorded_kafka(cluster_recording: Recording, tmp_path: Path) -> Iterator[Kafka]:
    """A broker on the recorded log directories."""
    server = Kafka(tmp_path / "broker")
    shutil.rmtree(tmp_path / "broker" / "data")
    shutil.move(cluster_recording.state / "kafka", tmp_path / "broker" / "data")
    with server:
        yield server


@pytest.fixture
def recorded_redis(cluster_recording: Recording, tmp_path: Path) -> Iterator[RedisCluster]:
    """A Redis Cluster on the recorded append-only files."""
    cluster = RedisCluster(tmp_path / "redis")
    cluster.restore(cluster_recording.state / "redis")
    yield cluster
    cluster.kill()


def test_cluster_deployment_of_358e9ba_goes_on(
    cluster_recording: Recording,
    recorded_kafka: Kafka,
    recorded_redis: RedisCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, folder = load_spec(cluster_recording.spec_file), tmp_path / "fleet"
    topics = topics_of(spec)
    stores = {
        "FRESHET_COMMON_LOG_URL": f"kafka://{recorded_kafka.bootstrap}/{PREFIX}?replication=1",
        "FRESHET_COMMON_ROWS_URL": f"redis://{recorded_redis.addresses}/{PREFIX}",
        "FRESHET_COMMON_VERSIONS_URL": f"file:{cluster_recording.state / 'versions'}",
    }
    for name, value in stores.items():
        monkeypatch.setenv(name, value)
    folder.mkdir()
    fleet = Fleet(cluster_recording.spec_file, folder, stores, {**COUNTS, "inference": 1})
    try:
        fleet.start()
        log = audit.open_log(folder)
        traffic = cluster_recording.traffic_after(fleet.url("gateway-0"))
        send_more(traffic)
        fleet.drain(log, topics, folder, len(traffic.impressions))
        books = audit.read_books(log, topics)
        inference = fleet.url("inference-0")
        wait_until_nothing_differs(partial(audit.against_serving, books, inference), within_s=60)
        joined: dict[str, Any] = {}
        wait_until("the joiners answer", lambda: bool(joined.update(fleet.joined()) or joined), within_s=60)
        ends = read_to(log, topics.samples)
        log.close()
        fleet.stop()
    finally:
        fleet.kill()
    ledger = joined["ledger"]
    assert list(audit.against_joiner(books, ledger, len(traffic.impressions))) == []
    assert differences(books, traffic, ledger, ends, folder, spec) == []


def send_more(traffic: Traffic) -> None:
    """Send events until enough are acknowledged after those recorded."""
    wanted = len(traffic.impressions) + NEW_IMPRESSIONS
    traffic.start()
    try:
        wait_until("more events", lambda: len(traffic.impressions) >= wanted, within_s=120)
    finally:
        traffic.stop()
    assert not traffic.errors


def differences(
    books: audit.Books,
    traffic: Traffic,
    ledger: dict[str, dict[str, int]],
    ends: dict[int, int],
    folder: Path,
    spec: Spec,
) -> list[str]:
    """Return how log, rows and weights differ from the events acknowledged before and after the upgrade."""
    late = ledger["events"]
    assert late["impressions_late"] == 0
    excused = late["actions_late"] + late["actions_orphan"]
    labels = tuple(label.name for label in spec.labels)
    return [
        *audit.against_acknowledged(books, traffic.impressions, traffic.actions, labels, excused=excused),
        *audit.against_offsets(ends, folder, spec),
        *audit.against_rows(books, folder, spec),
        *audit.against_dense(books, folder),
    ]
