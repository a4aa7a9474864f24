"""The batch stream: batches to a trainer rank and gradients in return, within the bound on staleness.

`RecentSamples` holds the newest learned samples, on which the gate compares versions.

Letters: B samples of a batch, K batches of a run, U unique rows of a group, G gradients of a group, S floats
of a row, T floats of its optimiser state.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from freshet.batches.read_my_writes import LookupResult
from freshet.clock import Clock
from freshet.model.inputs import Labels, ModelInputs
from freshet.model.native_loop import LoopBatches, Ran
from freshet.types import F32, I64, U8, U32, U64, Bool, Fence, OffsetRange

__all__ = ["BatchStream", "RunStream", "TrainBatch", "TrainRun"]

COPY_EVERY_S = 0.25
"""Seconds between two rounds of copies of recent samples: a batch costs 75 µs, and at full speed 2,000 arrive
in 10 ms."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """Whole blocks of samples with their rows, ready for the model.

    The batch holds a permit from its lookup until its push is acknowledged (PROTOCOL 16).
    """

    ranges: tuple[OffsetRange, ...]  # at most one per partition
    fence: Fence
    inputs: ModelInputs
    sample_ids: I64  # (B,) 64-bit id of (impression, label)
    request_ids: U64  # (B,) samples of one request have the same id
    event_times_ms: I64  # (B,)
    segments: Mapping[str, U64]  # segment field of the spec -> (B,) keys of its values
    served: Mapping[str, F32]  # label -> (B,) logged prediction; NaN: none was logged
    replayed: bool = False  # a store had applied a part of it: learned where necessary, not measured again
    explored: Bool | None = None  # (B,) served in random order; None: unknown for all
    items: U64 | None = None  # (B,) key of the item, 0: null; None: the spec has no feature for it
    looked: LookupResult | None = (
        None  # keys and states for read-my-writes; None: the trainer applies nothing
    )
    states: Sequence[F32] | None = None
    """Per group (U, T) optimiser state of its rows, if the stream accepts several gradients a row. Steps
    within the batch change it. None: the stream accepts one gradient a row."""
    ends: I64 | None = None  # (K,) ends of the batches that it joins, for measures; None: it is one batch

    def __len__(self) -> int:
        return len(self.sample_ids)

    def part(self, first: int, last: int) -> TrainBatch:
        """Return the samples [first, last) without rows and ranges, for measures."""
        at, labels = slice(first, last), self.inputs.labels
        own = None if labels is None else Labels(labels.index[at], labels.value[at], labels.weight[at])
        return TrainBatch(
            ranges=(),
            fence=self.fence,
            inputs=ModelInputs(last - first, (), self.inputs.dense[at], own),
            sample_ids=self.sample_ids[at],
            request_ids=self.request_ids[at],
            event_times_ms=self.event_times_ms[at],
            segments={name: keys[at] for name, keys in self.segments.items()},
            served={name: scores[at] for name, scores in self.served.items()},
            replayed=self.replayed,
            explored=None if self.explored is None else self.explored[at],
            items=None if self.items is None else self.items[at],
            ends=None if self.ends is None else self.ends[(self.ends > first) & (self.ends <= last)] - first,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TrainRun:
    """K consecutive batches of one lane, read and decoded together. A batch may have no sample.

    Native code steps and pushes each by itself, in order. At most one is in flight, so the lane holds one
    permit for all of them.
    """

    batches: LoopBatches
    replayed: Sequence[bool]  # (K,) as `TrainBatch.replayed`
    keep: U8  # (K,) 1: copy its rows for the gate (`Ran.kept`)
    samples: TrainBatch  # of all batches, without rows and ranges
    traced: bool = False  # record `Ran.moments_ns`

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def starts(self) -> list[int]:
        """The K starts of the batches' samples, and the end of the last one."""
        return [0, *self.batches.ends.tolist()]


def _warn_renamed(former: str, present: str) -> None:
    warnings.warn(f"`{former}` is deprecated: call `{present}`", DeprecationWarning, stacklevel=3)


class BatchStream(Protocol):
    """The batches of one rank. Lanes may call concurrently; each has partitions of its own.

    Adapters inherit from it, for the former names of its methods.
    """

    def next_batch(self, lane: int, wait_s: float) -> TrainBatch | None:
        """Return the lane's next batch; None if no batch or no permit is available within `wait_s`.

        A stream may prefetch, or read and look up on the caller's thread. For the rows of a batch it may wait
        up to a quarter of a second longer, once: not in each call while shards are unreachable.

        Raises:
            DataLost, Unavailable: as the log and the row service do.
        """

    def push_gradients(
        self,
        lane: int,
        batch: TrainBatch,
        gradients: Sequence[F32] | None,
        counts: Sequence[U32] | None = None,
    ) -> None:
        """Push a batch's row gradients; None returns the batch unused, to be issued again.

        Args:
            lane: the lane that took the batch.
            batch: one that `next_batch` returned; each is returned once.
            gradients: per group (G, S) float32, G the sum of the group's counts.
            counts: per group (U,) uint32, for a batch with `states`: the gradients of each row, which are
                adjacent and in the order of its steps. None: one each.

        The permit is released once all shards have acknowledged the push (PROTOCOL 16). A stream may push
        asynchronously: it then copies the gradients, and a refusal rewinds the lane without an error here.
        After a refusal the lane's batches in flight are void, and `next_batch` restarts at the applied
        offsets; the caller returns void batches as usual.

        Raises:
            Refused: a synchronous push was refused.
            ValueError: the batch is not in flight.
        """

    def flush(self, wait_s: float) -> bool:
        """Wait until all pushes are acknowledged; False if some are not within `wait_s`.

        Call it at the end of a run, or before a read that must contain all pushed gradients.
        """

    def recent(self, rows: int) -> Sequence[ModelInputs]:
        """Return at least `rows` of the newest learned samples, if there are, with their rows before that.

        The gate compares versions on these samples. Present rows have learned them, which would favour the
        version that relies most on the expert that memorises; for the same reason replayed batches are
        excluded. The caller must not change the arrays.
        """

    def lag(self) -> Mapping[int, int]:
        """Return {partition: blocks in the log that no batch has contained}."""

    def close(self) -> None:
        """Release all resources. Idempotent."""

    def take(self, lane: int, wait_s: float) -> TrainBatch | None:
        """Deprecated: the former name of `next_batch`."""
        _warn_renamed("take", "next_batch")
        return self.next_batch(lane, wait_s)

    def give_back(
        self,
        lane: int,
        batch: TrainBatch,
        gradients: Sequence[F32] | None,
        counts: Sequence[U32] | None = None,
    ) -> None:
        """Deprecated: the former name of `push_gradients`, with the same (G, S) and (U,) arrays."""
        _warn_renamed("give_back", "push_gradients")
        self.push_gradients(lane, batch, gradients, counts)

    def settled(self, wait_s: float) -> bool:
        """Deprecated: the former name of `flush`."""
        _warn_renamed("settled", "flush")
        return self.flush(wait_s)


class RunStream(BatchStream, Protocol):
    """A stream for the native loop (`freshet.model.native_loop`), which looks up and pushes rows itself."""

    def next_run(self, lane: int, wait_s: float) -> TrainRun | None:
        """Return the lane's next batches; waits for the first like `next_batch`, but for no further ones.

        Raises:
            Fenced: the claim on rows or partitions is lost.
            DataLost, Unavailable: as `next_batch`.
        """

    def finish_run(self, lane: int, run: TrainRun, ran: Ran | None) -> None:
        """Finish a run that native code has pushed; None returns it unused.

        Batches that were not pushed are issued again, and the lane's permit is released.

        Raises Refused if a push was refused, Unavailable if rows could not be read.
        """

    def take_run(self, lane: int, wait_s: float) -> TrainRun | None:
        """Deprecated: the former name of `next_run`."""
        _warn_renamed("take_run", "next_run")
        return self.next_run(lane, wait_s)

    def give_back_run(self, lane: int, run: TrainRun, ran: Ran | None) -> None:
        """Deprecated: the former name of `finish_run`."""
        _warn_renamed("give_back_run", "finish_run")
        self.finish_run(lane, run, ran)

    def push_run(self, lane: int, run: TrainRun, ran: Ran | None) -> None:
        """Deprecated: the former name of `finish_run`."""
        _warn_renamed("push_run", "finish_run")
        self.finish_run(lane, run, ran)


class RecentSamples:
    """Copies of the newest learned batches with their rows from before that, for the gate. Thread-safe."""

    def __init__(self, wanted: int, clock: Clock) -> None:
        """Keep at least `wanted` samples."""
        self._wanted, self._clock = wanted, clock
        self._lock = threading.Lock()
        self._kept: deque[ModelInputs] = deque()
        self._rows = self._fresh_rows = 0  # kept; and of these, in the present round of copies
        self._next_round_s = -math.inf

    def wants(self) -> int:
        """Return how many of the newest samples to copy; 0 between two rounds."""
        return 0 if self._clock.monotonic() < self._next_round_s else self._wanted

    def add(self, inputs: ModelInputs) -> None:
        """Copy a batch, unless between two rounds: the gate needs a few thousand rows every few seconds."""
        if self.wants():
            self.keep(inputs.copied())  # the next batch reuses the memory

    def keep(self, kept: ModelInputs) -> None:
        """Keep a batch without copying it; one without samples is no part of the bound, and is not kept."""
        if not kept.size:
            return
        now = self._clock.monotonic()
        with self._lock:
            self._kept.append(kept)
            self._rows += kept.size
            self._fresh_rows += kept.size
            while self._rows - self._kept[0].size >= self._wanted:
                self._rows -= self._kept.popleft().size
            if self._fresh_rows >= self._wanted:
                self._fresh_rows, self._next_round_s = 0, now + COPY_EVERY_S

    def newest(self, rows: int) -> Sequence[ModelInputs]:
        """Return the newest batches, oldest first, with at least `rows` samples if there are so many."""
        with self._lock:
            newest = list(self._kept)
        first, total = len(newest), 0
        while first and total < rows:
            first -= 1
            total += newest[first].size
        return newest[first:]
