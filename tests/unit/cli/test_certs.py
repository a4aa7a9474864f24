"""`freshet certs`: what is missing or expires soon is made, what is good stays, and the rest is said."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from freshet.cli.certificate_authority import opened
from freshet.cli.certs import command
from freshet.errors import ConfigError


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)


def made(*arguments: object) -> list[str]:
    """Names of the certificates that were made by it."""
    said: dict[str, Any] = orjson.loads(run(*arguments, "--json").output)
    return [one["name"] for one in said["certificates"] if one["made_because"]]


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def handshake(folder: Path, *, server: str, client: str, host: str) -> None:
    """In memory, both sides asking for a certificate. Raises ssl.SSLError of whoever refuses."""
    sides = []
    for purpose, name in ((ssl.PROTOCOL_TLS_SERVER, server), (ssl.PROTOCOL_TLS_CLIENT, client)):
        context = ssl.SSLContext(purpose)
        context.load_verify_locations(folder / "ca.pem")
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
        context.verify_mode = ssl.CERT_REQUIRED
        sides.append(context)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        sides[0].wrap_bio(up, down, server_side=True),
        sides[1].wrap_bio(down, up, server_hostname=host),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def test_two_services_trust_each_other_by_name_and_by_address(tmp_path: Path) -> None:
    hosts = ("--host", "shard-0=10.0.0.3")
    assert made(tmp_path, "shard-0", "trainer-0", *hosts) == ["ca", "shard-0", "trainer-0"]

    for host in ("shard-0", "localhost", "127.0.0.1", "10.0.0.3"):
        handshake(tmp_path, server="shard-0", client="trainer-0", host=host)
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'shard-1'"):
        handshake(tmp_path, server="shard-0", client="trainer-0", host="shard-1")


def test_a_host_is_of_one_service_whose_name_is_told(tmp_path: Path) -> None:
    run(tmp_path, "shard-0", "trainer-0", "--host", "shard-0=a.internal", "--host", "trainer-0=b.internal")

    handshake(tmp_path, server="shard-0", client="trainer-0", host="a.internal")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for 'a\.internal'"):
        handshake(tmp_path, server="trainer-0", client="shard-0", host="a.internal")


@pytest.mark.parametrize(
    ("names", "host"), [(("shard-0", "trainer-0"), "a"), (("shard-0",), "b=a"), (("shard-0", "b"), "c=a")]
)
def test_a_host_of_which_nobody_knows_whose_it_is_is_refused(
    tmp_path: Path, names: tuple[str, ...], host: str
) -> None:
    with pytest.raises(ConfigError, match=rf"--host = '{host}'\n  expected NAME=HOST, NAME one of shard-0"):
        run(tmp_path, *names, "--host", host)

    assert list(tmp_path.iterdir()) == []


def test_of_one_service_alone_a_host_needs_no_name(tmp_path: Path) -> None:
    run(tmp_path, "shard-0", "--host", "a.internal", "--host", "shard-0=fd00::3")

    for host in ("a.internal", "fd00::3"):
        handshake(tmp_path, server="shard-0", client="shard-0", host=host)


def test_only_their_owner_reads_keys(tmp_path: Path) -> None:
    run(tmp_path, "shard-0")

    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "shard-0.pem": 0o644, "shard-0.key": 0o600}


def test_what_is_good_stays_as_it_is(tmp_path: Path) -> None:
    run(tmp_path, "shard-0")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    assert made(tmp_path, "shard-0") == []

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_expires_soon_is_made_again_and_its_authority_stays(tmp_path: Path) -> None:
    run(tmp_path, "shard-0", "--days", 10, "--renew-within", 9)
    first = certificate(tmp_path / "shard-0.pem")

    assert made(tmp_path, "shard-0", "--days", 10, "--renew-within", 9) == []
    assert made(tmp_path, "shard-0", "--days", 90, "--renew-within", 30) == ["shard-0"]

    assert certificate(tmp_path / "shard-0.pem").not_valid_after_utc > first.not_valid_after_utc
    handshake(tmp_path, server="shard-0", client="shard-0", host="shard-0")


@pytest.mark.parametrize("harm", ["other host", "other key", "other authority", "no key"])
def test_what_no_longer_fits_is_made_again(tmp_path: Path, harm: str) -> None:
    run(tmp_path, "shard-0", "shard-1")
    more: list[str] = []
    if harm == "other host":
        more = ["--host", "elsewhere"]
    elif harm == "other key":  # as a run leaves it that ended between key and certificate
        (tmp_path / "shard-0.key").write_bytes((tmp_path / "shard-1.key").read_bytes())
    elif harm == "no key":
        (tmp_path / "shard-0.key").unlink()
    else:
        (tmp_path / "ca.pem").unlink()

    assert made(tmp_path, "shard-0", *more) == (["ca"] if harm == "other authority" else []) + ["shard-0"]
    handshake(tmp_path, server="shard-0", client="shard-0", host="shard-0")


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    run(tmp_path, "shard-0", "--ca-days", 40)

    ends = certificate(tmp_path / "shard-0.pem").not_valid_after_utc
    assert ends == certificate(tmp_path / "ca.pem").not_valid_after_utc


def test_an_authority_that_has_expired_signs_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, days=1, now=datetime.now(UTC) - timedelta(days=2)):
        pass

    with pytest.raises(ConfigError, match=r"expired on .*\n.*\n.*another folder"):
        run(tmp_path, "shard-0")


def test_the_settings_to_set_are_printed(tmp_path: Path) -> None:
    text = run(tmp_path, "shard-0").output

    for option, file in (("CA_FILE", "ca.pem"), ("CERT_FILE", "shard-0.pem"), ("KEY_FILE", "shard-0.key")):
        assert f"FRESHET_GRPC_{option}={tmp_path / file}\n" in text
    assert "for shard-0, localhost, 127.0.0.1, ::1" in text


def test_a_check_says_when_they_expire_and_makes_nothing(tmp_path: Path) -> None:
    run(tmp_path, "shard-0", "--days", 50)

    lines = run("--check", tmp_path).output.splitlines()

    assert [line.split()[0] for line in lines] == ["certificate", "ca", "shard-0"]
    assert "50.0" in lines[2]
    assert lines[2].endswith("good")
    assert run("--check", tmp_path, "--renew-within", 60).output.splitlines()[2].endswith("renew it")
    with pytest.raises(ConfigError, match=r"holds no shard-1\.pem"):
        run("--check", tmp_path, "shard-1")
    with pytest.raises(ConfigError, match=r"holds no ca\.pem"):
        run("--check", tmp_path / "nothing")


def test_a_check_fails_where_one_has_expired(tmp_path: Path) -> None:
    with opened(tmp_path, days=9, now=datetime.now(UTC) - timedelta(days=2)) as (authority, _):
        authority.issue("shard-0", ["shard-0"], days=1, renew_within=0)

    with pytest.raises(ConfigError, match=r"expired: shard-0\n.*\n.*makes them again"):
        run("--check", tmp_path)


@pytest.mark.parametrize("name", ["ca", "../shard", "", "a" * 65, "shard 0"])
def test_a_name_that_is_no_file_of_its_own_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 64 letters"):
        run(tmp_path, name)


def test_a_renewal_at_every_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--renew-within = 30\n.*fewer than the 20"):
        run(tmp_path, "shard-0", "--days", 20)
