"""`freshet replay`: recorded events through a running gateway, or into a log of their own, joined and learned
from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from freshet.cli.options import FILE, PATH, SEED, FiniteRange, examples, json_option
from freshet.errors import ConfigError
from freshet.terminal import emit

if TYPE_CHECKING:
    from freshet.config.spec import Spec
    from freshet.config.spec.model import TimeField
    from freshet.recordings.event_times import EventTimes, SetAside
    from freshet.recordings.sources import Piece, Role

__all__ = ["command"]


@click.group()
def command() -> None:
    """Send recorded events through the gateway, or straight into a log, joined and learned from."""


def _common(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option("--gateway", help="URL of a running gateway to send to. Without it: --direct."),
            click.option(
                "--direct", is_flag=True, help="Into a log of their own, joined and learned from at once."
            ),
            click.option(
                "--keep",
                type=PATH,
                help="Keep log, rows and versions here (--direct); new or empty.",
            ),
            click.option(
                "--lanes", type=click.IntRange(1, 64), help="Lanes; 1 gives the same result each time."
            ),
            click.option(
                "--speed",
                type=FiniteRange(0, min_open=True),
                help="Events a second; without it, as fast as possible.",
            ),
            json_option,
        )
    ):
        function = option(function)
    return function


@command.command("online-retail", epilog=examples("freshet replay online-retail retail-data --lanes 1"))
@click.argument("path", type=PATH)
@click.option("--spec", "spec_file", type=PATH, help="Instead of ours.")
@click.option(
    "--seed",
    type=SEED,
    default=0,
    show_default=True,
    help="Of the impressions that were not bought, and the delays.",
)
@_common
def retail_command(path: Path, spec_file: Path | None, seed: int, **options: Any) -> None:
    """The Online Retail II data (UCI, D. Chen, CC BY 4.0) as a click stream.

    PATH is online_retail_ii_events.csv.gz or its folder. Users, items, prices and times are real; the
    impressions that were not bought, and the delays, are simulated.
    """
    from freshet.config.spec import load_spec
    from freshet.recordings.sources import ONLINE_RETAIL, online_retail

    _run(load_spec(spec_file or ONLINE_RETAIL), online_retail(path, seed), **options)


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
    """Events of your own from files, one a stream, in order of time: JSON lines, csv, Parquet or Arrow, gzip
    or not."""
    from freshet.apps.replay import streams_of
    from freshet.config.spec import load_spec
    from freshet.config.spec.schemas import load_schemas, written_by_us
    from freshet.recordings.event_times import EventTimes
    from freshet.recordings.sources import events_of_files

    spec = load_spec(spec_file)
    spec = written_by_us(spec)
    files: dict[Role, Path] = {"served": impressions, "action": actions}
    if shown is not None:
        files["shown"] = shown
    times: dict[Role, TimeField] = {stream.role: stream.time for stream in streams_of(spec)}
    loaded = load_schemas(spec)
    schemas = {role: loaded.of(role) for role in times}
    seen = {role: EventTimes(f"{time.path}:{time.unit}", time.unit) for role, time in times.items()}
    _run(spec, events_of_files(files, times, schemas, spec.files, seen), seen=seen, **options)


@command.command(
    "topics", epilog=examples("freshet replay topics new.toml --from freshet-run --keep new-run")
)
@click.argument("spec_file", type=PATH)
@click.option("--from", "source", type=PATH, required=True, help="Run folder that has the events.")
@click.option("--since", type=click.DateTime(), help="Only what its log took from then on (UTC).")
@click.option("--until", type=click.DateTime(), help="Only what its log took before then (UTC).")
@_common
def topics_command(
    spec_file: Path, source: Path, since: datetime | None, until: datetime | None, **options: Any
) -> None:
    """Events of another run, as it acknowledged them: how a new model learns from an old one's log.

    Records that the spec cannot read are set aside: they are counted by stream and reason, and the first of
    each is shown. If none of a stream's can be read, the command ends with an error.

    Into a log of their own only; with --keep the folder can go on with `freshet up --folder`.
    """
    from freshet.adapters import open_eventlog
    from freshet.config.spec import load_spec
    from freshet.process.run_folder import existing_folder
    from freshet.recordings.event_times import SetAside
    from freshet.recordings.topics import events_of_topics

    if options["gateway"]:
        raise ConfigError(
            "replay topics",
            "--gateway",
            options["gateway"],
            "no gateway",
            "topics are copied as they are into a log of their own; --keep keeps it",
        )
    spec = load_spec(spec_file)
    log = open_eventlog(f"sqlite:{existing_folder(source) / 'log'}")
    try:
        set_aside = SetAside()
        pieces = events_of_topics(log, spec, set_aside, since_ms=_ms(since), until_ms=_ms(until))
        _run(spec, pieces, set_aside=set_aside, **options)
    finally:
        log.close()


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.replace(tzinfo=UTC).timestamp() * 1000)


def _run(
    spec: Spec,
    pieces: Iterable[Piece],
    gateway: str | None,
    direct: bool,
    keep: Path | None,
    lanes: int | None,
    speed: float | None,
    as_json: bool,
    seen: Mapping[Role, EventTimes] | None = None,
    set_aside: SetAside | None = None,
) -> None:
    from freshet.apps.replay import replay, send
    from freshet.apps.results import outcome_text
    from freshet.config.settings import load_settings
    from freshet.http import tls
    from freshet.http.token_file import read_token

    if gateway and direct:
        raise ConfigError("replay", "--gateway", gateway, "either --gateway or --direct")
    began = time.perf_counter()

    def print_progress(stage: str, done: int) -> None:
        rate = done / max(time.perf_counter() - began, 1e-9)
        click.echo(f"\r{stage}: {done:,} ({rate:,.0f}/s)  ", nl=False, err=True)

    progress = (lambda stage, done: None) if as_json else print_progress
    if gateway:
        settings = load_settings()
        tls.use(settings)
        token = read_token(settings.common.client_token_file)
        sent = send(spec, pieces, gateway, speed, progress, token)
        emit({"events": sent}, as_json=as_json, text=f"\nsent {sent:,} events")
        return
    outcome = replay(
        spec, pieces, keep=keep, lanes=lanes, speed=speed, progress=progress, set_aside=set_aside
    )
    outcome = replace(outcome, times={str(role): times for role, times in (seen or {}).items()})
    emit(outcome.as_json(), as_json=as_json, text="\n" + outcome_text(outcome))
