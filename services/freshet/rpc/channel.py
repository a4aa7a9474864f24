"""Connections between our services: size limits, certificates and tokens of both ends; channels of clients.

Connections use TLS where certificates are given, and mutual TLS: each side shows a certificate that the
common authority has signed. The token is required in addition. A listener for external clients may omit the
authority; it then shows its certificate and requires none. The server's side is `freshet.rpc.server`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import ConfigError
from freshet.http.tls import CertificateFiles, Pems
from freshet.http.token_files import WatchedFile
from freshet.rpc.pieces import MAX_PIECES

MIB = 1 << 20
MARGIN_BYTES = 64 << 10
"""Bytes above our own limit that gRPC accepts, so that we refuse a frame slightly above it by name."""

KEEPALIVE_MS = 2_000
KEEPALIVE_TIMEOUT_MS = 2_000
"""After both together, a connection to a machine that is gone is closed, also without traffic."""

HTTP2_FRAME_BYTES = 4 * MIB
"""HTTP/2 frames: the rows of a batch have 0.5 MB, and splitting them at 16 KiB costs more than the copy."""

RECONNECT_MS = (50, 500)
"""First and longest wait between two attempts: the next owner of buckets is up within seconds."""

CONNECT_MS = 2_000
"""Longest attempt, with its TLS handshake: three round trips, on a machine that may be busy."""

RETRY_AFTER_S = 0.2
"""Delay before a retry, for a peer that is refused as overloaded."""

MAX_TOKENS = 8
"""Tokens of a file: each call is compared with all of them."""

MAX_TOKENS_BYTES = 64 << 10


class PeerTokens(WatchedFile[str]):
    """The tokens of a file between our services.

    A file may hold several tokens, one a line: clients send the first, listeners accept each. So a token is
    replaced without an interruption: the new one second everywhere, then first everywhere, then alone.
    """

    def __init__(self, path: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """Read the file. Raises ConfigError if it cannot be read or holds no token."""
        super().__init__(path, _read_tokens, clock)


def _read_tokens(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOKENS_BYTES + 1)
    except OSError as error:
        raise ConfigError("grpc", "token_file", str(path), "a file that can be read", str(error)) from error
    text = content.decode("ascii", "replace") if len(content) <= MAX_TOKENS_BYTES else ""
    tokens = tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    usable = all(token.isascii() and token.isprintable() and " " not in token for token in tokens)
    if not usable or not 1 <= len(tokens) <= MAX_TOKENS:
        raise ConfigError(
            "grpc",
            "token_file",
            str(path),
            f"a file with one token of letters and digits a line, at most {MAX_TOKENS}",
            "the first is shown to others, each is taken from them",
        )
    return tokens


@dataclass(frozen=True, slots=True)
class Transport:
    """Size limit, certificates (texts of PEM files) and token of a connection's own side."""

    ca: bytes = b""  # signs the other side's certificate; empty: none is required
    cert: bytes = b""  # empty: no TLS
    key: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)  # empty: none is required, or `tokens` has them
    max_message_bytes: int = 64 * MIB  # longer messages are sent in pieces
    files: CertificateFiles | None = None  # source of the texts and of renewed ones; None: they stay
    tokens: PeerTokens | None = None  # source of the token and of changed ones; None: it stays

    @property
    def whole_bytes(self) -> int:
        """Size of the longest message, all its pieces together (`freshet.rpc.pieces`)."""
        return MAX_PIECES * self.max_message_bytes

    @property
    def secure(self) -> bool:
        """Whether connections use TLS."""
        return bool(self.ca or self.cert)

    def tokens_now(self) -> tuple[str, ...]:
        """Return the valid tokens; clients send the first. Empty: none is required."""
        if self.tokens is not None:
            return self.tokens.now()
        return (self.token,) if self.token else ()

    def pems(self) -> Pems:
        """Return the current certificates; changed files are read again."""
        return self.files.now() if self.files else Pems(self.ca, self.cert, self.key)


def transport_of(
    *,
    ca_file: str = "",
    cert_file: str = "",
    key_file: str = "",
    token_file: str = "",
    max_message_bytes: int,
    external: bool = False,
) -> Transport:
    """Read certificates and token.

    Args:
        external: whether it is for a listener for external clients; without `ca_file` such a listener
            requires no client certificate.

    Raises:
        ConfigError: a file cannot be read, or only some of the three certificate files are given.
    """
    files = {"ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
    missing = [name for name, path in files.items() if not path]
    if 0 < len(missing) < len(files) and not (external and missing == ["ca_file"]):
        raise ConfigError(
            "grpc",
            missing[0],
            "",
            "all of ca_file, cert_file and key_file, or none of them",
            "both sides of a connection show a certificate that ca_file has signed",
        )
    given = CertificateFiles("grpc", **files) if cert_file else None
    pems = given.now() if given else Pems(b"", b"", b"")
    tokens = PeerTokens(token_file) if token_file else None
    return Transport(pems.ca, pems.cert, pems.key, "", max_message_bytes, given, tokens)


def method_name(service: str, method: str) -> str:
    """Return gRPC's name of a method between our services."""
    return f"/freshet.wire.v1.{service}/{method}"


def message_options(transport: Transport) -> list[tuple[str, int]]:
    """Return the channel arguments for messages: size limit, no compression, large HTTP/2 frames."""
    return [
        ("grpc.max_send_message_length", transport.max_message_bytes + MARGIN_BYTES),
        ("grpc.max_receive_message_length", transport.max_message_bytes + MARGIN_BYTES),
        # Compressed messages are refused: some versions of gRPC expand a message before they check its size.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.http2.max_frame_size", HTTP2_FRAME_BYTES),
    ]


def peer_options(transport: Transport) -> list[tuple[str, int]]:
    """Return the channel arguments of both sides where both are our services, within one network."""
    return [
        *message_options(transport),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # otherwise 60 s for a frozen peer
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ]


def open_channel(address: str, transport: Transport) -> grpc.Channel:
    """Open a channel to `host:port`, with the current certificates; it connects at its first call."""
    options = [
        *peer_options(transport),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS[0]),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # gRPC's name for the longest time of one attempt
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS[1]),
        ("grpc.use_local_subchannel_pool", 1),  # a new channel does not inherit the backoff of an old one
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


class _WithToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Sends the current token with every call."""

    def __init__(self, tokens: Callable[[], tuple[str, ...]]) -> None:
        self._tokens = tokens

    # One method for all four: only the types of `continuation` differ.
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
