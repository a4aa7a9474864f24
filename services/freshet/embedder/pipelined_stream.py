"""The batch stream over a link: rows are looked up ahead of the trainer, gradients are pushed behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from freshet.batches.read_my_writes import ReadMyWrites
from freshet.batches.stream import TrainBatch
from freshet.clock import Clock
from freshet.config.spec.layout import Layout
from freshet.config.spec.model import Spec
from freshet.embedder.batch_builder import BatchBuilder
from freshet.embedder.block_decoder import BlockDecoder
from freshet.embedder.core import Permits
from freshet.embedder.partition_reader import BatchSizes, PartitionReader, lag_of
from freshet.embedder.prefetch_lane import LaneContext, LaneCounts, PrefetchLane
from freshet.embedder.recent_samples import RecentSamples
from freshet.embedder.staleness_limiter import StalenessLimiter
from freshet.log import EventLog
from freshet.model import NATIVE_KINDS
from freshet.model.inputs import ModelInputs
from freshet.rows.service import OwnersChange, RowService
from freshet.types import F32, U32, Fence

__all__ = ["DenseApplied", "PipelinedStream", "ReadMyWritesBy", "Share"]

CLOSE_WAIT_S = 5.0
"""How long `close` goes on pushing what was given back. What is left is trained on again after a restart."""

PAUSE_S = 0.005
"""Between two looks at several lanes, unless rows arrive before."""

MOST_LOOKUPS = 32
"""Lookups that are asked for at once, each by a thread that waits: enough for 5 ms each way at 3,000 batches
a second."""


DenseApplied = Callable[[], Mapping[int, Sequence[int]]]
"""What the trainer has applied; Unavailable while it cannot tell."""


ReadMyWritesBy = Literal["stream", "trainer"]


@dataclass(frozen=True, slots=True)
class Share:
    """Partitions of one lane, all under one claim."""

    partitions: Sequence[int]
    fence: Fence  # pushes and batches carry it
    dense_applied: DenseApplied | None = None  # of the rank that trains on it, if not all lanes have one


class PipelinedStream:
    """See `freshet.batches.stream.BatchStream`. Any thread may take and give back.

    A lane may have several batches out at once. Pushes are answered later: `give_back` never raises Refused;
    a lane whose push is refused, or whose rows change their owner, starts again by itself, and what its
    trainer still holds of before is dropped when it is given back.
    """

    def __init__(
        self,
        *,
        spec: Spec,
        layout: Layout,
        topic: str,
        log: EventLog,
        rows: RowService,
        decoder: Callable[[], BlockDecoder],
        dense_applied: DenseApplied,
        lanes: Sequence[Share],
        clock: Clock,
        batch_rows: int,
        staleness_rows: int,
        recent: RecentSamples | None = None,
        read_my_writes: ReadMyWritesBy | None = None,
    ) -> None:
        """Begin to read and look up at once.

        Args:
            dense_applied: may raise Unavailable: it is asked again.
            recent: where samples are kept for the gate, if they outlive this stream.
            read_my_writes: who brings rows up to what their trainer has pushed since, where lookups go ahead:
                this stream when they are taken, or whoever takes them, by `TrainBatch.looked`; None: nobody.
        """
        self._topic, self._log, self._clock = topic, log, clock
        self._closed = False
        self._limiter = StalenessLimiter(Permits(staleness_rows, sync=spec.train.mode == "sync"))
        self._recent = recent or RecentSamples(spec.serve.gate.samples, clock)
        ahead, native = spec.train.mode != "sync", spec.model.kind in NATIVE_KINDS
        in_flight = 1 + staleness_rows // batch_rows if ahead else max(1, len(lanes))
        self._lookups = ThreadPoolExecutor(min(MOST_LOOKUPS, in_flight), "look-up")
        self._error: BaseException | None = None
        self._lanes: list[PrefetchLane] = []
        self._arrived = threading.Condition()
        self._own = own = ReadMyWrites(layout) if read_my_writes == "stream" and ahead else None
        common = LaneContext(
            rows,
            rows.ownership if isinstance(rows, OwnersChange) else lambda: 0,
            self._limiter,
            self._recent,
            BatchBuilder(
                spec,
                layout,
                states=read_my_writes is not None and ahead,
                in_steps=native,
            ),
            self._lookups,
            clock,
            ahead,
            self._fail,
            self._notify,
            own,
        )
        behind_rows = spec.train.behind_rows(native_loop=False)
        sizes = BatchSizes(batch_rows, behind_rows, spec.train.batch_wait_ms, warms_up=native)
        # One is decoded while the others are in flight. Own writes are kept until what was looked up before
        # them has been taken: as many again.
        slots = 1 + (in_flight if ahead else 1) * (1 if own is None else 2)
        self._lanes += [
            PrefetchLane(
                i,
                PartitionReader(log, topic, share.partitions, sizes, clock),
                decoder(),
                share.fence,
                share.dense_applied or dense_applied,
                common,
                slots=slots,
            )
            for i, share in enumerate(lanes)
        ]
        for lane in self._lanes:
            lane.start()

    def take(self, lane: int, wait_s: float) -> TrainBatch | None:
        """The lane's next batch; see the protocol."""
        if self._error is not None:
            raise self._error
        batch = self._lanes[lane].take(wait_s)
        if batch is None and self._error is not None:
            raise self._error
        return batch

    def give_back(
        self,
        lane: int,
        batch: TrainBatch,
        gradients: Sequence[F32] | None,
        counts: Sequence[U32] | None = None,
    ) -> None:
        """Have a batch's gradients pushed, or return it unused; see the protocol."""
        self._lanes[lane].give_back(batch, gradients, counts)

    def take_of(
        self, lanes: Sequence[int], wait_s: float, wanted: Callable[[], bool] = lambda: True
    ) -> tuple[int, TrainBatch] | None:
        """(The lane, its next batch) of the first of these lanes that has one; None if none has within
        `wait_s`, or once it is not `wanted` any more."""
        deadline = self._clock.monotonic() + wait_s
        while wanted():
            for lane in lanes:
                if (batch := self.take(lane, 0.0)) is not None:
                    return lane, batch
            left = deadline - self._clock.monotonic()
            if left <= 0 or self._closed:
                return None
            with self._arrived:  # what came between the look and this is seen after the pause
                self._arrived.wait(min(left, PAUSE_S))
        return None

    def settled_lane(self, lane: int, wait_s: float) -> bool:
        """As `settled`, of one lane."""
        return self._lanes[lane].settled(wait_s)

    def settled(self, wait_s: float) -> bool:
        """Wait until every push of what was given back was answered; see the protocol."""
        return all(lane.settled(wait_s) for lane in self._lanes)

    def abandon(self, lane: int) -> None:
        """The lane's trainer is gone: what it holds is issued again."""
        self._lanes[lane].abandon()

    def recent(self, rows: int) -> Sequence[ModelInputs]:
        """The newest samples with their rows before they were trained on; see the protocol."""
        return self._recent.newest(rows)

    def lag(self) -> Mapping[int, int]:
        """{partition: blocks that no batch has covered that was handed out}."""
        lag: dict[int, int] = {}
        for lane in self._lanes:
            lag |= lag_of(self._log, self._topic, lane.partitions, lane.covered())
        return lag

    def seconds(self) -> dict[str, float]:
        """How long batches have been in each stage, summed over them; lookups and pushes overlap the rest."""
        total = dict.fromkeys(("read", "credit", "decode", "plan", "lookup", "push"), 0.0)
        for lane in self._lanes:
            for name, seconds in lane.stages.seconds.items():
                total[name] += seconds
            total["lookup"] += lane.counts.lookup_s
            total["push"] += lane.counts.push_s
        return total

    def counts(self) -> list[LaneCounts]:
        """What each lane has done."""
        return [lane.counts for lane in self._lanes]

    @property
    def stepped_rows(self) -> int:
        """Copies of rows brought up to own pushes so far."""
        return self._own.stepped_rows if self._own is not None else 0

    @property
    def limiter(self) -> StalenessLimiter:
        """Who has permits and who waits for one."""
        return self._limiter

    def close(self) -> None:
        """Push what was given back, then free everything. Idempotent."""
        self._closed = True
        for lane in self._lanes:
            lane.close(CLOSE_WAIT_S)
        self._lookups.shutdown()

    def _notify(self) -> None:
        with self._arrived:
            self._arrived.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        for lane in self._lanes:
            lane.end()
