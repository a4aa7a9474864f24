"""Servers that tests ask for by a fixture's name: one of each a run, started by the first test that
wants it.

Topics and models of different tests have different names; a test that kills or pauses a server brings it
back.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.servers.kafka import Kafka
from tests.servers.redis_cluster import RedisCluster, RedisServer
from tests.servers.s3 import ENVIRONMENT, S3

SERVERS = {"kafka": "kafka", "brokers": "kafka", "redis_server": "redis", "redis_cluster": "redis"}
"""Fixtures that are servers, and the marker of tests that use them, for `make test SKIP=kafka`."""


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A running Kafka."""
    with Kafka(tmp_path_factory.mktemp("kafka")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A running S3 server; it comes with the test dependencies, so nothing marks who uses it."""
    with S3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_url(s3: S3, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a version store in a bucket of its own, with the credentials in the environment."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    bucket = f"b-{uuid.uuid4().hex}"
    s3.make_bucket(bucket)
    return s3.url(bucket)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One running Redis, by itself."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """A running Redis Cluster: three masters, each with a replica."""
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by the servers that it uses, directly or through other fixtures."""
    for item in items:
        for fixture, marker in SERVERS.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)
