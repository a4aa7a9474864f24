"""The files that docs/compose.md has its readers write fit the compose files."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from typing import Any

import pytest
import yaml

from tests.fixtures.pages import ROOT, blocks
from tests.unit.docker.stack_files import COMPOSE, TOKENS

PAGE = ROOT / "docs" / "compose.md"
DOCKERFILE = ROOT / "ops" / "docker" / "Dockerfile"
VOLUMES = {
    name
    for path in ROOT.glob("*compose*.yml")
    for name in yaml.safe_load(path.read_text().replace("!override", "")).get("volumes", ())
}
EXAMPLES = [
    yaml.safe_load(block.text.replace("!override", ""))["services"]
    for block in blocks(PAGE)
    if block.language == "yaml"
]


def section(title: str) -> str:
    """The text of the page below a heading, up to the next of its level."""
    level = title.partition(" ")[0]
    return re.split(rf"\n#{{1,{len(level)}}} ", PAGE.read_text().split(f"\n{title}\n")[1])[0]


def first_cells(text: str) -> list[str]:
    """Return the first cells of the rows of a table, without its head."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [line.split("|")[1] for line in rows[2:]]


@pytest.fixture
def another() -> dict[str, Any]:
    """The services of "Another shard, joiner or replica"."""
    (found,) = [services for services in EXAMPLES if "shard-2" in services]
    return dict(found)


def test_an_example_changes_or_extends_existing_services() -> None:
    for services in EXAMPLES:
        for name, service in services.items():
            assert name in COMPOSE or service["extends"]["service"] in COMPOSE, name


def overrides() -> dict[str, dict[str, Any]]:
    """What the files beside docker-compose.yml change, by file and service."""
    texts = {path.name: path.read_text().replace("!override", "") for path in ROOT.glob("compose.*.yml")}
    return {name: yaml.safe_load(text)["services"] for name, text in texts.items()}


def test_every_optional_file_is_documented_and_fits_the_stack() -> None:
    (told,) = (line for line in PAGE.read_text().splitlines() if line.startswith("| `COMPOSE_FILE`"))

    assert len(overrides()) > 3
    for file, services in overrides().items():
        assert f"`{file}`" in told or f":{file}`" in told, file
        assert set(services) <= set(COMPOSE), file


def test_the_gpu_file_changes_the_existing_trainer_only() -> None:
    """Ranks of a model are all on one kind of device."""
    services = overrides()["compose.gpu.yml"]

    assert set(services) == {name for name in COMPOSE if name.startswith("trainer-")}
    for service in services.values():
        assert service["environment"] == {"FRESHET_TRAINER_DEVICE": "cuda"}
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_the_ssd_file_gives_all_that_hold_rows_a_folder() -> None:
    services = overrides()["compose.ssd.yml"]
    (made,) = re.findall(r"install -d -o freshet .* /var/lib/freshet (.*) && install", DOCKERFILE.read_text())

    assert set(services) == {name for name in COMPOSE if name.startswith(("shard-", "inference-"))}
    for name, service in services.items():
        (folder,) = (v for k, v in service["environment"].items() if k.endswith("_SSD_FOLDER"))
        (volume,) = service["volumes"]
        assert volume.endswith(f":{folder}"), name
        assert folder in made.split(), "a new volume has the owner of the image's folder"


def test_clients_wait_for_a_start_only_without_another_server() -> None:
    waits = "FRESHET_INFERENCE_START_WAIT"
    small = yaml.safe_load((ROOT / "compose.small.yml").read_text().replace("!override", ""))
    servers = [service for name, service in COMPOSE.items() if name.startswith("inference-")]

    assert [server["environment"][waits] for server in servers] == ["0ms", "0ms"]
    assert small["services"]["inference-0"]["environment"][waits] == "5s"
    assert "inference-1" in small["services"], "it is left out there"


def test_another_shard_has_a_name_and_a_certificate_of_its_own(another: dict[str, Any]) -> None:
    made, with_another = COMPOSE["secrets"]["entrypoint"], another["secrets"]["entrypoint"]
    former = COMPOSE["shard-1"]["environment"]

    assert [name for name in with_another if name != "shard-2"] == made
    assert "shard-2" in with_another
    assert another["shard-2"]["environment"] == {
        key: value.replace("shard-1", "shard-2") for key, value in former.items() if "shard-1" in value
    }


def test_another_inference_server_requires_the_same_tokens(another: dict[str, Any]) -> None:
    for part in ("environment", "volumes"):
        assert another["inference-2"][part] == TOKENS["inference-1"][part]


def test_a_new_model_keeps_secrets_and_audit_log_only() -> None:
    (removed,) = re.findall(r"docker volume rm (.*)", section("### Another model"))

    of_a_model = {name for name in VOLUMES if name in ("kafka", "versions") or name.startswith("redis-")}
    assert {name.removeprefix("freshet_") for name in removed.split()} == of_a_model - {"redis-secrets"}


def test_the_loss_of_every_volume_is_documented() -> None:
    told = first_cells(section("### What is lost with each volume"))
    names = {pattern for cell in told for pattern in re.findall(r"`([^`]+)`", cell)} | {
        "*-secrets",
        "authority",
    }

    assert {v for v in VOLUMES if not any(fnmatch(v, name) for name in names)} == set()
    assert {n for n in names if not any(fnmatch(v, n) for v in VOLUMES)} == set()
    assert any(cell.strip() == "secrets, any of them" for cell in told)


def test_what_is_rotated_is_what_make_secrets_makes() -> None:
    maker = (ROOT / "ops" / "docker" / "make-secrets").read_text()
    files = [f for cell in first_cells(section("### Rotation")) for f in re.findall(r"`(\S+/\S+)`", cell)]

    assert len(files) > 6
    for file in files:
        part, _, name = file.removeprefix("/run/").rpartition("/")
        assert f'"{part}' in maker or part == "authority", file
        assert name in maker, file
