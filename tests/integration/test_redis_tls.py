"""Rows in a Redis with TLS and named users: false identities are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from freshet.adapters import open_rowstore
from freshet.errors import ConfigError, Unavailable
from freshet.process.ports import lease_ports
from freshet.rows.store import RowStore
from tests.fixtures.bucket_owner import Owner
from tests.servers.certificates import Files, issued
from tests.servers.redis_cluster import RedisServer

PASSWORD = "s3cret"
Open = Callable[..., RowStore]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Certificates of server and client."""
    return issued(authority, tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def port(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server that requires a certificate of the authority, and the user `freshet`."""
    (port,) = lease_ports(1)
    (rights,) = (
        line.removeprefix("ACL SETUSER ").replace("<password>", PASSWORD)
        for line in Path("docs/redis.md").read_text().splitlines()
        if line.startswith("ACL SETUSER freshet")
    )
    settings = {
        "tls-port": str(port),
        "tls-cert-file": str(files.cert),
        "tls-key-file": str(files.key),
        "tls-ca-cert-file": str(files.ca),
        "tls-auth-clients": "yes",
        "user": rights,
    }
    with RedisServer(tmp_path_factory.mktemp("tls"), settings) as server:
        server.ask("ACL", "SETUSER", "default", "off")
        yield port


@pytest.fixture
def opened(port: int, files: Files, tmp_path: Path) -> Iterator[Open]:
    """Open the store as its rightful user, but for what is given instead; an empty option is left out."""
    secret = tmp_path / "password"
    stores: list[RowStore] = []

    def open_it(password: str = PASSWORD, **instead: str | Path) -> RowStore:
        secret.write_text(password)
        given = {"ca_file": files.ca, "cert_file": files.cert, "key_file": files.key, "user": "freshet"}
        options = {**given, "password_file": secret, "timeout": "2s", **instead}
        query = "&".join(f"{key}={value}" for key, value in options.items() if value)
        stores.append(open_rowstore(f"rediss://127.0.0.1:{port}/news?{query}"))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()


def test_rows_are_written_and_read_over_tls_with_a_password(opened: Open) -> None:
    owner = Owner(opened(), 5)
    owner.flush()
    owner.check(opened())


def test_a_wrong_password_is_refused_and_never_shown(opened: Open) -> None:
    with pytest.raises(ConfigError, match=r"(?s)refuses user 'freshet'.*password_file") as refused:
        opened(password="gu3ss")
    assert "gu3ss" not in str(refused.value)


def test_an_unknown_user_is_refused(opened: Open) -> None:
    with pytest.raises(ConfigError, match="refuses user 'somebody'"):
        opened(user="somebody")


def test_a_client_without_a_user_is_refused(opened: Open) -> None:
    with pytest.raises(ConfigError, match="refuses user 'default'"):
        opened(user="", password_file="")


def test_a_server_with_an_untrusted_certificate_is_refused(opened: Open, tmp_path: Path) -> None:
    other = issued(trustme.CA(), tmp_path, "other")
    with pytest.raises(ConfigError, match=r"(?s)certificate.*ca_file"):
        opened(ca_file=other.ca)


def test_a_client_certificate_of_another_authority_is_refused(opened: Open, tmp_path: Path) -> None:
    other = issued(trustme.CA(), tmp_path, "other")
    with pytest.raises(ConfigError, match=r"(?s)cert_file"):
        opened(cert_file=other.cert, key_file=other.key)


def test_a_client_without_a_certificate_is_refused(opened: Open) -> None:
    with pytest.raises(ConfigError, match=r"(?s)cert_file"):
        opened(cert_file="", key_file="")


def test_a_client_without_tls_does_not_get_in(port: int) -> None:
    with pytest.raises(Unavailable, match="cannot be reached"):
        open_rowstore(f"redis://127.0.0.1:{port}/news?timeout=500ms")
