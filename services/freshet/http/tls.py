"""TLS over HTTP: of every listener of this process, and of what it asks other services.

Which certificates those are is said once, when the process starts (`use`); without it all is plain HTTP.
Contexts are those of `ssl`; one whose files have changed gives way to another at the next handshake.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections import Counter
from typing import Any, Literal, TypedDict

import structlog

from freshet.config.settings import Settings
from freshet.errors import ConfigError
from freshet.http.certificates import CertificateFiles, Pems
from freshet.observability.metrics import Metric

__all__ = [
    "HANDSHAKES",
    "HttpTls",
    "certificate_required",
    "client_files",
    "connection",
    "handshakes",
    "listening",
    "scheme",
    "use",
]

log = structlog.get_logger("freshet.tls")

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
"""Of this process, for its metric."""


class HttpTls:
    """Certificates, as files hold them now, and what is asked of clients."""

    def __init__(self, files: CertificateFiles, client_certs: ClientCerts = "none") -> None:
        """`files`: with a certificate for a listener, with an authority for who asks others."""
        self.files, self.client_certs = files, client_certs
        self._pems = files.now()
        self._listening = self._listener(self._pems)
        self._asking = self._asker(self._pems)

    def listener(self) -> ssl.SSLContext:
        """Of a listener: for all its connections, it renews itself."""
        self._renew()
        return self._listening

    def asker(self) -> ssl.SSLContext:
        """Of a client: for one connection. It compares the name, too."""
        self._renew()
        return self._asking

    def _renew(self) -> None:
        """Make contexts anew if the files have changed: of the texts that fitted each other, as the files may
        be half written again by now."""
        pems = self.files.now()
        if pems is not self._pems:
            self._listening, self._asking, self._pems = self._listener(pems), self._asker(pems), pems

    def _listener(self, pems: Pems) -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_SERVER, pems)
        if self.client_certs != "none":
            required = self.client_certs == "required"
            context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
            _never_resume(context)
        context.sslobject_class, context.sslsocket_class = _CountedObject, _CountedSocket
        context.sni_callback = self._greeted
        return context

    def _asker(self, pems: Pems) -> ssl.SSLContext:
        return _context(ssl.PROTOCOL_TLS_CLIENT, pems)

    def _greeted(self, connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        """A client has said hello, by a name or without: OpenSSL calls this before it shows a certificate."""
        try:
            current = self.listener()
            if current is not context:
                connection.context = current
        except OSError as error:  # no file can be opened; the former certificates do
            log.warning(
                "new certificates are not taken yet", path=self.files.paths["cert_file"], reason=str(error)
            )


def _context(protocol: ssl._SSLMethod, pems: Pems) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    pems.load_into(context)
    return context


def _never_resume(context: ssl.SSLContext) -> None:
    """Have every handshake verify the client's certificate: one that resumes a session verifies none, and
    would let in whose authority is no longer believed. TLS 1.2 also resumes without tickets, which `ssl`
    cannot forbid."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET


def _count(error: ssl.SSLError | None) -> None:
    outcome = "done" if error is None else _outcome(error)
    _ENDED[outcome] += 1
    if error is not None:
        log.warning("a client did not come in", why=outcome, reason=str(error))


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
    """A connection of an event loop: a handshake is several calls, the last of which ends it."""

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
        """Tell the client that nothing follows, and do not wait for its answer (RFC 8446, section 6.1): an
        idle client reads it with its next request, and a stop would wait as long."""
        with contextlib.suppress(ssl.SSLWantReadError):
            super().unwrap()


class _CountedSocket(ssl.SSLSocket):
    """A connection of a thread."""

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
    """Take what the settings say, for this process. Raises ConfigError: files that are missing or wrong."""
    given = {
        "ca_file": settings.http.ca_file,
        "cert_file": settings.http.cert_file,
        "key_file": settings.http.key_file,
    }
    if settings.http.client_certs != "none" and not given["cert_file"]:  # plain HTTP asks nobody
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
    """Files for a client that makes a TLS context of its own; empty: plain HTTP."""

    ca_file: str
    cert_file: str
    key_file: str


def client_files() -> ClientFiles:
    """What this process asks services with, for `freshet.client`."""
    if not _used:
        return {}
    paths = _used[0].files.paths
    return {"ca_file": paths["ca_file"], "cert_file": paths["cert_file"], "key_file": paths["key_file"]}


def listening() -> HttpTls | None:
    """What listeners of this process speak; None: plain HTTP."""
    return _used[0] if _used and _used[0].files.paths["cert_file"] else None


def certificate_required() -> bool:
    """Whether listeners of this process want a certificate of every client."""
    secure = listening()
    return secure is not None and secure.client_certs == "required"


def scheme() -> str:
    """Of services, as this process asks them."""
    return "https" if _used else "http"


def connection(host: str, port: int, timeout_s: float) -> http.client.HTTPConnection:
    """A connection to a service, not yet made; over TLS if `use` said so."""
    if not _used:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_used[0].asker())


def handshakes() -> dict[tuple[str, ...], float]:
    """Of HANDSHAKES now; empty where no listener speaks TLS."""
    return {(outcome,): float(n) for outcome, n in list(_ENDED.items())}
