"""Settings as frozen objects, a class a service. Names carry units; every bound says what happens when it
is reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from freshet.options import Choice, Duration, Integer, Number, Text, option
from freshet.settings.run_folder import RunFolder

__all__ = [
    "Common",
    "Console",
    "Embedder",
    "Gateway",
    "Grpc",
    "GrpcDoor",
    "Http",
    "Inference",
    "Joiner",
    "Paramserver",
    "Registry",
    "Settings",
    "Simulator",
    "Traces",
    "Trainer",
]

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000  # milliseconds
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PORT = Integer(0, 65_535)
PATH = Text("a path")
HOST = Text("an IP address or a host name", r"[A-Za-z0-9.:_-]{1,255}")
CODEC = Choice(("fp32", "bf16", "fp16", "int8"))
URL = Text('an URL with the adapter as its scheme, such as "sqlite:run/log"', r"[a-z][a-z0-9+.-]*:.+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What every service of a run shares."""

    run_folder: str = option(
        "deployment",
        "where a run on this machine keeps everything; --folder goes before it",
        Text("a path"),
        default="freshet-run",
    )
    log_url: str = option("deployment", "the event log; without it, log/ of the run folder", URL, default="")
    rows_url: str = option(
        "deployment", "the row store; without it, rows/ of the run folder", URL, default=""
    )
    versions_url: str = option(
        "deployment", "the version store; without it, versions/ of the run folder", URL, default=""
    )
    bind_address: str = option(
        "deployment",
        "address that services listen on; 0.0.0.0 lets the network in",
        HOST,
        default="127.0.0.1",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "deployment",
        "least severe message that is kept",
        Choice(("debug", "info", "warning", "error")),
        default="info",
    )
    log_format: Literal["json", "text"] = option(
        "deployment", "a JSON object a line, or text for people", Choice(("json", "text")), default="json"
    )
    drain_ms: int = option(
        "deployment",
        "how long a stop waits for work in hand; what is cut off then is logged",
        Duration(0, HOUR),
        key="drain",
        default=10 * SECOND,
    )

    max_connections: int = option(
        "deployment",
        "connections over HTTP that gateway, inference and console hold at once, each; one more gets 503. "
        "Fewer if the process may not have so many files open",
        Integer(16, 1_000_000),
        default=2_000,
    )
    trusted_proxies: int = option(
        "deployment",
        "proxies of ours before gateway, inference and console, whose X-Forwarded-For is believed: "
        "a client's address is then what the outermost of them has seen",
        Integer(0, 10),
        default=0,
    )
    audit_file: str = option(
        "deployment",
        "where it is written who has promoted, rolled back, and made or dropped tokens; without it, "
        "audit.jsonl of the run folder. `freshet audit` reads it",
        PATH,
        default="",
    )
    tokens_file: str = option(
        "deployment",
        "the tokens that gateway, inference and console ask for over HTTP and gRPC, each with its scopes; "
        "`freshet token` writes it, and a change is taken up within a second. Without it, gateway and "
        "inference believe whoever reaches them",
        PATH,
        default="",
    )
    client_token_file: str = option(
        "deployment",
        "a file with the token that `freshet rank`, `replay` and `simulate`, freshet.local and the console's "
        "page send where one is asked for",
        PATH,
        default="",
    )

    @property
    def run(self) -> RunFolder:
        """The run folder's layout."""
        return RunFolder(Path(self.run_folder))

    @property
    def audit(self) -> Path:
        """Where it is written who has changed what."""
        return Path(self.audit_file) if self.audit_file else self.run.audit

    @property
    def stores_versions_itself(self) -> bool:
        """Whether versions lie in the run folder, and not where another URL says."""
        return self.versions_url == f"file:{self.run.versions}"


CLIENT_REQUESTS = (
    "requests of one client: a token, unless its line says another number, or an address where no tokens are "
    "asked for; beyond it 429 with Retry-After. 0: no limit"
)
PEM = Text("the path of a PEM file")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcDoor:
    """gRPC beside HTTP, of a service that clients from outside talk to; the extra `grpc` brings it."""

    grpc_port: int = option("deployment", "gRPC; 0: none", PORT, default=0)
    grpc_cert_file: str = option(
        "deployment", "the certificate that gRPC shows; without it no TLS", PEM, default=""
    )
    grpc_key_file: str = option("deployment", "the certificate's key", PEM, default="")
    grpc_ca_file: str = option(
        "deployment",
        "who signs clients' certificates; without it no client is asked for one",
        PEM,
        default="",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway(GrpcDoor):
    """The door for events."""

    port: int = option("deployment", "HTTP; 0 takes a free one", PORT, default=7000)
    max_body_bytes: int = option(
        "deployment", "a larger request is refused with 413", Integer(KIB, GIB), default=8 * MIB
    )
    max_events: int = option(
        "deployment", "a request with more events is refused with 413", Integer(1, 1_000_000), default=10_000
    )
    client_requests_per_s: float = option(
        "deployment",
        CLIENT_REQUESTS,
        Number(0, 1e9),
        default=0,
    )
    client_events_per_s: float = option(
        "deployment",
        "events of one client; whoever has sent more gets 429 until they are earned. 0: no limit",
        Number(0, 1e9),
        default=0,
    )
    queue_events: int = option(
        "deployment",
        "events waiting for the log; beyond it 429 with Retry-After",
        Integer(1, 10_000_000),
        default=50_000,
    )
    queue_bytes: int = option(
        "deployment",
        "bytes of events waiting for the log; beyond it 429 with Retry-After",
        Integer(KIB, 1 << 46),
        default=64 * MIB,
    )
    body_timeout_ms: int = option(
        "deployment",
        "how long a whole body may take to arrive; a slower client gets 408",
        Duration(10, HOUR),
        key="body_timeout",
        default=10 * SECOND,
    )
    append_events: int = option(
        "deployment", "events of one append; more wait for the next", Integer(1, 1_000_000), default=20_000
    )
    append_wait_ms: int = option(
        "deployment",
        "how long an append gathers events of other requests, so that they share one write",
        Duration(0, SECOND),
        key="append_wait",
        default=2,
    )
    retry_after_ms: int = option(
        "deployment",
        "what Retry-After tells a client",
        Duration(SECOND, HOUR),
        key="retry_after",
        default=SECOND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """Impressions and actions to samples."""

    name: str = option(
        "deployment",
        "tells joiners that share a model's partitions apart (on Kafka; the embedded log has one joiner);"
        " a process that takes the place of another has its name; without it, host name and process id",
        Text("1 to 100 letters, digits, . - and _", r"[A-Za-z0-9._-]{1,100}"),
        default="",
    )
    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7010)
    read_records: int = option(
        "deployment", "records taken from the log at once", Integer(1, 1_000_000), default=8_192
    )
    commit_interval_ms: int = option(
        "deployment",
        "how often samples are written; also the longest a decided sample waits;"
        " 0: as is good for the log, 20 ms embedded, 200 ms on Kafka, where each is a transaction",
        Duration(0, MINUTE),
        key="commit_interval",
        default=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The trainer: alone with embedder and shard in its process, or a rank among others beside theirs."""

    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7011)
    batches: Literal["own", "shards", "embedders"] = option(
        "deployment",
        "own: embedder and shard are in this process; shards: rows are in paramserver processes, which this "
        "one asks ahead of time; embedders: batches come with their rows from embedder processes. Shards and "
        "embedders are found in the control topic, and then several trainers share the work as ranks",
        Choice(("own", "shards", "embedders")),
        default="own",
    )
    rows: Literal["fp32", "bf16", "fp16", "int8"] = option(
        "deployment", "how rows travel from the shards, where this process asks them", CODEC, default="fp32"
    )
    gradients: Literal["fp32", "bf16", "fp16", "int8"] = option(
        "deployment", "how gradients travel to embedder processes, or to the shards", CODEC, default="fp32"
    )
    device: str = option(
        "deployment",
        "where the network of kinds dlrm, deepfm, dcnv2 and classes of your own computes: cpu, cuda, or "
        "cuda:N. Rows stay in memory; ranks of a model are all on one kind of device",
        Text("cpu, cuda or cuda:N", r"cpu|cuda(:[0-9]{1,2})?"),
        default="cpu",
    )
    advertised_host: str = option(
        "deployment",
        "the host that other ranks reach this one by; without it, the bind address",
        HOST,
        default="",
    )
    rank_answer_ms: int = option(
        "deployment",
        "a rank that is silent for longer during a step is lost to the others, which go on without it",
        Duration(100, MINUTE),
        key="rank_answer",
        default=3 * SECOND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """Samples with their rows to trainers, as a process of its own beside shards."""

    name: str = option(
        "deployment",
        "tells the embedders of a model apart; a process that takes the place of another has its name",
        Text("1 to 60 letters, digits, - and _", r"[A-Za-z0-9_-]{1,60}"),
        default="embedder-0",
    )
    port: int = option("deployment", "gRPC; 0 takes a free one", PORT, default=7030)
    advertised_host: str = option(
        "deployment", "the host that trainers reach it by; without it, the bind address", HOST, default=""
    )
    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7031)
    rows: Literal["fp32", "bf16", "fp16", "int8"] = option(
        "deployment", "how rows travel from the shards and to the trainers", CODEC, default="fp32"
    )
    gradients: Literal["fp32", "bf16", "fp16", "int8"] = option(
        "deployment", "how gradients travel to the shards", CODEC, default="fp32"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Paramserver:
    """A shard of the rows as a process of its own; without one the trainer holds all rows itself."""

    name: str = option(
        "deployment",
        "tells the shards of a model apart; a process that takes the place of another has its name",
        Text("1 to 60 letters, digits, - and _", r"[A-Za-z0-9_-]{1,60}"),
        default="shard-0",
    )
    port: int = option("deployment", "gRPC; 0 takes a free one", PORT, default=7020)
    advertised_host: str = option(
        "deployment",
        "the host that embedders and trainers reach it by; without it, the bind address",
        HOST,
        default="",
    )
    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7021)
    memory_bytes: int = option(
        "deployment",
        "what its rows, with their indexes, may take; a shard that is full takes no slices, answers no "
        "lookups of training, and says so, until slices have moved to shards with room. "
        "Leave as much again for flushes and messages. 0: no limit",
        Integer(0, 1 << 46),
        default=0,
    )
    rebalance_unevenness: float = option(
        "deployment",
        "slices move for load alone once a shard has this part too much, or too little, of its fair share; "
        "then until all are within half of it. A large number: only when shards come or go",
        Number(0.05, 1e6),
        default=0.25,
    )
    rebalance_interval_ms: int = option(
        "deployment",
        "over which load is measured, and from one plan to the next for load alone; what is over within half "
        "of it moves nothing",
        Duration(SECOND, 24 * HOUR),
        key="rebalance_interval",
        default=MINUTE,
    )


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
        "a file with the token that every call must show; without it none is asked for",
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
class Inference(GrpcDoor):
    """The server of predictions."""

    port: int = option("deployment", "HTTP; 0 takes a free one", PORT, default=7001)
    client_requests_per_s: float = option(
        "deployment",
        CLIENT_REQUESTS,
        Number(0, 1e9),
        default=0,
    )
    start_wait_ms: int = option(
        "deployment",
        "how long a rank request waits for rows and a version while the server starts; then it gets 503",
        Duration(0, MINUTE),
        key="start_wait",
        default=5 * SECOND,
    )
    max_candidates: int = option(
        "deployment", "a request with more is refused with 413", Integer(1, 1_000_000), default=10_000
    )
    batch_budget_ms: int = option(
        "deployment",
        "rank requests that wait are scored together while that should take no longer; 0: one by one",
        Duration(0, SECOND),
        key="batch_budget",
        default=5,
    )
    max_body_bytes: int = option(
        "deployment", "a larger request is refused with 413", Integer(KIB, GIB), default=16 * MIB
    )
    body_timeout_ms: int = option(
        "deployment",
        "how long a whole body may take to arrive; a slower client gets 408",
        Duration(10, HOUR),
        key="body_timeout",
        default=10 * SECOND,
    )
    queue_served: int = option(
        "deployment",
        "served events waiting for the log; beyond it they are dropped and counted, never the answer",
        Integer(1, 10_000_000),
        default=10_000,
    )
    follow_wait_ms: int = option(
        "deployment",
        "longest sleep between reads of changed rows",
        Duration(1, MINUTE),
        key="follow_wait",
        default=20,
    )
    version_poll_ms: int = option(
        "deployment",
        "how often the version store is asked which version is stable",
        Duration(10, MINUTE),
        key="version_poll",
        default=200,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """The page for people: what the other services do, how well the model predicts, and its versions."""

    port: int = option("deployment", "HTTP; 0 takes a free one", PORT, default=7002)
    token: str = option(
        "deployment",
        "what promote and rollback ask for; without it, that of state/console.token in the run folder",
        Text("16 to 200 letters, digits, - and _", r"[A-Za-z0-9_-]{16,200}"),
        default="",
    )
    token_file: str = option(
        "deployment",
        "a file that holds that token, such as a secret that is mounted; not beside FRESHET_CONSOLE_TOKEN",
        PATH,
        default="",
    )
    host: str = option(
        "deployment",
        "names that browsers may ask for it by, besides localhost and the bind address; commas between",
        Text("host names with commas between", r"[A-Za-z0-9.:,_-]{1,2000}"),
        default="",
    )
    services: str = option(
        "deployment",
        "where the services answer HTTP, if not on this machine by their own ports: role=host:port, commas "
        "between; a role may come again, and IPv6 stands in brackets",
        Text("role=host:port with commas between", longest=50_000),
        default="",
    )
    poll_ms: int = option(
        "deployment",
        "how often the services are asked how they are",
        Duration(50, MINUTE),
        key="poll",
        default=SECOND,
    )
    vitals_ms: int = option(
        "deployment",
        "how often rates, lags and memory are written to the topic of measures",
        Duration(100, HOUR),
        key="vitals",
        default=5 * SECOND,
    )
    trace_ms: int = option(
        "deployment",
        "pause between two actions that are followed to the served rows",
        Duration(100, HOUR),
        key="trace",
        default=3 * SECOND,
    )
    history_ms: int = option(
        "deployment",
        "how far back the page looks; the topic of measures is read back so far at the start",
        Duration(MINUTE, 7 * 24 * HOUR),
        key="history",
        default=24 * HOUR,
    )
    max_streams: int = option(
        "deployment",
        "pages that are kept up to date at once; one more gets 503",
        Integer(1, 10_000),
        default=64,
    )
    max_body_bytes: int = option(
        "deployment", "a larger request is refused with 413", Integer(KIB, GIB), default=MIB
    )
    body_timeout_ms: int = option(
        "deployment",
        "how long a whole body may take to arrive; a slower client gets 408",
        Duration(10, HOUR),
        key="body_timeout",
        default=10 * SECOND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """Simulated readers: `freshet simulate` and `freshet demo`."""

    admin_port: int = option("deployment", "health and metrics; 0 takes a free one", PORT, default=7012)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a run."""

    common: Common
    gateway: Gateway
    joiner: Joiner
    trainer: Trainer
    embedder: Embedder
    paramserver: Paramserver
    http: Http
    grpc: Grpc
    registry: Registry
    inference: Inference
    console: Console
    simulator: Simulator
    traces: Traces
