"""One partition's join from records to appends: decoding, state, watermark, commits and their replay. No
I/O.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from freshet.clock import ClockState
from freshet.config.spec.topics import COMMIT_SKIPS, RecordLimits
from freshet.errors import Corrupt, Unavailable
from freshet.joiner import blocks
from freshet.joiner.commit import Commit, Skips
from freshet.joiner.core import (
    NOT_IN_A_REPLAY,
    ActionColumns,
    ImpressionColumns,
    Joiner,
    Samples,
    ShownColumns,
    datable,
)
from freshet.joiner.decode import EventColumns, EventDecoder, Refused, refuse_too_large
from freshet.joiner.ledger import Ledger
from freshet.joiner.plan import JoinPlan
from freshet.joiner.watermark import Now, Timed, TimeRules, Watermark, judge_times
from freshet.log.dead_letters import letter
from freshet.observability.spans import JoinedEvent
from freshet.observability.tracing import traced
from freshet.types import I64, U8, Append, BytesColumn, Records

if TYPE_CHECKING:
    from freshet.observability.tracer import Tracer

__all__ = ["READY_BYTES", "Outputs", "Task", "Topics", "joined_events", "pieces"]

READY_BYTES = 64 << 20
"""Of decided samples that one flush holds, beyond those of the last event: a second's worth of windows that
close in a catch-up may be gigabytes, as each sample has its event's context."""

PIECE_BYTES = 256 << 10
"""Of records that are joined before it is looked whether the task is full; one record at least. It bounds the
elements of one piece, and so a commit (`freshet.config.spec.topics.COMMIT_SKIPS`)."""

_STAGE_MS, _STAGES = 1000, 1000

LONGEST_REASON = 2_000
"""Characters of a reason that a decoder's error gives."""

_NOT_OF_A_RECORD = (Unavailable, MemoryError)
"""Errors that say nothing of the records: they are read again, or the process starts again."""


@dataclass(frozen=True, slots=True)
class Topics:
    """Topics of the join, by what they are for."""

    inputs: Mapping[str, str]  # role -> topic; `shown` only if the spec has it
    samples: str
    late: str
    joiner: str
    dead_letters: str
    log_ids: Mapping[str, str]  # input topic -> log id
    limits: RecordLimits  # of records that are derived from events
    samples_partitions: int  # the spec's; partition p of the inputs goes to p modulo this many

    def samples_partition(self, partition: int) -> int:
        """Where samples of a partition of the inputs go. Several partitions may share one: inputs may grow,
        `samples` does not in a model's life (PROTOCOL 1)."""
        return partition % self.samples_partitions


@dataclass(slots=True)
class Outputs:
    """What one flush of one partition appends; `commit` says what is true with it."""

    appends: list[Append]
    dead_letters: list[bytes]
    commit: Commit
    samples: int  # on time, in `appends`
    newest_ms: int | None  # newest event time among these
    outcomes: Mapping[str, int]  # EVENT_COUNTERS -> events since the last commit
    refused: Mapping[str, Mapping[str, int]]  # role -> REFUSALS -> events since the last commit
    out_of_bounds: Mapping[str, int] = field(default_factory=dict)  # label -> samples dropped for its bounds
    joined: Sequence[JoinedEvent] = ()  # the traced events among them


@dataclass(frozen=True, slots=True)
class _Step:
    """A commit of the past: where a replay may begin."""

    offset: int  # in `<model>.joiner`; -1: the beginning
    next: Mapping[str, int]


@dataclass(slots=True)
class Task:
    """The join of one partition.

    Call `take` with what was read, and `flush` to decide and get what must be appended, in one atomic append
    with all other partitions' outputs; after it `appended`. If the append is not known to have happened the
    task is void: build a new one from the log.
    """

    partition: int
    plan: JoinPlan
    topics: Topics
    decoder: EventDecoder
    next: dict[str, int]  # role -> next offset to read
    joiner: Joiner = field(init=False)
    watermark: Watermark = field(init=False)
    start: dict[str, int] = field(init=False)
    events: int = 0  # read by this process
    refused: int = 0  # since the model began
    clock: ClockState | None = None  # of the process whose commit was the last
    _letters: list[bytes] = field(default_factory=list)
    _refused: dict[str, Counter[str]] = field(default_factory=dict)  # role -> REFUSALS, as the letters
    _committed_events: Mapping[str, int] = field(default_factory=dict)
    _skips: Skips = field(default_factory=Skips)
    _steps: deque[_Step] = field(default_factory=deque)
    _committed_next: dict[str, int] = field(default_factory=dict)
    _advanced_ms: int | None = None  # the watermark that the join has advanced to; at most `watermark.value`

    def __post_init__(self) -> None:
        self.joiner = Joiner(self.plan)
        self.watermark = Watermark(tuple(self.topics.inputs))
        self.start = dict(self.next)
        self._committed_next = dict(self.next)
        self._committed_events = self.ledger().events
        self._steps.append(_Step(-1, dict(self.next)))

    # -- live

    def take(self, role: str, records: Records, now: Now | None = None) -> Refused:
        """Join what was read from one stream, from `next[role]` on.

        Args:
            now: the present time; None for a log that is joined as history.

        Returns what was refused. If clocks disagree on a record (`disputed`), records from it on are left,
        and `next[role]` is its offset.
        """
        columns, refused = self.decode(role, records)
        if isinstance(columns, ImpressionColumns):
            columns = self.decoder.fitting(columns, records, refused)
            labels = len(self.plan.labels)
            columns = refuse_too_large(columns, records, self.topics.limits, labels, refused)
        timed = self._timed(role, columns, records, now, refused)
        end = len(records)
        if timed.disputed is not None:
            end = int(records.offsets.searchsorted(timed.disputed.offset))
            refused = refused.before(end)
        if len(timed.columns):
            self.watermark.observe(role, timed.first_ms, timed.last_ms)
            self._skip_later(role, timed.columns, self._join(timed.columns))
        if len(refused):
            self._refuse(role, records, refused)
        self.events += end
        self.next[role] = records.next_offset if timed.disputed is None else timed.disputed.offset
        refused.disputed = timed.disputed
        return refused

    @property
    def has_output(self) -> bool:
        """Would a flush append samples or dead letters."""
        w = self.watermark.value
        return bool(self._letters) or self.joiner.has_ready or (w is not None and self.joiner.due(w))

    @property
    def has_progress(self) -> bool:
        """Has anything been read since the last commit."""
        return self.next != self._committed_next

    def flush(self, now_ms: int) -> Outputs:
        """Advance to the watermark, and make the commit with all that it holds."""
        if self.watermark.value is not None:
            self._advance(self.watermark.value)
        appends = []
        most = self.topics.limits.block_bytes, self.plan.block_samples
        decided, late = self.joiner.take(), self.joiner.take_late()
        for topic, samples in ((self.topics.samples, decided), (self.topics.late, late)):
            if len(samples):
                encoded = blocks.encode(samples, *most)
                where = self.topics.samples_partition(self.partition)
                appends.append(Append(topic, where, encoded))
        joined = joined_events(decided, *most) or ()
        commit = self._commit(now_ms)
        appends.append(Append(self.topics.joiner, self.partition, BytesColumn.of([commit.encode()])))
        letters, self._letters, self._skips = self._letters, [], Skips()
        refused, self._refused = self._refused, {}
        outside = self.joiner.take_out_of_bounds()
        newest_ms = int(decided.times_ms.max()) if len(decided) else None
        before = self._committed_events
        outcomes = {name: events - before[name] for name, events in commit.ledger.events.items()}
        return Outputs(appends, letters, commit, len(decided), newest_ms, outcomes, refused, outside, joined)

    def _advance(self, target_ms: int) -> None:
        """Advance to a watermark, or to an earlier one at which samples of READY_BYTES are decided: the next
        flush goes on from there. Stages of a second, or of a thousandth of the way if that is longer, bound
        what one flush holds in memory; where W pauses on its way decides nothing else."""
        at = self._advanced_ms
        if at is None or not self.joiner.due(target_ms):
            at = target_ms
        stage = max(_STAGE_MS, (target_ms - at) // _STAGES)
        while True:
            at = min(target_ms, at + stage)
            self.joiner.advance(at)
            if at == target_ms or self.joiner.ready_bytes >= READY_BYTES:
                break
        self._advanced_ms = at

    @property
    def is_full(self) -> bool:
        """Whether it should be flushed before it takes more: many samples are decided, or a commit would name
        many events that a replay leaves out."""
        return self.joiner.ready_bytes >= READY_BYTES or self._skips.elements_count >= COMMIT_SKIPS

    def appended(self, outputs: Outputs, commit_offset: int) -> None:
        """The flush is in the log; its commit at this offset."""
        self._committed_next = dict(outputs.commit.next)
        self._committed_events = outputs.commit.ledger.events
        self._steps.append(_Step(commit_offset, outputs.commit.next))

    def ledger(self) -> Ledger:
        """Counts since the model began."""
        return self.joiner.ledger(self.refused)

    # -- replay

    def begin_replay(self, base: tuple[int, Commit] | None, last: Commit) -> dict[str, int]:
        """Prepare to rebuild the state of commit `last`, from the commit `base` = (offset, commit), or from
        the start.

        Returns where to read each stream from; feed each later commit's records to `replay` in order.
        """
        self.start = dict(last.start)
        before = dict(last.start) if base is None else dict(base[1].next)
        self._steps = deque([_Step(-1 if base is None else base[0], before)])
        if base is not None and base[1].watermark_ms is not None:
            self.joiner.restart_at(base[1].watermark_ms)
        if last.began_ms is not None:
            self.joiner.begin_at(last.began_ms)
        # Records below `low` cannot matter any more: they need not even be in the log.
        self.next = {role: max(offset, last.low[role]) for role, offset in before.items()}
        return dict(self.next)

    def replay(self, offset: int, commit: Commit, read: Mapping[str, Sequence[Records]]) -> None:
        """Repeat one commit: its records from each stream, then its watermark. What it yields was emitted
        then.
        """
        for role, pieces in read.items():
            skipped = np.array(sorted(commit.skips.records.get(role, ())), np.int64)
            for records in pieces:
                columns, _ = self.decode(role, records)
                columns = _without(columns, skipped, set(commit.skips.elements.get(role, ())))
                if len(columns):
                    self._join(columns)
        if commit.watermark_ms is not None:
            self.joiner.advance(commit.watermark_ms)
        self.joiner.discard()
        self.next = {role: max(self.next[role], stop) for role, stop in commit.next.items()}
        self._steps.append(_Step(offset, commit.next))

    def replay_set_back(self, offset: int, commit: Commit, read: Mapping[str, Iterable[Records]]) -> None:
        """Repeat the commit by which an operator has put the watermark back; it follows the former commit
        without events in between. `read`: each stream from `WatermarkSetBack.recall` to the commit's `next`.

        Raises Corrupt if the rebuilt watermark is lower than the one that the commit sets.
        """
        assert commit.watermark_ms is not None, "a commit that sets the watermark back has one"
        try:
            self.joiner.set_back(commit.watermark_ms)
        except ValueError as error:
            raise Corrupt(
                f"{self.topics.joiner}[{self.partition}] at {offset}: {error}\n"
                f"  it sets the watermark back to {commit.watermark_ms}; commits before it are missing"
            ) from error
        for role, pieces in read.items():
            for records in pieces:
                columns, _ = self.decode(role, records)
                columns = columns.where(datable(columns.times_ms))  # the others were refused
                if len(columns):
                    self._join(columns)
        self.joiner.end_recall()
        self._steps.append(_Step(offset, commit.next))

    def end_replay(self, last: Commit, now_ms: int) -> None:
        """The state is that of `last`: go on from it.

        Raises Corrupt if the rebuilt state is not the one that was committed: then events were lost or
        changed.
        """
        found = {label: counts["pending"] for label, counts in self.joiner.ledger().labels.items()}
        expected = {label: counts["pending"] for label, counts in last.ledger.labels.items()}
        if found != expected:
            raise Corrupt(
                f"{self.topics.joiner}[{self.partition}]: the commit says that pending are {expected}\n"
                f"  the replay of its events finds {found}\n"
                "  events between `low` and `next` were removed or changed, or the spec's join keys were"
            )
        self.joiner.set_counters(last.ledger)
        self.refused = last.ledger.refused
        self.clock = last.clock
        self.next = dict(last.next)
        self._committed_next = dict(last.next)
        self._committed_events = last.ledger.events
        self._advanced_ms = last.watermark_ms
        self.watermark.resume(last.watermark_ms, last.clocks, now_ms - last.written_ms)

    # -- within

    def decode(self, role: str, records: Records) -> tuple[EventColumns, Refused]:
        """Decode records. Those for which the decoder raises an error are refused, whatever it is: no record
        ends the joiner."""
        try:
            return self._decode_all(role, records)
        except _NOT_OF_A_RECORD:
            raise
        except Exception:  # decoding each part again tells which records raise it; these keep its words
            bad = dict(self._failing(role, records, range(len(records))))
        rows = [row for row in range(len(records)) if row not in bad]
        try:
            columns, refused = self._decode_all(role, records.where(rows))
        except _NOT_OF_A_RECORD:
            raise
        except Exception as error:  # of records that can be decoded alone, but not together
            bad |= dict.fromkeys(rows, _words(error))
            rows = []
            columns, refused = self._decode_all(role, records.where(rows))
        refused.rows = [rows[row] for row in refused.rows]
        for row, reason in bad.items():
            refused.rows.append(row)
            refused.reasons.append(reason)
        return columns, refused

    def _failing(self, role: str, records: Records, rows: range) -> Iterator[tuple[int, str]]:
        """(Row, reason) of records for which the decoder raises an error; found by halves."""
        try:
            self._decode_all(role, records.where(rows))
            return
        except _NOT_OF_A_RECORD:
            raise
        except Exception as error:
            if len(rows) == 1:
                yield rows[0], _words(error)
                return
        middle = len(rows) // 2
        yield from self._failing(role, records, rows[:middle])
        yield from self._failing(role, records, rows[middle:])

    def _decode_all(self, role: str, records: Records) -> tuple[EventColumns, Refused]:
        if role == "served":
            return self.decoder.served(records)
        if role == "shown":
            return self.decoder.shown(records)
        return self.decoder.actions(records)

    def _timed(
        self,
        role: str,
        columns: ImpressionColumns | ShownColumns | ActionColumns,
        records: Records,
        now: Now | None,
        refused: Refused,
    ) -> Timed[ImpressionColumns] | Timed[ShownColumns] | Timed[ActionColumns]:
        """Judge the times of events."""
        rules = TimeRules(role, self.plan.max_ahead_ms, self.plan.times.get(role))
        if isinstance(columns, ImpressionColumns):
            return judge_times(columns, records, rules, now, refused)
        if isinstance(columns, ShownColumns):
            return judge_times(columns, records, rules, now, refused)
        return judge_times(columns, records, rules, now, refused)

    def _join(self, columns: ImpressionColumns | ShownColumns | ActionColumns) -> U8:
        if isinstance(columns, ImpressionColumns):
            return self.joiner.on_served(columns)
        if isinstance(columns, ShownColumns):
            return self.joiner.on_shown(columns)
        return self.joiner.on_actions(columns)

    def _skip_later(
        self, role: str, columns: ImpressionColumns | ShownColumns | ActionColumns, outcomes: U8
    ) -> None:
        chosen = np.isin(outcomes, NOT_IN_A_REPLAY)
        if not chosen.any():
            return
        offsets, places = columns.places
        # A record that is left out as a whole, such as one that was sent again, is named as a whole.
        _, record, counts = np.unique(offsets, return_inverse=True, return_counts=True)
        whole = (np.bincount(record, chosen) == counts)[record]
        self._skips.add(role, np.unique(offsets[whole]))
        self._skips.add_elements(role, offsets[chosen & ~whole], places[chosen & ~whole])

    def _refuse(self, role: str, records: Records, refused: Refused) -> None:
        self.refused += len(refused)
        self._refused.setdefault(role, Counter()).update(refused.by_reason())
        self._skips.add(role, records.offsets[refused.rows])
        for row, reason in zip(refused.rows, refused.reasons, strict=True):
            said = {
                "v": 1,
                "kind": "dead-letter",
                "reason": reason,
                "topic": self.topics.inputs[role],
                "partition": self.partition,
                "offset": int(records.offsets[row]),
                "time_ms": int(records.times_ms[row]),
            }
            most = self.topics.limits.dead_letter_bytes
            self._letters.append(letter(said, records.values[row], max_bytes=most))

    def _commit(self, now_ms: int) -> Commit:
        low = {role: self.joiner.low(role, offset) for role, offset in self.next.items()}
        while len(self._steps) > 1 and all(self._steps[1].next[role] <= low[role] for role in low):
            self._steps.popleft()
        return Commit(
            next=dict(self.next),
            low=low,
            watermark_ms=self._advanced_ms,
            clocks=dict(self.watermark.clocks),
            since=self._steps[0].offset,
            start=self.start,
            log_ids=self.topics.log_ids,
            ledger=self.ledger(),
            written_ms=now_ms,
            began_ms=self.joiner.began_ms,
            skips=self._skips,
            clock=self.clock,
        )


@traced
def joined_events(tracer: Tracer, decided: Samples, max_bytes: int, max_samples: int) -> list[JoinedEvent]:
    """Return the traced events among samples that are about to be appended in blocks of these sizes."""
    requests = tracer.ids.traced(decided.requests)
    if not requests:
        return []
    ends = np.array([stop for _, stop in blocks.cuts(decided, max_bytes, max_samples)], np.int64)
    decided_ns, events = tracer.now_ns(), []
    for request in requests:
        rows = np.flatnonzero(decided.requests == np.uint64(request))
        block = int(np.searchsorted(ends, rows[0], side="right"))
        events.append(JoinedEvent(request, int(decided.times_ms[rows].min()), len(rows), block, decided_ns))
    return events


def _words(error: Exception) -> str:
    return f"the decoder raises {type(error).__name__}: {error}"[:LONGEST_REASON]


def _without(
    columns: ImpressionColumns | ShownColumns | ActionColumns, skipped: I64, elements: set[tuple[int, int]]
) -> ImpressionColumns | ShownColumns | ActionColumns:
    """Leave out what a commit names: whole records, and (offset, place) of single impressions or actions."""
    if not len(columns) or not (len(skipped) or elements):
        return columns
    offsets, places = columns.places
    kept = ~np.isin(offsets, skipped)
    if elements:
        pairs = zip(offsets.tolist(), places.tolist(), strict=True)
        kept &= np.array([pair not in elements for pair in pairs], bool)
    return columns.where(kept)


def pieces(records: Records) -> Iterator[Records]:
    """Records in pieces of about PIECE_BYTES, one record at least."""
    ends = records.values.ends
    if len(records.values.data) <= PIECE_BYTES or len(records) == 1:
        yield records
        return
    start = before = 0
    while start < len(records):
        stop = max(start + 1, int(np.searchsorted(ends, before + PIECE_BYTES, side="right")))
        yield Records(
            records.offsets[start:stop],
            records.times_ms[start:stop],
            records.keys.slice(start, stop),
            records.values.slice(start, stop),
            records.next_offset if stop == len(records) else int(records.offsets[stop - 1]) + 1,
        )
        start, before = stop, int(ends[stop - 1])
