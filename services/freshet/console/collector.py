"""Looks at the whole system about once a second, shows what it found, and writes it down now and then.

Each part of a look stands alone: what is away or broken is noted in the state, and leaves the rest as it is.
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
from freshet.console.board import Board
from freshet.console.core import Edge, Look, Rates, Service, edges_of, health_of, number
from freshet.console.following import Commits, Follower
from freshet.console.history import History
from freshet.console.letters import Letters
from freshet.console.metrics import LOOK_SECONDS, LOOKS
from freshet.console.served import ServedSample
from freshet.console.services import Services
from freshet.console.tracing import Traces
from freshet.console.versions import Versions
from freshet.errors import FreshetError
from freshet.seams.eventlog import EventLog, Writer
from freshet.seams.eventlog.topics import ensure_topics
from freshet.seams.versions import VersionStore
from freshet.settings import Console as Settings
from freshet.spec.model import Spec
from freshet.spec.topics import topics_of
from freshet.types import Append, BytesColumn, TopicPartition

__all__ = ["Collector", "Sources"]

log = structlog.get_logger(__name__)

RELEASE = "0.1.0"
READ_AT_ONCE = 2_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the console looks."""

    spec: Spec
    folder: Path  # of the run
    log: EventLog
    versions: VersionStore


@dataclass(slots=True, eq=False)
class _Reading:
    """What reads the log, once it is there."""

    measures: Follower
    versions: Versions
    letters: Letters
    served: ServedSample
    commits: Commits
    writer: Writer


class Collector:
    """The only writer of the board and the history. `run` is a thread's; the rest may be called by any."""

    def __init__(
        self,
        sources: Sources,
        settings: Settings,
        services: Services,
        board: Board,
        traces: Traces,
        clock: Clock,
        registry: CollectorRegistry,
    ) -> None:
        self._sources, self._settings, self._services = sources, settings, services
        self._board, self._traces, self._clock = board, traces, clock
        self._topics = topics_of(sources.spec)
        self._looks, self._seconds = LOOKS.counter(registry), LOOK_SECONDS.histogram(registry)
        self._rates = Rates()
        self._lock = threading.Lock()  # history and board change together
        self._history = History(settings.history_ms)
        self._reading: _Reading | None = None
        self._known: dict[str, Any] = {}  # what each part found last
        self._notes: list[str] = []
        self._vitals_due = clock.monotonic() + settings.vitals_ms / 1e3  # there are rates by then
        self._written_ms = 0  # end of the newest window of clicks that was written
        self._soon = threading.Event()
        self.caught_up = threading.Event()  # the past was read back

    def run(self, stop: threading.Event) -> None:
        """Look until told to stop."""
        while not stop.is_set():
            started = self._clock.monotonic()
            self._soon.clear()
            try:
                self.look()
                self._looks.labels("troubled" if self._notes else "good").inc()
            except Exception as error:  # a fault of ours must not end the looking
                log.error("a look failed", exc_info=error)
                self._looks.labels("failed").inc()
            self._seconds.observe(self._clock.monotonic() - started)
            left = self._settings.poll_ms / 1e3 - (self._clock.monotonic() - started)
            self._soon.wait(max(0.02, left)) if not stop.is_set() else None
        self._close()

    def look_soon(self) -> None:
        """Look again now: something was changed, or it is time to stop."""
        self._soon.set()

    def history(self, span_ms: int) -> dict[str, Any]:
        """What /api/history answers."""
        with self._lock:
            return self._history.to_json(span_ms, self._clock.now_ms())

    @property
    def requests(self) -> Sequence[Mapping[str, Any]]:
        """Recent served requests, newest first."""
        return self._reading.served.requests if self._reading is not None else []

    def look(self) -> None:
        """One look: ask, read, show, write down."""
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
            self._part("writing", lambda: self._write_down(reading, look, edges), None)

    # --- parts of a look

    def _part(self, name: str, do: Callable[[], T], otherwise: T) -> T:
        """What a part finds; if it fails, a note, and what it found last."""
        try:
            self._known[name] = found = do()
        except (FreshetError, KeyError, OSError) as error:
            self._notes.append(f"console: {name}: {str(error).splitlines()[0] if str(error) else error!r}")
            last: T = self._known.get(name, otherwise)
            return last
        return found

    def _open(self) -> None:
        if self._reading is not None:
            return
        spec, event_log = self._sources.spec, self._sources.log
        ensure_topics(event_log, spec)
        at = TopicPartition(self._topics.measures, 0)
        measures = Follower(event_log, at, span_ms=self._settings.history_ms, now_ms=self._clock.now_ms())
        self._reading = _Reading(
            measures,
            Versions(self._sources.versions, event_log, self._topics.versions),
            Letters(event_log, refused=self._topics.refused, dead_letters=self._topics.dead_letters),
            ServedSample(spec, event_log, self._topics.served),
            Commits(event_log, self._topics.joiner, spec.partitions),
            event_log.writer(),
        )
        self._board.begin(measures.next)

    def _read_measures(self, reading: _Reading) -> None:
        while True:
            records, anew = reading.measures.read(READ_AT_ONCE)
            with self._lock:
                if anew:
                    self._history = History(self._settings.history_ms)
                    self._board.begin(reading.measures.next)
                for offset, value in records:
                    told = self._history.add(offset, value)
                    if told is not None:
                        self._board.tell(offset, told)
                self._history.next = reading.measures.next
                self._board.seen(reading.measures.next)
            if not records and not anew:
                self.caught_up.set()
                return

    def _read_versions(self, reading: _Reading) -> None:
        for event in reading.versions.events():
            with self._lock:
                self._history.add_version(event)
                self._board.tell_version(event)

    def _ends(self) -> dict[str, int]:
        topics, partitions = self._topics, range(self._sources.spec.partitions)
        named = {
            "served": topics.served,
            "shown": topics.shown,
            "action": topics.action,
            "samples": topics.samples,
        }
        bounds = self._sources.log.bounds
        ends = {
            what: sum(bounds(TopicPartition(topic, p)).end for p in partitions)
            for what, topic in named.items()
            if topic is not None
        }
        rows = next(plan.partitions for plan in topics.plans if plan.name == topics.rows)
        return ends | {"rows": sum(bounds(TopicPartition(topics.rows, p)).end for p in range(rows))}

    # --- what is shown

    def _state(self, look: Look, edges: Sequence[Edge]) -> dict[str, Any]:
        services = list(look.services.values())
        health, notes = health_of(services, edges, look)
        reading = self._reading
        serving = look.figure("inference", "version")
        nothing = {"serving": serving, "aliases": {}, "pinned": False, "list": []}
        none_refused = {"refused": 0, "joiner": 0, "newest": []}
        versions = self._part(
            "version store", lambda: reading.versions.to_json(serving) if reading else nothing, nothing
        )
        letters = self._part(
            "dead letters", lambda: reading.letters.to_json() if reading else none_refused, none_refused
        )
        return {
            "v": 1,
            "now_ms": self._clock.now_ms(),
            "model": self._sources.spec.name,
            "freshet": RELEASE,
            "folder": str(self._sources.folder),
            "health": health if health != "good" or not self._notes else "degraded",
            "notes": [*notes, *self._notes],
            "services": [s.to_json() for s in services],
            "edges": [e.to_json() for e in edges],
            "freshness_ms": look.figure("inference", "freshness_ms"),
            "trace": self._traces.to_json(),
            "quality": self._quality(look),
            "segments": self._segments(),
            "tables": self._tables(look),
            "rows_bytes": look.figure("trainer", "bytes"),
            "versions": versions,
            "dead_letters": letters,
            "simulator": self._simulator(look),
            "console": {"streams": self._board.streams},
        }

    def _quality(self, look: Look) -> dict[str, Any]:
        return {
            "labels": [label.name for label in self._sources.spec.labels],
            "totals": look.figure("trainer", "measures") or {},
            "open": look.figure("trainer", "open") or [],
            "reliability": self._history.reliability.to_json(),
        }

    def _segments(self) -> list[dict[str, Any]]:
        served = self._reading.served if self._reading is not None else None
        return [
            {
                **change,
                "text": served.text(change["segment"], change["value"]) if served is not None else None,
            }
            for change in self._history.segments.changes()
        ]

    def _tables(self, look: Look) -> list[dict[str, Any]]:
        rows, evicted = (look.figure("trainer", key) for key in ("rows", "evicted"))
        rows, evicted = (figures if isinstance(figures, Mapping) else {} for figures in (rows, evicted))
        found = []
        for table in self._sources.spec.tables:
            n, gone = (figures.get(table.name, figures.get(str(table.id))) for figures in (rows, evicted))
            found.append({"table": table.name, "rows": n, "bytes": None, "evicted": gone})
        return found

    def _simulator(self, look: Look) -> dict[str, Any] | None:
        if "simulator" not in look.services:
            return None
        figures = look.services["simulator"].figures
        return {
            "rate": figures.get("rate"),
            "seed": figures.get("seed"),
            "drifts": figures.get("drifts")
            or [{"time_ms": d["time_ms"], "what": d.get("what")} for d in self._history.drifts],
        }

    # --- what is written down

    def _write_down(self, reading: _Reading, look: Look, edges: Sequence[Edge]) -> None:
        now_s = self._clock.monotonic()
        if now_s < self._vitals_due:
            return
        self._vitals_due = now_s + self._settings.vitals_ms / 1e3
        records = [self._vitals(look, edges), *self._simulated(look.services.get("simulator"))]
        values = BytesColumn.of([orjson.dumps(r, option=orjson.OPT_NON_STR_KEYS) for r in records])
        reading.writer.append([Append(self._topics.measures, 0, values)])
        ends = [r["stop_ms"] for r in records if r["kind"] == "clicks"]
        self._written_ms = max([self._written_ms, *ends])

    def _vitals(self, look: Look, edges: Sequence[Edge]) -> dict[str, Any]:
        return {
            "v": 1,
            "kind": "vitals",
            "time_ms": self._clock.now_ms(),
            "rates": {e.name: None if e.rate is None else round(e.rate, 2) for e in edges},
            "lag": {e.name: e.lag for e in edges if e.lag is not None},
            "freshness_ms": look.figure("inference", "freshness_ms"),
            "trace": self._traces.newest,
            "memory_mb": {s.name: s.memory_mb for s in look.services.values()},
            "rows": {t["table"]: t["rows"] for t in self._tables(look)},
            "rows_bytes": look.figure("trainer", "bytes"),
            "version": look.figure("inference", "version"),
        }

    def _simulated(self, simulator: Service | None) -> list[dict[str, Any]]:
        """Windows of clicks and drifts that are not in the topic yet."""
        if simulator is None:
            return []
        written = max(self._history.clicks_until_ms, self._written_ms)
        windows, drifts = (simulator.figures.get(key) for key in ("windows", "drifts"))
        fresh = [
            {"v": 1, "kind": "clicks", **w}
            for w in (windows if isinstance(windows, list) else [])
            if isinstance(w, dict) and (number(w.get("stop_ms")) or 0) > written
        ]
        known = {d["time_ms"] for d in self._history.drifts}
        return fresh + [
            {"v": 1, "kind": "drift", "time_ms": d["time_ms"], "what": d.get("what")}
            for d in (drifts if isinstance(drifts, list) else [])
            if isinstance(d, dict) and type(d.get("time_ms")) is int and d["time_ms"] not in known
        ]

    def _close(self) -> None:
        self._services.close()
        if self._reading is not None:
            for part in (
                self._reading.measures,
                self._reading.versions,
                self._reading.commits,
                self._reading.writer,
            ):
                part.close()
