"""An inference server with rows on a local disk, beside one that has all in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from freshet.inference.row_reads import Unread
from freshet.inference.rows import ServingTable
from freshet.testing.conditions import wait_until
from tests.fixtures.inference import CANDIDATES, COLUMNS, CONTEXT, SPEC, Running, greedy, serving, trained
from tests.fixtures.tables import disk_folder
from tests.fixtures.trained_model import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = trained(tmp_path, greedy(SPEC))
    yield made
    made.close()


@pytest.fixture
def tight() -> dict[str, str]:
    """Settings under which no row stays in memory, and each request waits for its rows."""
    return {
        "inference_memory_bytes": "1",
        "inference_ssd_folder": str(disk_folder()),
        "inference_rows_wait": "10s",
    }


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


def holds_none(server: Running) -> bool:
    """Whether all rows have left memory."""
    status = server.get("/status").json()
    return bool(status["ssd"]["rows"] == status["rows_held"] > 0)


def wait_until_spilled(server: Running) -> None:
    wait_until("rows have left memory", lambda: holds_none(server), within_s=60)


def test_every_route_scores_as_with_all_rows_in_memory(world: World, tight: dict[str, str]) -> None:
    with serving(world) as full, serving(world, **tight) as tiered:
        for _ in range(3):
            wait_until_spilled(tiered)
            assert scores(tiered, dry_run=True) == scores(full, dry_run=True)
        wait_until_spilled(tiered)
        explained = {"dry_run": True, "explain": True}
        assert tiered.rank(**explained).json()["items"] == full.rank(**explained).json()["items"]
        wait_until_spilled(tiered)
        assert inferred(tiered)["outputs"] == inferred(full)["outputs"]
        answer = tiered.rank(dry_run=True).json()
        assert answer["defaulted_rows"] == {}
        assert answer["unknown_rows"] == full.rank(dry_run=True).json()["unknown_rows"]


def test_deltas_replace_rows_on_disk(world: World, tight: dict[str, str]) -> None:
    with serving(world) as full, serving(world, **tight) as tiered:
        for label in (7, 8):
            before = scores(full)
            wait_until_spilled(tiered)
            event = {**CONTEXT, "request_id": label, "items": [{"pos": 0, **c} for c in CANDIDATES]}
            world.learn(event, label)
            world.publish()
            wait_until("the delta is served", partial(changed, full, before), within_s=60)
            wait_until("from disk, too", lambda: scores(tiered) == scores(full), within_s=60)
            wait_until_spilled(tiered)
            assert scores(tiered) == scores(full)


def changed(server: Running, before: dict[int, Any]) -> bool:
    return scores(server) != before


def test_rows_in_memory_are_not_read(world: World, tight: dict[str, str]) -> None:
    with serving(world, **{**tight, "inference_memory_bytes": str(1 << 30)}) as server:
        for _ in range(3):
            assert server.rank().json()["defaulted_rows"] == {}
        assert server.get("/status").json()["ssd"]["pages_read"] == 0
        assert "freshet_inference_unread_rows_total 0.0" in server.get("/metrics").text


def test_rows_that_cannot_be_read_are_counted(
    world: World, tight: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(world) as full, serving(world, **tight) as tiered:
        wait_until_spilled(tiered)
        read = ServingTable.fetch

        def half(table: ServingTable, keys: Unread) -> Unread:
            if any(key % 2 for _, key in keys):
                raise OSError("a damaged sector")
            return read(table, keys)

        monkeypatch.setattr(ServingTable, "fetch", half)
        answer = tiered.rank(dry_run=True).json()
        assert set(answer["defaulted_rows"]) == {"unreadable"}
        lost = answer["defaulted_rows"]["unreadable"]
        assert answer["items"] != full.rank(dry_run=True).json()["items"]
        counted = f'freshet_inference_defaulted_rows_total{{why="unreadable"}} {lost}.0'
        assert counted in tiered.get("/metrics").text
        wait_until_spilled(tiered)
        monkeypatch.setattr(ServingTable, "fetch", lambda table, keys: half(table, Unread({(0, 1)})))
        assert tiered.rank(dry_run=True).json()["defaulted_rows"]["unreadable"] > lost
        assert inferred(tiered)["parameters"]["defaulted_rows"] > 0


def test_slow_disk_delays_a_request_by_its_bound(
    world: World, tight: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, read = threading.Event(), ServingTable.fetch

    def slow(table: ServingTable, keys: Unread) -> Unread:
        gate.wait(60)
        return read(table, keys)

    with serving(world, **{**tight, "inference_rows_wait": "50ms"}) as tiered:
        wait_until_spilled(tiered)
        monkeypatch.setattr(ServingTable, "fetch", slow)
        answer = tiered.rank(dry_run=True).json()
        assert set(answer["defaulted_rows"]) == {"late"}
        gate.set()  # what comes late is of use to later requests
        wait_until(
            "rows have come", lambda: tiered.rank(dry_run=True).json()["defaulted_rows"] == {}, within_s=60
        )


def nameless(folder: Path) -> list[Path]:
    """Return this process's nameless files in a folder."""
    found = []
    for at in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            target = str(at.readlink())
            if target.startswith(f"{folder}/") and target.endswith("(deleted)"):
                found.append(at)
    return found


def damage(folder: Path) -> None:
    """Change every page of this process's nameless files in a folder."""
    for at in nameless(folder):
        with at.open("r+b", buffering=0) as file:
            for start in range(100, os.fstat(file.fileno()).st_size, 4096):
                os.pwrite(file.fileno(), b"x", start)


def test_damaged_disk_costs_the_rows_once_and_they_are_read_anew(world: World, tight: dict[str, str]) -> None:
    with serving(world) as full, serving(world, **tight) as tiered:
        wait_until_spilled(tiered)
        files = len(nameless(disk_folder()))
        damage(disk_folder())
        assert set(tiered.rank(dry_run=True).json()["defaulted_rows"]) == {"unreadable"}
        wait_until(
            "rows are whole again",
            lambda: tiered.rank(dry_run=True).json()["defaulted_rows"] == {},
            within_s=60,
        )
        assert scores(tiered) == scores(full)
        wait_until("the damaged files are closed", lambda: len(nameless(disk_folder())) <= files, within_s=60)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"inference_memory_bytes": "1"}, "FRESHET_INFERENCE_SSD_FOLDER"),
        ({"inference_ssd_folder": "/tmp"}, "FRESHET_INFERENCE_MEMORY_BYTES"),
        ({"inference_memory_bytes": "1", "inference_ssd_folder": "/proc"}, "SSD_FOLDER"),
    ],
)
def test_memory_and_folder_are_set_together(world: World, settings: dict[str, str], named: str) -> None:
    with pytest.raises(Exception, match=named), serving(world, **settings):
        pass
