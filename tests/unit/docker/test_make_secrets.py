"""What a deployment's containers are given at their first start, and keep."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from freshet.http.tls import CertificateFiles
from freshet.http.token_files import read_tokens
from freshet.http.tokens import matching_entry
from freshet.log.kafka.connection import parse_url
from freshet.observability.audit import read_audit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
COMPOSE_FILES = {name: (ROOT / name).read_text() for name in ("docker-compose.yml", "compose.tokens.yml")}
COMPOSE = yaml.safe_load(COMPOSE_FILES["docker-compose.yml"])


def made(folder: Path, *names: str) -> str:
    """Run it as the service `secrets` does; what it printed."""
    for part in ("secrets", "authority"):
        (folder / part).mkdir(exist_ok=True)
    script, into = str(ROOT / "ops/docker/make-secrets"), (str(folder / "secrets"), str(folder / "authority"))
    done = subprocess.run(
        [sys.executable, script, *into, *names],
        check=True,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "services"),
            "FRESHET_COMMON_AUDIT_FILE": str(folder / "audit.jsonl"),
        },
        timeout=60,
    )
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deployment")
    made(folder, *COMPOSE["services"]["secrets"]["entrypoint"][3:])
    return folder / "secrets"


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    assert "made kafka.password\n" in made(tmp_path, "kafka", "shard-0")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    assert made(tmp_path, "kafka", "shard-0") == ""

    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_expiring_or_foreign_certificate_is_replaced(tmp_path: Path) -> None:
    made(tmp_path, "kafka", "shard-0", "shard-1")
    authority, peers = tmp_path / "authority", tmp_path / "secrets" / "peers"
    before = {name: (peers / f"{name}.pem").read_bytes() for name in ("shard-0", "shard-1")}
    soon = ["-subj", "/CN=shard-0", "-days", "364", "-extensions", "service", "-config", "openssl.cnf"]
    signed_by = ["-CA", "ca.pem", "-CAkey", "ca.key", "-key", "shard-0.key", "-out", "shard-0.pem"]
    subprocess.run(["openssl", "req", "-x509", "-new", *soon, *signed_by], check=True, cwd=authority)

    assert made(tmp_path, "kafka", "shard-0", "shard-1") == "made shard-0.key\nmade shard-0.pem\n"

    assert (peers / "shard-0.pem").read_bytes() != before["shard-0"]
    assert (peers / "shard-1.pem").read_bytes() == before["shard-1"]
    (authority / "ca.pem").unlink()
    made(tmp_path, "kafka", "shard-0", "shard-1")
    files = [peers / name for name in ("ca.pem", "shard-1.pem", "shard-1.key")]
    subprocess.run(["openssl", "verify", "-CAfile", *map(str, files[:2])], check=True, capture_output=True)
    ca, cert, key = map(str, files)
    assert CertificateFiles("grpc", ca_file=ca, cert_file=cert, key_file=key).expires()


def test_no_service_gets_the_authority_s_key(folder: Path) -> None:
    secret = (folder.parent / "authority" / "ca.key").read_text()

    assert not [path for path in folder.rglob("*") if path.is_file() and secret in path.read_text()]
    assert not [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o337]
    others = [name for name, service in COMPOSE["services"].items() if "authority" in str(service)]
    assert others == ["secrets"]


def test_every_file_that_a_service_reads_is_made(folder: Path) -> None:
    for file, told_of in COMPOSE_FILES.items():
        told = set(re.findall(r"/run/freshet/([a-z]+/[A-Za-z0-9.-]+)", told_of))
        assert {name for name in told if not (folder / name).is_file()} == set(), file


# Each part of the secrets, and the services that the compose file gives it to.
READERS = {
    "admin": "form-cluster",
    "broker": "kafka",
    "client": "",
    "console": "console",
    "doors": "",
    "log": "console embedder gateway inference joiner kafka prepare shard trainer",
    "operator": "",
    "peers": "embedder shard trainer",
    "reader": "inference",
    "redis": "redis",
    "rows": "prepare shard",
}
# So many more have one by compose.tokens.yml.
READERS_OF_TOKENS = {"client": "console simulator", "doors": "console gateway inference"}


@pytest.mark.parametrize(
    ("file", "readers"),
    [("docker-compose.yml", READERS), ("compose.tokens.yml", READERS_OF_TOKENS)],
)
def test_only_those_that_need_a_secret_have_it(folder: Path, file: str, readers: dict[str, str]) -> None:
    assert {path.name for path in folder.iterdir()} == set(READERS)
    seen: dict[str, set[str]] = {part: set() for part in readers}
    for name, service in yaml.safe_load(COMPOSE_FILES[file])["services"].items():
        for volume in service.get("volumes", []):
            source, _, at = volume.partition(":")
            if source.endswith("-secrets") and name != "secrets":
                part = source.removesuffix("-secrets")
                assert at == f"/run/freshet/{part}:ro", (name, volume)
                seen[part].add(name.rstrip("-0123456789"))

    assert {part: " ".join(sorted(names)) for part, names in seen.items()} == readers


def test_only_those_that_need_the_versions_have_them() -> None:
    mounts = {
        name.rstrip("-0123456789"): volume
        for name, service in COMPOSE["services"].items()
        for volume in service.get("volumes", [])
        if volume.startswith("versions:")
    }

    assert {name: volume.endswith(":ro") for name, volume in mounts.items()} == {
        "console": False, "inference": True, "prepare": False, "trainer": False,
    }  # fmt: skip


def test_secrets_has_every_part_and_its_image_has_the_folders(folder: Path) -> None:
    """A new volume takes its owner from the image's folder: root's could not be written to."""
    mounted = {f"{part}-secrets:/run/freshet/{part}" for part in READERS}
    (made_folders,) = re.findall(r"for part in ([a-z ]+); do", (ROOT / "ops/docker/Dockerfile").read_text())

    assert mounted <= set(COMPOSE["services"]["secrets"]["volumes"])
    assert set(made_folders.split()) == set(READERS)


def test_each_caller_shows_a_certificate_of_its_own_host(folder: Path) -> None:
    for name, service in COMPOSE["services"].items():
        environment = service.get("environment", {})
        if "FRESHET_GRPC_CA_FILE" in environment:
            cert, key = (
                folder / environment[f"FRESHET_GRPC_{kind}_FILE"].removeprefix("/run/freshet/")
                for kind in ("CERT", "KEY")
            )
            assert cert.stem == key.stem == name
            advertised = [host for key_, host in environment.items() if key_.endswith("ADVERTISED_HOST")]
            assert advertised == [name]
            ca = folder / "peers" / "ca.pem"
            assert CertificateFiles("grpc", ca_file=str(ca), cert_file=str(cert), key_file=str(key)).expires()


def test_kafka_is_reached_by_what_stands_in_its_properties(folder: Path) -> None:
    properties = (folder / "log" / "kafka.properties").read_text()
    client = parse_url(f"kafka://kafka:9092/freshet?properties={folder}/log/kafka.properties").client

    assert client["security.protocol"] == "SASL_SSL"
    assert client["sasl.password"] == (folder / "log" / "kafka.password").read_text()
    assert client["sasl.password"] not in properties


def test_a_run_repairs_the_files_of_a_killed_one(tmp_path: Path) -> None:
    made(tmp_path, "kafka")
    token = tmp_path / "secrets" / "peers" / "grpc.token"
    token.unlink()
    half = token.with_name(".grpc.token")
    half.write_text("ha")
    half.chmod(0o440)

    assert made(tmp_path, "kafka") == "made grpc.token\n"

    assert len(token.read_text()) > 40
    assert not half.exists()


def test_two_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        said = [*pool.map(lambda _: made(tmp_path, "kafka"), range(3))]

    assert sorted(map(bool, said)) == [False, False, True]
    entries = read_tokens(tmp_path / "secrets" / "doors" / "tokens")
    token = (tmp_path / "secrets" / "client" / "client.token").read_bytes().strip()
    assert matching_entry(token, entries) is not None


# --- tokens of clients


def rewritten(file: Path, text: str) -> None:
    file.chmod(0o640)
    file.write_text(text)


def test_each_token_is_known_by_its_name_and_scopes(folder: Path) -> None:
    entries = read_tokens(folder / "doors" / "tokens")

    for name, scopes in (
        ("send", {"send"}),
        ("rank", {"rank"}),
        ("operate", {"operate"}),
        ("client", {"send", "rank"}),
    ):
        path = folder / ("client" if name == "client" else "operator") / f"{name}.token"
        found = matching_entry(path.read_bytes().strip(), entries)
        assert found is not None
        assert (found.name, set(found.scopes)) == (name, scopes)
        assert path.stat().st_mode & 0o777 == 0o440


def test_a_token_that_was_dropped_is_not_made_again(tmp_path: Path) -> None:
    made(tmp_path, "kafka")
    file = tmp_path / "secrets" / "doors" / "tokens"
    left = [line for line in file.read_text().splitlines() if not line.startswith("send ")]
    rewritten(file, "\n".join(left) + "\n")
    made(tmp_path, "kafka")

    assert [e.name for e in read_tokens(file)] == ["rank", "operate", "client"]


def test_a_removed_token_is_replaced_and_no_longer_valid(tmp_path: Path) -> None:
    made(tmp_path, "kafka")
    file, token = tmp_path / "secrets" / "doors" / "tokens", tmp_path / "secrets" / "client" / "client.token"
    rewritten(file, "".join(
        line + (" requests_per_s=5" if line.startswith("client ") else "") + "\n"
        for line in file.read_text().splitlines()
    ))  # fmt: skip
    former = token.read_bytes().strip()
    token.unlink()

    assert made(tmp_path, "kafka") == "put client.token into tokens\nmade client.token\n"

    found = matching_entry(token.read_bytes().strip(), read_tokens(file))
    assert found is not None
    assert (found.name, set(found.scopes), found.requests_per_s) == ("client", {"send", "rank"}, 5.0)
    assert matching_entry(former, read_tokens(file)) is None
    assert len(read_tokens(file)) == 4
    assert file.read_text().startswith("# NAME")
    assert made(tmp_path, "kafka") == ""
    lines = read_audit(tmp_path / "audit.jsonl", 100).lines
    assert [(line.action, line.what["name"], line.outcome) for line in lines] == [
        ("token new", name, "done") for name in ("send", "rank", "operate", "client", "client")
    ]
    assert lines[-1].what["id"] == found.id


def test_a_file_is_there_while_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = runpy.run_path(str(ROOT / "ops/docker/make-secrets"))["written"]
    users, found = tmp_path / "redis.acl", list[str]()
    users.write_text("former")
    monkeypatch.setattr(os, "fsync", lambda file: found.append(users.read_text()))

    written(users, "new")

    assert found == ["former"]
    assert (users.read_text(), users.stat().st_mode & 0o777) == ("new", 0o440)
