"""The files that docs/compose.md has its readers write fit the compose files."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.docs.markdown import ROOT, blocks

COMPOSE, TOKENS = (
    yaml.safe_load((ROOT / name).read_text())["services"]
    for name in ("docker-compose.yml", "compose.tokens.yml")
)
PAGE = ROOT / "docs" / "compose.md"
EXAMPLES = [
    yaml.safe_load(block.text.replace("!override", ""))["services"]
    for block in blocks(PAGE)
    if block.language == "yaml"
]


@pytest.fixture
def another() -> dict[str, Any]:
    """The services of "Another shard, joiner or replica"."""
    (found,) = [services for services in EXAMPLES if "shard-2" in services]
    return dict(found)


def test_an_example_changes_services_that_there_are_or_extends_one() -> None:
    for services in EXAMPLES:
        for name, service in services.items():
            assert name in COMPOSE or service["extends"]["service"] in COMPOSE, name


def test_another_shard_has_a_name_and_a_certificate_of_its_own(another: dict[str, Any]) -> None:
    made, with_another = COMPOSE["secrets"]["entrypoint"], another["secrets"]["entrypoint"]
    former = COMPOSE["shard-1"]["environment"]

    assert [name for name in with_another if name != "shard-2"] == made
    assert "shard-2" in with_another
    assert another["shard-2"]["environment"] == {
        key: value.replace("shard-1", "shard-2") for key, value in former.items() if "shard-1" in value
    }


def test_another_inference_server_asks_for_tokens_as_the_others_do(another: dict[str, Any]) -> None:
    for part in ("environment", "volumes"):
        assert another["inference-2"][part] == TOKENS["inference-1"][part]
