"""Settings of how services reach each other and what is around them."""

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

# --- Units and forms that settings share.


SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000  # milliseconds
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PORT = Integer(0, 65_535)
PATH = Text("a path")
HOST = Text("an IP address or a host name", r"[A-Za-z0-9.:_-]{1,255}")
HOSTS = Text("host names with commas between", r"[A-Za-z0-9.:,_ -]{1,2000}")
CODEC = Choice(("fp32", "bf16", "fp16", "int8"))
URL = Text('an URL with the adapter as its scheme, such as "sqlite:run/log"', r"[a-z][a-z0-9+.-]*:.+")

CLIENT_REQUESTS = (
    "requests of one client: a token, unless its line says another number, or an address where no tokens are "
    "asked for; beyond it 429 with Retry-After. 0: no limit"
)
PEM = Text("the path of a PEM file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Http:
    """TLS of everything that speaks HTTP: all listeners, their health and metrics, and who asks them."""

    cert_file: str = option(
        "deployment", "the certificate that every HTTP listener shows; without it no TLS", PEM, default=""
    )
    key_file: str = option("deployment", "the certificate's key", PEM, default="")
    ca_file: str = option(
        "deployment",
        "who signs the certificates of services, and of clients; set alone, it is for who only asks",
        PEM,
        default="",
    )
    client_certs: Literal["none", "optional", "required"] = option(
        "deployment",
        "whether a listener asks its clients for a certificate that ca_file has signed; optional: one "
        "that is shown must be good",
        Choice(("none", "optional", "required")),
        default="none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpc:
    """What services that speak gRPC with each other share."""

    ca_file: str = option(
        "deployment",
        "PEM of who has signed both sides' certificates; without it connections are not encrypted",
        PATH,
        default="",
    )
    cert_file: str = option("deployment", "PEM of this service's certificate", PATH, default="")
    key_file: str = option("deployment", "PEM of this service's private key", PATH, default="")
    token_file: str = option(
        "deployment",
        "a file with the tokens between services, one a line: the first is shown with every call, each is "
        "taken, and a change is taken up within a second. Without it none is asked for",
        PATH,
        default="",
    )
    max_message_bytes: int = option(
        "deployment",
        "of a message between services; a longer one goes in pieces, at most 64, which a start checks to be "
        "enough for the spec's batches. The same on every service of a model",
        Integer(KIB, GIB),
        default=64 * MIB,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """The schema registry of event topics of the format confluent; the joiner asks it."""

    url: str = option(
        "deployment",
        "of a registry that speaks Confluent's REST API, http://HOST:PORT; several divided by commas",
        Text("http://HOST:PORT or https://HOST:PORT", r"https?://.+"),
        default="",
    )
    user: str = option("deployment", "who asks; with a password file", Text("a name"), default="")
    password_file: str = option("deployment", "a file with the user's password", PATH, default="")
    token_file: str = option("deployment", "a file with a bearer token, instead of a user", PATH, default="")
    ca_file: str = option(
        "deployment", "PEM of who signs the registry's certificate; without it the system's", PATH, default=""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """OpenTelemetry traces along one event, off by default; the extra `tracing`. OTEL_SERVICE_NAME,
    OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_… and OTEL_BSP_SCHEDULE_DELAY count too.
    """

    ratio: float = option(
        "deployment",
        "of events that are traced, chosen by their request id: the same in every service; 0: none",
        Number(0, 1),
        default=0.0,
    )
    endpoint: str = option(
        "deployment",
        "the OTLP receiver of spans, by HTTP; without it OTEL_EXPORTER_OTLP_ENDPOINT, or this machine's",
        Text("a URL such as http://collector:4318", r"https?://[^\s@]+"),
        default="",
    )
    queue_spans: int = option(
        "deployment",
        "spans that wait to be sent; more are dropped and counted",
        Integer(1, 1_000_000),
        default=8_192,
    )
