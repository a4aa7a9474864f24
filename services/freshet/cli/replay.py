"""`freshet replay`: recorded events through a running gateway, or straight into a log of their own, joined
and learned from."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from freshet.cli.options import emit, json_option
from freshet.cli.pipeline import Outcome, Pipeline, outcome_text
from freshet.errors import BadInput, ConfigError
from freshet.features import EventExtractor, JsonTranscoder, partition_of, take
from freshet.recordings.sources import ONLINE_RETAIL, Piece, Role, events_of_files, online_retail
from freshet.spec import Spec, load_spec
from freshet.spec.schemas import Schemas, load_schemas
from freshet.types import Append

__all__ = ["command", "replay"]

DAY_MS = 86_400_000


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
                "--keep", type=click.Path(path_type=Path), help="Keep log, rows and versions here (--direct)."
            ),
            click.option(
                "--lanes", type=click.IntRange(1, 64), help="Lanes; 1 gives the same result each time."
            ),
            click.option("--speed", type=float, help="Events a second; without it, as fast as possible."),
            json_option,
        )
    ):
        function = option(function)
    return function


@command.command("online-retail")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--spec", "spec_file", type=click.Path(path_type=Path), default=ONLINE_RETAIL, help="Instead of ours."
)
@click.option(
    "--seed", default=0, show_default=True, help="Of the impressions that were not bought, and the delays."
)
@_common
def retail_command(path: Path, spec_file: Path, seed: int, **options: Any) -> None:
    """The Online Retail II data (UCI, D. Chen, CC BY 4.0) as a click stream.

    PATH is online_retail_ii_events.csv.gz or its folder. Users, items, prices and times are real; the
    impressions that were not bought, and the delays, are simulated.
    """
    _run(load_spec(spec_file), online_retail(path, seed), **options)


@command.command("files")
@click.argument("spec_file", type=click.Path(path_type=Path))
@click.option("--impressions", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--shown", type=click.Path(path_type=Path, exists=True))
@click.option("--actions", type=click.Path(path_type=Path, exists=True), required=True)
@_common
def files_command(
    spec_file: Path, impressions: Path, shown: Path | None, actions: Path, **options: Any
) -> None:
    """Events of your own from files: .jsonl, .csv or .parquet (.gz too), one a stream, in order of time."""
    spec = load_spec(spec_file)
    files: dict[Role, Path] = {"served": impressions, "action": actions}
    if shown is not None:
        files["shown"] = shown
    times = {stream.role: stream.time.path for stream in _streams(spec)}
    _run(spec, events_of_files(files, times), **options)


def _run(
    spec: Spec,
    pieces: Iterable[Piece],
    gateway: str | None,
    direct: bool,
    keep: Path | None,
    lanes: int | None,
    speed: float | None,
    as_json: bool,
) -> None:
    if gateway and direct:
        raise ConfigError("replay", "--gateway", gateway, "either --gateway or --direct")
    began = time.perf_counter()

    def tell(stage: str, done: int) -> None:
        rate = done / max(time.perf_counter() - began, 1e-9)
        click.echo(f"\r{stage}: {done:,} ({rate:,.0f}/s)  ", nl=False, err=True)

    progress = (lambda stage, done: None) if as_json else tell
    if gateway:
        sent = _send(spec, pieces, gateway, speed, progress)
        emit({"events": sent}, as_json=as_json, text=f"\nsent {sent:,} events")
        return
    outcome = replay(spec, pieces, keep=keep, lanes=lanes, speed=speed, progress=progress)
    emit(outcome.as_json(), as_json=as_json, text="\n" + outcome_text(outcome))


def replay(
    spec: Spec,
    pieces: Iterable[Piece],
    *,
    keep: str | Path | None = None,
    lanes: int | None = None,
    speed: float | None = None,
    window_ms: int = DAY_MS,
    progress: Callable[[str, int], None] = lambda stage, done: None,
) -> Outcome:
    """Encode events, join them and learn from the samples, each stage through the real log; then return the
    measures.

    Args:
        pieces:    events in order of time, such as `freshet.recordings.sources.online_retail(path)`.
        keep:      folder for log, rows and versions; without it they are deleted at the end.
        lanes:     1 gives the same result each time; without it, as live.
        speed:     events a second; without it, as fast as possible.
        window_ms: length of a window of measures, in event time.
        progress:  called with the stage's name and how much of it is done.

    Raises BadInput if an event does not fit the spec's schemas, ConfigError if a schema is missing.
    """
    from freshet.joiner.service import Pace  # noqa: PLC0415
    from freshet.joiner.start import make  # noqa: PLC0415

    spec = replace(spec, train=replace(spec.train, measure_window_ms=window_ms))
    with tempfile.TemporaryDirectory(prefix="freshet-") as temporary:
        schemas = load_schemas(spec)
        pipeline = Pipeline(spec, Path(keep) if keep is not None else Path(temporary), lanes, schemas)
        try:
            ingest = _Ingest(pipeline, schemas)
            began = time.perf_counter()
            for piece in paced(pieces, speed):
                ingest.append(piece)
                progress("events", ingest.events)
            appended = time.perf_counter()
            joiner = make(spec, pipeline.log, pace=Pace(flush_interval_ms=200))
            joiner.run(until_end=True)
            joined = time.perf_counter()
            assert joiner.status is not None, "a joiner that ran to the end has told what it did"
            outcome = pipeline.train(lambda share: progress("training, percent", int(100 * share)))
            stages = {
                "events encoded and appended": ingest.events / (appended - began),
                "of that, encoding and appending alone": ingest.events / max(ingest.seconds, 1e-9),
                "events joined": joiner.status.events / (joined - appended),
                "samples joined": joiner.status.samples / (joined - appended),
            }
            return replace(
                outcome, stages={**stages, **outcome.stages}, ledger=joiner.status.ledger.to_json()
            )
        finally:
            pipeline.close()


def paced(pieces: Iterable[Piece], speed: float | None) -> Iterable[Piece]:
    """The pieces, each not before its turn at `speed` events a second."""
    began = time.monotonic()
    sent = 0
    for piece in pieces:
        if speed:
            time.sleep(max(0.0, began + sent / speed - time.monotonic()))
        yield piece
        sent += piece.events


@dataclass
class _Ingest:
    """Encodes events by the spec's schemas and appends them where the joiner reads: what the gateway does, in
    whole pieces."""

    pipeline: Pipeline
    schemas: Schemas
    events: int = 0
    seconds: float = 0.0  # spent here, without the source
    _streams: Mapping[Role, tuple[str, JsonTranscoder, EventExtractor]] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.pipeline.spec
        self._streams = {}
        for stream in _streams(spec):
            schema = self.schemas.of(stream.role)
            schema_id = self.pipeline.registry.register(schema)
            transcoder = JsonTranscoder(schema, schema_id=schema_id)
            self._streams[stream.role] = (stream.topic, transcoder, EventExtractor(stream, schema))

    def append(self, piece: Piece) -> None:
        """Append one piece, impressions before actions, so that a reader never sees an action long before its
        cause."""
        began = time.perf_counter()
        appends: list[Append] = []
        for role, lines in piece.lines.items():
            if lines:
                appends += self._encoded(role, lines)
        if appends:
            self.pipeline.writer.append(appends)
        self.seconds += time.perf_counter() - began

    def _encoded(self, role: Role, lines: bytes) -> Sequence[Append]:
        topic, transcoder, extractor = self._streams[role]
        made = transcoder.body(lines)
        if made.bad:
            raise BadInput(f"{role} stream: {made.bad[0]}\n  the spec's schema of this stream says what fits")
        events = extractor.extract(made.records, framed=True)
        if len(events.bad):
            raise BadInput(f"{role} stream: event {events.bad[0]}: {events.why[0]}")
        self.events += made.total
        partitions = partition_of(events.request_keys, self.pipeline.spec.partitions)
        appends = []
        for p in np.unique(partitions).tolist():
            mine = np.flatnonzero(partitions == p)
            appends.append(
                Append(topic, p, take(made.records, events.events[mine]), take(events.request_keys, mine))
            )
        return appends


def _send(
    spec: Spec,
    pieces: Iterable[Piece],
    gateway: str,
    speed: float | None,
    progress: Callable[[str, int], None],
) -> int:
    """Send everything through a running gateway; returns how many events it accepted."""
    import orjson  # noqa: PLC0415

    from freshet.client import Client  # noqa: PLC0415 - httpx is only needed here

    sent = 0
    with Client(gateway=gateway) as client:
        send = {"served": client.impressions, "shown": client.shown, "action": client.actions}
        for piece in paced(pieces, speed):
            for role, lines in piece.lines.items():
                events = [orjson.loads(line) for line in lines.splitlines()]
                for start in range(0, len(events), SEND_EVENTS):
                    sent += len(send[role](events[start : start + SEND_EVENTS]).acks)
            progress("events", sent)
    return sent


SEND_EVENTS = 500
"""Events in one request: far below the gateway's bound, large enough that a request costs little."""


def _streams(spec: Spec) -> list[Any]:
    events = spec.events
    return [s for s in (events.served, events.shown, events.action) if s is not None]
