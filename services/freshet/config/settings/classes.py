"""Settings as frozen objects, a class a service. Names carry units; every bound says what happens when it
is reached.
"""

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
    hosts: str = option(
        "deployment",
        "names by which HTTP ports may be asked, and sites whose pages may ask them, besides localhost, "
        "addresses, this machine's name and names without dots; commas between, `.example.com` stands for "
        "all names below it",
        HOSTS,
        default="",
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
        "how long a stop waits for work in hand, in all stages together; what is cut off then is logged. "
        "What still runs 5 s later is killed by `freshet up`; other supervisors should wait as long",
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
