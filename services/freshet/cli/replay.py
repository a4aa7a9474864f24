"""`freshet replay`: send recorded events to a gateway, or join and learn them in a log of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from freshet.cli.options import FILE, PATH, FiniteRange, examples, json_option
from freshet.errors import ConfigError
from freshet.terminal import emit

if TYPE_CHECKING:
    from freshet.config.spec import Spec
    from freshet.config.spec.model import TimeField
    from freshet.recordings.event_times import EventTimes, SetAside
    from freshet.recordings.sources import Piece, Role


@click.group()
def command() -> None:
    """Send recorded events to a gateway, or join and learn them in a log of their own."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The options that all sources of events share; see their help."""

    gateway: str | None
    direct: bool
    keep: Path | None
    lanes: int | None
    speed: float | None
    as_json: bool


def _common(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option("--gateway", help="URL of a running gateway. Without it: --direct."),
            click.option(
                "--direct", is_flag=True, help="Join and learn in a log of their own, without services."
            ),
            click.option(
                "--keep",
                type=PATH,
                help="New or empty folder for log, rows and versions (without --gateway).",
            ),
            click.option(
                "--lanes",
                type=click.IntRange(1, 64),
                help="Lanes; 1 gives the same result each time (without --gateway).",
            ),
            click.option(
                "--speed",
                type=FiniteRange(0, min_open=True),
                help="Events a second; by default as fast as possible.",
            ),
            json_option,
        )
    ):
        function = option(function)
    return function


@command.command(
    "files",
    epilog=examples(
        "freshet replay files freshet.toml --impressions served.jsonl --actions clicks.jsonl",
        "freshet replay files freshet.toml --impressions served.csv.gz --actions clicks.csv.gz "
        "--gateway http://127.0.0.1:7000 --speed 500",
    ),
)
@click.argument("spec_file", type=PATH)
@click.option("--impressions", type=FILE, required=True)
@click.option("--shown", type=FILE)
@click.option("--actions", type=FILE, required=True)
@_common
def files_command(
    spec_file: Path, impressions: Path, shown: Path | None, actions: Path, **options: Any
) -> None:
    """Replay events of your own from files, one per stream, in order of time: JSON lines, csv, Parquet or
    Arrow, gzip or not."""
    from freshet.apps.replay import streams_of
    from freshet.config.spec import load_spec
    from freshet.config.spec.schemas import load_schemas, written_by_us
    from freshet.recordings.event_times import EventTimes
    from freshet.recordings.sources import events_of_files

    spec = written_by_us(load_spec(spec_file))
    files: dict[Role, Path] = {"served": impressions, "action": actions}
    if shown is not None:
        files["shown"] = shown
    times: dict[Role, TimeField] = {stream.role: stream.time for stream in streams_of(spec)}
    loaded = load_schemas(spec)
    schemas = {role: loaded.of(role) for role in times}
    seen = {role: EventTimes(f"{time.path}:{time.unit}", time.unit) for role, time in times.items()}
    _run(spec, events_of_files(files, times, schemas, spec.files, seen), _Options(**options), seen)


@command.command(
    "topics", epilog=examples("freshet replay topics new.toml --from freshet-run --keep new-run")
)
@click.argument("spec_file", type=PATH)
@click.option("--from", "source", type=PATH, required=True, help="Run folder with the events.")
@click.option("--since", type=click.DateTime(), help="Only events that its log received from then on (UTC).")
@click.option("--until", type=click.DateTime(), help="Only events that its log received before then (UTC).")
@_common
def topics_command(
    spec_file: Path, source: Path, since: datetime | None, until: datetime | None, **options: Any
) -> None:
    """Replay acknowledged events of another run, so that a new model learns from an old one's log.

    Records that the spec cannot read are set aside, counted by stream and reason, and the first of each is
    shown. If no record of a stream can be read, the command ends with an error.

    The events go to a log of their own; with --keep, `freshet up --folder` can continue with it.
    """
    from freshet.adapters import open_eventlog
    from freshet.config.spec import load_spec
    from freshet.process.run_state import existing_folder
    from freshet.recordings.event_times import SetAside
    from freshet.recordings.sources import events_of_topics

    if options["gateway"]:
        raise ConfigError(
            "replay topics",
            "--gateway",
            options["gateway"],
            "no gateway",
            "topics are copied unchanged into a log of their own; --keep keeps it",
        )
    spec = load_spec(spec_file)
    log = open_eventlog(f"sqlite:{existing_folder(source) / 'log'}")
    try:
        set_aside = SetAside()
        pieces = events_of_topics(log, spec, set_aside, since_ms=_ms(since), until_ms=_ms(until))
        _run(spec, pieces, _Options(**options), set_aside=set_aside)
    finally:
        log.close()


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.replace(tzinfo=UTC).timestamp() * 1000)


def _run(
    spec: Spec,
    pieces: Iterable[Piece],
    options: _Options,
    seen: Mapping[Role, EventTimes] | None = None,
    set_aside: SetAside | None = None,
) -> None:
    from freshet.apps.replay import replay, send
    from freshet.apps.results import odd_times, outcome_text
    from freshet.config.settings import load_settings
    from freshet.http import tls
    from freshet.http.token_files import read_token

    if options.gateway and options.direct:
        raise ConfigError("replay", "--gateway", options.gateway, "either --gateway or --direct")
    for name, given in (("--keep", options.keep), ("--lanes", options.lanes)):
        if options.gateway and given is not None:
            hint = "the gateway's services have a log and lanes of their own; leave it out, or --gateway"
            raise ConfigError("replay", name, str(given), f"no {name} beside --gateway", hint)
    began = time.perf_counter()

    def print_progress(stage: str, done: int) -> None:
        rate = done / max(time.perf_counter() - began, 1e-9)
        click.echo(f"\r{stage}: {done:,} ({rate:,.0f}/s)  ", nl=False, err=True)

    progress = (lambda stage, done: None) if options.as_json else print_progress
    if options.gateway:
        settings = load_settings()
        tls.use(settings)
        token = read_token(settings.common.client_token_file)
        sent = send(spec, pieces, options.gateway, options.speed, progress, token)
        odd = odd_times(seen or {})
        lines = [
            f"\nsent {sent:,} events",
            *(line for times in (seen or {}).values() for line in times.lines()),
        ]
        emit(
            {"events": sent, **({"times": odd} if odd else {})},
            as_json=options.as_json,
            text="\n".join(lines),
        )
        return
    outcome = replay(
        spec,
        pieces,
        keep=options.keep,
        lanes=options.lanes,
        speed=options.speed,
        progress=progress,
        set_aside=set_aside,
    )
    outcome = replace(outcome, times={str(role): times for role, times in (seen or {}).items()})
    emit(outcome.as_json(), as_json=options.as_json, text="\n" + outcome_text(outcome))
