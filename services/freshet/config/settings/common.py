"""Settings common to all services: the run folder, listeners, connections between services, traces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from freshet.config.options import Choice, Duration, Integer, Number, Text, deployment
from freshet.errors import ConfigError

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000  # milliseconds
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PORT = Integer(0, 65_535)
PATH = Text("a path")
HOST = Text("an IP address or a host name", r"[A-Za-z0-9.:_-]{1,255}")
HOSTS = Text("host names with commas between", r"[A-Za-z0-9.:,_ -]{1,2000}")
Codec = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"]
CODEC = Choice(get_args(Codec))
AUTO = (
    "auto: fp32 on one host; to another host int8 at first, then the most exact of fp32, bf16, int8 and int4 "
    "that keeps the link busy for less than 5 % of the time"
)
URL = Text('an URL with the adapter as its scheme, such as "sqlite:run/log"', r"[a-z][a-z0-9+.-]*:.+")

# Meanings of options that several services have.

SSD_FOLDER = (
    "folder on a local SSD with a file system such as ext4 or xfs: rows beyond {} move to files here, the "
    "least used first, and come back as they are needed. The files have no names, and end with the process. "
    "Empty: rows are in memory alone"
)
SSD_BYTES = "most bytes of these files; beyond it, or once the disk is full, rows stay in memory. 0: no limit"
ADMIN_PORT = "health and metrics; 0 takes a free one"
BODY = "a larger request is refused with 413"
BODIES = (
    "memory budget of HTTP request bodies that are received and processed at once; more get 503, but one "
    "body of the largest size is always accepted"
)
BODY_TIMEOUT = "how long a whole body may take to arrive; a slower client gets 408"
CLIENT_REQUESTS = (
    "requests of one client: of a token, unless its line in the tokens file states another number, or of an "
    "address if there are no tokens; more get 429 with Retry-After. 0: no limit"
)
PEM = Text("the path of a PEM file")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths in a run folder. To delete the folder deletes the model and its log, and nothing else."""

    path: Path

    @property
    def log(self) -> Path:
        """The event log: the only copy of the acknowledged events."""
        return self.path / "log"

    @property
    def rows(self) -> Path:
        """The row store."""
        return self.path / "rows"

    @property
    def versions(self) -> Path:
        """Dense versions and their manifests."""
        return self.path / "versions"

    @property
    def log_url(self) -> str:
        """URL of the event log in this folder."""
        return f"sqlite:{self.log}"

    @property
    def rows_url(self) -> str:
        """URL of the row store in this folder."""
        return f"sqlite:{self.rows / 'rows.sqlite'}"

    @property
    def versions_url(self) -> str:
        """URL of the version store in this folder."""
        return f"file:{self.versions}"

    @property
    def logs(self) -> Path:
        """Log files of the processes, one for each role. A process keeps its file open, so truncate it
        while the process runs: lines written after a deletion are lost until the process starts again."""
        return self.path / "logs"

    @property
    def audit(self) -> Path:
        """The audit log: JSON lines; the file is never truncated or rotated."""
        return self.path / "audit.jsonl"

    @property
    def state(self) -> Path:
        """State of the running processes: ids, ports, a copy of the spec; may be deleted when none runs."""
        return self.path / "state"

    def process_log(self, role: str) -> Path:
        """Return the log file of a role."""
        return self.logs / f"{role}.log"

    def create(self) -> RunFolder:
        """Create missing folders, readable by the owner only. Raises ConfigError if one cannot be created."""
        try:
            for folder in (self.path, self.log, self.rows, self.versions, self.logs, self.state):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "run folder",
                "",
                f"{self.path} cannot be created ({error.filename}: {error.strerror})",
                "the path of a folder that exists or can be created by this user",
                "name another with --folder (backtest and replay: --keep)",
            ) from error
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Settings that all services of a run share."""

    run_folder: str = deployment(
        "folder of all data of a run on this machine; --folder overrides it",
        Text("a path"),
        default="freshet-run",
    )
    log_url: str = deployment("the event log; without it, log/ of the run folder", URL, default="")
    rows_url: str = deployment("the row store; without it, rows/ of the run folder", URL, default="")
    versions_url: str = deployment(
        "the version store; without it, versions/ of the run folder", URL, default=""
    )
    bind_address: str = deployment(
        "address that services listen on; 0.0.0.0 accepts connections from the network",
        HOST,
        default="127.0.0.1",
    )
    hosts: str = deployment(
        "host names that HTTP listeners accept, and origins whose pages may call them, besides localhost, "
        "addresses, this machine's name and names without dots; separated by commas, `.example.com` matches "
        "all names below it",
        HOSTS,
        default="",
    )
    log_level: Literal["debug", "info", "warning", "error"] = deployment(
        "lowest severity of messages that are logged",
        Choice(("debug", "info", "warning", "error")),
        default="info",
    )
    log_format: Literal["json", "text"] = deployment(
        "a JSON object a line, or text for people", Choice(("json", "text")), default="json"
    )
    drain_ms: int = deployment(
        "how long a stop waits for work in progress, over all stages; work that is cancelled then is logged. "
        "`freshet up` kills processes that still run 5 s later; other supervisors should wait as long",
        Duration(0, HOUR),
        default=10 * SECOND,
    )

    max_connections: int = deployment(
        "HTTP connections that gateway, inference and console each hold at once; while there are more, each "
        "request gets 503 and its connection is closed. Fewer if the limit of open files is lower",
        Integer(16, 1_000_000),
        default=2_000,
    )
    trusted_proxies: int = deployment(
        "number of own proxies before gateway, inference and console, whose X-Forwarded-For is trusted: a "
        "client's address is the one that the outermost of them reports",
        Integer(0, 10),
        default=0,
    )
    audit_file: str = deployment(
        "audit log of promotions, rollbacks, and tokens created or removed, with the principal; without it, "
        "audit.jsonl of the run folder. `freshet audit` reads it",
        PATH,
        default="",
    )
    tokens_file: str = deployment(
        "the tokens that gateway, inference and console accept over HTTP and gRPC, each with its scopes; "
        "`freshet token` writes it, and a change applies within a second. Without it, gateway and inference "
        "accept every client",
        PATH,
        default="",
    )
    client_token_file: str = deployment(
        "a file with the token that `freshet rank`, `load`, `replay` and `simulate`, freshet.local and the "
        "console's page send to services that require one",
        PATH,
        default="",
    )

    @property
    def run(self) -> RunFolder:
        """Layout of the run folder."""
        return RunFolder(Path(self.run_folder))

    @property
    def audit(self) -> Path:
        """Path of the audit log."""
        return Path(self.audit_file) if self.audit_file else self.run.audit


@dataclass(frozen=True, slots=True, kw_only=True)
class Http:
    """TLS of all HTTP listeners, with health and metrics, and of the HTTP clients."""

    cert_file: str = deployment("the certificate of every HTTP listener; without it no TLS", PEM, default="")
    key_file: str = deployment("the private key of the certificate", PEM, default="")
    ca_file: str = deployment(
        "the authority that signs the certificates of services and clients; a process that is only a client "
        "sets this alone",
        PEM,
        default="",
    )
    client_certs: Literal["none", "optional", "required"] = deployment(
        "whether a listener requires clients to present a certificate signed by ca_file; optional: a "
        "certificate that a client presents must be valid",
        Choice(("none", "optional", "required")),
        default="none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpc:
    """TLS, tokens and message size of gRPC between services."""

    ca_file: str = deployment(
        "PEM of the authority that signs both sides' certificates; without it connections are not encrypted",
        PATH,
        default="",
    )
    cert_file: str = deployment("PEM of this service's certificate", PATH, default="")
    key_file: str = deployment("PEM of this service's private key", PATH, default="")
    token_file: str = deployment(
        "a file with the tokens between services, one a line: clients send the first, servers accept all, "
        "and a change applies within a second. Without it servers require no token",
        PATH,
        default="",
    )
    max_message_bytes: int = deployment(
        "size of a message between services; a larger one is sent in at most 64 pieces, and a process checks "
        "at start that these suffice for the spec's batches. The same on every service of a model",
        Integer(KIB, GIB),
        default=64 * MIB,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """The schema registry for event topics in the format confluent; the joiner is its client."""

    url: str = deployment(
        "URL of a registry with Confluent's REST API, http://HOST:PORT; several separated by commas",
        Text("http://HOST:PORT or https://HOST:PORT", r"https?://.+"),
        default="",
    )
    user: str = deployment("user name; needs a password file", Text("a name"), default="")
    password_file: str = deployment("a file with the user's password", PATH, default="")
    token_file: str = deployment("a file with a bearer token, instead of a user", PATH, default="")
    ca_file: str = deployment(
        "PEM of the authority that signs the registry's certificate; without it the system's",
        PATH,
        default="",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """OpenTelemetry traces of single events, off by default; they need the extra `tracing`.

    OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_… and OTEL_BSP_SCHEDULE_DELAY apply too.
    """

    ratio: float = deployment(
        "share of events that are traced, sampled by request id, so every service traces the same; 0: none",
        Number(0, 1),
        default=0.0,
    )
    endpoint: str = deployment(
        "the OTLP receiver of spans over HTTP; without it OTEL_EXPORTER_OTLP_ENDPOINT, or this machine's",
        Text("a URL such as http://collector:4318", r"https?://[^\s@]+"),
        default="",
    )
    queue_spans: int = deployment(
        "spans queued for export; more are dropped and counted", Integer(1, 1_000_000), default=8_192
    )
