"""Set-back of event time, after the watermark followed wrong clocks (PROTOCOL 19)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from freshet.clock import Clock
from freshet.errors import DataLost, Unavailable
from freshet.joiner.commit import Commit, ReplayExclusions, WatermarkSetBack
from freshet.joiner.core import Joiner
from freshet.joiner.partition import Topics
from freshet.joiner.plan import JoinPlan
from freshet.joiner.replay import last_commits
from freshet.log import EventLog, Writer
from freshet.types import Append, BytesColumn, TopicPartition

__all__ = ["CLOCK_MARGIN_MS", "Partition", "set_back", "time_at"]

CLOCK_MARGIN_MS = 3_600_000
"""Largest difference between an event's time and the log's time of its record, by which events are found."""

_STALLED_POLLS = 30


@dataclass(frozen=True, slots=True)
class Partition:
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


def set_back(
    log: EventLog,
    model: str,
    topics: Topics,
    plan: JoinPlan,
    groups: Sequence[tuple[int, ...]],
    writer_of: Callable[[tuple[int, ...]], Writer],
    clock: Clock,
    *,
    dry_run: bool,
) -> list[Partition]:
    """Set back the watermark of every partition that is ahead of the clock, to the present, or to the time of
    the oldest unread event.

    Each group of partitions changes in one atomic append, by the joiner's own writer: a running joiner is
    fenced, and starts again from the new commits. Other partitions do not change, so the function can be
    repeated, and killed at any moment.

    Args:
        log: that holds the topics.
        model: its name is part of the writers' and retention pins' names.
        topics: of the join.
        plan: of the join, which has the horizon of ids.
        groups: partitions that share a writer.
        writer_of: opens the joiner's writer of a group.
        clock: the present time; the caller has checked it.
        dry_run: change nothing, and open no writer.

    Raises:
        DataLost: a topic was created anew, or has removed events whose ids must be known.
        Fenced: a joiner has started meanwhile.
        Corrupt: a commit cannot be read.
        Unavailable: the log cannot be reached.
    """
    horizon_ms = Joiner(plan).horizon_ms
    done: list[Partition] = []
    for group in groups:
        writer = None if dry_run else writer_of(group)
        try:
            last = last_commits(log, topics, group)
            found = [_judge(log, topics, horizon_ms, p, last[p], clock.now_ms()) for p in group]
            if writer is not None and any(one.changed for one in found):
                _write(log, model, topics, writer, found, last, clock.now_ms())
        finally:
            if writer is not None:
                writer.close()
        done += found
    return done


def _judge(
    log: EventLog,
    topics: Topics,
    horizon_ms: int,
    partition: int,
    last: tuple[int, Commit] | None,
    now_ms: int,
) -> Partition:
    commit = None if last is None else last[1]
    if commit is None or commit.watermark_ms is None:
        return Partition(partition, None, None, {}, {} if commit is None else commit.next)
    was_ms = commit.watermark_ms
    if max(was_ms, min(commit.clocks.values(), default=was_ms)) <= now_ms:
        return Partition(partition, was_ms, was_ms, {}, commit.next)
    places = {role: TopicPartition(topic, partition) for role, topic in topics.inputs.items()}
    unread = [time_at(log, at, commit.next[role], log.bounds(at).end) for role, at in places.items()]
    to_ms = min([now_ms, was_ms, *(time_ms for time_ms in unread if time_ms is not None)])
    # Later events are no longer late, so their ids must be known.
    from_ms = to_ms - horizon_ms
    recall = {}
    for role, at in places.items():
        start = log.bounds(at).start
        recall[role] = min(max(log.offset_at(at, from_ms - CLOCK_MARGIN_MS), start), commit.next[role])
        if recall[role] == start > commit.start[role]:
            oldest_ms = time_at(log, at, start, commit.next[role])
            if oldest_ms is not None and oldest_ms > from_ms:
                raise DataLost(
                    f"{at}: expected the events of the {horizon_ms / 1000:.0f} s (window + 2 grace) before "
                    f"{to_ms}, found none before {oldest_ms}: the log has removed them\n"
                    "  duplicates of removed events would be joined again: wait until the clock has reached "
                    f"{oldest_ms + horizon_ms}, and repeat the command"
                )
    return Partition(partition, was_ms, to_ms, recall, commit.next)


def _write(
    log: EventLog,
    model: str,
    topics: Topics,
    writer: Writer,
    found: Sequence[Partition],
    last: Mapping[int, tuple[int, Commit] | None],
    now_ms: int,
) -> None:
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
    log.hold(f"joiner-{model}-{found[0].partition}", held)
    writer.append(appends)


def time_at(log: EventLog, at: TopicPartition, start: int, stop: int) -> int | None:
    """Return the log's time of the first record in [start, stop); None if there is none.

    Raises Unavailable if no record comes within 30 polls.
    """
    reader = log.reader()
    try:
        position, empty = max(start, log.bounds(at).start), 0
        if position >= stop:
            return None
        reader.assign({at: position})
        while position < stop:
            polled = reader.poll(1, 1.0)
            for _, records in polled:
                if len(records):
                    return int(records.times_ms[0]) if int(records.offsets[0]) < stop else None
                position = records.next_offset
            empty = 0 if polled else empty + 1
            if empty == _STALLED_POLLS:
                raise Unavailable(f"{at}: expected records up to {stop}, found none after {position}")
        return None
    finally:
        reader.close()
