"""Commits of the joiner: JSON records of `<model>.joiner`, one per partition and commit, atomic with the
samples.

A restart replays them. The watermark is constant between two commits, so reading the records up to `next` and
then advancing to `watermark_ms`, commit by commit, restores the state exactly (PROTOCOL 18).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from freshet.clock import ClockState
from freshet.errors import Corrupt
from freshet.joiner.ledger import Ledger
from freshet.types import I64

__all__ = ["LONG_AGO_MS", "Commit", "ReplayExclusions", "WatermarkSetBack", "spans"]

VERSION = 1

LONG_AGO_MS = -(2**53)
"""`began_ms` of commits that lack the field, from earlier releases: their label-delay warm-up is over."""


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
                {str(role): _unspan(pairs) for role, pairs in record.get("skip", {}).items()},
                {
                    str(role): [(int(offset), int(place)) for offset, place in pairs]
                    for role, pairs in record.get("skip_elements", {}).items()
                },
            )
            watermark = record["watermark_ms"]
            began = record.get("began_ms", LONG_AGO_MS)
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


def _unspan(pairs: list[int]) -> list[int]:
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
    if not isinstance(value, int) or not LONG_AGO_MS <= value <= -LONG_AGO_MS:
        raise ValueError(f"a time of {value!r}")
    return value


def _integers(record: Mapping[str, Any]) -> dict[str, int]:
    return {str(k): int(v) for k, v in record.items()}
