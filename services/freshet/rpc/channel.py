"""How our services speak gRPC with each other: the same limits, certificates and token at both ends.

The server's side is `freshet.rpc.server`. Connections are TLS where certificates are given, and
mutual: each side shows one that the common authority has signed. The token is asked for besides. A listener
for clients from outside may leave the authority out: then it shows its certificate, and asks for none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from freshet.errors import BadInput, ConfigError, FreshetError, Mismatch, Overloaded, TooLarge, Unavailable
from freshet.http.certificates import CertificateFiles, Pems
from freshet.rpc.peer_tokens import Patience, PeerTokens
from freshet.rpc.pieces import MOST_PIECES

__all__ = [
    "MIB",
    "Transport",
    "cut",
    "door_options",
    "error_of",
    "listen_credentials",
    "method_name",
    "open_channel",
    "shared_options",
    "transport_of",
]

MIB = 1 << 20
ROOM = 64 << 10
"""Bytes beyond our own limit that gRPC lets pass, so that a frame a little too long is refused by us, by
name."""

KEEPALIVE_MS = 2_000
"""A peer whose machine is gone is noticed after this and the timeout, without traffic too."""
KEEPALIVE_TIMEOUT_MS = 2_000

DOOR_KEEPALIVE_MS = 30_000
DOOR_KEEPALIVE_TIMEOUT_MS = 60_000
"""Of clients from outside. The answer to a ping waits behind what its client is sending: over 1 Mbit/s that
may be most of a minute for one large message, and the connection must not end for it."""
DOOR_CLIENT_PING_MS = 10_000
"""Clients that ping more often than this, with nothing to send, are told that they ping too much."""

DOOR_WINDOW_BYTES = 64 << 10
"""Of one call, that a client may send before its message is read. gRPC would let it grow with the link's
delay and rate, to many MiB; one that is being read gets the room that it needs in any case."""

HTTP2_FRAME_BYTES = 4 * MIB
"""Frames of HTTP/2: a batch's rows are half a megabyte, and 16 KiB pieces of it cost more than the copy."""

RECONNECT_MS = (50, 500)
"""First and longest wait between two attempts: who takes over buckets is there within seconds."""

CONNECT_MS = 2_000
"""Of one attempt, its TLS handshake included: three round trips, on a machine that may be busy."""

TEXT_BYTES = 2_000
"""Of an error that ends a call: it goes in a header, where each may become three, of which clients take 8
KiB; beyond that they tell of their own limit instead of the error."""

RETRY_AFTER_S = 0.2
"""For a peer that does not say itself."""


@dataclass(frozen=True, slots=True)
class Transport:
    """What a connection needs: texts of PEM files and the token itself."""

    ca: bytes = b""  # who signs the other side's certificate; empty: none is asked for
    cert: bytes = b""  # empty: no TLS
    key: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)  # empty: none is asked for, or `tokens` has them
    max_message_bytes: int = 64 * MIB  # what is longer goes in pieces
    files: CertificateFiles | None = None  # where the texts come from, and new ones; None: they stay
    tokens: PeerTokens | None = None  # the same of the token; None: it stays

    @property
    def whole_bytes(self) -> int:
        """Of a message with all its pieces (`freshet.rpc.pieces`)."""
        return MOST_PIECES * self.max_message_bytes

    @property
    def secure(self) -> bool:
        """Whether connections are TLS."""
        return bool(self.ca or self.cert)

    def tokens_now(self) -> tuple[str, ...]:
        """Those that are taken; the first is shown. Empty: none is asked for."""
        if self.tokens is not None:
            return self.tokens.now()
        return (self.token,) if self.token else ()

    def pems(self) -> Pems:
        """The certificates as they are now: files are read again when they change."""
        return self.files.now() if self.files else Pems(self.ca, self.cert, self.key)


def transport_of(
    *,
    ca_file: str = "",
    cert_file: str = "",
    key_file: str = "",
    token_file: str = "",
    max_message_bytes: int,
    for_outsiders: bool = False,
) -> Transport:
    """Read certificates and token.

    Args:
        for_outsiders: a listener that may do without `ca_file`, and then asks no client for a certificate.

    Raises ConfigError: a file cannot be read, or some of the three certificate files are given and others
    not.
    """
    files = {"ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
    missing = [name for name, path in files.items() if not path]
    if 0 < len(missing) < len(files) and not (for_outsiders and missing == ["ca_file"]):
        raise ConfigError(
            "grpc", missing[0], "", "all of ca_file, cert_file and key_file, or none of them",
            "both sides of a connection show a certificate that ca_file has signed",
        )  # fmt: skip
    given = CertificateFiles("grpc", **files) if cert_file else None
    pems = given.now() if given else Pems(b"", b"", b"")
    tokens = PeerTokens(token_file) if token_file else None
    return Transport(pems.ca, pems.cert, pems.key, "", max_message_bytes, given, tokens)


def method_name(service: str, method: str) -> str:
    """What gRPC calls a method of ours."""
    return f"/freshet.wire.v1.{service}/{method}"


def _message_options(transport: Transport) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", transport.max_message_bytes + ROOM),
        ("grpc.max_receive_message_length", transport.max_message_bytes + ROOM),
        # Nothing compressed is taken: some versions of gRPC expand a message before they look at its size.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.http2.max_frame_size", HTTP2_FRAME_BYTES),
    ]


def door_options(transport: Transport) -> list[tuple[str, int]]:
    """Arguments of a listener for clients from outside, over whatever links they have."""
    return [
        *_message_options(transport),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", DOOR_WINDOW_BYTES),
        ("grpc.keepalive_time_ms", DOOR_KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", DOOR_KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", DOOR_KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", DOOR_CLIENT_PING_MS),
    ]


def shared_options(transport: Transport) -> list[tuple[str, int]]:
    """Channel arguments of both sides, where both are ours and within one network."""
    return [
        *_message_options(transport),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # without it a frozen peer is waited for 60 s
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ]


def cut(text: str) -> str:
    """An error's text, as long as one may be that ends a call."""
    data = text.encode(errors="replace")
    if len(data) <= TEXT_BYTES:
        return text
    return data[: TEXT_BYTES - 3].decode(errors="ignore") + "…"


def listen_credentials(transport: Transport, begun: Callable[[], None]) -> grpc.ServerCredentials | None:
    """Of a listener; None: no TLS.

    `begun` is called, from gRPC's threads, whenever a client has connected and the handshake begins. How it
    ends gRPC tells nobody: a client with a wrong certificate is seen as handshakes without calls.
    """
    if not transport.secure:
        return None
    last = transport.pems()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last  # of handshakes that come at once, each may show the new one first: it is the same
        begun()
        pems = transport.pems()
        if pems is last or pems == last:
            return None
        last = pems
        return _shown(pems)

    return grpc.dynamic_ssl_server_credentials(
        _shown(last), renewed, require_client_authentication=bool(transport.ca)
    )


def _shown(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(pems.key, pems.cert)], root_certificates=pems.ca or None
    )


def open_channel(address: str, transport: Transport) -> grpc.Channel:
    """A channel to `host:port`; it connects when it is used, again and again, with today's certificates."""
    options = [
        *shared_options(transport),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS[0]),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # what gRPC calls so is how long one attempt may take
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS[1]),
        ("grpc.use_local_subchannel_pool", 1),  # a new channel to a restarted peer starts without its past
    ]
    if transport.secure:
        pems = transport.pems()
        credentials = grpc.ssl_channel_credentials(pems.ca or None, pems.key or None, pems.cert or None)
        channel = grpc.secure_channel(address, credentials, options)
    else:
        channel = grpc.insecure_channel(address, options)
    if not transport.tokens_now():
        return channel
    return grpc.intercept_channel(channel, _WithToken(transport.tokens_now))


_PATIENCE = Patience()
"""Of all links of the process: each refusal of a token is told once for each call that it ended."""


def error_of(error: grpc.RpcError, where: str, patience: Patience = _PATIENCE) -> FreshetError:
    """Our error for a call that gRPC ended; `where` names the peer."""
    code, details = error.code(), error.details() or ""
    text = f"{where}: {details or code.name}"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return patience.refused(where, details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        too_large = "larger than max" in details
        return TooLarge(text) if too_large else Overloaded(text, RETRY_AFTER_S)
    for found, hint in _TLS_HINTS.items():
        if found in details:
            text += f"\n  {hint.format(host=where.rpartition(':')[0])}"
            break
    return _FAMILIES.get(code, Unavailable)(text)


_TLS_HINTS = {
    "certificate has expired": "renew the certificate of {host}, as docs/security.md says",
    "Hostname Verification": "the certificate there is not for {host}: make one that is, as "
    "docs/security.md says, or advertise a host that it names",
    "CERTIFICATE_VERIFY_FAILED": "FRESHET_GRPC_CA_FILE here has not signed the certificate of {host}",
    "WRONG_VERSION_NUMBER": "what answers there speaks no TLS: FRESHET_GRPC_CERT_FILE is set here, not there",
}
"""What gRPC says of a handshake that failed on our side, and what to do about it; the first that is found."""

_FAMILIES: dict[grpc.StatusCode, Callable[[str], FreshetError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: Mismatch,
    grpc.StatusCode.UNIMPLEMENTED: Mismatch,
    grpc.StatusCode.INVALID_ARGUMENT: BadInput,
}


class _WithToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Shows the token with every call: the one that there is then."""

    def __init__(self, tokens: Callable[[], tuple[str, ...]]) -> None:
        self._tokens = tokens

    # One for all four: what differs is what `continuation` takes and returns.
    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    intercept_unary_stream = intercept_unary_unary
    intercept_stream_unary = intercept_unary_unary
    intercept_stream_stream = intercept_unary_unary

    def _with_token(self, details: Any) -> Any:
        metadata = [*(details.metadata or ()), ("authorization", f"Bearer {self._tokens()[0]}")]
        return _Details(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )


@dataclass(frozen=True, slots=True)
class _Details(grpc.ClientCallDetails):
    method: str
    timeout: float | None
    metadata: Any
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any = None
