"""Imports, private names and long names, on small samples."""

from __future__ import annotations

import ast

import pytest

from ops.house.names import Names, is_borrowed, names_of


def names(source: str, path: str = "tests/unit/http/test_a.py") -> Names:
    return names_of(path, list(ast.walk(ast.parse(source))))


@pytest.mark.parametrize(
    ("path", "imported", "borrowed"),
    [
        ("tests/unit/http/test_a.py", "tests.unit.http.test_b.f", True),
        ("tests/unit/http/test_a.py", "tests.conftest.f", True),
        ("tests/unit/http/test_a.py", "tests.unit.tables.reference.f", True),
        ("bench/a.py", "tests.unit.tables.reference.f", True),
        ("tests/unit/tables/test_a.py", "tests.unit.tables.reference.f", False),
        ("tests/unit/tables/test_a.py", "tests.unit.tables.reference", False),
        ("tests/unit/tables/deeper/test_a.py", "tests.unit.tables.reference.f", False),
        ("tests/integration/test_a.py", "tests.integration.ranks.shared_rows.f", False),
        ("bench/a.py", "tests.fixtures.serving.f", False),
        ("tests/unit/http/test_a.py", "tests.servers.kafka", False),
        ("tests/unit/http/test_a.py", "freshet.testing.clock.f", False),
    ],
)
def test_helpers_of_other_directories_are_borrowed(path: str, imported: str, borrowed: bool) -> None:
    assert is_borrowed(path, imported) == borrowed


def test_an_import_statement_counts_once_and_relative_ones_count() -> None:
    found = names("from .test_b import f, g\nfrom tests.unit.http.test_c import f, g\nfrom . import test_d")

    assert [place.partition(" ")[0].rpartition(":")[2] for place in found.borrowed] == ["1", "2", "3"]


def test_private_names_count_however_they_are_reached() -> None:
    source = """
import uvicorn
import torch as t
from grpc import _channel
from redis.cluster import RedisCluster as Cluster
uvicorn.Server._serve
t.ops.mkl._linear(1)
Cluster()._close
getattr(uvicorn, "_main")
monkeypatch.setattr(uvicorn.Server, "_serve", None)
"""
    found = {place.partition(" ")[2] for place in names(source).private}

    assert found == {
        "grpc._channel",
        "uvicorn.Server._serve",
        "torch.ops.mkl._linear",
        "redis.cluster.RedisCluster()._close",
        "uvicorn._main",
    }


def test_documented_and_own_private_names_are_free() -> None:
    source = """
import _thread, os
from confluent_kafka import KafkaError
from freshet import _native
os._exit(1)
KafkaError._TIMED_OUT
_native.f()
self._x
os.__name__
"""
    assert names(source).private == []


def test_test_names_are_measured_in_test_modules_only() -> None:
    source = f"def test_{'a' * 55}(): ...\ndef test_{'b' * 56}(): ..."

    assert names(source).long == [f"tests/unit/http/test_a.py:2 test_{'b' * 56} (61)"]
    assert names(source, "services/freshet/testing/contracts/rows.py").long == []
