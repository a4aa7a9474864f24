"""Settings of connections between services and to the schema registry and the trace collector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freshet.config.options import Choice, Integer, Number, Text, option

__all__ = [
    "CLIENT_REQUESTS",
    "CODEC",
    "GIB",
    "HOST",
    "HOSTS",
    "HOUR",
    "KIB",
    "MIB",
    "MINUTE",
    "PATH",
    "PEM",
    "PORT",
    "SECOND",
    "URL",
    "Grpc",
    "Http",
    "Registry",
    "Traces",
]


SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000  # milliseconds
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PORT = Integer(0, 65_535)
PATH = Text("a path")
HOST = Text("an IP address or a host name", r"[A-Za-z0-9.:_-]{1,255}")
HOSTS = Text("host names with commas between", r"[A-Za-z0-9.:,_ -]{1,2000}")
CODEC = Choice(("fp32", "bf16", "fp16", "int8"))
URL = Text('an URL with the adapter as its scheme, such as "sqlite:run/log"', r"[a-z][a-z0-9+.-]*:.+")

CLIENT_REQUESTS = (
    "requests of one client: of a token, unless its line in the tokens file states another number, or of an "
    "address if there are no tokens; more get 429 with Retry-After. 0: no limit"
)
PEM = Text("the path of a PEM file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Http:
    """TLS of all HTTP listeners, with health and metrics, and of the HTTP clients."""

    cert_file: str = option(
        "deployment", "the certificate of every HTTP listener; without it no TLS", PEM, default=""
    )
    key_file: str = option("deployment", "the private key of the certificate", PEM, default="")
    ca_file: str = option(
        "deployment",
        "the authority that signs the certificates of services and clients; a process that is only a client "
        "sets this alone",
        PEM,
        default="",
    )
    client_certs: Literal["none", "optional", "required"] = option(
        "deployment",
        "whether a listener requires clients to present a certificate signed by ca_file; optional: a "
        "certificate that a client presents must be valid",
        Choice(("none", "optional", "required")),
        default="none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpc:
    """TLS, tokens and message size of gRPC between services."""

    ca_file: str = option(
        "deployment",
        "PEM of the authority that signs both sides' certificates; without it connections are not encrypted",
        PATH,
        default="",
    )
    cert_file: str = option("deployment", "PEM of this service's certificate", PATH, default="")
    key_file: str = option("deployment", "PEM of this service's private key", PATH, default="")
    token_file: str = option(
        "deployment",
        "a file with the tokens between services, one a line: clients send the first, servers accept all, "
        "and a change applies within a second. Without it servers require no token",
        PATH,
        default="",
    )
    max_message_bytes: int = option(
        "deployment",
        "size of a message between services; a larger one is sent in at most 64 pieces, and a process checks "
        "at start that these suffice for the spec's batches. The same on every service of a model",
        Integer(KIB, GIB),
        default=64 * MIB,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """The schema registry for event topics in the format confluent; the joiner is its client."""

    url: str = option(
        "deployment",
        "URL of a registry with Confluent's REST API, http://HOST:PORT; several separated by commas",
        Text("http://HOST:PORT or https://HOST:PORT", r"https?://.+"),
        default="",
    )
    user: str = option("deployment", "user name; needs a password file", Text("a name"), default="")
    password_file: str = option("deployment", "a file with the user's password", PATH, default="")
    token_file: str = option("deployment", "a file with a bearer token, instead of a user", PATH, default="")
    ca_file: str = option(
        "deployment",
        "PEM of the authority that signs the registry's certificate; without it the system's",
        PATH,
        default="",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """OpenTelemetry traces of single events, off by default; they need the extra `tracing`.

    OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_… and OTEL_BSP_SCHEDULE_DELAY apply too.
    """

    ratio: float = option(
        "deployment",
        "share of events that are traced, sampled by request id, so every service traces the same; 0: none",
        Number(0, 1),
        default=0.0,
    )
    endpoint: str = option(
        "deployment",
        "the OTLP receiver of spans over HTTP; without it OTEL_EXPORTER_OTLP_ENDPOINT, or this machine's",
        Text("a URL such as http://collector:4318", r"https?://[^\s@]+"),
        default="",
    )
    queue_spans: int = option(
        "deployment",
        "spans queued for export; more are dropped and counted",
        Integer(1, 1_000_000),
        default=8_192,
    )
