"""Servers that tests ask for by a fixture's name: one of each a run, started by the first test that
wants it.

Topics and models of different tests have different names; a test that kills or pauses a server brings it
back.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.kafka import Kafka

SERVERS = ("kafka",)
"""Fixtures that are servers; each has a marker of its name, for `make test SKIP=kafka`."""


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A running Kafka."""
    with Kafka(tmp_path_factory.mktemp("kafka")) as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by the servers that it uses, directly or through other fixtures."""
    for item in items:
        for name in SERVERS:
            if name in getattr(item, "fixturenames", ()):
                item.add_marker(name)
