"""Batches beside the joiner after clocks were wrong (docs/operations.md, "A clock that was wrong").

`set_back` sets event time back, after the watermark followed wrong clocks (PROTOCOL 19). `LateJoin` joins
impressions of `<model>.samples.late` once their windows are over, with the events that the log still holds.
It leaves out samples that are in `<model>.samples`, so the batch can be repeated, and killed at any moment.

Letters: E events, K late samples, N impressions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from freshet import _native
from freshet.errors import DataLost
from freshet.features.blocks import read_blocks
from freshet.joiner.commit import Commit, ReplayExclusions, WatermarkSetBack
from freshet.joiner.core import (
    ActionColumns,
    ImpressionColumns,
    Joiner,
    Samples,
    ShownColumns,
    datable,
    encode_samples,
)
from freshet.joiner.decoder import Refused
from freshet.joiner.partition import READY_BYTES, Task
from freshet.joiner.plan import JoinContext
from freshet.joiner.replay import last_commits, stream
from freshet.log import Writer
from freshet.types import I64, Append, Bool, BytesColumn, Records, TopicPartition

SET_BACK_MARGIN_MS = 3_600_000
"""Largest difference between an event's time and the log's time of its record, by which events are found."""


@dataclass(frozen=True, slots=True)
class SetBackPartition:
    """Watermark of one partition, before and after."""

    partition: int
    was_ms: int | None  # None: no event was joined yet
    watermark_ms: int | None  # equals `was_ms` if it is not changed
    recall: Mapping[str, int]  # role -> offset from which ids are recalled; empty: it is not changed
    next: Mapping[str, int]  # role -> offset of the first event that is joined under the new watermark

    @property
    def changed(self) -> bool:
        """Whether the watermark is, or in a dry run would be, set back."""
        return bool(self.recall)


def set_back(context: JoinContext, *, dry_run: bool) -> list[SetBackPartition]:
    """Set back the watermark of every partition that is ahead of the clock, to the present, or to the time of
    the oldest unread event.

    Each group of partitions changes in one atomic append, by the joiner's own writer: a running joiner is
    fenced, and starts again from the new commits. Other partitions do not change, so the function can be
    repeated, and killed at any moment.

    Args:
        context: of the join; the caller has checked its clock.
        dry_run: change nothing, and open no writer.

    Raises:
        DataLost: a topic was created anew, or has removed events that must be known by id.
        Fenced: a joiner has started meanwhile.
        Corrupt: a commit cannot be read.
        Unavailable: the log cannot be reached.
    """
    horizon_ms = Joiner(context.plan).horizon_ms
    done: list[SetBackPartition] = []
    for group in context.groups(context.partitions):
        writer = None if dry_run else context.writer_of(group)
        try:
            last = last_commits(context, group)
            found = [_judge(context, horizon_ms, p, last[p]) for p in group]
            if writer is not None and any(one.changed for one in found):
                _write(context, writer, found, last)
        finally:
            if writer is not None:
                writer.close()
        done += found
    return done


def _judge(
    context: JoinContext, horizon_ms: int, partition: int, last: tuple[int, Commit] | None
) -> SetBackPartition:
    log, now_ms = context.log, context.clock.now_ms()
    commit = None if last is None else last[1]
    if commit is None or commit.watermark_ms is None:
        return SetBackPartition(partition, None, None, {}, {} if commit is None else commit.next)
    was_ms = commit.watermark_ms
    if max(was_ms, min(commit.clocks.values(), default=was_ms)) <= now_ms:
        return SetBackPartition(partition, was_ms, was_ms, {}, commit.next)
    places = {role: TopicPartition(topic, partition) for role, topic in context.topics.inputs.items()}
    unread = [time_at(context, at, commit.next[role], log.bounds(at).end) for role, at in places.items()]
    to_ms = min([now_ms, was_ms, *(time_ms for time_ms in unread if time_ms is not None)])
    # Later events are no longer late, so their ids must be known.
    from_ms = to_ms - horizon_ms
    recall = {}
    for role, at in places.items():
        start = log.bounds(at).start
        recall[role] = min(max(log.offset_at(at, from_ms - SET_BACK_MARGIN_MS), start), commit.next[role])
        if recall[role] == start > commit.start[role]:
            oldest_ms = time_at(context, at, start, commit.next[role])
            if oldest_ms is not None and oldest_ms > from_ms:
                raise DataLost(
                    f"{at}: expected the events of the {horizon_ms / 1000:.0f} s (window + 2 grace) before "
                    f"{to_ms}, found none before {oldest_ms}: the log has removed them\n"
                    "  duplicates of removed events would be joined again: wait until the clock has reached "
                    f"{oldest_ms + horizon_ms}, and repeat the command"
                )
    return SetBackPartition(partition, was_ms, to_ms, recall, commit.next)


def _write(
    context: JoinContext,
    writer: Writer,
    found: Sequence[SetBackPartition],
    last: Mapping[int, tuple[int, Commit] | None],
) -> None:
    topics, now_ms = context.topics, context.clock.now_ms()
    appends = []
    held: dict[TopicPartition, int] = {}
    for one in found:
        known = last[one.partition]
        if known is None:
            continue
        commit = known[1]
        if one.changed:
            assert one.watermark_ms is not None
            assert one.was_ms is not None
            commit = replace(
                commit,
                low={role: min(low, one.recall[role]) for role, low in commit.low.items()},
                watermark_ms=one.watermark_ms,
                clocks={role: min(clock, one.watermark_ms) for role, clock in commit.clocks.items()},
                written_ms=now_ms,
                exclusions=ReplayExclusions(),
                clock=None,  # the former writers' clocks were wrong
                set_back=WatermarkSetBack(one.was_ms, one.recall),
            )
            appends.append(Append(topics.joiner, one.partition, BytesColumn.of([commit.encode()])))
        held |= {
            TopicPartition(topic, one.partition): commit.low[role] for role, topic in topics.inputs.items()
        }
        held[TopicPartition(topics.joiner, one.partition)] = max(commit.since, 0)
    # Before the commit, so that retention removes nothing that the commit needs.
    context.log.hold(f"joiner-{context.model}-{found[0].partition}", held)
    writer.append(appends)


def time_at(context: JoinContext, at: TopicPartition, start: int, stop: int) -> int | None:
    """Return the log's time of the first record in [start, stop); None if there is none.

    Raises Unavailable if the log does not answer.
    """
    for records in stream(context.log, at, start, stop, context.clock):
        if len(records):
            return int(records.times_ms[0])
    return None


ROUND_BYTES = 256 << 20
"""Payload bytes of late samples that are joined together. Memory holds them and their actions."""

LATE_JOIN_MARGIN_MS = 25 * 3_600_000
"""Events are found by the log's time of their records, which may be a day and an hour off."""


@dataclass(slots=True)
class LateJoined:
    """Outcomes of the late samples of one partition of `samples`; a sample is (impression, label)."""

    partition: int
    start: int  # the offsets [start, stop) of `samples.late` were read
    stop: int
    read: int = 0  # late samples, without duplicates
    already: int = 0  # in `samples` before
    positive: int = 0  # joined now; a number counts as positive
    negative: int = 0
    no_sample: int = 0  # the spec makes none: sampled out, not shown, the given label false, no value
    left: dict[str, int] = field(
        default_factory=lambda: {"windows_open": 0, "event_gone": 0, "samples_gone": 0}
    )


@dataclass(slots=True)
class LateJoin:
    """The batch; `run` joins the partitions of `samples` one after the other."""

    context: JoinContext
    dry_run: bool = False
    round_bytes: int = ROUND_BYTES

    def run(self) -> Iterator[LateJoined]:
        """Join each partition of `samples`; yields the outcomes of its late samples.

        Raises:
            Fenced: another such batch has begun.
            DataLost: a topic was created anew, or has removed records.
            Corrupt: a commit cannot be read.
            Unavailable: the log cannot be read or written; repeat the batch.
        """
        for partition in range(self.context.topics.samples_partitions):
            yield self._partition(partition)

    def _partition(self, partition: int) -> LateJoined:
        late = TopicPartition(self.context.topics.late, partition)
        bounds = self.context.log.bounds(late)
        done = LateJoined(partition, bounds.start, bounds.end)
        if bounds.start == bounds.end:
            return done
        # Opened before `samples` is read, so that an earlier batch cannot append after that.
        name = f"late-{self.context.model}-{partition}"
        writer = None if self.dry_run else self.context.writer_named(name)
        try:
            for ids, times in self._rounds(late, bounds.start, bounds.end):
                self._round(done, writer, ids, times)
        finally:
            if writer is not None:
                writer.close()
        return done

    def _rounds(self, at: TopicPartition, start: int, stop: int) -> Iterator[tuple[I64, I64]]:
        """Yield (ids, times), (K,) int64 each, of rounds of about `round_bytes`, sorted by unique id."""
        ids: list[I64] = []
        times: list[I64] = []
        size = 0
        for records in stream(self.context.log, at, start, stop, self.context.clock):
            found = read_blocks(records.values)
            ids.append(found.sample_ids)
            times.append(found.event_times_ms)
            size += len(found.payloads.data)
            if size >= self.round_bytes:
                yield _once(ids, times)
                ids, times, size = [], [], 0
        if ids:
            yield _once(ids, times)

    def _round(self, done: LateJoined, writer: Writer | None, ids: I64, times: I64) -> None:
        done.read += len(ids)
        log, topics, clock = self.context.log, self.context.topics, self.context.clock
        inputs = [p for p in self.context.partitions if topics.samples_partition(p) == done.partition]
        # Read before `samples`, which thus holds all that the joiner has decided by these watermarks.
        last = last_commits(self.context, inputs)
        out = TopicPartition(topics.samples, done.partition)
        bounds = log.bounds(out)
        end = bounds.end
        if bounds.start > 0:
            oldest_ms = time_at(self.context, out, bounds.start, end)
            gone = np.ones(len(ids), bool) if oldest_ms is None else times <= oldest_ms + LATE_JOIN_MARGIN_MS
            done.left["samples_gone"] += int(gone.sum())
            ids, times = ids[~gone], times[~gone]
        if not len(ids):
            return
        from_ms = int(times.min()) - self.context.plan.grace_ms - LATE_JOIN_MARGIN_MS
        known = np.zeros(len(ids), bool)
        # All retained blocks: a clock must not affect which samples count as written.
        for records in stream(log, out, bounds.start, end, clock):
            known |= np.isin(ids, read_blocks(records.values).sample_ids)
        done.already += int(known.sum())
        ids = ids[~known]
        for p in inputs:
            commit = last[p]
            if not len(ids):
                return
            if commit is not None and commit[1].watermark_ms is not None:
                until_ms = min(clock.now_ms(), commit[1].watermark_ms)
                ids = self._join(done, writer, p, ids, from_ms, until_ms)
        done.left["event_gone"] += len(ids)

    def _join(
        self, done: LateJoined, writer: Writer | None, p: int, ids: I64, from_ms: int, until_ms: int
    ) -> I64:
        """Join one input partition's impressions. `ids`: (K,) int64, sorted; returns those without event."""
        topics, plan = self.context.topics, replace(self.context.plan, early=False, ramp=0)
        joiner = Joiner(plan)
        task = Task(p, plan, topics, self.context.decoder(), dict.fromkeys(topics.inputs, 0))
        newest = np.full(len(ids), -1, np.int64)  # (K,) time of each sample's newest event
        keys = []
        for records in self._read("served", p, from_ms):
            columns, refused = task.decode("served", records)
            if not isinstance(columns, ImpressionColumns) or not len(columns):
                continue
            columns = self._usable(task, columns, records, refused)
            found = _native.join_sample_ids(columns.keys, len(plan.labels))
            wanted = np.isin(found, ids)
            rows: Bool = np.asarray(wanted.any(axis=1))
            columns, found, wanted = columns.where(rows), found[rows], wanted[rows]
            if len(columns):
                at = np.searchsorted(ids, found[wanted])
                np.maximum.at(newest, at, np.broadcast_to(columns.times_ms[:, None], wanted.shape)[wanted])
                keys.append(columns.keys[:, 1])
                joiner.on_served(columns)
        if not keys:
            return ids
        of_these = np.unique(np.concatenate(keys))
        for role in topics.inputs:
            if role == "served":
                continue
            for records in self._read(role, p, from_ms):
                columns, _ = task.decode(role, records)
                chosen = np.isin(columns.keys[:, 1], of_these) & datable(columns.times_ms)
                if isinstance(columns, ShownColumns):
                    joiner.on_shown(columns.where(chosen))
                elif isinstance(columns, ActionColumns):
                    joiner.on_actions(columns.where(chosen))
        joiner.advance(until_ms)
        samples = joiner.take_samples()
        # The running joiner may still wait with a later event of the same impression.
        longest_wait_ms = joiner.horizon_ms - plan.grace_ms
        over = newest + longest_wait_ms <= until_ms
        samples = samples.where(np.isin(samples.ids, ids[over & (newest >= 0)]))
        if writer is not None:
            for piece in _pieces(samples):
                encoded = encode_samples(piece, topics.limits.block_bytes, plan.block_samples)
                writer.append([Append(topics.samples, done.partition, encoded)])
        positive = int((samples.values != 0).sum())
        done.positive += positive
        done.negative += len(samples) - positive
        done.left["windows_open"] += int((~over).sum())
        done.no_sample += int((over & (newest >= 0)).sum()) - len(samples)
        return ids[newest < 0]

    def _usable(
        self, task: Task, columns: ImpressionColumns, records: Records, refused: Refused
    ) -> ImpressionColumns:
        """Drop the impressions that a joiner refuses."""
        columns = task.decoder.fitting(columns, records, refused)
        columns = task.sizes.refuse_too_large(columns, records, refused)
        return columns.where(datable(columns.times_ms)) if len(columns) else columns

    def _read(self, role: str, partition: int, from_ms: int) -> Iterator[Records]:
        log, at = self.context.log, TopicPartition(self.context.topics.inputs[role], partition)
        end = log.bounds(at).end
        return stream(log, at, min(log.offset_at(at, from_ms), end), end, self.context.clock)


def _once(ids: list[I64], times: list[I64]) -> tuple[I64, I64]:
    """Return the ids sorted and without duplicates, each with its smallest time."""
    all_ids, all_times = np.concatenate(ids), np.concatenate(times)
    order = np.lexsort((all_times, all_ids))
    unique, first = np.unique(all_ids[order], return_index=True)
    return unique, all_times[order][first]


def _pieces(samples: Samples) -> Iterator[Samples]:
    """Yield samples in pieces of about READY_BYTES that end where a request ends."""
    n = len(samples)
    if not n:
        return
    start = size_before = 0
    for end in (*(np.flatnonzero(samples.requests[1:] != samples.requests[:-1]) + 1).tolist(), n):
        size = int(samples.payloads.ends[end - 1])
        if end == n or size - size_before >= READY_BYTES:
            rows = np.zeros(n, bool)
            rows[start:end] = True
            yield samples.where(rows)
            start, size_before = end, size
