"""Settings common to all services, and the object that holds the settings of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from freshet.config.options import Choice, Duration, Integer, Text, option
from freshet.config.settings.network import HOST, HOSTS, HOUR, PATH, SECOND, URL, Grpc, Http, Registry, Traces
from freshet.config.settings.pipeline_services import Embedder, Joiner, Paramserver, Trainer
from freshet.config.settings.public_services import Console, Gateway, Inference, Simulator
from freshet.config.settings.run_folder import RunFolder

__all__ = ["Common", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Settings that all services of a run share."""

    run_folder: str = option(
        "deployment",
        "folder of all data of a run on this machine; --folder overrides it",
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
        "address that services listen on; 0.0.0.0 accepts connections from the network",
        HOST,
        default="127.0.0.1",
    )
    hosts: str = option(
        "deployment",
        "host names that HTTP listeners accept, and origins whose pages may call them, besides localhost, "
        "addresses, this machine's name and names without dots; separated by commas, `.example.com` matches "
        "all names below it",
        HOSTS,
        default="",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "deployment",
        "lowest severity of messages that are logged",
        Choice(("debug", "info", "warning", "error")),
        default="info",
    )
    log_format: Literal["json", "text"] = option(
        "deployment", "a JSON object a line, or text for people", Choice(("json", "text")), default="json"
    )
    drain_ms: int = option(
        "deployment",
        "how long a stop waits for work in progress, over all stages; work that is cancelled then is logged. "
        "`freshet up` kills processes that still run 5 s later; other supervisors should wait as long",
        Duration(0, HOUR),
        key="drain",
        default=10 * SECOND,
    )

    max_connections: int = option(
        "deployment",
        "HTTP connections that gateway, inference and console each hold at once; while there are more, each "
        "request gets 503 and its connection is closed. Fewer if the limit of open files is lower",
        Integer(16, 1_000_000),
        default=2_000,
    )
    trusted_proxies: int = option(
        "deployment",
        "number of own proxies before gateway, inference and console, whose X-Forwarded-For is trusted: a "
        "client's address is the one that the outermost of them reports",
        Integer(0, 10),
        default=0,
    )
    audit_file: str = option(
        "deployment",
        "audit log of promotions, rollbacks, and tokens created or removed, with the principal; without it, "
        "audit.jsonl of the run folder. `freshet audit` reads it",
        PATH,
        default="",
    )
    tokens_file: str = option(
        "deployment",
        "the tokens that gateway, inference and console accept over HTTP and gRPC, each with its scopes; "
        "`freshet token` writes it, and a change applies within a second. Without it, gateway and inference "
        "accept every client",
        PATH,
        default="",
    )
    client_token_file: str = option(
        "deployment",
        "a file with the token that `freshet rank`, `replay` and `simulate`, freshet.local and the console's "
        "page send to services that require one",
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

    @property
    def stores_versions_itself(self) -> bool:
        """Whether the version store is in the run folder."""
        return self.versions_url == f"file:{self.run.versions}"


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
