"""A certificate and its key as they lie in files, read again when the files change; and when it expires.

Who renews certificates writes files in place of others; a service goes on with what it has until the new ones
fit each other, and shows them from the next handshake on. It does without the package `cryptography`.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

import structlog

from freshet.errors import ConfigError

__all__ = ["CertificateFiles", "Pems", "expiry_of", "seconds_left"]

log = structlog.get_logger("freshet.certificates")

_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Pems:
    """Texts of PEM files that fit each other."""

    ca: bytes  # who signs the other side's; empty: none given
    cert: bytes  # with the chain above it, if there is one; empty: none is shown
    key: bytes = field(repr=False)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Have a context use these texts, whatever their files hold by now. Raises ssl.SSLError."""
        if self.ca:
            with _file_of(self.ca) as ca:
                context.load_verify_locations(ca)
        if self.cert:
            with _file_of(self.cert) as cert, _file_of(self.key) as key:
                context.load_cert_chain(cert, key, password="")  # nosec B106  # an encrypted key asks nobody


@contextmanager
def _file_of(text: bytes) -> Iterator[str]:
    """The path of a file that holds a text, as `ssl` takes certificates from files alone. It lies in this
    process's memory: keys come to no other disk than their own."""
    file = os.memfd_create("pem")
    try:
        with os.fdopen(file, "wb", closefd=False) as writer:
            writer.write(text)
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)


class CertificateFiles:
    """The files of one listener or client, and what they held when they last fitted each other."""

    def __init__(self, of: str, *, ca_file: str = "", cert_file: str = "", key_file: str = "") -> None:
        """Read them.

        Args:
            of: what they are for, in settings' words: `grpc`, `http`.
            ca_file: who signs the other side's certificate; may be empty.
            cert_file: with its chain; empty with `key_file`: none is shown.
            key_file: the certificate's key, not encrypted.

        Raises ConfigError: a file cannot be read, is no PEM, or key and certificate do not fit.
        """
        self.of = of
        self._paths = {"ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
        self._lock = threading.Lock()  # handshakes come on several threads
        self._seen = self._stamps()
        self._pems = self._read()
        if cert_file:
            _SHOWN.add(self)

    @property
    def paths(self) -> Mapping[str, str]:
        """As given, by option."""
        return self._paths

    def now(self) -> Pems:
        """What the files hold; what they held, while new ones cannot be read or do not fit. Costs three
        looks at the file system."""
        with self._lock:
            stamps = self._stamps()
            if stamps != self._seen:
                try:
                    pems = self._read()
                except ConfigError as error:  # half written, perhaps: looked at again at the next handshake
                    log.warning(
                        "new certificates are not taken yet", path=self._paths["cert_file"], reason=str(error)
                    )
                else:
                    if self._stamps() == stamps:  # else they were written while they were read
                        self._seen, self._pems = stamps, pems
                        log.info("certificates were read again", path=self._paths["cert_file"])
            return self._pems

    def expires(self) -> float | None:
        """When the certificate that is shown ends to be valid, in seconds since 1970; None if none is."""
        pems = self.now()
        return expiry_of(pems.cert).timestamp() if pems.cert else None

    def _stamps(self) -> tuple[object, ...]:
        return tuple(_stamp(path) for path in self._paths.values())

    def _read(self) -> Pems:
        texts = {name: self._text(name, path) for name, path in self._paths.items()}
        pems = Pems(texts["ca_file"], texts["cert_file"], texts["key_file"])
        if pems.cert:
            self._check("cert_file", "certificates in PEM", lambda: expiry_of(pems.cert))
            pair = replace(pems, ca=b"")
            self._check("key_file", "the key of cert_file, not encrypted", lambda: _try(pair))
        if pems.ca:
            authority = Pems(pems.ca, b"", b"")
            self._check("ca_file", "certificates in PEM", lambda: _try(authority))
        return pems

    def _text(self, name: str, path: str) -> bytes:
        try:
            return Path(path).read_bytes() if path else b""
        except OSError as error:
            raise ConfigError(self.of, name, path, "a file that can be read", str(error)) from error

    def _check(self, name: str, expected: str, look: Callable[[], object]) -> None:
        try:
            look()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(self.of, name, self._paths[name], expected, str(error)) from error


def _try(pems: Pems) -> None:
    pems.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


_SHOWN: WeakSet[CertificateFiles] = WeakSet()
"""Of this process, for its metric."""


def seconds_left(now_s: float | None = None) -> dict[tuple[str, ...], float]:
    """Until the certificates that this process shows expire, by what they are for; below 0 once they have."""
    now = time.time() if now_s is None else now_s
    left: dict[tuple[str, ...], float] = {}
    for files in list(_SHOWN):
        expires = files.expires()
        if expires is not None:
            left[files.of,] = min(expires - now, left.get((files.of,), float("inf")))
    return left


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).stat() if path else None
    except OSError:
        return None
    return found and (found.st_mtime_ns, found.st_size, found.st_ino)


class _Der(NamedTuple):
    tag: int
    start: int  # of what it holds
    end: int


def expiry_of(pem: bytes) -> datetime:
    """When the first certificate of a PEM ends to be valid (RFC 5280, 4.1.2.5). ValueError: there is none."""
    try:
        text = pem[pem.index(_BEGIN) + len(_BEGIN) : pem.index(_END)]
        der = b64decode(text)
        at = _Der(0, 0, len(der))
        for _ in range(2):  # Certificate, and the TBSCertificate in it
            at = _part(der, at.start)
        part = _part(der, at.start)
        skipped = 4 if part.tag == 0xA0 else 3  # version, where it stands; serial number, algorithm, issuer
        for _ in range(skipped):
            part = _part(der, part.end)
        ends = _part(der, _part(der, part.start).end)
        written = der[ends.start : ends.end].decode("ascii")
    except (ValueError, IndexError):
        raise ValueError("no certificate stands there") from None
    if ends.tag == 0x17:  # UTCTime: years of two digits, from 1950 on
        written = ("19" if written >= "5" else "20") + written
    return datetime.strptime(written, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _part(der: bytes, at: int) -> _Der:
    tag, length, start = der[at], der[at + 1], at + 2
    if length >= 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(der[start : start + size]), start + size
    if start + length > len(der):
        raise ValueError
    return _Der(tag, start, start + length)
