"""`freshet load`: an open-loop load test of a running system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from freshet.cli.options import FILE, PATH, SEED, FiniteRange, examples, folder_option, json_option
from freshet.errors import ConfigError
from freshet.terminal import emit, say, table

if TYPE_CHECKING:
    import ssl

    from freshet.config.settings import Settings
    from freshet.config.spec.model import Spec
    from freshet.load.connections import Server
    from freshet.load.open_loop import Figures, Lane

EVERY_S = 5.0
MOST_PROBLEMS = 5


@click.command(
    epilog=examples(
        "freshet load freshet.toml --events 1000 --ranks 200 --seconds 60",
        "freshet load freshet.toml --ranks 500 --candidates 200 --inference https://ranks.example:443",
        "freshet load freshet.toml --events 5000 --batch 20 --keys reader=2000000",
    )
)
@click.argument("spec_file", type=PATH)
@folder_option
@click.option(
    "--events",
    type=FiniteRange(0, 1_000_000),
    default=0,
    show_default=True,
    help="Events a second, to the gateway.",
)
@click.option(
    "--ranks", type=FiniteRange(0, 100_000), default=0, show_default=True, help="Rank requests a second."
)
@click.option("--seconds", type=FiniteRange(1, 30 * 86_400), default=60, show_default=True, help="Duration.")
@click.option(
    "--gateway",
    multiple=True,
    metavar="URL",
    help="Gateway; may be repeated.  [default: this machine's]",
)
@click.option("--inference", multiple=True, metavar="URL", help="Inference server; likewise.")
@click.option(
    "--batch", type=click.IntRange(1, 10_000), default=1, show_default=True, help="Events per request."
)
@click.option(
    "--items", type=click.IntRange(1, 10_000), default=10, show_default=True,
    help="Items per impression, where the spec explodes an array.",
)  # fmt: skip
@click.option(
    "--actions",
    type=FiniteRange(0, 0.99),
    default=0.3,
    show_default=True,
    help="Share of actions among the events.",
)
@click.option(
    "--candidates",
    type=click.IntRange(1, 100_000),
    default=100,
    show_default=True,
    help="Candidates per rank request.",
)
@click.option(
    "--k", type=click.IntRange(1, 100_000), default=10, show_default=True, help="Items per ranking."
)
@click.option("--dry-run", is_flag=True, help="Do not log rankings as served.")
@click.option(
    "--rank-file", type=FILE, help="File of rank requests, a JSON object per line, instead of random ones."
)
@click.option(
    "--keys", multiple=True, metavar="FIELD=N",
    help="Distinct values of a field with rows; may be repeated.  [default: 100,000 for ids, 50 for others]",
)  # fmt: skip
@click.option(
    "--zipf",
    type=FiniteRange(0, 5),
    default=1.0,
    show_default=True,
    help="Exponent of the distribution of keys; 0: uniform.",
)
@click.option(
    "--connections",
    type=click.IntRange(1, 400),
    default=64,
    show_default=True,
    help="Concurrent connections, to gateway and to inference each.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(0.01, 600),
    default=5,
    show_default=True,
    help="Seconds for an answer, including the wait for a connection; then the request counts as failed.",
)
@click.option("--token-file", type=FILE, help="A file with the token that requests carry.")
@click.option(
    "--ca-file",
    type=FILE,
    help="CA certificates for https servers.  [default: those of this machine]",
)
@click.option("--seed", type=SEED, default=7, show_default=True, help="Seed of all random choices.")
@json_option
def command(spec_file: Path, folder: Path, as_json: bool, seconds: float, **how: Any) -> None:
    """Send random events and rank requests by SPEC_FILE's schemas to a running system, and print latencies.

    Requests are scheduled in advance and do not wait for answers (an open loop with Poisson arrivals). A
    latency begins when a request is due, even if it waits for a connection, so a stall of a second delays
    every request of that second. A failed request counts as slower than every successful one; a percentile
    among failed requests is shown as ">= 5,000.0".

    The model learns from these events, so use a system of its own. `freshet replay` sends real events.
    """
    import asyncio

    from freshet.config.settings import load_settings
    from freshet.config.spec import load_spec
    from freshet.load.open_loop import new_loop

    if not how["events"] and not how["ranks"]:
        raise click.UsageError("expected a rate: --events 1000, --ranks 200, or both")
    spec, settings = load_spec(spec_file), load_settings(run_folder=folder)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        whole = runner.run(_run(spec, settings, seconds, how, as_json))
    emit(
        {"spec": spec.name, "lanes": {name: figures.as_json() for name, figures in whole.items()}},
        as_json=as_json,
        text=summary_text(whole),
    )


async def _run(
    spec: Spec, settings: Settings, seconds: float, how: dict[str, Any], as_json: bool
) -> dict[str, Figures]:
    import asyncio
    import signal

    from freshet.load.open_loop import drive

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def end() -> None:
        stop.set()
        for number in numbers:  # a second signal ends at once, without waiting for answers
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, end)
    lanes = _lanes(spec, settings, how)
    try:
        return await drive(
            lanes,
            seconds,
            every_s=min(EVERY_S, seconds),
            report=lambda at_s, part: None if as_json else say(progress_line(at_s, part)),
            stop=stop,
        )
    finally:
        for lane in lanes:
            lane.connections.close()


def _lanes(spec: Spec, settings: Settings, how: dict[str, Any]) -> list[Lane]:
    from freshet.clock import SYSTEM_CLOCK
    from freshet.config.spec.schemas import load_schemas
    from freshet.http import tls
    from freshet.http.token_files import read_token
    from freshet.load.connections import Connections
    from freshet.load.open_loop import Lane
    from freshet.load.random_events import Draws, keys_of
    from freshet.load.requests import Events, Ranks, read_requests

    tls.use(settings)

    schemas = load_schemas(spec)
    keys = keys_of(spec, dict(map(_sized, how["keys"])), how["zipf"])
    token = read_token(str(how["token_file"] or settings.common.client_token_file))
    context = _context(str(how["ca_file"] or ""))

    def connections(servers: list[Server]) -> Connections:
        return Connections(servers, how["connections"], how["timeout_s"], token=token, tls=context)

    def draws(more: int) -> Draws:
        return Draws(how["seed"] + more, keys)

    lanes = []
    events = Events(
        spec, schemas, draws(0), SYSTEM_CLOCK, items=how["items"], actions=how["actions"], batch=how["batch"]
    )
    if how["events"]:
        servers = _servers("--gateway", how["gateway"], settings)
        rate = how["events"] / how["batch"]
        lanes.append(Lane("events", rate, events, connections(servers), how["seed"]))
    if how["ranks"]:
        servers = _servers("--inference", how["inference"], settings)
        ranks = (
            read_requests(how["rank_file"])
            if how["rank_file"]
            else Ranks(
                spec,
                schemas,
                draws(1),
                SYSTEM_CLOCK,
                candidates=how["candidates"],
                k=how["k"],
                dry_run=how["dry_run"],
                shown=events.remember,
            )
        )
        lanes.append(Lane("ranks", how["ranks"], ranks, connections(servers), how["seed"]))
    return lanes


def _context(ca_file: str) -> ssl.SSLContext:
    """Build the TLS context of the settings FRESHET_HTTP_*; `ca_file` replaces their CA."""
    import ssl

    from freshet.http import tls

    files = tls.client_files()
    ca, cert, key = ca_file or files.get("ca_file", ""), files.get("cert_file", ""), files.get("key_file", "")
    try:
        made = ssl.create_default_context(cafile=ca or None)
        if cert:
            made.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        named = ", ".join(filter(None, (ca, cert, key)))
        raise ConfigError("load", "--ca-file", named, "PEM files that can be read", str(error)) from error
    return made


def _servers(option: str, urls: tuple[str, ...], settings: Settings) -> list[Server]:
    from freshet.http import tls
    from freshet.http.addresses import Address, reachable_host
    from freshet.load.connections import Server, server_at

    if urls:
        return [server_at(option, url) for url in urls]
    port = settings.gateway.port if option == "--gateway" else settings.inference.port
    return [Server(Address(reachable_host(settings.common.bind_address), port), tls.scheme() == "https")]


def _sized(text: str) -> tuple[str, int]:
    field, _, number = text.rpartition("=")
    if not field or not number.isascii() or not number.isdigit() or not 0 < int(number) <= 100_000_000:
        raise ConfigError(
            "load", "--keys", text, "FIELD=N, with N from 1 to 100,000,000", "such as reader=1000000"
        )
    return field, int(number)


def progress_line(at_s: float, part: dict[str, Figures]) -> str:
    """Return rates, latencies and failures of each lane since the last line."""
    said = []
    for name, figures in part.items():
        p50, p99 = (figures.latency.percentile(p) for p in (50, 99))
        times = "" if p50 is None or p99 is None else f", p50 {p50.ms()} ms, p99 {p99.ms()} ms"
        failed = f", {figures.failed} failed" if figures.failed else ""
        said.append(f"{name} {_rate(name, figures):,.0f}/s{times}{failed}")
    return f"{at_s:7.0f} s  " + "   ".join(said)


def _rate(name: str, figures: Figures) -> float:
    return figures.events_per_s if name == "events" else figures.requests_per_s


def summary_text(whole: dict[str, Figures]) -> str:
    """Return the table of latencies, then answers, problems and warnings of each lane."""
    rows: list[list[object]] = []
    for name, figures in whole.items():
        latencies = figures.latency.all().values()
        rows.append([f"{name} latency", *("" if waited is None else waited.ms() for waited in latencies)])
        more = [("  from sending", figures.service), ("  sent late", figures.late)]
        if figures.failed:
            more.insert(0, ("  of answers", figures.latency.answered))
        if figures.freshness.count:
            more.append(("  freshness", figures.freshness))
        rows += [
            [f"{name} {caption}", *map(_ms, durations.figures().values())] for caption, durations in more
        ]
    lines = [table(["ms", "p50", "p90", "p99", "p99.9", "longest"], rows)]
    for name, figures in whole.items():
        answers = ", ".join(f"{kind}: {count:,}" for kind, count in figures.answers.most_common())
        lines.append(
            f"{name}: {_rate(name, figures):,.1f} a second, {figures.requests:,} requests; {answers}"
        )
        lines += [
            f"  first {kind}: {text}" for kind, text in list(figures.first_problem.items())[:MOST_PROBLEMS]
        ]
    lines += [_late(name, figures) for name, figures in whole.items() if figures.generator_late]
    return "\n".join(lines)


def _late(name: str, figures: Figures) -> str:
    late = figures.begun_late.figures()
    return (
        f"{name}: freshet load itself was late, before any wait for a connection: p99 {_ms(late['p99_ms'])} "
        f"ms, longest {_ms(late['max_ms'])} ms, which the latencies include: lower the rate, or send "
        "from one or more machines with free processor time"
    )


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"
