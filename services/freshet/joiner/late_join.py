"""Late join: a batch beside the running joiner (docs/operations.md, "A clock that was wrong").

Joins impressions of `<model>.samples.late` once their windows are over, with the events that the log still
holds. Leaves out samples that are in `<model>.samples`, so the batch can be repeated, and killed at any
moment.

Letters: E events, K late samples, N impressions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from freshet import _native
from freshet.clock import Clock
from freshet.features.blocks import read_blocks
from freshet.joiner import blocks
from freshet.joiner.core import ActionColumns, ImpressionColumns, Joiner, Samples, ShownColumns, datable
from freshet.joiner.decode import EventDecoder, Refused, refuse_too_large
from freshet.joiner.partition import READY_BYTES, Task, Topics
from freshet.joiner.plan import JoinPlan
from freshet.joiner.replay import last_commits, stream
from freshet.joiner.set_back import time_at
from freshet.log import EventLog, Writer
from freshet.types import I64, Append, Bool, Records, TopicPartition

__all__ = ["CLOCK_MARGIN_MS", "ROUND_BYTES", "LateJoin", "LateJoined"]

ROUND_BYTES = 256 << 20
"""Payload bytes of late samples that are joined together. Memory holds them and their actions."""

CLOCK_MARGIN_MS = 25 * 3_600_000
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

    log: EventLog
    model: str
    topics: Topics
    plan: JoinPlan
    decoder: Callable[[], EventDecoder]
    partitions: Sequence[int]  # of the inputs
    clock: Clock
    dry_run: bool = False
    round_bytes: int = ROUND_BYTES
    writer_of: Callable[[str], Writer] | None = None  # opens a writer by name; None: the log's

    def run(self) -> Iterator[LateJoined]:
        """Join each partition of `samples`; yields the outcomes of its late samples.

        Raises:
            Fenced: another such batch has begun.
            DataLost: a topic was created anew, or has removed records.
            Corrupt: a commit cannot be read.
            Unavailable: the log cannot be read or written; repeat the batch.
        """
        for partition in range(self.topics.samples_partitions):
            yield self._partition(partition)

    def _partition(self, partition: int) -> LateJoined:
        late = TopicPartition(self.topics.late, partition)
        bounds = self.log.bounds(late)
        done = LateJoined(partition, bounds.start, bounds.end)
        if bounds.start == bounds.end:
            return done
        name = f"late-{self.model}-{partition}"
        # Opened before `samples` is read, so that an earlier batch cannot append after that.
        writer = None if self.dry_run else (self.writer_of or self.log.writer)(name)
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
        for records in stream(self.log, at, start, stop, self.clock):
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
        inputs = [p for p in self.partitions if self.topics.samples_partition(p) == done.partition]
        # Read before `samples`, which thus holds all that the joiner has decided by these watermarks.
        last = last_commits(self.log, self.topics, inputs)
        out = TopicPartition(self.topics.samples, done.partition)
        bounds = self.log.bounds(out)
        end = bounds.end
        if bounds.start > 0:
            oldest_ms = time_at(self.log, out, bounds.start, end)
            gone = np.ones(len(ids), bool) if oldest_ms is None else times <= oldest_ms + CLOCK_MARGIN_MS
            done.left["samples_gone"] += int(gone.sum())
            ids, times = ids[~gone], times[~gone]
        if not len(ids):
            return
        from_ms = int(times.min()) - self.plan.grace_ms - CLOCK_MARGIN_MS
        known = np.zeros(len(ids), bool)
        # All retained blocks: a clock must not affect which samples count as written.
        for records in stream(self.log, out, bounds.start, end, self.clock):
            known |= np.isin(ids, read_blocks(records.values).sample_ids)
        done.already += int(known.sum())
        ids = ids[~known]
        for p in inputs:
            commit = last[p]
            if not len(ids):
                return
            if commit is not None and commit[1].watermark_ms is not None:
                until_ms = min(self.clock.now_ms(), commit[1].watermark_ms)
                ids = self._join(done, writer, p, ids, from_ms, until_ms)
        done.left["event_gone"] += len(ids)

    def _join(
        self, done: LateJoined, writer: Writer | None, p: int, ids: I64, from_ms: int, until_ms: int
    ) -> I64:
        """Join one input partition's impressions. `ids`: (K,) int64, sorted; returns those without event."""
        plan = replace(self.plan, early=False, ramp=0)
        joiner = Joiner(plan)
        task = Task(p, plan, self.topics, self.decoder(), dict.fromkeys(self.topics.inputs, 0))
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
        for role in self.topics.inputs:
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
                encoded = blocks.encode(piece, self.topics.limits.block_bytes, self.plan.block_samples)
                writer.append([Append(self.topics.samples, done.partition, encoded)])
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
        columns = refuse_too_large(columns, records, self.topics.limits, len(self.plan.labels), refused)
        return columns.where(datable(columns.times_ms)) if len(columns) else columns

    def _read(self, role: str, partition: int, from_ms: int) -> Iterator[Records]:
        at = TopicPartition(self.topics.inputs[role], partition)
        end = self.log.bounds(at).end
        return stream(self.log, at, min(self.log.offset_at(at, from_ms), end), end, self.clock)


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
