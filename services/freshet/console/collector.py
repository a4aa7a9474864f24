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
from freshet.config.avro.schema import Record
from freshet.config.settings import Console as Settings
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import load_schemas, readers_of
from freshet.config.spec.topics import topics_of
from freshet.console.board import Board, quality_of, segments_of, simulator_of, tables_of
from freshet.console.core import Edge, Look, Rates, edges_of, health_of, losses_of
from freshet.console.dead_letters import Letters
from freshet.console.history import History
from freshet.console.instances import roles_of
from freshet.console.metrics import LOOK_SECONDS, LOOKS, UNREADABLE
from freshet.console.recorder import Recorder
from freshet.console.served_events import ServedSample
from freshet.console.services import Services
from freshet.console.topic_follower import Commits, Follower
from freshet.console.tracing import Traces
from freshet.console.versions import Versions
from freshet.errors import ConfigError, FreshetError
from freshet.http import tls
from freshet.http.token_files import CONSOLE_TOKEN_FILE
from freshet.log import EventLog
from freshet.log.topics import ensure_topics
from freshet.release import RELEASE
from freshet.types import TopicPartition
from freshet.versions import VersionStore

__all__ = ["Collector", "Sources"]

log = structlog.get_logger(__name__)

READ_AT_ONCE = 2_000
READ_FOR_S = 0.5
"""Of a look, spent on reading measures: a day of them takes longer, and pages want the state meanwhile."""

KEPT_ANSWERS = 4
"""Spans whose history is kept as it was last told, some MB each: the page knows as many."""

PAST_MOVES = 50
"""Of what became of versions before the start, pages are told the newest: they may have missed them."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the console looks."""

    spec: Spec
    folder: Path  # of the run
    log: EventLog
    versions: VersionStore
    token_file: Path | None = None  # which holds the console's token; None: the run folder's does

    def token_place(self) -> str:
        """Path of the file that holds the console's token."""
        return str((self.token_file or self.folder / "state" / CONSOLE_TOKEN_FILE).absolute())


@dataclass(slots=True, eq=False)
class _Reading:
    """What reads the log, and writes to it, once it is there."""

    measures: Follower
    versions: Versions
    letters: Letters
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
        *,
        tokens_asked: bool = False,
    ) -> None:
        """`tokens_asked`: whether the services of this run ask clients for tokens."""
        self._tokens_asked = tokens_asked
        self._sources, self._settings, self._services = sources, settings, services
        self._board, self._traces, self._clock = board, traces, clock
        self._topics = topics_of(sources.spec)
        self._looks, self._seconds = LOOKS.counter(registry), LOOK_SECONDS.histogram(registry)
        self._unreadable = UNREADABLE.counter(registry)
        self._rates = Rates()
        self._lock = threading.Lock()  # history and board change together
        self._history = History(settings.history_ms)
        self._reading: _Reading | None = None
        self._known: dict[str, Any] = {}  # what each part found last
        self._notes: list[str] = []
        self._telling = threading.Lock()  # one history at a time, which others who ask then get, too
        self._told: dict[int, tuple[tuple[int, int], bytes]] = {}  # span -> (as of, what was answered)
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
            if not stop.is_set():
                self._soon.wait(max(0.02, left if self.caught_up.is_set() else 0.0))
        self._close()

    def look_soon(self) -> None:
        """Look again now: something was changed, or it is time to stop."""
        self._soon.set()

    def history(self, span_ms: int) -> bytes:
        """What /api/history answers; the same for all who ask within a second while nothing is added.

        Blocks for as long as it takes to write some thousand points.
        """
        with self._telling:
            now_ms = self._clock.now_ms()
            with self._lock:
                as_of = (self._history.next, now_ms // 1_000)
                known = self._told.get(span_ms)
                if known is not None and known[0] == as_of:
                    return known[1]
                content = self._history.to_json(span_ms, now_ms)
            answer = orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
            self._told[span_ms] = (as_of, answer)
            while len(self._told) > KEPT_ANSWERS:
                del self._told[next(iter(self._told))]
            return answer

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
            self._part("writing", lambda: self._write_down(reading.recorder, look, edges), None)

    # --- parts of a look

    def _part(self, name: str, do: Callable[[], T], otherwise: T) -> T:
        """What a part finds; if it fails, a note, and what it found last."""
        try:
            self._known[name] = found = do()
        except (FreshetError, KeyError, OSError) as error:
            return self._noted(name, str(error).splitlines()[0] if str(error) else repr(error), otherwise)
        except Exception as error:  # a fault of ours must not end the other parts
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
        measures = Follower(event_log, at, span_ms=self._settings.history_ms, now_ms=self._clock.now_ms())
        self._reading = _Reading(
            measures,
            Versions(self._sources.versions, event_log, self._topics.versions),
            Letters(event_log, refused=self._topics.refused, dead_letters=self._topics.dead_letters),
            ServedSample(spec, event_log, self._topics.served, self._unreadable.inc, _reader_of(spec)),
            Commits(event_log, self._topics.joiner),
            Recorder(spec, event_log.writer(), self._topics.measures, self._settings.vitals_ms, self._clock),
        )
        self._board.begin(measures.next)

    def _read_measures(self, reading: _Reading) -> None:
        until = self._clock.monotonic() + READ_FOR_S
        while self._clock.monotonic() < until:
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
        events = list(reading.versions.events())
        with self._lock:
            for event in events:
                self._history.add_version(event)
            for event in events[-PAST_MOVES:]:
                self._board.tell_version(event)

    def _write_down(self, recorder: Recorder, look: Look, edges: Sequence[Edge]) -> None:
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
        wanted = {what: topic for what, topic in named.items() if topic is not None}
        counts = self._sources.log.partition_counts([*wanted.values(), topics.joiner])
        if self._reading is not None:
            self._reading.commits.cover(counts.get(topics.joiner, 0))
        places = {
            TopicPartition(topic, p): what for what, topic in wanted.items() for p in range(counts[topic])
        }
        ends = dict.fromkeys(wanted, 0)
        for at, bounds in self._sources.log.all_bounds(places).items():
            ends[places[at]] += bounds.end
        return ends

    # --- what is shown

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
            "dead letters", lambda: reading.letters.to_json() if reading else none_refused, none_refused
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
            "versions": versions,
            "dead_letters": letters,
            "losses": losses_of(look),
            "simulator": simulator_of(look, self._history),
            "asking": {
                "scheme": tls.scheme(),
                "token": self._tokens_asked,
                "certificate": tls.certificate_required(),
            },
            "console": {"streams": self._board.streams},
        }

    def _close(self) -> None:
        self._services.close()
        if self._reading is not None:
            self._reading.close()


def _reader_of(spec: Spec) -> Record | None:
    """What served events are read as; None where the schemas' files are not here."""
    try:
        return readers_of(spec, load_schemas(spec))["served"]
    except ConfigError:
        return None
