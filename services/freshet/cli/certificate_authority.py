"""An authority of one folder, and the certificates that it signs: for development and small deployments.

`ca.pem` and `ca.key` are made once; NAME.pem and NAME.key are made, and made again when they expire soon, are
for other hosts or of another authority. What is good stays as it is, so it may run before every start.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from freshet.errors import ConfigError

__all__ = ["LOCAL", "Authority", "Issued", "certificates_in", "opened"]

LOCAL = ("localhost", "127.0.0.1", "::1")
"""In every certificate: health checks and `freshet status` ask services on their own machine."""

CLOCKS_DIFFER = timedelta(minutes=5)
"""A certificate is valid so long before it was made: the clock of another machine may be behind."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate, and what was done about it."""

    name: str
    expires: datetime
    hosts: tuple[str, ...]
    made: str = ""  # why it was made now; empty: it was there, and stays


@dataclass(frozen=True, slots=True)
class Authority:
    """Who signs."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    now: datetime

    def issue(self, name: str, hosts: Sequence[str], *, days: int, renew_within: int) -> Issued:
        """The certificate of `name`, for server and client, valid for `hosts`; made if there is no good one.

        Args:
            name: of its files, and its common name.
            hosts: DNS names and addresses.
            days: how long one that is made now is valid; never longer than its authority.
            renew_within: days before its end in which it is made again.

        Raises ConfigError: `name` or a host cannot stand in a certificate, or a file cannot be read.
        """
        cert_file, key_file = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        names = _names_of(hosts)
        why = self._why_anew(cert_file, key_file, set(names), renew_within)
        if not why:
            return Issued(name, _read(cert_file).not_valid_after_utc, tuple(hosts))
        key = ec.generate_private_key(ec.SECP256R1())
        ends = min(self.now + timedelta(days=days), self.certificate.not_valid_after_utc)
        certificate = (
            _builder(name, self.certificate.subject, key, self.now, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(of_authority=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
            .sign(self.key, hashes.SHA256())
        )
        _write(key_file, _key_pem(key), 0o600)
        _write(cert_file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        return Issued(name, certificate.not_valid_after_utc, tuple(hosts), why)

    def _why_anew(
        self, cert_file: Path, key_file: Path, names: set[x509.GeneralName], renew_within: int
    ) -> str:
        if not cert_file.exists() or not key_file.exists():
            return "there was none"
        there = _read(cert_file)
        if there.public_key() != _read_key(key_file).public_key():
            return "its key did not fit"
        try:
            there.verify_directly_issued_by(self.certificate)
        except (ValueError, TypeError, InvalidSignature):
            return "it was of another authority"
        if there.not_valid_after_utc - self.now < timedelta(days=renew_within):
            return f"it was to expire on {there.not_valid_after_utc:%Y-%m-%d}"
        if set(_subject_names(there)) != names:
            return "it was for other hosts"
        return ""


@contextmanager
def opened(folder: Path, *, days: int, now: datetime | None = None) -> Iterator[tuple[Authority, Issued]]:
    """The authority of a folder, made first if there is none; one process at a time has it.

    Raises ConfigError: its files cannot be read, or it has expired.
    """
    now = (now or datetime.now(UTC)).replace(microsecond=0)
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cert_file, key_file = folder / "ca.pem", folder / "ca.key"
        made = ""
        if not cert_file.exists():
            made = "there was none"
            _make_authority(cert_file, key_file, now, now + timedelta(days=days))
        certificate = _read(cert_file)
        if certificate.not_valid_after_utc <= now:
            raise ConfigError(
                "certs", "", f"{cert_file} expired on {certificate.not_valid_after_utc:%Y-%m-%d}",
                "an authority that is valid",
                "make all certificates anew in another folder, and set its ca.pem at every service",
            )  # fmt: skip
        key = _read_key(key_file)
        if key.public_key() != certificate.public_key():
            raise ConfigError("certs", "", f"{key_file} is not the key of {cert_file}", "the key of ca.pem")
        ca = Issued("ca", certificate.not_valid_after_utc, (), made)
        yield Authority(folder, key, certificate, now), ca
    finally:
        os.close(lock)


def certificates_in(folder: Path) -> Iterator[tuple[str, x509.Certificate]]:
    """All certificates of a folder by name, the authority's first. Raises ConfigError: one is damaged."""
    for path in sorted(folder.glob("*.pem"), key=lambda p: (p.stem != "ca", p.stem)):
        yield path.stem, _read(path)


def _make_authority(cert_file: Path, key_file: Path, now: datetime, ends: datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own: two authorities of one name are hard to tell apart in a client's error.
    name = f"freshet {x509.random_serial_number():x}"[:24]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        _builder(name, subject, key, now, ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(of_authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(key_file, _key_pem(key), 0o600)
    _write(cert_file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    try:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    except ValueError as error:
        raise ConfigError("certs", "NAME", name, "1 to 64 characters") from error
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, of_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not of_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=of_authority,
        crl_sign=of_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _names_of(hosts: Sequence[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ip_address(host)))
        except ValueError:
            try:
                names.append(x509.DNSName(host))
            except ValueError as error:
                raise ConfigError("certs", "--host", host, "a DNS name in ASCII, or an address") from error
    return names


def _subject_names(certificate: x509.Certificate) -> Sequence[x509.GeneralName]:
    try:
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def _read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ConfigError(
            "certs", "", f"{path} holds no certificate", "one in PEM", "delete the file; it is made again"
        ) from error


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise ConfigError("certs", "", f"{path} holds no key", "one in PEM, not encrypted") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("certs", "", f"{path} holds another kind of key", "one that `freshet certs` made")
    return key


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whole or not at all, and never readable by others for a moment."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.chmod(mode)
    new.rename(path)
