"""TLS: certificate files, which are read again when they change, and contexts of HTTP listeners and clients.

Certificates are renewed by replacing files; a service keeps its certificates until the new files match each
other, and uses the new ones from the next handshake on. The settings are applied once, when the process
starts (`use`); without certificates all is plain HTTP. The package `cryptography` is not needed.

Files of tokens are watched by the same `file_stamp` as those of certificates.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict
from weakref import WeakSet

import structlog

from freshet.config.settings import Settings
from freshet.errors import ConfigError
from freshet.observability.metrics import Metric

log = structlog.get_logger("freshet.tls")

_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"

HANDSHAKES = Metric(
    "freshet_tls_handshakes",
    "counter",
    "connections",
    "Handshakes of HTTP listeners by how they ended: `done`; `no_tls`: no TLS was spoken, or too old a one; "
    "`no_certificate`: none was shown where one is required; `certificate`: one that is not believed; "
    "`not_believed`: the client did not believe ours; `broken`: anything else. "
    "Clients that go away half-way are not counted.",
    ("outcome",),
    at=lambda _: handshakes(),
)

_TLS_ONLY = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNSUPPORTED_PROTOCOL")

ClientCerts = Literal["none", "optional", "required"]

_ENDED: Counter[str] = Counter()
"""Handshakes of this process by outcome."""


# --- certificate files


def file_stamp(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return values that change with a file's content, its replacement or a link's target; () without a file.

    Two writes of equal length within one tick of the file system's clock look alike.
    """
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class Pems:
    """Texts of PEM files that match each other."""

    ca: bytes  # signs the other side's certificate; empty: none
    cert: bytes  # with its chain; empty: none
    key: bytes = field(repr=False)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load the texts into a context. Raises ssl.SSLError."""
        if self.ca:
            with _file_of(self.ca) as ca:
                context.load_verify_locations(ca)
        if self.cert:
            with _file_of(self.cert) as cert, _file_of(self.key) as key:
                context.load_cert_chain(cert, key, password="")  # nosec B106  # without it, an encrypted key prompts


@contextlib.contextmanager
def _file_of(text: bytes) -> Iterator[str]:
    """Yield the path of an in-memory file with a text: `ssl` loads files only, and keys must not be copied to
    another disk."""
    file = os.memfd_create("pem")
    try:
        with os.fdopen(file, "wb", closefd=False) as writer:
            writer.write(text)
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)


class CertificateFiles:
    """The certificate files of a listener or client, and their texts when they last matched each other."""

    def __init__(self, of: str, *, ca_file: str = "", cert_file: str = "", key_file: str = "") -> None:
        """Read the files.

        Args:
            of: group of the settings: `grpc`, `http`.
            ca_file: certificate of the authority that signs the other side's; may be empty.
            cert_file: own certificate with its chain; empty together with `key_file`.
            key_file: the certificate's key, not encrypted.

        Raises:
            ConfigError: a file cannot be read or is not PEM, or the key does not match the certificate.
        """
        self.of = of
        self._paths = {"ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
        self._lock = threading.Lock()  # handshakes run in several threads
        self._seen = self._stamps()
        self._pems = self._read()
        if cert_file:
            _OWN.add(self)

    @property
    def paths(self) -> Mapping[str, str]:
        """Paths by setting, as given."""
        return self._paths

    def now(self) -> Pems:
        """Return the files' texts, or the former ones while new files are unreadable or do not match. Costs
        three calls of `stat`."""
        with self._lock:
            stamps = self._stamps()
            if stamps != self._seen:
                try:
                    pems = self._read()
                except (
                    ConfigError
                ) as error:  # read again at the next handshake, as a file may be half written
                    log.warning(
                        "new certificates are not taken yet", path=self._paths["cert_file"], reason=str(error)
                    )
                else:
                    if self._stamps() == stamps:  # otherwise they changed while they were read
                        self._seen, self._pems = stamps, pems
                        log.info("certificates were read again", path=self._paths["cert_file"])
            return self._pems

    def expires(self) -> float | None:
        """Return the expiry of the own certificate in seconds since 1970; None without one."""
        pems = self.now()
        return expiry_of(pems.cert).timestamp() if pems.cert else None

    def _stamps(self) -> tuple[object, ...]:
        return tuple(file_stamp(path) for path in self._paths.values())

    def _read(self) -> Pems:
        texts = {name: self._text(name, path) for name, path in self._paths.items()}
        pems = Pems(texts["ca_file"], texts["cert_file"], texts["key_file"])
        if pems.cert:
            self._check("cert_file", "certificates in PEM", lambda: expiry_of(pems.cert))
            pair = replace(pems, ca=b"")
            self._check("key_file", "the key of cert_file, not encrypted", lambda: _load(pair))
        if pems.ca:
            authority = Pems(pems.ca, b"", b"")
            self._check("ca_file", "certificates in PEM", lambda: _load(authority))
        return pems

    def _text(self, name: str, path: str) -> bytes:
        try:
            return Path(path).read_bytes() if path else b""
        except OSError as error:
            raise ConfigError(self.of, name, path, "a file that can be read", str(error)) from error

    def _check(self, name: str, expected: str, load: Callable[[], object]) -> None:
        try:
            load()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(self.of, name, self._paths[name], expected, str(error)) from error


def _load(pems: Pems) -> None:
    pems.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


_OWN: WeakSet[CertificateFiles] = WeakSet()
"""Files of this process's own certificates, for their metric."""


def seconds_left(now_s: float | None = None) -> dict[tuple[str, ...], float]:
    """Return the seconds until the own certificates expire, by settings group; negative once expired."""
    now = time.time() if now_s is None else now_s
    left: dict[tuple[str, ...], float] = {}
    for files in list(_OWN):
        expires = files.expires()
        if expires is not None:
            left[files.of,] = min(expires - now, left.get((files.of,), float("inf")))
    return left


class _Der(NamedTuple):
    tag: int
    start: int  # of its content
    end: int


def expiry_of(pem: bytes) -> datetime:
    """Return the expiry of a PEM's first certificate (RFC 5280, 4.1.2.5). Raises ValueError without one."""
    try:
        text = pem[pem.index(_BEGIN) + len(_BEGIN) : pem.index(_END)]
        der = b64decode(text)
        at = _Der(0, 0, len(der))
        for _ in range(2):  # Certificate, and its TBSCertificate
            at = _part(der, at.start)
        part = _part(der, at.start)
        skipped = 4 if part.tag == 0xA0 else 3  # version, if present; serial number, algorithm, issuer
        for _ in range(skipped):
            part = _part(der, part.end)
        ends = _part(der, _part(der, part.start).end)
        written = der[ends.start : ends.end].decode("ascii")
    except (ValueError, IndexError):
        raise ValueError("no certificate stands there") from None
    if ends.tag == 0x17:  # UTCTime: years of two digits, from 1950
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


# --- contexts


class HttpTls:
    """TLS contexts with the current certificates."""

    def __init__(self, files: CertificateFiles, client_certs: ClientCerts = "none") -> None:
        """`files`: need a certificate for a listener, an authority for a client."""
        self.files, self.client_certs = files, client_certs
        self._pems = files.now()
        self._server_context = self._for_server(self._pems)
        self._client_context = _context(self._pems, server=False)

    def server_context(self) -> ssl.SSLContext:
        """Return the context for all connections of a listener; its certificates are renewed."""
        self._renew()
        return self._server_context

    def client_context(self) -> ssl.SSLContext:
        """Return the context for one connection of a client; it checks the server's name, too."""
        self._renew()
        return self._client_context

    def _renew(self) -> None:
        """Replace the contexts if the certificates have changed."""
        pems = self.files.now()
        if pems is not self._pems:
            self._server_context = self._for_server(pems)
            self._client_context = _context(pems, server=False)
            self._pems = pems

    def _for_server(self, pems: Pems) -> ssl.SSLContext:
        context = _context(pems, server=True)
        if self.client_certs != "none":
            required = self.client_certs == "required"
            context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
            _forbid_resumption(context)
        context.sslobject_class, context.sslsocket_class = _CountedObject, _CountedSocket
        context.sni_callback = self._use_current
        return context

    def _use_current(self, connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        """Called by OpenSSL after the client's hello, before a certificate is sent."""
        try:
            current = self.server_context()
            if current is not context:
                connection.context = current
        except OSError as error:  # no file can be opened; the former certificates are used
            log.warning(
                "new certificates are not taken yet", path=self.files.paths["cert_file"], reason=str(error)
            )


def _context(pems: Pems, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    pems.load_into(context)
    return context


def _forbid_resumption(context: ssl.SSLContext) -> None:
    """Verify the client's certificate in every handshake: a resumed session verifies none, so a client of a
    former authority could connect. TLS 1.2 also resumes without tickets, which `ssl` cannot forbid."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET


def _count(error: ssl.SSLError | None) -> None:
    outcome = "done" if error is None else _outcome(error)
    _ENDED[outcome] += 1
    if error is not None:
        log.warning("a TLS handshake failed", why=outcome, reason=str(error))


def _outcome(error: ssl.SSLError) -> str:
    reason = error.reason or ""
    if reason in _TLS_ONLY:
        return "no_tls"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "no_certificate"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "certificate"
    return "not_believed" if "_ALERT_" in reason else "broken"


class _CountedObject(ssl.SSLObject):
    """A connection of an event loop: a handshake takes several calls."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise
        except ssl.SSLError as error:
            _count(error)
            raise
        _count(None)

    def unwrap(self) -> None:
        """Send the closing alert without waiting for the client's (RFC 8446, section 6.1): an idle client
        reads it with its next request, and a stop would wait as long."""
        with contextlib.suppress(ssl.SSLWantReadError):
            super().unwrap()


class _CountedSocket(ssl.SSLSocket):
    """A connection of a blocking server."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise
        except ssl.SSLError as error:
            _count(error)
            raise
        _count(None)


_used: list[HttpTls] = []


def use(settings: Settings) -> None:
    """Apply the settings to this process. Raises ConfigError for missing or wrong files."""
    given = {
        "ca_file": settings.http.ca_file,
        "cert_file": settings.http.cert_file,
        "key_file": settings.http.key_file,
    }
    if settings.http.client_certs != "none" and not given["cert_file"]:  # plain HTTP requires none
        raise ConfigError(
            "http", "client_certs", settings.http.client_certs, "none: there is no certificate of ours",
            "set FRESHET_HTTP_CERT_FILE, FRESHET_HTTP_KEY_FILE and FRESHET_HTTP_CA_FILE",
        )  # fmt: skip
    if not any(given.values()):
        _used.clear()
        return
    if bool(given["cert_file"]) != bool(given["key_file"]) or not given["ca_file"]:
        missing = next(name for name in ("ca_file", "cert_file", "key_file") if not given[name])
        raise ConfigError(
            "http", missing, "", "ca_file, cert_file and key_file; or ca_file alone, for who only asks",
            "services ask each other how they are, so who shows a certificate also names who signs them",
        )  # fmt: skip
    _used[:] = [HttpTls(CertificateFiles("http", **given), settings.http.client_certs)]


class ClientFiles(TypedDict, total=False):
    """Files for a client with a TLS context of its own; empty: plain HTTP."""

    ca_file: str
    cert_file: str
    key_file: str


def client_files() -> ClientFiles:
    """Return the files of this process for `freshet.client`."""
    if not _used:
        return {}
    paths = _used[0].files.paths
    return {"ca_file": paths["ca_file"], "cert_file": paths["cert_file"], "key_file": paths["key_file"]}


def listener_tls() -> HttpTls | None:
    """Return the TLS of this process's HTTP listeners; None: plain HTTP."""
    return _used[0] if _used and _used[0].files.paths["cert_file"] else None


def certificate_required() -> bool:
    """Return whether HTTP listeners of this process require client certificates."""
    secure = listener_tls()
    return secure is not None and secure.client_certs == "required"


def scheme() -> str:
    """Return the scheme by which this process calls services."""
    return "https" if _used else "http"


def connection(host: str, port: int, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection to a service, not yet opened; with TLS if `use` configured it."""
    if not _used:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_used[0].client_context())


def handshakes() -> dict[tuple[str, ...], float]:
    """Return HANDSHAKES; empty without TLS listeners."""
    return {(outcome,): float(n) for outcome, n in list(_ENDED.items())}
