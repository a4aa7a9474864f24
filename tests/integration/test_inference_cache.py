"""An inference server with less memory than rows, beside one that has all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from freshet.errors import Corrupt, Unavailable
from freshet.testing.conditions import wait_until
from freshet.testing.faults import Faulty
from freshet.types import I64, U8, U64
from tests.fixtures.inference import CANDIDATES, COLUMNS, CONTEXT, SPEC, Running, greedy, serving, trained
from tests.fixtures.trained_model import World

CACHE = {"inference_memory_bytes": "1", "inference_rows_wait": "10s"}
"""No row stays that the row store has; each request waits for its rows."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = trained(tmp_path, greedy(SPEC))
    made.store = Faulty(made.store)
    yield made
    made.close()


def faults(world: World) -> Faulty:
    assert isinstance(world.store, Faulty)
    return world.store


def scores(server: Running, **changes: Any) -> dict[int, Any]:
    answer = server.rank(**changes).json()
    return {item["index"]: item["predictions"] for item in answer["items"]}


def inferred(server: Running) -> dict[str, Any]:
    tensors = []
    for name, values in COLUMNS.items():
        kind = {"i8": "INT64", "i4": "INT32", "f4": "FP32"}.get(values.dtype.str[1:], "BYTES")
        data = [v.decode() for v in values] if kind == "BYTES" else values.ravel().tolist()
        tensors.append({"name": name, "datatype": kind, "shape": list(values.shape), "data": data})
    url = f"{server.url}/v2/models/{SPEC.name}/infer"
    found: dict[str, Any] = httpx.post(url, json={"inputs": tensors}, timeout=15).json()
    return found


def test_every_route_scores_as_with_all_rows(world: World) -> None:
    with serving(world) as full, serving(world, **CACHE) as cached:
        for _ in range(3):
            assert scores(cached, dry_run=True) == scores(full, dry_run=True)
        explained = {"dry_run": True, "explain": True}
        assert cached.rank(**explained).json()["items"] == full.rank(**explained).json()["items"]
        assert inferred(cached)["outputs"] == inferred(full)["outputs"]
        answer = cached.rank(dry_run=True).json()
        assert answer["defaulted_rows"] == {}
        assert answer["unknown_rows"] == full.rank(dry_run=True).json()["unknown_rows"]


def test_deltas_reach_rows_that_are_not_in_memory(world: World) -> None:
    with serving(world) as full, serving(world, **CACHE) as cached:
        before = scores(cached)
        world.learn({**CONTEXT, "request_id": 9, "items": [{"pos": 0, **c} for c in CANDIDATES]}, 7)
        world.publish()
        wait_until("the delta is served", lambda: scores(full) != before, within_s=20)
        wait_until("the cache has it, too", lambda: scores(cached) == scores(full), within_s=20)
        world.flush()
        cached.clock.advance(1.0)
        wait_until("its rows have left", lambda: cached.get("/status").json()["rows_held"] == 0, within_s=20)
        assert scores(cached) == scores(full)


def test_rows_in_memory_are_not_read_again(world: World) -> None:
    with serving(world, inference_memory_bytes=str(1 << 30), inference_rows_wait="10s") as cached:
        cached.rank()
        reads = faults(world).calls("read_many")
        assert reads > 0
        for _ in range(3):
            assert cached.rank().json()["defaulted_rows"] == {}
        assert faults(world).calls("read_many") == reads, "a row, or that there is none, was forgotten"
        text = cached.get("/metrics").text
        assert 'freshet_inference_row_keys_total{where="missing"}' in text


@pytest.mark.parametrize(
    ("fault", "why"), [(Unavailable("away"), "unavailable"), (Corrupt("a damaged page"), "damaged")]
)
def test_rows_that_cannot_be_read_are_counted(world: World, fault: Exception, why: str) -> None:
    with serving(world) as full, serving(world, **CACHE) as cached:
        faults(world).script("read_many", nth=1, times=1_000_000, error=fault)
        answer = cached.rank(dry_run=True).json()
        assert set(answer["defaulted_rows"]) == {why}
        keys = sum(answer["defaulted_rows"].values())
        assert keys >= len(CANDIDATES)
        assert answer["items"] != full.rank(dry_run=True).json()["items"]
        assert (
            f'freshet_inference_defaulted_rows_total{{why="{why}"}} {keys}.0' in cached.get("/metrics").text
        )
        assert inferred(cached)["parameters"]["defaulted_rows"] > 0


def test_slow_row_store_delays_a_request_by_its_bound(world: World) -> None:
    gate = threading.Event()
    with serving(world, inference_memory_bytes=str(1 << 30), inference_rows_wait="50ms") as cached:
        faults(world).script("read_many", nth=1, times=2, before=lambda: gate.wait(30))
        answer = cached.rank(dry_run=True).json()
        assert set(answer["defaulted_rows"]) == {"late"}
        gate.set()  # what comes late is of use to later requests
        wait_until(
            "rows have come", lambda: cached.rank(dry_run=True).json()["defaulted_rows"] == {}, within_s=20
        )


class Damaged:
    """A row store of which some buckets have damaged pages."""

    def __init__(self, inner: Any, damaged: range) -> None:
        self.inner, self.damaged = inner, damaged

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read_many(self, buckets: I64, tables: U8, keys: U64) -> Any:
        if np.isin(buckets, list(self.damaged)).any():
            raise Corrupt("a damaged page")
        return self.inner.read_many(buckets, tables, keys)


def test_damaged_buckets_cost_only_their_own_rows(world: World) -> None:
    inner, counts = world.store, []
    for damaged in (range(16), range(8), range(8, 16)):
        world.store = Damaged(inner, damaged)
        with serving(world, **CACHE) as cached:
            found = cached.rank(dry_run=True).json()["defaulted_rows"]
            assert set(found) == {"damaged"}
            counts.append(found["damaged"])
    world.store = inner
    assert counts[0] == counts[1] + counts[2]


def test_request_that_cannot_be_decoded_is_refused(world: World) -> None:
    with serving(world, **CACHE) as cached:
        for ts in (None, 1 << 62):
            assert cached.rank(context={**CONTEXT, "ts": ts}, dry_run=True).status_code in (200, 400)
        assert cached.rank(context={**CONTEXT, "ts": 1 << 62}, dry_run=True).status_code == 400
