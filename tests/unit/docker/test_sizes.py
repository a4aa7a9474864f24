"""Sizes in the compose files, and in the table of docs/compose.md, fit together: Redis and each inference
server have space for the rows of all shards, and every container has memory for what it does beside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from freshet.config.spec import load_spec
from freshet.config.spec.explanation import INDEX_BYTES, row_bytes
from freshet.config.spec.layout import layout_of
from freshet.demo import DEMO_SPEC
from freshet.paramserver.placement import FILLED
from freshet.tables.store import Store
from tests.fixtures.pages import ROOT
from tests.unit.docker.stack_files import filled

PAGE = (ROOT / "docs" / "compose.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("## Sizes")[2].partition("\n## ")[0].splitlines()
    if line.startswith("|") and "STACK_" not in line and "---" not in line
]
VARIABLES = ("SHARD_BYTES", "SHARD_LIMIT", "REDIS_BYTES", "REDIS_LIMIT", "INFERENCE_LIMIT")
MIB, GIB = 1 << 20, 1 << 30

TWICE = 1.6
"""So many times its own bytes a row may take in Redis: docs/redis.md, "Sizing"."""
PAGES = 1_024 * (64 << 10)
"""Bytes of pages that are not compacted yet, in all buckets."""
FULLEST = 1.04
"""The fullest of three masters has so many times its share of the store's 1,024 buckets."""
SERVICES_BESIDE = 128 * MIB
"""What an inference server takes beside rows; 122 MB were seen under load."""


def read(variables: Mapping[str, str], *, small: bool) -> dict[str, Any]:
    """Services that run of the compose files, with these variables, or defaults, in place."""
    text = (ROOT / "docker-compose.yml").read_text()
    services = yaml.safe_load(filled(text, variables))["services"]
    if small:
        text = (ROOT / "compose.small.yml").read_text().replace("!override", "")
        changes = yaml.safe_load(filled(text, variables))
        for name, change in changes["services"].items():
            services[name]["profiles"] = change.get("profiles", [])
            services[name]["environment"] = {
                **services[name].get("environment", {}),
                **change.get("environment", {}),
            }
    once = {name for name, service in services.items() if service["restart"] == "no"}
    return {name: s for name, s in services.items() if not s.get("profiles") and name not in once}


def size(word: object) -> int:
    number, unit = re.fullmatch(r"(\d+)([mg]?)", str(word)).groups()  # type: ignore[union-attr]
    return int(number) * {"": 1, "m": MIB, "g": GIB}[unit]


def of(row: list[str]) -> tuple[dict[str, str], bool]:
    """A row's variables, and whether it is of the small stack."""
    return dict(zip((f"STACK_{name}" for name in VARIABLES), row[2:7], strict=True)), "small" in row[0]


def shards_bytes(services: Mapping[str, Any]) -> int:
    found = [
        s["environment"].get("FRESHET_PARAMSERVER_MEMORY_BYTES")
        for s in services.values()
        if "environment" in s
    ]
    return sum(size(held) for held in found if held)


def nodes(services: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [service for name, service in services.items() if name.startswith("redis-")]


@pytest.fixture(params=ROWS, ids=[row[0] for row in ROWS])
def services(request: pytest.FixtureRequest) -> dict[str, Any]:
    variables, small = of(request.param)
    return read(variables, small=small)


def test_redis_has_space_for_all_that_shards_may_hold(services: dict[str, Any]) -> None:
    cluster = nodes(services)
    masters = cluster if len(cluster) == 1 else cluster[: len(cluster) // 2]
    room = sum(size(node["environment"]["REDIS_MAXMEMORY"]) for node in masters)
    uneven = FULLEST if len(masters) > 1 else 1.0

    assert room >= uneven * TWICE * shards_bytes(services) + PAGES


def test_no_row_exceeds_its_share_in_redis_or_in_serving() -> None:
    """So that bytes of shards may be compared with bytes of Redis and of inference servers."""
    for path in (DEMO_SPEC, *sorted((ROOT / "examples").glob("*/freshet.toml"))):
        spec = load_spec(path)
        layout = layout_of(spec)
        learning, serving = (Store.of(spec, layout, serving=only) for only in (False, True))
        for group in layout.groups:
            in_shard, table = row_bytes(group) + INDEX_BYTES, group.tables[0]
            assert learning.record_bytes(table) + 8 <= in_shard, path
            assert serving.resident_bytes(table) + INDEX_BYTES <= in_shard, path


def test_every_container_has_memory_for_more_than_rows(services: dict[str, Any]) -> None:
    for node in nodes(services):
        assert size(node["mem_limit"]) * 2 >= size(node["environment"]["REDIS_MAXMEMORY"]) * 3
    for name, service in services.items():
        limit = size(service["mem_limit"])
        if name.startswith("shard-"):
            assert limit >= 2 * size(service["environment"]["FRESHET_PARAMSERVER_MEMORY_BYTES"])
        if name.startswith("inference-"):
            assert limit * 0.9 >= shards_bytes(services) + SERVICES_BESIDE


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_table_says_how_many_rows_and_what_limits_add_up_to(row: list[str]) -> None:
    variables, small = of(row)
    services = read(variables, small=small)
    limits = sum(size(service["mem_limit"]) for service in services.values())

    for said, bytes_a_row in zip(row[:2], (100, 128), strict=True):
        held = FILLED * shards_bytes(services) / (bytes_a_row + INDEX_BYTES) / 1e6
        assert 0.9 * held < float(said.split()[0]) <= held
    assert row[7] == f"{limits / GIB:.0f} GiB"


def test_the_table_begins_with_the_defaults() -> None:
    for row in (row for row in ROWS if "default" in row[0]):
        variables, small = of(row)

        assert read({}, small=small) == read(variables, small=small)
    assert len([row for row in ROWS if "default" in row[0]]) == 2
