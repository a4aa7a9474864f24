"""One lane's partitions as they are read: from what every store has applied on, put together into batches."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from freshet.clock import Clock
from freshet.embedder.core import Assembler, BatchPlan, cut_points
from freshet.features.blocks import block_samples
from freshet.log import EventLog
from freshet.observability.metrics import Metric, Reading
from freshet.types import TopicPartition

__all__ = [
    "BAD_IN_A_ROW",
    "REFUSALS",
    "RefusedSamples",
    "Sizes",
    "Source",
    "lag_of",
    "refused_metrics",
    "refused_readings",
]

# --- Samples and blocks that cannot be decoded: written to `<model>.refused`, counted by reason (PROTOCOL
# 3).


log = structlog.get_logger("freshet.embedder")

REFUSALS = ("unreadable", "no_schema", "damaged", "label", "label_value", "transform")
"""Why samples are refused, in a word: their bytes are not what their schema says; their block's schema is not
known, or lacks what the spec names; their block fails its own checks; their label is none of the spec's; the
value of their label lies outside of the label's bounds, or is no finite number; a transform of the spec
raises an error for them."""

BAD_IN_A_ROW = 100
"""Refused samples without a good one in between, from which on the process says that it is not ready."""

LOG_AGAIN_S = 60.0
"""Between two log lines of one reason."""


@dataclass(slots=True)
class RefusedSamples:
    """Writes refused samples to the log and counts them. Thread-safe: the lanes of a process share one."""

    write: Callable[[list[bytes]], None]  # JSON records for `<model>.refused`; durable when it returns
    monotonic: Callable[[], float]  # seconds
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _counts: Counter[str] = field(default_factory=Counter)
    _in_a_row: int = 0
    _last: str = ""
    _logged_s: dict[str, float] = field(default_factory=dict)  # reason -> when it was logged

    def refuse(self, letters: list[bytes], by_reason: Mapping[str, int], example: str) -> None:
        """Write letters, then count the samples that they stand for.

        Args:
            letters: JSON records, one for each sample or block.
            by_reason: word of REFUSALS -> samples; a damaged block counts as one.
            example: one of the reasons in full.

        Raises:
            Unavailable: the log cannot be written; nothing is counted.
        """
        self.write(letters)
        now, loud = self.monotonic(), []
        with self._lock:
            self._counts.update(by_reason)
            self._in_a_row += sum(by_reason.values())
            self._last = example
            for reason in by_reason:
                if now - self._logged_s.get(reason, float("-inf")) >= LOG_AGAIN_S:
                    self._logged_s[reason] = now
                    loud.append(reason)
        for reason in loud:
            log.warning("samples were refused", why=reason, records=by_reason[reason], reason=example)

    def accept(self) -> None:
        """Note that good samples were decoded."""
        if self._in_a_row:
            with self._lock:
                self._in_a_row = 0

    def counts(self) -> dict[str, int]:
        """{word of REFUSALS: samples}, all words."""
        with self._lock:
            return {reason: self._counts[reason] for reason in REFUSALS}

    def trouble(self) -> str | None:
        """None, or why hardly anything can be learned: the last samples were all refused."""
        with self._lock:
            if self._in_a_row < BAD_IN_A_ROW:
                return None
            return f"the last {self._in_a_row} samples were all refused: {self._last}"


def refused_metrics(role: str) -> tuple[Metric, ...]:
    """What a process of this role tells of samples that it refused."""
    return (
        Metric(
            f"freshet_{role}_refused",
            "counter",
            "samples",
            "Samples that could not be decoded and went to the topic of refused events, by this process; "
            "after a restart some count again. Reasons: unreadable (not what their schema says); no_schema "
            "(of their block: not known, or lacking what the spec names); damaged (a block that fails its "
            "own checks, counted as one); label (none of the spec's); label_value (not finite, or outside "
            "of the label's bounds); transform (one of the spec raises an error).",
            ("reason",),
        ),
    )


def refused_readings(role: str, status: Mapping[str, Any]) -> dict[str, Reading]:
    """Readings of `refused_metrics`, of a status with `refused`."""
    return {
        f"freshet_{role}_refused": {(reason,): float(n) for reason, n in status["refused"].items()},
    }


READ_AHEAD_ROWS = 16_384
"""Rows read from the log at once, if blocks are full: tens of milliseconds of work."""
MOST_BLOCKS = 256
"""Blocks read from the log at once at most: where batches are of few rows, blocks are short."""


class Sizes:
    """How many rows make a batch, and how long one may wait for them."""

    __slots__ = ("behind_rows", "ramps", "rows", "wait_s")

    def __init__(self, rows: int, behind_rows: int, wait_ms: int, *, ramps: bool = False) -> None:
        """`behind_rows` is the size of batches while at least twice as much waits; at least `rows`. `ramps`:
        a new model's first batches are short."""
        self.rows, self.behind_rows, self.wait_s = rows, max(rows, behind_rows), wait_ms / 1000
        self.ramps = ramps


class Source:
    """Reads and assembles for one lane. Used by one thread; `positions` may be asked by any."""

    def __init__(
        self, log: EventLog, topic: str, partitions: Sequence[int], sizes: Sizes, clock: Clock
    ) -> None:
        """Nothing is read before the first `rewind`."""
        self.partitions = tuple(partitions)
        self.topic, self._sizes, self._clock = topic, sizes, clock
        self._reader = log.reader()
        self._assembler: Assembler | None = None
        self._replayed_until: dict[int, int] = {}
        self._waiting_since = 0.0
        self._blocks = min(MOST_BLOCKS, READ_AHEAD_ROWS // block_samples(sizes.rows))
        self._more = False  # the log had something when it was read last
        self._issued: int | None = None  # rows in batches so far, while the first ones of a new model

    @property
    def started(self) -> bool:
        """Whether there is a place to read from; False until `rewind`, and after `stop`."""
        return self._assembler is not None

    def stop(self) -> None:
        """Forget what was read; the next batch comes after a `rewind`."""
        self._assembler = None

    def rewind(self, told: Sequence[Mapping[int, Sequence[int]]]) -> None:
        """Start from the smallest offset that any store has told, with the others as cut points (PROTOCOL 7).

        Raises DataLost, Unavailable: as `Reader.assign` does.
        """
        starts, cuts = cut_points(told)
        mine = {p: starts[p] for p in self.partitions}
        self._reader.assign({TopicPartition(self.topic, p): offset for p, offset in mine.items()})
        self._replayed_until = {p: max([starts[p], *cuts[p]]) for p in self.partitions}
        self._assembler, self._more = Assembler(mine, cuts), False
        from_the_start = self._sizes.ramps and not any(mine.values())  # nothing is learned yet
        self._issued = 0 if from_the_start else None

    def assemble(self, deadline: float) -> BatchPlan | None:
        """Wait for a full batch, but no longer than a batch's own wait once a block is there; None at the
        deadline."""
        plans = self.assemble_run(deadline, 0, 1)
        return plans[0] if plans else None

    def assemble_run(self, deadline: float, rows: int, batches: int) -> list[BatchPlan]:
        """As `assemble`, and after that batch as many full ones as are there already, until they have `rows`
        rows together or are `batches`; at the log's end what is left as well, for which no round of its own
        is worth waiting."""
        assembler, sizes = self._assembler, self._sizes
        assert assembler is not None
        wanted = max(2 * sizes.behind_rows, rows)
        while (waiting := assembler.waiting()) < (wanted if self._more else sizes.rows):
            now = self._clock.monotonic()
            if not waiting:
                self._waiting_since = now
            enough = waiting >= sizes.rows  # for a batch: it is only looked whether the lane is far behind
            until = min(deadline, self._waiting_since + sizes.wait_s) if waiting else deadline
            until = now if enough else until
            polled = self._reader.poll(self._blocks, max(0.0, until - now))
            self._more = bool(polled)
            for partition, records in polled:
                assembler.offer(partition.partition, records)
            if polled:
                continue
            if enough:
                break
            if not assembler.waiting() or self._clock.monotonic() < self._waiting_since + sizes.wait_s:
                return []
            break
        size = sizes.behind_rows if assembler.waiting() >= 2 * sizes.behind_rows else sizes.rows
        plans, taken = list[BatchPlan](), 0
        least = size if self._more else 1
        while not plans or (taken < rows and len(plans) < batches and assembler.waiting() >= least):
            plan = assembler.next(self._ramped(size))
            if plan is None:
                break
            plans.append(plan)
            taken += plan.rows
            if self._issued is not None:
                self._issued += plan.rows
        return plans

    def _ramped(self, size: int) -> int:
        """Rows of the next batch at most: a new model's first batches have 1, 2, 4 rows and so on, if blocks
        are as short."""
        if self._issued is None or self._issued >= size:
            self._issued = None
            return size
        return self._issued + 1

    def replayed(self, plan: BatchPlan) -> bool:
        """Whether some store had applied a part of it before."""
        return any(r.start < self._replayed_until[r.partition] for r in plan.ranges)

    def positions(self) -> dict[int, int]:
        """{partition: where its next range starts}; empty while there is no place to read from."""
        assembler = self._assembler
        return assembler.positions() if assembler is not None else {}

    def covered(self) -> dict[int, int]:
        """{partition: up to where no block waits for a batch}; empty while there is no place to read from."""
        assembler = self._assembler
        return assembler.covered() if assembler is not None else {}

    def close(self) -> None:
        """Close the reader. Idempotent."""
        self._reader.close()


def lag_of(
    log: EventLog, topic: str, partitions: Sequence[int], covered: Mapping[int, int]
) -> dict[int, int]:
    """{partition: blocks in the log at or past where it is covered to, or all of them}."""
    found = log.all_bounds([TopicPartition(topic, p) for p in partitions])
    return {
        at.partition: max(0, bounds.end - covered.get(at.partition, bounds.start))
        for at, bounds in found.items()
    }
