"""Join of one partition, from records to appends: decoding, state, watermark, commits, replay. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from freshet.clock import ClockState
from freshet.config.spec.topics import COMMIT_SKIPS
from freshet.errors import Corrupt, Unavailable
from freshet.joiner.commit import Commit, Ledger, ReplayExclusions
from freshet.joiner.core import (
    REPLAY_EXCLUDED,
    ImpressionColumns,
    JoinColumns,
    Joiner,
    Samples,
    ShownColumns,
    block_bounds,
    datable,
    encode_samples,
)
from freshet.joiner.decoder import EventDecoder, Refused, SampleSizes
from freshet.joiner.plan import JoinPlan, Topics
from freshet.joiner.watermark import Now, TimeRules, Watermark, judge_times
from freshet.log.records import letter
from freshet.observability.spans import JoinedEvent
from freshet.observability.tracing import traced
from freshet.types import I64, U8, Append, BytesColumn, Records

if TYPE_CHECKING:
    from freshet.observability.tracer import Tracer

READY_BYTES = 64 << 20
"""Payload bytes of decided samples in one flush, exceeded by those of the last event at most. A second of
windows that close in a catch-up can decide gigabytes, as each sample copies its event's context."""

PIECE_BYTES = 256 << 10
"""Bytes of records joined between two checks of `Task.is_full`; one record at least. Bounds the elements of
one piece, and so the size of a commit (`freshet.config.spec.topics.COMMIT_SKIPS`)."""

STEPS = 200
"""A replay may begin too early by one in STEPS of the commits in open windows. So a task notes about two
thousand of the millions of commits in windows of days."""

_STAGE_MS, _STAGES = 1000, 1000

LONGEST_REASON = 2_000
"""Characters of a decoder's error that a dead letter quotes."""

_NOT_OF_A_RECORD = (Unavailable, MemoryError)
"""Errors that are not caused by a record: the records are read again, or the process restarts."""


@dataclass(slots=True)
class Outputs:
    """Appends of one flush of one partition; `commit` is the state once they are written."""

    appends: list[Append]
    dead_letters: list[bytes]
    commit: Commit
    samples: int  # number of samples on time in `appends`
    newest_ms: int | None  # newest event time of these samples
    outcomes: Mapping[str, int]  # EVENT_COUNTERS -> events since the last commit
    refused: Mapping[str, Mapping[str, int]]  # role -> REFUSALS -> events since the last commit
    out_of_bounds: Mapping[str, int] = field(default_factory=dict)  # label -> samples dropped for its bounds
    joined: Sequence[JoinedEvent] = ()  # the traced events of these samples


@dataclass(frozen=True, slots=True)
class _Step:
    """A past commit, where a replay may begin."""

    offset: int  # in `<model>.joiner`; -1: before the first commit
    next: Mapping[str, int]


@dataclass(slots=True)
class Task:
    """Join of one partition.

    Call `join_records` with records, and `flush` to decide samples and get the appends; write these in one
    atomic append with the other partitions' outputs, then call `on_appended`. If the append is not known to
    be written, the task is void: build a new one from the log.
    """

    partition: int
    plan: JoinPlan
    topics: Topics
    decoder: EventDecoder
    next: dict[str, int]  # role -> next offset to read
    joiner: Joiner = field(init=False)
    watermark: Watermark = field(init=False)
    start: dict[str, int] = field(init=False)
    sizes: SampleSizes = field(init=False)
    events: int = 0  # read by this process
    refused: int = 0  # since the model began
    clock: ClockState | None = None  # of the process that wrote the last commit
    commit: Commit | None = None  # the last one in the log; None: there is none yet
    _samples_partition: int = field(init=False)
    _dead_letters: list[bytes] = field(default_factory=list)
    _refused: dict[str, Counter[str]] = field(default_factory=dict)  # role -> REFUSALS -> events
    _committed_events: Mapping[str, int] = field(default_factory=dict)
    _exclusions: ReplayExclusions = field(default_factory=ReplayExclusions)
    _steps: deque[_Step] = field(default_factory=deque)
    _committed_next: dict[str, int] = field(default_factory=dict)
    _newest_ms: int = 0  # newest event time that was joined
    _advanced_ms: int | None = None  # the watermark that the join has advanced to; at most `watermark.value`

    def __post_init__(self) -> None:
        self.joiner = Joiner(self.plan)
        self.sizes = SampleSizes(self.topics.limits, len(self.plan.labels))
        self._samples_partition = self.topics.samples_partition(self.partition)
        self.watermark = Watermark(tuple(self.topics.inputs))
        self.start = dict(self.next)
        self._committed_next = dict(self.next)
        self._committed_events = self.ledger().events
        self._steps.append(_Step(-1, dict(self.next)))

    # -- live

    def join_records(self, role: str, records: Records, now: Now | None = None) -> Refused:
        """Join records of one stream, from `next[role]` on.

        Args:
            role: the stream.
            records: consecutive records of the stream.
            now: the present time; None for a log that is joined as history.

        Returns the refused records. If clocks disagree on a record (`disputed`), the records from it on are
        not joined, and `next[role]` is its offset.
        """
        columns, refused = self.decode(role, records)
        if isinstance(columns, ImpressionColumns):
            columns = self.decoder.fitting(columns, records, refused)
            columns = self.sizes.refuse_too_large(columns, records, refused)
        rules = TimeRules(role, self.plan.max_ahead_ms, self.plan.times.get(role))
        timed = judge_times(columns, records, rules, now, refused)
        end = len(records)
        if timed.disputed is not None:
            end = int(records.offsets.searchsorted(timed.disputed.offset))
            refused = refused.before(end)
        if len(timed.columns):
            self.watermark.observe(role, timed.first_ms, timed.last_ms)
            self._exclude_later_duplicates(role, timed.columns, self._join(timed.columns))
        if len(refused):
            self._refuse(role, records, refused)
        self.events += end
        self.next[role] = records.next_offset if timed.disputed is None else timed.disputed.offset
        refused.disputed = timed.disputed
        return refused

    @property
    def has_output(self) -> bool:
        """Whether a flush would append samples or dead letters."""
        w = self.watermark.value
        return bool(self._dead_letters) or self.joiner.has_ready or (w is not None and self.joiner.due(w))

    @property
    def has_progress(self) -> bool:
        """Whether records were read since the last commit, or it needs events that the next one does not:
        retention may remove them while no others come."""
        if self.next != self._committed_next:
            return True
        w, last = self.watermark.value, self.commit
        is_over = w is not None and w >= self._newest_ms + self.plan.remembered_ms
        return is_over and last is not None and last.low != last.next

    def flush(self, now_ms: int) -> Outputs:
        """Advance to the watermark; returns the samples and the commit."""
        if self.watermark.value is not None:
            self._advance(self.watermark.value)
        appends = []
        most = self.topics.limits.block_bytes, self.plan.block_samples
        decided, late = self.joiner.take_samples(), self.joiner.take_late_samples()
        for topic, samples in ((self.topics.samples, decided), (self.topics.late, late)):
            if len(samples):
                encoded = encode_samples(samples, *most)
                appends.append(Append(topic, self._samples_partition, encoded))
        joined = joined_events(decided, *most) or ()
        commit = self._commit(now_ms)
        appends.append(Append(self.topics.joiner, self.partition, BytesColumn.of([commit.encode()])))
        letters, self._dead_letters, self._exclusions = self._dead_letters, [], ReplayExclusions()
        refused, self._refused = self._refused, {}
        outside = self.joiner.take_out_of_bounds()
        newest_ms = int(decided.times_ms.max()) if len(decided) else None
        before = self._committed_events
        outcomes = {name: events - before[name] for name, events in commit.ledger.events.items()}
        return Outputs(appends, letters, commit, len(decided), newest_ms, outcomes, refused, outside, joined)

    def _advance(self, target_ms: int) -> None:
        """Advance to a watermark, or to an earlier one at which READY_BYTES of samples are decided; the next
        flush continues from there.

        The join advances in stages of a second, or of a thousandth of the way if that is longer, which bounds
        the memory of one flush. Stages do not change decisions.
        """
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
        """Whether to flush before joining more: many samples are decided, or a commit would name many events
        that a replay excludes."""
        return self.joiner.ready_bytes >= READY_BYTES or self._exclusions.elements_count >= COMMIT_SKIPS

    def on_appended(self, outputs: Outputs, commit_offset: int) -> None:
        """Record that the flush is written, with its commit at this offset."""
        self.commit = outputs.commit
        self._committed_next = dict(outputs.commit.next)
        self._committed_events = outputs.commit.ledger.events
        self._add_step(commit_offset, outputs.commit)

    def ledger(self) -> Ledger:
        """Return the counts since the model began."""
        return self.joiner.ledger(self.refused)

    # -- replay

    def begin_replay(self, base: tuple[int, Commit] | None, last: Commit) -> dict[str, int]:
        """Prepare to rebuild the state of commit `last`, from the commit `base` = (offset, commit), or from
        the start if `base` is None.

        Returns the offset from which to read each stream. Call `replay` for each later commit, in order.
        """
        self.start = dict(last.start)
        before = dict(last.start) if base is None else dict(base[1].next)
        self._steps = deque([_Step(-1 if base is None else base[0], before)])
        if base is not None and base[1].watermark_ms is not None:
            self.joiner.restart_at(base[1].watermark_ms)
        if last.began_ms is not None:
            self.joiner.begin_at(last.began_ms)
        # The state does not depend on records below `low`; the log may have removed them.
        self.next = {role: max(offset, last.low[role]) for role, offset in before.items()}
        return dict(self.next)

    def replay(self, offset: int, commit: Commit, read: Mapping[str, Sequence[Records]]) -> None:
        """Repeat one commit: join its records of each stream, then advance to its watermark. Samples are
        dropped, as they are in the log already."""
        for role, pieces in read.items():
            skipped = np.array(sorted(commit.exclusions.records.get(role, ())), np.int64)
            for records in pieces:
                columns, _ = self.decode(role, records)
                columns = _without(columns, skipped, set(commit.exclusions.elements.get(role, ())))
                if len(columns):
                    self._join(columns)
        if commit.watermark_ms is not None:
            self.joiner.advance(commit.watermark_ms)
        self.joiner.discard()
        self.next = {role: max(self.next[role], stop) for role, stop in commit.next.items()}
        self._add_step(offset, commit)

    def replay_set_back(self, offset: int, commit: Commit, read: Mapping[str, Iterable[Records]]) -> None:
        """Repeat a commit by which an operator set the watermark back. It follows the former commit without
        events in between. `read` has each stream from `WatermarkSetBack.recall` to the commit's `next`.

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
                columns = columns.where(datable(columns.times_ms))  # events of other times were refused
                if len(columns):
                    self._join(columns)
        self.joiner.end_recall()
        self._add_step(offset, commit)

    def end_replay(self, last: Commit, now_ms: int) -> None:
        """End a replay at commit `last`; joining continues from it.

        Raises Corrupt if the rebuilt state differs from the committed one: events were lost or changed.
        """
        found = {label: counts["pending"] for label, counts in self.joiner.ledger().labels.items()}
        expected = {label: counts["pending"] for label, counts in last.ledger.labels.items()}
        if found != expected:
            raise Corrupt(
                f"{self.topics.joiner}[{self.partition}]: expected pending impressions {expected}\n"
                f"  the replay of its events finds {found}\n"
                "  events between `low` and `next` were removed or changed, or the spec's join keys were"
            )
        self.joiner.set_counters(last.ledger)
        self.refused = last.ledger.refused
        self.clock = last.clock
        self.commit = last
        self.next = dict(last.next)
        self._committed_next = dict(last.next)
        self._committed_events = last.ledger.events
        self._advanced_ms = last.watermark_ms
        self.watermark.resume(last.watermark_ms, last.clocks, now_ms - last.written_ms)

    # -- internal

    def decode(self, role: str, records: Records) -> tuple[JoinColumns, Refused]:
        """Decode records. A record for which the decoder raises any error is refused: no record ends the
        joiner."""
        try:
            return self._decode_all(role, records)
        except _NOT_OF_A_RECORD:
            raise
        except Exception:  # decode parts again to find the records that raise it
            bad = dict(self._failing(role, records, range(len(records))))
        rows = [row for row in range(len(records)) if row not in bad]
        try:
            columns, refused = self._decode_all(role, records.where(rows))
        except _NOT_OF_A_RECORD:
            raise
        except Exception as error:  # records that decode one by one, but not together
            bad |= dict.fromkeys(rows, _reason(error))
            rows = []
            columns, refused = self._decode_all(role, records.where(rows))
        refused.rows = [rows[row] for row in refused.rows]
        for row, reason in bad.items():
            refused.rows.append(row)
            refused.reasons.append(reason)
        return columns, refused

    def _failing(self, role: str, records: Records, rows: range) -> Iterator[tuple[int, str]]:
        """Yield (row, reason) of the records for which the decoder raises an error, by bisection."""
        try:
            self._decode_all(role, records.where(rows))
            return
        except _NOT_OF_A_RECORD:
            raise
        except Exception as error:
            if len(rows) == 1:
                yield rows[0], _reason(error)
                return
        middle = len(rows) // 2
        yield from self._failing(role, records, rows[:middle])
        yield from self._failing(role, records, rows[middle:])

    def _decode_all(self, role: str, records: Records) -> tuple[JoinColumns, Refused]:
        if role == "served":
            return self.decoder.served(records)
        if role == "shown":
            return self.decoder.shown(records)
        return self.decoder.actions(records)

    def _join(self, columns: JoinColumns) -> U8:
        self._newest_ms = max(self._newest_ms, int(columns.times_ms.max()))
        if isinstance(columns, ImpressionColumns):
            return self.joiner.on_served(columns)
        if isinstance(columns, ShownColumns):
            return self.joiner.on_shown(columns)
        return self.joiner.on_actions(columns)

    def _exclude_later_duplicates(self, role: str, columns: JoinColumns, outcomes: U8) -> None:
        chosen = np.isin(outcomes, REPLAY_EXCLUDED)
        if not chosen.any():
            return
        offsets, places = columns.places
        # A record of which all elements are excluded, such as one that was sent again, is named as a whole.
        _, record, counts = np.unique(offsets, return_inverse=True, return_counts=True)
        whole = (np.bincount(record, chosen) == counts)[record]
        self._exclusions.add(role, np.unique(offsets[whole]))
        self._exclusions.add_elements(role, offsets[chosen & ~whole], places[chosen & ~whole])

    def _refuse(self, role: str, records: Records, refused: Refused) -> None:
        self.refused += len(refused)
        self._refused.setdefault(role, Counter()).update(refused.by_reason())
        self._exclusions.add(role, records.offsets[refused.rows])
        for row, reason in zip(refused.rows, refused.reasons, strict=True):
            fields = {
                "v": 1,
                "kind": "dead-letter",
                "reason": reason,
                "topic": self.topics.inputs[role],
                "partition": self.partition,
                "offset": int(records.offsets[row]),
                "time_ms": int(records.times_ms[row]),
            }
            most = self.topics.limits.dead_letter_bytes
            self._dead_letters.append(letter(fields, records.values[row], max_bytes=most))

    def _add_step(self, offset: int, commit: Commit) -> None:
        """Note a commit from which a replay may begin, instead of the last one noted if that is near the one
        before. A replay that begins earlier than it needs to finds the same state: it reads no event below
        `low`."""
        steps = self._steps
        if len(steps) > 1 and offset - steps[-2].offset <= (offset - steps[0].offset) / STEPS:
            steps.pop()
        steps.append(_Step(offset, commit.next))

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
            exclusions=self._exclusions,
            clock=self.clock,
        )


@traced
def joined_events(tracer: Tracer, decided: Samples, max_bytes: int, max_samples: int) -> list[JoinedEvent]:
    """Return the traced events among samples to be appended in blocks of these sizes."""
    requests = tracer.ids.traced(decided.requests)
    if not requests:
        return []
    ends = np.array([stop for _, stop in block_bounds(decided, max_bytes, max_samples)], np.int64)
    decided_ns, events = tracer.now_ns(), []
    for request in requests:
        rows = np.flatnonzero(decided.requests == np.uint64(request))
        block = int(np.searchsorted(ends, rows[0], side="right"))
        events.append(JoinedEvent(request, int(decided.times_ms[rows].min()), len(rows), block, decided_ns))
    return events


def _reason(error: Exception) -> str:
    return f"the decoder raises {type(error).__name__}: {error}"[:LONGEST_REASON]


def _without(columns: JoinColumns, skipped: I64, elements: set[tuple[int, int]]) -> JoinColumns:
    """Drop the events that a commit excludes: whole records, and single elements as (offset, index)."""
    if not len(columns) or not (len(skipped) or elements):
        return columns
    offsets, places = columns.places
    kept = ~np.isin(offsets, skipped)
    if elements:
        pairs = zip(offsets.tolist(), places.tolist(), strict=True)
        kept &= np.array([pair not in elements for pair in pairs], bool)
    return columns.where(kept)


def pieces(records: Records) -> Iterator[Records]:
    """Yield records in pieces of about PIECE_BYTES, one record at least."""
    ends = records.values.ends
    if len(records.values.data) <= PIECE_BYTES or len(records) == 1:
        yield records
        return
    start = before = 0
    while start < len(records):
        stop = max(start + 1, int(np.searchsorted(ends, before + PIECE_BYTES, side="right")))
        following = records.next_offset if stop == len(records) else int(records.offsets[stop - 1]) + 1
        yield records.slice(start, stop, following)
        start, before = stop, int(ends[stop - 1])
