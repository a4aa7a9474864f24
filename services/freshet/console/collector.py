"""Composes the state of the whole system about once a second, and records its vitals every few seconds.

The parts of a look are independent: a part that is away or broken is noted in the state and changes no other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
import structlog
from prometheus_client import CollectorRegistry

from freshet.clock import Clock
from freshet.config.avro.schema import Record
from freshet.config.settings import Console as Settings
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import load_schemas, readers_of
from freshet.config.spec.topics import topics_of
from freshet.console.board import Board, links_of, quality_of, segments_of, simulator_of, tables_of, wires_of
from freshet.console.core import Edge, Look, Rates, edges_of, health_of, losses_of
from freshet.console.history import History
from freshet.console.instances import Places, number, roles_of
from freshet.console.segments import MOST_AHEAD_MS
from freshet.console.served_events import ServedSample
from freshet.console.services import Services
from freshet.console.topic_readers import Commits, DeadLetters, Follower, Versions
from freshet.console.traces import Traces
from freshet.errors import ConfigError, FreshetError
from freshet.http import tls
from freshet.http.app import HTTP_METRICS
from freshet.http.authenticator import AUTH_METRICS
from freshet.http.token_files import CONSOLE_TOKEN_FILE
from freshet.log import EventLog, Writer
from freshet.log.topics import ensure_topics
from freshet.observability.metrics import Metric
from freshet.release import RELEASE
from freshet.types import Append, BytesColumn, TopicPartition
from freshet.versions import VersionStore

log = structlog.get_logger(__name__)

LOOKS = Metric(
    "freshet_console_looks",
    "counter",
    "looks",
    "Reads of services and log, by outcome: good, troubled (a part failed), failed.",
    ("outcome",),
)
LOOK_SECONDS = Metric(
    "freshet_console_look_seconds",
    "histogram",
    "seconds",
    "Duration of a read of services and log.",
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
)
UNREADABLE = Metric(
    "freshet_console_unreadable",
    "counter",
    "events",
    "Served events that the console read and cannot show.",
)
METRICS = (*HTTP_METRICS, *AUTH_METRICS, LOOKS, LOOK_SECONDS, UNREADABLE)

READ_AT_ONCE = 2_000
READ_FOR_S = 0.5
"""Longest time of a look for measures: a day of them takes longer, and pages need the state meanwhile."""

KEPT_ANSWERS = 4
"""Spans of which the last answer is kept, some MB each; the page has as many."""

PAST_MOVES = 50
"""Newest events of versions before the start that are sent to pages, which may have missed them."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sources:
    """Services, stores and files that the console reads."""

    spec: Spec
    folder: Path  # of the run
    log: EventLog
    versions: VersionStore
    places: Places  # addresses of the services
    token_file: Path | None = None  # file of the console's token; None: in the run folder

    def token_place(self) -> str:
        """Return the path of the console's token file."""
        return str((self.token_file or self.folder / "state" / CONSOLE_TOKEN_FILE).absolute())


@dataclass(slots=True, eq=False)
class _Reading:
    """Readers and the writer of the log, once it can be opened."""

    measures: Follower
    versions: Versions
    dead_letters: DeadLetters
    served: ServedSample
    commits: Commits
    recorder: Recorder

    def close(self) -> None:
        """Close readers and writer."""
        self.measures.close()
        self.versions.close()
        self.commits.close()
        self.recorder.close()


class Collector:
    """The only writer of board and history. `run` belongs to one thread; the rest is thread-safe."""

    def __init__(
        self,
        sources: Sources,
        settings: Settings,
        services: Services,
        board: Board,
        traces: Traces,
        clock: Clock,
        registry: CollectorRegistry,
        *,
        tokens_required: bool = False,
    ) -> None:
        """Read nothing yet. `tokens_required`: whether the services of this run require clients' tokens."""
        self._tokens_required = tokens_required
        self._sources, self._settings, self._services = sources, settings, services
        self._board, self._traces, self._clock = board, traces, clock
        self._topics = topics_of(sources.spec)
        self._looks, self._seconds = LOOKS.counter(registry), LOOK_SECONDS.histogram(registry)
        self._unreadable = UNREADABLE.counter(registry)
        self._rates = Rates()
        self._lock = threading.Lock()  # history and board change together
        self._history = History(settings.history_ms)
        self._reading: _Reading | None = None
        self._known: dict[str, Any] = {}  # last result of each part
        self._notes: list[str] = []
        self._encoding = threading.Lock()  # one history at a time, so that concurrent requests share it
        self._answers: dict[int, tuple[tuple[int, int], bytes]] = {}  # span -> (as of, answer)
        self._soon = threading.Event()
        self.caught_up = threading.Event()  # the past was read back

    def run(self, stop: threading.Event) -> None:
        """Look until `stop` is set."""
        while not stop.is_set():
            started = self._clock.monotonic()
            self._soon.clear()
            try:
                self.look()
                self._looks.labels("troubled" if self._notes else "good").inc()
            except Exception as error:  # a bug must not end the loop
                log.error("a look failed", exc_info=error)
                self._looks.labels("failed").inc()
            self._seconds.observe(self._clock.monotonic() - started)
            left = self._settings.poll_ms / 1e3 - (self._clock.monotonic() - started)
            if not stop.is_set():
                self._soon.wait(max(0.02, left if self.caught_up.is_set() else 0.0))
        self._close()

    def look_soon(self) -> None:
        """Look again now, after a change or to stop."""
        self._soon.set()

    def history(self, span_ms: int) -> bytes:
        """Return the answer of /api/history; the same within a second while no record is added.

        Blocks while some thousand points are encoded.
        """
        with self._encoding:
            now_ms = self._clock.now_ms()
            with self._lock:
                as_of = (self._history.next, now_ms // 1_000)
                known = self._answers.get(span_ms)
                if known is not None and known[0] == as_of:
                    return known[1]
                content = self._history.to_json(span_ms, now_ms)
            answer = orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
            self._answers[span_ms] = (as_of, answer)
            while len(self._answers) > KEPT_ANSWERS:
                del self._answers[next(iter(self._answers))]
            return answer

    @property
    def requests(self) -> Sequence[Mapping[str, Any]]:
        """Recent served requests, newest first."""
        return self._reading.served.requests if self._reading is not None else []

    def look(self) -> None:
        """Query services, read the log, publish the state, and record vitals if they are due."""
        self._notes = []
        services = self._services.look()
        self._part("log", self._open, None)
        reading = self._reading
        if reading is not None:
            self._part("measures", lambda: self._read_measures(reading), None)
            self._part("versions", lambda: self._read_versions(reading), None)
            self._part("served events", reading.served.look, None)
        look = Look(
            services,
            self._part("joiner's commits", lambda: reading.commits.read() if reading else {}, {}),
            self._part("ends", self._ends, {}),
            self._sources.spec.serve.log_served,
        )
        edges = edges_of(look, self._rates, self._clock.monotonic())
        self._board.show(self._state(look, edges))
        if reading is not None and self.caught_up.is_set():
            self._part("writing", lambda: self._record(reading.recorder, look, edges), None)

    # --- parts of a look

    def _part(self, name: str, do: Callable[[], T], otherwise: T) -> T:
        """Return the result of a part; if it fails, note that and return its last result."""
        try:
            self._known[name] = found = do()
        except (FreshetError, KeyError, OSError) as error:
            return self._noted(name, str(error).splitlines()[0] if str(error) else repr(error), otherwise)
        except Exception as error:  # a bug must not end the other parts
            log.error("a part of a look failed", reason=name, exc_info=error)
            return self._noted(name, f"failed ({type(error).__name__}), see the console's log", otherwise)
        return found

    def _noted(self, name: str, why: str, otherwise: T) -> T:
        self._notes.append(f"console: {name}: {why}")
        last: T = self._known.get(name, otherwise)
        return last

    def _open(self) -> None:
        if self._reading is not None:
            return
        spec, event_log = self._sources.spec, self._sources.log
        ensure_topics(event_log, spec)
        at = TopicPartition(self._topics.measures, 0)
        span_ms, now_ms = self._settings.history_ms, self._clock.now_ms()
        measures = Follower(event_log, at, span_ms=span_ms, now_ms=now_ms)
        self._reading = _Reading(
            measures,
            Versions(
                self._sources.versions, event_log, self._topics.versions, span_ms=span_ms, now_ms=now_ms
            ),
            DeadLetters(event_log, refused=self._topics.refused, dead_letters=self._topics.dead_letters),
            ServedSample(spec, event_log, self._topics.served, self._unreadable.inc, _reader_of(spec)),
            Commits(event_log, self._topics.joiner),
            Recorder(spec, event_log.writer(), self._topics.measures, self._settings.vitals_ms, self._clock),
        )
        self._board.begin(measures.next)

    def _read_measures(self, reading: _Reading) -> None:
        until = self._clock.monotonic() + READ_FOR_S
        while self._clock.monotonic() < until:
            records, anew = reading.measures.read(READ_AT_ONCE)
            now_ms = self._clock.now_ms()
            with self._lock:
                if anew:
                    self._history = History(self._settings.history_ms)
                    self._board.begin(reading.measures.next)
                for offset, value in records:
                    shown = self._history.add(offset, value, now_ms)
                    if shown is not None:
                        self._board.publish_record(offset, shown)
                self._history.next = reading.measures.next
                self._board.advance(reading.measures.next)
            if not records and not anew:
                self.caught_up.set()
                return

    def _read_versions(self, reading: _Reading) -> None:
        events = list(reading.versions.events())
        with self._lock:
            for event in events:
                self._history.add_version(event)
            for event in events[-PAST_MOVES:]:
                self._board.publish_version(event)

    def _record(self, recorder: Recorder, look: Look, edges: Sequence[Edge]) -> None:
        recorder.write(look, edges, self._history, self._traces.newest)

    def _ends(self) -> dict[str, int]:
        topics = self._topics
        named = {
            "served": topics.served,
            "shown": topics.shown,
            "action": topics.action,
            "samples": topics.samples,
            "rows": topics.rows,
        }
        wanted = {name: topic for name, topic in named.items() if topic is not None}
        counts = self._sources.log.partition_counts([*wanted.values(), topics.joiner])
        if self._reading is not None:
            self._reading.commits.cover(counts.get(topics.joiner, 0))
        places = {
            TopicPartition(topic, p): name for name, topic in wanted.items() for p in range(counts[topic])
        }
        ends = dict.fromkeys(wanted, 0)
        for at, bounds in self._sources.log.all_bounds(places).items():
            ends[places[at]] += bounds.end
        return ends

    # --- the state

    def _state(self, look: Look, edges: Sequence[Edge]) -> dict[str, Any]:
        services = list(look.services.values())
        health, notes = health_of(services, edges)
        reading, spec = self._reading, self._sources.spec
        serving = look.figure("inference", "version")
        nothing = {"serving": serving, "aliases": {}, "pinned": False, "list": []}
        none_refused = {"refused": 0, "joiner": 0, "newest": []}
        versions = self._part(
            "version store", lambda: reading.versions.to_json(serving) if reading else nothing, nothing
        )
        letters = self._part(
            "dead letters", lambda: reading.dead_letters.to_json() if reading else none_refused, none_refused
        )
        return {
            "v": 1,
            "now_ms": self._clock.now_ms(),
            "model": spec.name,
            "freshet": RELEASE,
            "folder": str(self._sources.folder.absolute()),
            "token_file": self._sources.token_place(),
            "health": health if health != "good" or not self._notes else "degraded",
            "notes": [*notes, *self._notes],
            "services": [s.to_json() for s in services],
            "roles": roles_of(services),
            "edges": [e.to_json() for e in edges],
            "freshness_ms": look.figure("inference", "freshness_ms"),
            "trace": self._traces.to_json(),
            "quality": quality_of(spec, look, self._history),
            "segments": segments_of(self._history, reading.served.text if reading else lambda *_: None),
            "tables": tables_of(spec.tables, look),
            "rows_bytes": look.figure(look.holder, "bytes"),
            "wires": wires_of(look),
            "links": links_of(look),
            "versions": versions,
            "dead_letters": letters,
            "losses": losses_of(look),
            "simulator": simulator_of(look, self._history),
            "asking": {
                "scheme": tls.scheme(),
                "token": self._tokens_required,
                "certificate": tls.certificate_required(),
            },
            "console": {"streams": self._board.streams},
        }

    def _close(self) -> None:
        self._services.close()
        if self._reading is not None:
            self._reading.close()


def _reader_of(spec: Spec) -> Record | None:
    """Return the reader schema of served events; None if the schema files are not on this machine."""
    try:
        return readers_of(spec, load_schemas(spec))["served"]
    except ConfigError:
        return None


class Recorder:
    """Writes vitals every few seconds, and clicks and drifts of a simulator once. Not thread-safe."""

    def __init__(self, spec: Spec, writer: Writer, topic: str, every_ms: int, clock: Clock) -> None:
        """Take over `writer`, which `close` closes."""
        self._spec, self._writer, self._topic, self._clock = spec, writer, topic, clock
        self._every_s = every_ms / 1e3
        self._due = clock.monotonic() + self._every_s  # rates are known by then
        self._clicks_until_ms = 0  # end of the newest window of clicks that was written

    def write(
        self, look: Look, edges: Sequence[Edge], history: History, trace: Mapping[str, float] | None
    ) -> None:
        """Record this look, if due. Raises Unavailable as the log does; the next look is then written."""
        now_s = self._clock.monotonic()
        if now_s < self._due:
            return
        self._due = now_s + self._every_s
        now_ms = self._clock.now_ms()
        latest_ms = now_ms + MOST_AHEAD_MS
        written_ms = self._clicks_until_ms if self._clicks_until_ms <= latest_ms else 0
        vitals = vitals_of(self._spec, look, edges, trace, now_ms)
        news = news_of(look, history, max(history.clicks_until_ms(latest_ms), written_ms), latest_ms)
        values = [orjson.dumps({"v": 1, **r}, option=orjson.OPT_NON_STR_KEYS) for r in (vitals, *news)]
        self._writer.append([Append(self._topic, 0, BytesColumn.of(values))])
        ends = [r["stop_ms"] for r in news if r["kind"] == "clicks"]
        self._clicks_until_ms = max([written_ms, *ends])

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


def vitals_of(
    spec: Spec, look: Look, edges: Sequence[Edge], trace: Mapping[str, float] | None, now_ms: int
) -> dict[str, Any]:
    """Return rates, lags, freshness, memory and rows of a look."""
    return {
        "kind": "vitals",
        "time_ms": now_ms,
        "rates": {e.name: None if e.rate is None else round(e.rate, 2) for e in edges},
        "lag": {e.name: e.lag for e in edges if e.lag is not None},
        "freshness_ms": look.figure("inference", "freshness_ms"),
        "trace": trace,
        "memory_mb": {s.name: s.memory_mb for s in look.services.values()},
        "rows": {t["table"]: t["rows"] for t in tables_of(spec.tables, look)},
        "rows_bytes": look.figure(look.holder, "bytes"),
        "version": look.figure("inference", "version"),
    }


def news_of(look: Look, history: History, clicks_until_ms: int, latest_ms: int) -> list[dict[str, Any]]:
    """Return windows of clicks that end after `clicks_until_ms`, up to `latest_ms`, and drifts that the
    history lacks."""
    windows, drifts = (look.figure("simulator", key) for key in ("windows", "drifts"))
    clicks = [
        {"kind": "clicks", **w}
        for w in (windows if isinstance(windows, list) else [])
        if isinstance(w, dict) and clicks_until_ms < (number(w.get("stop_ms")) or 0) <= latest_ms
    ]
    known = {d["time_ms"] for d in history.drifts}
    return clicks + [
        {"kind": "drift", "time_ms": d["time_ms"], "what": d.get("what")}
        for d in (drifts if isinstance(drifts, list) else [])
        if isinstance(d, dict) and type(d.get("time_ms")) is int and d["time_ms"] not in known
    ]
