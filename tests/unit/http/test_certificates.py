"""Certificates: changed files are read again, expiry is reported."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from cryptography import x509

from freshet.errors import ConfigError
from freshet.http.tls import CertificateFiles, expiry_of, seconds_left
from tests.servers.certificates import Files, issued


def read(files: Files, of: str = "grpc") -> CertificateFiles:
    return CertificateFiles(of, ca_file=str(files.ca), cert_file=str(files.cert), key_file=str(files.key))


@pytest.mark.parametrize("ends", [datetime(2049, 12, 31, 23, 59, 59), datetime(2051, 2, 3, 4, 5, 6)])
def test_an_expiry_is_read_as_others_read_it(ends: datetime) -> None:  # UTCTime, and GeneralizedTime
    pem = trustme.CA().issue_cert("here", not_after=ends).cert_chain_pems[0].bytes()

    assert (
        expiry_of(pem) == x509.load_pem_x509_certificate(pem).not_valid_after_utc == ends.replace(tzinfo=UTC)
    )


@pytest.mark.parametrize("cut", [0, 40, 100, 300])
def test_half_a_certificate_is_none(cut: int) -> None:
    pem = trustme.CA().issue_cert("here").cert_chain_pems[0].bytes()

    for text in (pem[:cut], pem[:cut] + b"\n-----END CERTIFICATE-----\n"):
        with pytest.raises(ValueError, match="no certificate"):
            expiry_of(text)


def test_new_files_are_taken_once_they_fit(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = read(issued(authority, tmp_path))
    first = files.now()
    (tmp_path / "new").mkdir()
    new = issued(authority, tmp_path / "new")

    os.replace(new.key, tmp_path / "server.key.pem")
    assert files.now() is first  # the key of another certificate
    os.replace(new.cert, tmp_path / "server.cert.pem")

    taken = files.now()
    assert (taken.cert, taken.key) == (
        (tmp_path / "server.cert.pem").read_bytes(),
        (tmp_path / "server.key.pem").read_bytes(),
    )
    assert taken != first
    assert files.now() is taken  # nothing changed since


def test_removed_files_leave_the_former_certificates(tmp_path: Path) -> None:
    files = read(issued(trustme.CA(), tmp_path))
    first = files.now()

    (tmp_path / "server.cert.pem").unlink()

    assert files.now() is first


def test_the_remaining_validity_is_reported(tmp_path: Path) -> None:
    authority = trustme.CA()
    soon = authority.issue_cert("here", not_after=datetime.fromtimestamp(time.time() + 1000, UTC))
    paths = issued(authority, tmp_path)
    paths.cert.write_bytes(soon.cert_chain_pems[0].bytes())
    soon.private_key_pem.write_to_path(str(paths.key))
    files = read(paths, "of this test")

    left = seconds_left()["of this test",]
    assert 990 < left <= 1000
    assert seconds_left(time.time() + 2000)["of this test",] < 0
    del files
    assert ("of this test",) not in seconds_left()


def test_a_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    good, other = issued(trustme.CA(), tmp_path), issued(trustme.CA(), tmp_path, "other")
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")

    for wrong, option in (
        (Files(good.ca, nothing, good.key), "cert_file"),
        (Files(good.ca, good.cert, other.key), "key_file"),
        (Files(nothing, good.cert, good.key), "ca_file"),
        (Files(tmp_path / "absent", good.cert, good.key), "ca_file"),
    ):
        with pytest.raises(ConfigError, match=rf"grpc: {option} = "):
            read(wrong)
