"""The composition root: the adapters and parts of each service. The only importer of services.

Each runner blocks until `stop` is set, then drains. A runner imports its service itself, so that a process
loads only its own modules.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from freshet.adapters import open_eventlog, open_rowstore, open_versions
from freshet.apps.metrics import JOINER_METRICS
from freshet.apps.row_memory import shard_rows_bound
from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.settings import Common, Settings
from freshet.config.settings import Gateway as GatewaySettings
from freshet.config.settings import Inference as InferenceSettings
from freshet.config.spec.identity import identity_hash
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import load_schemas
from freshet.errors import ConfigError
from freshet.extras import how_to_install
from freshet.http.addresses import Address, reachable_host
from freshet.http.admin import Admin
from freshet.observability.metrics import register
from freshet.process.lifecycle import CLOSE_S, Cleanup, Pulse, interruptible_start
from freshet.process.telemetry import service_registry

if TYPE_CHECKING:
    from freshet.gateway.service import Gateway
    from freshet.http.authenticator import Authenticator
    from freshet.http.server import Listener
    from freshet.http.token_files import TokenFile
    from freshet.inference.service import Inference
    from freshet.log.schema_registry import RestRegistry
    from freshet.rpc.public_server import PublicServer

logger = structlog.get_logger("freshet.lifecycle")

Runner = Callable[[Spec, Settings, threading.Event], None]


def run_gateway(spec: Spec, settings: Settings, stop: threading.Event) -> None:
    """Run a gateway: events from HTTP and gRPC to the log."""
    from freshet.gateway.service import Gateway, codecs_of, run
    from freshet.http.browser_checks import AllowedSites
    from freshet.process.memory import shorten_pauses

    with Cleanup(CLOSE_S) as cleanup:
        log = open_eventlog(settings.common.log_url)
        cleanup.add("log", log.close)
        schemas = load_schemas(spec)
        roles = {s: schemas.of(s) for s in ("served", "shown", "action") if _has(spec, s)}
        codecs = codecs_of(spec, roles, log)
        shorten_pauses()
        build = partial(
            Gateway,
            spec,
            log,
            codecs,
            settings.gateway,
            authenticator=build_authenticator(
                settings.common,
                requests_per_s=settings.gateway.client_requests_per_s,
                events_per_s=settings.gateway.client_events_per_s,
            ),
            sites=AllowedSites(settings.common.bind_address, settings.common.hosts),
        )
        grpc_listener = gateway_grpc_listener(settings.gateway, settings.common)
        run(build, settings.gateway.port, settings.common, stop=stop, grpc_listener=grpc_listener)


def run_joiner(spec: Spec, settings: Settings, stop: threading.Event) -> None:
    """Run a joiner: events to samples."""
    from freshet.joiner.service import JoinerStatus
    from freshet.joiner.start import assignment_of, intervals_of, make

    with Cleanup() as cleanup:
        log = open_eventlog(settings.common.log_url)
        cleanup.add("log", log.close)
        latest: list[JoinerStatus] = []
        pulse = Pulse()

        def note(status: JoinerStatus) -> None:
            latest[:] = [status]

        registry = service_registry()
        register(registry, JOINER_METRICS, lambda: latest[0] if latest else None)
        admin = Admin(
            settings.common.bind_address,
            settings.joiner.admin_port,
            hosts=settings.common.hosts,
            registry=registry,
            ready=lambda: (
                latest[0].trouble
                if latest
                else "the state is being rebuilt from the log, or another process holds the membership lease"
            ),
            status=lambda: _joiner_status(latest),
            stuck=pulse.stuck,
        )
        cleanup.add("admin", admin.close)
        intervals = intervals_of(
            log,
            commit_interval_ms=settings.joiner.commit_interval_ms,
            poll_records=settings.joiner.read_records,
        )
        shared = assignment_of(spec, log, settings.joiner.name)
        if shared:
            cleanup.add("claims", shared[0].close)
        external = external_registry(settings)
        joiner = make(
            spec,
            log,
            assignment=shared and shared[1],
            external_schemas=external,
            intervals=intervals,
            stop=stop,
        )
        joiner.pulse, joiner.on_status = pulse, note
        joiner.run()


def external_registry(settings: Settings) -> RestRegistry | None:
    """Return a client of the schema registry that the settings name; None if they name none."""
    if not settings.registry.url:
        return None
    from freshet.log.schema_registry import Access, RestRegistry

    return RestRegistry(
        Access(
            settings.registry.url,
            settings.registry.user,
            settings.registry.password_file,
            settings.registry.token_file,
            settings.registry.ca_file,
        )
    )


def run_trainer(spec: Spec, settings: Settings, stop: threading.Event) -> None:
    """Run a trainer: with rows of its own, or as a rank with rows elsewhere."""
    from freshet.apps.trainer import run

    run(spec, settings, stop)


def run_embedder(spec: Spec, settings: Settings, stop: threading.Event) -> None:
    """Run an embedder: samples with their rows to trainer ranks."""
    from freshet.apps.embedder import run

    run(spec, settings, stop)


def run_paramserver(spec: Spec, settings: Settings, stop: threading.Event) -> None:
    """Run a paramserver: a shard of the rows."""
    from freshet.apps.embedder import build_transport
    from freshet.log.topics import ModelContext
    from freshet.paramserver.balancer import Bounds
    from freshet.paramserver.service import ParamServer, ShardAddress

    transport = build_transport(settings, spec)
    rows_bound = shard_rows_bound(settings)
    bounds = Bounds(
        settings.paramserver.rebalance_unevenness,
        settings.paramserver.rebalance_interval_ms / 1000,
        settings.paramserver.memory_bytes,
    )
    place = ShardAddress(
        settings.paramserver.name,
        settings.common.bind_address,
        settings.paramserver.port,
        settings.paramserver.advertised_host,
    )
    with Cleanup(CLOSE_S) as cleanup:
        made: list[ParamServer] = []
        registry = service_registry()
        admin = Admin(
            settings.common.bind_address,
            settings.paramserver.admin_port,
            hosts=settings.common.hosts,
            registry=registry,
            ready=lambda: made[0].ready() if made else "claiming the membership lease",
            status=lambda: made[0].status() if made else {},
            progress=lambda: made[0].progress() if made else {},
        )
        cleanup.add("admin", admin.close)
        log = open_eventlog(settings.common.log_url)
        cleanup.add("log", log.close)
        rows = open_rowstore(settings.common.rows_url)
        cleanup.add("rows", rows.close)
        spec_hash = identity_hash(spec, load_schemas(spec))
        with interruptible_start(stop):
            made.append(
                ParamServer(
                    ModelContext.open(spec, spec_hash, log),
                    rows,
                    place,
                    transport,
                    bounds=bounds,
                    rows_bound=rows_bound,
                    stop=stop,
                )
            )
        if not made:
            return
        made[0].register(registry)
        made[0].run(stop, drain_s=settings.common.drain_ms / 1000)


def run_inference(spec: Spec, settings: Settings, stop: threading.Event) -> None:
    """Run an inference server."""
    from freshet.inference.service import Parts, run
    from freshet.process.memory import shorten_pauses

    with Cleanup(CLOSE_S) as cleanup:
        log = open_eventlog(settings.common.log_url)
        cleanup.add("log", log.close)
        rows = open_rowstore(settings.common.rows_url)
        cleanup.add("rows", rows.close)
        versions = open_versions(settings.common.versions_url)
        cleanup.add("versions", versions.close)
        schemas = load_schemas(spec)
        parts = Parts(spec, identity_hash(spec, schemas), schemas.served, log, rows, versions)
        run(
            parts,
            settings.inference,
            settings.common,
            stop=stop,
            ready=lambda _: shorten_pauses(),
            grpc_listener=inference_grpc_listener(settings.inference, settings.common),
            authenticator=build_authenticator(
                settings.common, requests_per_s=settings.inference.client_requests_per_s
            ),
        )


def gateway_grpc_listener(settings: GatewaySettings, common: Common) -> Callable[[Gateway], Listener] | None:
    """Return a factory of the gateway's gRPC listener; None without a port. Raises as
    `inference_grpc_listener`."""
    if not settings.grpc_port:
        return None
    with _needs_grpc():
        from freshet.gateway.grpc_service import add_events
    open_listener = _listener_factory(settings, common, "FRESHET_GATEWAY_GRPC_MAX_BODIES_BYTES")

    def build(gateway: Gateway) -> Listener:
        listener = open_listener(gateway.grpc_counts, authenticator=gateway.authenticator)
        add_events(listener, gateway.endpoints)
        return listener

    return build


def inference_grpc_listener(
    settings: InferenceSettings, common: Common
) -> Callable[[Inference], Listener] | None:
    """Return a factory of inference's gRPC listener; None without a port.

    Raises ConfigError if the extra `grpc` is not installed, or certificates cannot be read.
    """
    if not settings.grpc_port:
        return None
    with _needs_grpc():
        from freshet.inference.oip_grpc import add_oip
    open_listener = _listener_factory(settings, common, "FRESHET_INFERENCE_GRPC_MAX_BODIES_BYTES")

    def build(server: Inference) -> Listener:
        listener = open_listener(server.grpc_counts, authenticator=server.authenticator)
        add_oip(listener, server.oip)
        return listener

    return build


def _listener_factory(
    settings: GatewaySettings | InferenceSettings, common: Common, bytes_setting: str
) -> partial[PublicServer]:
    """Return a factory of a public gRPC listener; it still needs counts and the authenticator."""
    with _needs_grpc():
        from freshet.rpc.channel import transport_of
        from freshet.rpc.public_server import PublicServer
    transport = transport_of(
        ca_file=settings.grpc_ca_file,
        cert_file=settings.grpc_cert_file,
        key_file=settings.grpc_key_file,
        external=True,
        max_message_bytes=settings.max_body_bytes,
    )
    return partial(
        PublicServer,
        str(Address(common.bind_address, settings.grpc_port)),
        transport,
        message_timeout_s=settings.body_timeout_ms / 1e3,
        budget_bytes=settings.grpc_max_bodies_bytes,
        budget_setting=bytes_setting,
    )


def run_console(spec: Spec, settings: Settings, stop: threading.Event) -> None:
    """Run the console."""
    from freshet.apps.ports import optional_ports_of, ports_of
    from freshet.console.instances import listed_places, local_places
    from freshet.console.service import Sources, run
    from freshet.http.authenticator import Authenticator, RateLimits
    from freshet.http.token_files import CONSOLE_HINT, console_entry, console_token
    from freshet.observability.audit import Audit

    run_folder = settings.common.run
    audit = Audit(settings.common.audit)
    with Cleanup(CLOSE_S) as cleanup:
        cleanup.add("audit", audit.close)
        token = console_token(settings.console.token, run_folder.state, settings.console.token_file)
        if settings.console.services:
            places = listed_places(settings.console.services)
        else:
            ports = {name: port for name, port in ports_of(settings).items() if name != "console"}
            places = local_places(
                ports, optional_ports_of(settings), reachable_host(settings.common.bind_address)
            )
        log = open_eventlog(settings.common.log_url)
        cleanup.add("log", log.close)
        versions = open_versions(settings.common.versions_url)
        cleanup.add("versions", versions.close)
        run(
            Sources(
                spec,
                run_folder.path,
                log,
                versions,
                places,
                Path(settings.console.token_file) if settings.console.token_file else None,
            ),
            settings.console,
            settings.common,
            authenticator=Authenticator(
                _tokens_of(settings.common),
                more=[console_entry(token)],
                hint=CONSOLE_HINT,
                on_refused=audit.on_refused,
                limits=RateLimits(trusted_proxies=settings.common.trusted_proxies),
            ),
            audit=audit,
            stop=stop,
        )


RUNNERS: Mapping[str, Runner] = {
    "gateway": run_gateway,
    "joiner": run_joiner,
    "embedder": run_embedder,
    "trainer": run_trainer,
    "paramserver": run_paramserver,
    "inference": run_inference,
    "console": run_console,
}


def build_authenticator(
    common: Common,
    clock: Clock = SYSTEM_CLOCK,
    *,
    requests_per_s: float = 0.0,
    events_per_s: float = 0.0,
) -> Authenticator | None:
    """Build the authenticator and rate limiter of public requests; None if neither tokens nor limits are set.

    Raises ConfigError if the file of tokens is invalid.
    """
    from freshet.http.authenticator import Authenticator, RateLimits

    tokens = _tokens_of(common, clock)
    if tokens is None and not (requests_per_s or events_per_s):
        return None
    return Authenticator(
        tokens, clock, limits=RateLimits(requests_per_s, events_per_s, common.trusted_proxies)
    )


def _tokens_of(common: Common, clock: Clock = SYSTEM_CLOCK) -> TokenFile | None:
    from freshet.http.token_files import TokenFile

    return TokenFile(common.tokens_file, clock) if common.tokens_file else None


@contextlib.contextmanager
def _needs_grpc() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            "environment", "grpc_port", error.name, "the packages of the extra grpc",
            f"{how_to_install('grpc')}; or leave the port out",
        ) from error  # fmt: skip


def _has(spec: Spec, role: str) -> bool:
    return role != "shown" or spec.events.shown is not None


def _joiner_status(latest: list[Any]) -> dict[str, Any]:
    if not latest:
        return {}
    status = latest[0]
    return {
        "events": status.events,
        "samples": status.samples,
        "commits": status.commits,
        "watermark_ms": dict(status.watermark_ms),
        "now_ms": status.now_ms,
        "clock_step_ms": status.clock_step_ms,
        "disputed_ms": dict(status.disputed_ms),
        "refused": {role: dict(counts) for role, counts in status.counts.refused.items()},
        "bad_times": dict(status.bad_times),
        "out_of_bounds": dict(status.counts.out_of_bounds),
        "lag": dict(status.lag),
        "ledger": status.ledger.to_json(),
        "partitions": status.growth.to_json(),
        "losses": dict(status.losses),
        "placing": dict(status.placing),
    }
