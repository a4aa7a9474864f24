"""Servers of the HTTP tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.http.hot_server import Running, running_server


@pytest.fixture
def hot_server() -> Iterator[Running]:
    """A server with hot routes."""
    with running_server() as made:
        yield made
