"""Commits of the joiner, with its ledger: exact counts of the outcomes of all events.

Commits are JSON records of `<model>.joiner`, one per partition and commit, atomic with the samples. A restart
replays them. The watermark is constant between two commits, so reading the records up to `next` and then
advancing to `watermark_ms`, commit by commit, restores the state exactly (PROTOCOL 18).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import orjson

from freshet import _native
from freshet.clock import ClockState
from freshet.errors import Corrupt
from freshet.types import I64

_names: tuple[list[str], list[str]] = _native.join_counters()
LABEL_COUNTERS: tuple[str, ...] = tuple(_names[0])
"""Final outcomes of (impression, label): trained_positive, trained_negative, not_shown, given_false,
sampled_out, no_value, late.
"""

EVENT_COUNTERS: tuple[str, ...] = tuple(_names[1])
"""Outcomes of events: impressions*, actions_*, shown_*."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts since the model began. Each impression is, for each label, in exactly one of the label's counts.

    `no_value` counts numeric labels without a number (the maximum of no actions), or with one out of the
    label's bounds. Actions are counted as matched (they changed a label), again (the label was true already),
    late, outside (dated before their impression by more than the grace), repeated, orphan (no impression
    within the grace, or dated after its windows) or no_label; those that wait for an impression are in
    `waiting`, even if they are counted as orphans.
    """

    labels: Mapping[str, Mapping[str, int]]  # label -> LABEL_COUNTERS and "pending"
    events: Mapping[str, int]  # EVENT_COUNTERS
    waiting: int  # actions and shown events that wait for an impression, orphans among them
    refused: int  # events that became dead letters

    def unexplained(self) -> Mapping[str, int]:
        """Return, for each label, the impressions that its counts do not explain: always 0."""
        seen = self.events["impressions"] + self.events["impressions_late"]
        return {label: seen - sum(counts.values()) for label, counts in self.labels.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the object of commits and of `freshet status --json`."""
        return {
            "labels": {label: dict(counts) for label, counts in self.labels.items()},
            "events": dict(self.events),
            "waiting": self.waiting,
            "refused": self.refused,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Ledger:
        """Read the object of `to_json`. Raises KeyError or TypeError if it is something else."""
        labels = {
            str(label): {name: int(counts.get(name, 0)) for name in (*LABEL_COUNTERS, "pending")}
            for label, counts in record["labels"].items()
        }
        events = {name: int(record["events"].get(name, 0)) for name in EVENT_COUNTERS}
        return cls(labels, events, int(record["waiting"]), int(record["refused"]))

    @classmethod
    def of(cls, names: Sequence[str], counters: I64, pending: I64, waiting: int, refused: int) -> Ledger:
        """Make a ledger from the native core's counters.

        Args:
            names: of the L labels.
            counters: (L * label counters + event counters,) int64.
            pending: (L,) int64 undecided impressions.
            waiting: events without an impression yet.
            refused: events that became dead letters.
        """
        width = len(LABEL_COUNTERS)
        labels = {}
        for i, name in enumerate(names):
            counts = counters[i * width : (i + 1) * width].tolist()
            labels[name] = {**dict(zip(LABEL_COUNTERS, counts, strict=True)), "pending": int(pending[i])}
        events = dict(zip(EVENT_COUNTERS, counters[len(names) * width :].tolist(), strict=True))
        return cls(labels, events, waiting, refused)

    def counters(self) -> I64:
        """Return the counters as `of` takes them: (L * label counters + event counters,) int64."""
        flat = [counts[name] for counts in self.labels.values() for name in LABEL_COUNTERS]
        return np.array(flat + [self.events[name] for name in EVENT_COUNTERS], np.int64)

    def __add__(self, other: Ledger) -> Ledger:
        """Add the counts of other partitions, of the same labels."""
        return Ledger(
            {label: _sum(counts, other.labels[label]) for label, counts in self.labels.items()},
            _sum(self.events, other.events),
            self.waiting + other.waiting,
            self.refused + other.refused,
        )

    @classmethod
    def empty(cls, names: Sequence[str]) -> Ledger:
        """Make a ledger of zeros for labels of these names."""
        width = len(names) * len(LABEL_COUNTERS) + len(EVENT_COUNTERS)
        return cls.of(names, np.zeros(width, np.int64), np.zeros(len(names), np.int64), 0, 0)

    @staticmethod
    def total(ledgers: Sequence[Ledger]) -> Ledger:
        """Return the sum of ledgers; at least one."""
        return reduce(lambda a, b: a + b, ledgers)


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


REFUSALS = ("unreadable", "no_schema", "bad_time", "too_large")
"""Reasons of refusals: bytes that do not match their schema; an unknown schema, or one that lacks fields of
the spec; a time before 1970 or too far ahead; samples that exceed the log's limits."""


@dataclass(slots=True)
class EventCounts:
    """Counts of durable commits since the process started.

    The ledger counts since the model began and moves with its partition. Here the process that wrote a commit
    counts it once, so sums over joiners stay right when partitions move. If the writer dies, or gets no
    acknowledgement, before it counts a commit, that commit is in the ledger only.
    """

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVENT_COUNTERS, 0))
    refused: dict[str, dict[str, int]] = field(default_factory=dict)  # role -> REFUSALS -> events
    out_of_bounds: dict[str, int] = field(default_factory=dict)  # label with bounds -> samples dropped

    @classmethod
    def of(cls, roles: Iterable[str], bounded: Iterable[str] = ()) -> EventCounts:
        """Make zero counts for streams and for labels with bounds: a counter that begins with its first event
        shows no increase."""
        return cls(
            refused={role: dict.fromkeys(REFUSALS, 0) for role in roles},
            out_of_bounds=dict.fromkeys(bounded, 0),
        )

    def add(
        self,
        outcomes: Mapping[str, int],
        refused: Mapping[str, Mapping[str, int]],
        out_of_bounds: Mapping[str, int] | None = None,
    ) -> None:
        """Add the counts of one written commit."""
        for label, samples in (out_of_bounds or {}).items():
            self.out_of_bounds[label] = self.out_of_bounds.get(label, 0) + samples
        for name, events in outcomes.items():
            self.outcomes[name] += events
        for role, counts in refused.items():
            for reason, events in counts.items():
                self.refused[role][reason] += events


VERSION = 1

MAX_TIME_MS = 2**53
"""The bound of times in a commit, before and after 1970; other JSON readers round integers beyond it."""


@dataclass(slots=True)
class ReplayExclusions:
    """Events that a replay of one commit reads but does not join.

    They are refused events, which a later release may be able to read, and duplicates dated later than their
    first event, which may be gone by the time of the replay.
    """

    records: dict[str, list[int]] = field(default_factory=dict)  # role -> offsets
    elements: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # role -> (offset, index in it)

    @property
    def elements_count(self) -> int:
        """Number of excluded single impressions and actions."""
        return sum(map(len, self.elements.values()))

    def add(self, role: str, offsets: I64) -> None:
        """Exclude whole records. `offsets`: (N,) int64."""
        if len(offsets):
            self.records.setdefault(role, []).extend(offsets.tolist())

    def add_elements(self, role: str, offsets: I64, places: I64) -> None:
        """Exclude single elements: (N,) int64 record offsets, (N,) int64 indices in the records."""
        if len(offsets):
            self.elements.setdefault(role, []).extend(zip(offsets.tolist(), places.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class WatermarkSetBack:
    """The change of a watermark that an operator set back with a commit (PROTOCOL 19).

    Decisions made under the former watermark stand. A replay of this commit recalls impressions that were
    late or forgotten by then, so that none of them yields a second sample.
    """

    was_ms: int  # the watermark before
    recall: Mapping[str, int]  # role -> offset from which events are read again, up to the commit's `next`


@dataclass(frozen=True, slots=True)
class Commit:
    """State of one partition as of a record of `<model>.joiner`."""

    next: Mapping[str, int]  # role -> next offset to read
    low: Mapping[str, int]  # role -> smallest offset that the state depends on
    watermark_ms: int | None
    clocks: Mapping[str, int]  # role -> the watermark's clock of that stream
    since: int  # offset in `<model>.joiner` of the commit after which a replay begins; -1: at `start`
    start: Mapping[str, int]  # role -> first offset that was ever read
    log_ids: Mapping[str, str]  # topic -> log id, without which offsets have no meaning
    ledger: Ledger
    written_ms: int  # wall clock
    began_ms: int | None  # event time of the first impression that was joined; None: none yet
    exclusions: ReplayExclusions = field(default_factory=ReplayExclusions)
    clock: ClockState | None = None  # the writer's
    set_back: WatermarkSetBack | None = None  # only in commits of `freshet late set-back`

    def encode(self) -> bytes:
        """Return the record's bytes."""
        record: dict[str, Any] = {
            "v": VERSION,
            "kind": "commit",
            "next": self.next,
            "low": self.low,
            "watermark_ms": self.watermark_ms,
            "clocks": self.clocks,
            "since": self.since,
            "start": self.start,
            "log_ids": self.log_ids,
            "ledger": self.ledger.to_json(),
            "written_ms": self.written_ms,
            "began_ms": self.began_ms,
        }
        if self.clock is not None:
            record["clock"] = list(self.clock)
        if self.set_back is not None:
            record["set_back"] = {"was_ms": self.set_back.was_ms, "recall": self.set_back.recall}
        if self.exclusions.records:
            record["skip"] = {role: spans(offsets) for role, offsets in self.exclusions.records.items()}
        if self.exclusions.elements:
            record["skip_elements"] = self.exclusions.elements
        return orjson.dumps(record)

    @classmethod
    def decode(cls, value: bytes, where: str) -> Commit:
        """Read a record back. Raises Corrupt, naming `where`, if it is not one."""
        try:
            record = orjson.loads(value)
            if record["v"] != VERSION or record["kind"] != "commit":
                raise Corrupt(
                    f"{where}: expected a joiner's commit of format {VERSION}, found {value[:60]!r}"
                )
            exclusions = ReplayExclusions(
                {str(role): unspan(pairs) for role, pairs in record.get("skip", {}).items()},
                {
                    str(role): [(int(offset), int(place)) for offset, place in pairs]
                    for role, pairs in record.get("skip_elements", {}).items()
                },
            )
            watermark = record["watermark_ms"]
            began = record["began_ms"]
            clock = record.get("clock")
            set_back = record.get("set_back")
            return cls(
                next=_integers(record["next"]),
                low=_integers(record["low"]),
                watermark_ms=None if watermark is None else int(watermark),
                clocks=_integers(record["clocks"]),
                since=int(record["since"]),
                start=_integers(record["start"]),
                log_ids={str(k): str(v) for k, v in record["log_ids"].items()},
                ledger=Ledger.from_json(record["ledger"]),
                written_ms=int(record["written_ms"]),
                began_ms=None if began is None else _event_time(began),
                exclusions=exclusions,
                clock=None if clock is None else _clock_state(clock),
                set_back=None if set_back is None else _set_back(set_back, watermark),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(f"{where}: expected a joiner's commit, found {value[:60]!r} ({error})") from error


def spans(offsets: list[int]) -> list[int]:
    """Offsets as [start, count, start, count, …]: those of a resent batch are consecutive."""
    if not offsets:
        return []
    values = np.unique(np.array(offsets, np.int64))
    starts = np.concatenate([[0], np.flatnonzero(np.diff(values) != 1) + 1])
    counts = np.diff(np.append(starts, len(values)))
    return [int(x) for pair in zip(values[starts], counts, strict=True) for x in pair]


def unspan(pairs: list[int]) -> list[int]:
    """Return the offsets that `spans` has encoded. Raises ValueError if it cannot have encoded them."""
    if len(pairs) % 2:
        raise ValueError("spans come in pairs of start and count")
    offsets: list[int] = []
    for start, count in zip(pairs[::2], pairs[1::2], strict=True):
        if not 0 <= count <= MOST_SKIPPED:
            raise ValueError(f"a span of {count} records")
        offsets.extend(range(int(start), int(start) + int(count)))
    return offsets


MOST_SKIPPED = 10_000_000
"""Records in one span of skips; more than a commit ever covers, so a larger one is damage."""


def _clock_state(record: list[Any]) -> ClockState:
    boot, offset_ms, former_ms, known_from_ms = record
    former = None if former_ms is None else int(former_ms)
    return ClockState(str(boot), int(offset_ms), former, int(known_from_ms))


def _set_back(record: Mapping[str, Any], watermark_ms: int | None) -> WatermarkSetBack:
    found = WatermarkSetBack(_event_time(record["was_ms"]), _integers(record["recall"]))
    if watermark_ms is None or watermark_ms > found.was_ms:
        raise ValueError(f"a watermark of {watermark_ms} that was set back from {found.was_ms}")
    return found


def _event_time(value: object) -> int:
    if not isinstance(value, int) or not -MAX_TIME_MS <= value <= MAX_TIME_MS:
        raise ValueError(f"a time of {value!r}")
    return value


def _integers(record: Mapping[str, Any]) -> dict[str, int]:
    return {str(k): int(v) for k, v in record.items()}
