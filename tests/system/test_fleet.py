"""The production shape: several of each service on a real Kafka and a real Redis Cluster; everything
acknowledged counts once, everywhere."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from freshet.spec import load_spec
from freshet.spec.topics import topics_of
from tests.servers.kafka import Kafka
from tests.servers.redis_cluster import RedisCluster
from tests.system import audit
from tests.system.fleet import Fleet, read_to
from tests.system.running import LEDGER
from tests.system.traffic import Asker, Traffic
from tests.system.waiting import wait_until, wait_until_nothing_differs

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

COUNTS = {"joiner": 2, "paramserver": 2, "embedder": 2, "trainer": 2, "inference": 1, "gateway": 1}
SEED = int(os.environ.get("FRESHET_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


@pytest.fixture
def fleet(
    kafka: Kafka, redis_cluster: RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fleet]:
    """Two of each, not started; the test's own process looks at the same stores."""
    life = uuid.uuid4().hex[:8]
    stores = {
        "FRESHET_COMMON_LOG_URL": f"kafka://{kafka.bootstrap}/{life}?replication=1",
        "FRESHET_COMMON_ROWS_URL": f"redis://{redis_cluster.addresses}/{life}",
        "FRESHET_COMMON_VERSIONS_URL": f"file:{tmp_path / 'versions'}",
    }
    for name, value in stores.items():
        monkeypatch.setenv(name, value)
    made = Fleet(LEDGER, tmp_path, stores, COUNTS)
    yield made
    made.kill()


def test_two_of_each_on_kafka_and_redis_count_everything_once(fleet: Fleet, tmp_path: Path) -> None:
    print(f"\nFRESHET_TEST_SEED={SEED}")
    spec = load_spec(LEDGER)
    topics = topics_of(spec)
    fleet.start()
    log = audit.open_log(tmp_path)
    traffic, asker = Traffic(fleet.url("gateway-0"), SEED), Asker(fleet.url("inference-0"))
    traffic.start()
    asker.start()
    try:
        wait_until("samples are trained on", lambda: sum(fleet.applied().values()) > 200, within_s=120)
    finally:
        traffic.stop()
        asker.stop()
    assert not traffic.errors
    fleet.drain(log, topics, tmp_path, len(traffic.impressions))
    books = audit.read_books(log, topics)
    wait_until_nothing_differs(lambda: audit.against_serving(books, fleet.url("inference-0")), within_s=30)
    ledger, ends = fleet.joined()["ledger"], read_to(log, topics.samples)
    log.close()
    fleet.stop()
    assert list(audit.against_joiner(books, ledger, len(traffic.impressions))) == []
    assert list(audit.against_offsets(ends, tmp_path, spec)) == []
    assert list(audit.against_rows(books, tmp_path, spec)) == []
    assert list(audit.against_dense(books, tmp_path)) == []
