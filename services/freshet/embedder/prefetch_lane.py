"""One lane of the pipelined stream: its batches from the log to the trainer, and home."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from freshet.batches.read_my_writes import Begun, OwnWrites, Write
from freshet.batches.stream import TrainBatch
from freshet.clock import Clock, Stages
from freshet.embedder.backoff import Patience
from freshet.embedder.batch_builder import Made, Maker, Slot
from freshet.embedder.block_decoder import BlockDecoder
from freshet.embedder.core import BatchPlan
from freshet.embedder.partition_reader import Source
from freshet.embedder.push_queue import Pusher
from freshet.embedder.recent_samples import Recent
from freshet.embedder.staleness_limiter import CreditDesk
from freshet.errors import Unavailable
from freshet.observability.spans import record_batch, start_rows_call
from freshet.observability.tracing import context_of, end_span, now_ns
from freshet.rows.service import RowService
from freshet.types import F32, U32, Fence

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["AheadLane", "Common", "LaneCounts"]

log = structlog.get_logger("freshet.embedder")

LOOK_S = 0.05
"""Between two looks whether owners have changed, while there is nothing else to do."""


@dataclass(frozen=True, slots=True, eq=False)
class Common:
    """What the lanes of one stream share."""

    rows: RowService
    ownership: Callable[[], int]  # see `OwnersChange`
    desk: CreditDesk
    recent: Recent
    maker: Maker
    lookups: Executor
    clock: Clock
    ahead: bool  # False: a lookup waits for `take` (mode `sync`)
    failed: Callable[[BaseException], None]
    arrived: Callable[[], None]  # a batch is ready
    own: OwnWrites | None = None  # None: rows are trained on as they were looked up


@dataclass(slots=True)
class LaneCounts:
    """What a lane has done since it started."""

    batches: int = 0  # handed out
    rewinds: int = 0  # after the first
    void_rows: int = 0  # samples of batches that were looked up and issued again
    lookup_s: float = 0.0  # from asking to having, summed over batches
    push_s: float = 0.0  # from gradients to acknowledgement, summed over batches


@dataclass(slots=True, eq=False)
class _Flight:
    """A batch from its lookup to its acknowledgement."""

    made: Made
    slot: Slot
    batch: TrainBatch
    epoch: int  # of the lane when it was made; it is void once the lane's is another
    credit: int = 0  # 0: none yet (mode `sync`, before `take`)
    looking: bool = False  # a lookup writes to its slot
    ready: bool = False
    dropped: bool = False
    since: float = 0.0  # of the lookup or push that is under way
    begun: Begun | None = None  # its lookup, until its rows were brought up
    write: Write | None = None  # its gradients, once they are there
    push_span: Span | None = None  # of its push, if it is traced


class AheadLane:
    """Looks up ahead of its trainer, in a thread; pushes behind it, in another (`Pusher`).

    A batch is in one place at a time: ready (its credit taken, its rows here or on their way), out (at the
    trainer), with the pusher, or gone. `void` empties them all; once nothing is out and no push is in the air
    any more, the lane asks what is applied and starts again there (PROTOCOL 6 and 7).
    """

    def __init__(
        self,
        index: int,
        source: Source,
        decoder: BlockDecoder,
        fence: Fence,
        dense_applied: Callable[[], Mapping[int, Sequence[int]]],
        common: Common,
        *,
        slots: int,
    ) -> None:
        """`slots` bounds the batches that are held at once, whatever their size."""
        self.partitions = source.partitions
        self.counts = LaneCounts()
        self.stages = Stages(("read", "credit", "decode", "plan"))
        self._index, self._source, self._decoder, self._fence = index, source, decoder, fence
        self._common, self._dense_applied, self._slots_left = common, dense_applied, slots
        self._changed = threading.Condition()  # guards all below
        self._ready: deque[_Flight] = deque()
        self._out: dict[int, _Flight] = {}  # by the id of their batch, which they hold on to
        self._slots: list[Slot] = []
        self._covered: dict[int, int] = {}  # {partition: up to where batches were handed out}
        self._epoch = 0
        self._void = True  # there is no place to read from yet
        self._closed = False
        self._over = False  # a lane has failed: nothing is handed out any more
        self._owners = 0
        self._again_until: dict[int, int] = {}
        self._patience = Patience()
        self._pusher: Pusher[_Flight] = Pusher(
            common.rows,
            name=f"push-{index}",
            acknowledged=self._acknowledged,
            dropped=self._dropped,
            moved=self._notify,
            refused=lambda refused: self.void(f"a push was refused: {refused}"),
            failed=self._fail,
        )
        self._thread = threading.Thread(target=self._run, name=f"ahead-{index}", daemon=True)

    def start(self) -> None:
        """Begin to read and look up."""
        self._thread.start()

    # --- the trainer's side

    def take(self, wait_s: float) -> TrainBatch | None:
        """The next batch with its rows, or None if there is none within `wait_s`."""
        deadline = self._common.clock.monotonic() + wait_s
        with self._changed:
            if not self._changed.wait_for(self._takeable, wait_s) or self._closed or self._over:
                return None
            flight = self._ready.popleft()
            self._out[id(flight.batch)] = flight
            flight.looking = not self._common.ahead
        if not self._common.ahead and not self._look_up_now(flight, deadline):
            return None
        with self._changed:
            begun, flight.begun = flight.begun, None
        if self._common.own is not None and begun is not None:
            flight.made.bring_up(self._common.own, begun)
        with self._changed:
            self._covered.update({r.partition: r.stop for r in flight.batch.ranges})
            self.counts.batches += 1
        return flight.batch

    def give_back(
        self, batch: TrainBatch, gradients: Sequence[F32] | None, counts: Sequence[U32] | None = None
    ) -> None:
        """Have a batch's gradients pushed. Given None, or void meanwhile, it is issued again."""
        self._common.desk.step_over()
        with self._changed:
            flight = self._out.get(id(batch))
        if flight is None:
            raise ValueError(f"a batch of {batch.ranges} is given back that is not out")
        kept = flight.slot.keep(gradients) if gradients is not None else None
        with self._changed:
            self._out.pop(id(batch), None)
            void = flight.epoch != self._epoch or self._closed
            if kept is not None and not void:
                flight.since = self._common.clock.monotonic()
                push = flight.made.push(self._fence, kept, counts)
                if self._common.own is not None and not flight.made.replayed:  # shards may have those
                    flight.write = self._common.own.given(
                        batch.ranges, push.groups, kept, partial(self._free, flight.slot)
                    )
                flight.push_span = start_rows_call(flight.made.traced, "Push")
                if flight.push_span is not None:
                    push = replace(push, span=context_of(flight.push_span))
                self._pusher.give(push, flight)
                return
        self._dropped(flight)
        if not void:
            self.void("the trainer gave a batch back unused")

    def abandon(self) -> None:
        """The trainer is gone with what it holds: that is issued again."""
        with self._changed:
            left = list(self._out.values())
            self._out.clear()
        for flight in left:
            self._dropped(flight)
        self.void("the trainer is gone")

    def settled(self, wait_s: float) -> bool:
        """Wait until nothing that was given back awaits its acknowledgement."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pusher.idle, wait_s)

    def covered(self) -> dict[int, int]:
        """{partition: up to where batches were handed out, or where no block is left that one could hold};
        empty before the first rewind."""
        with self._changed:
            handed, read = dict(self._covered), self._source.covered()
            assembled = self._source.positions()
        return {
            p: max(stop, read.get(p, 0)) if assembled.get(p) == stop else stop for p, stop in handed.items()
        }

    def void(self, why: str) -> None:
        """Drop every batch that is not out, and start again from what is applied; from any thread."""
        with self._changed:
            if self._void or self._closed:
                return
            log.info("a lane starts again from what is applied", lane=self._index, reason=why)
            self._void, self._epoch = True, self._epoch + 1
            dropped = list(self._ready)
            self._ready.clear()
            self._pusher.drop()
            self._changed.notify_all()
        for flight in dropped:
            self._dropped(flight)
        self._common.desk.wake()

    def end(self) -> None:
        """Hand out nothing any more: the stream has failed."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def close(self, wait_s: float) -> None:
        """Push what was given back, for so long at most, then end. Idempotent."""
        with self._changed:
            self._closed = True
            self._patience.cut()
            self._changed.notify_all()
        self._common.desk.wake()
        if self._thread.ident is not None:
            self._thread.join()
        if not self._pusher.close(wait_s):
            log.warning("gradients were not acknowledged; their samples come again", lane=self._index)
        self._source.close()

    # --- the lane's thread

    def _run(self) -> None:
        try:
            while not self._closed:
                try:
                    self._step()
                    self._patience.renew()
                except Unavailable as error:
                    if self._patience.short:  # once, not at every look
                        log.warning("a lane waits", lane=self._index, reason=str(error))
                    self.void("what it needs cannot be reached")
                    self._patience.rest()
        except BaseException as error:  # takers are told
            self._fail(error)

    def _step(self) -> None:
        if self._void:
            if not self._quiet():
                return
            self._rewind()
        elif not self._stands():
            return
        self.stages.begin()
        plan = self._source.assemble(self._common.clock.monotonic() + LOOK_S)
        self.stages.mark("read")
        if plan is not None and (slot := self._slot()) is not None:
            self._prepare(plan, slot)

    def _prepare(self, plan: BatchPlan, slot: Slot) -> None:
        """Decode, plan, and, where lookups go ahead, take a credit and ask for the rows."""
        epoch = self._epoch
        try:
            made = self._made(plan, slot)
        except BaseException:  # what cannot be decoded is reported, and the log may be away
            self._free(slot)
            raise
        flight = _Flight(made, slot, made.batch(self._fence, looked=self._common.own is None), epoch)
        if self._common.ahead:
            flight.credit = self._credit(plan)
            self.stages.mark("credit")
        with self._changed:
            void = self._gone() or epoch != self._epoch
            if not void:
                flight.looking = self._common.ahead
                flight.since = self._common.clock.monotonic()
                self._ready.append(flight)
                self._changed.notify_all()
        if void:
            self._dropped(flight)
        elif self._common.ahead:
            self._common.lookups.submit(self._look_up, flight)

    def _made(self, plan: BatchPlan, slot: Slot) -> Made:
        self.stages.begin()
        start_ns = now_ns()
        decoded = self._decoder.decode(plan.blocks, plan.places)
        self.stages.mark("decode")
        replayed = self._source.replayed(plan)
        made = self._common.maker.make(plan, decoded, slot, replayed=replayed, stages=self.stages)
        made.traced = record_batch(
            plan.ranges, len(plan.blocks), decoded.request_ids, self._source.topic, start_ns
        )
        return made

    def _credit(self, plan: BatchPlan) -> int:
        """Wait for a credit; 0 if the lane is void before there is one."""
        if all(r.start >= self._again_until.get(r.partition, 0) for r in plan.ranges):
            self._common.desk.settle(self._index)
        credit = 0
        while not credit and self._stands():
            credit = self._common.desk.take(self._index, plan.rows, LOOK_S, self._gone)
        return credit

    def _rewind(self) -> None:
        """Ask everybody what is applied, and start there. Raises Unavailable while somebody cannot tell."""
        owners, common = self._common.ownership(), self._common
        first = not self._again_until
        for partition, stop in self._source.positions().items():
            self._again_until[partition] = max(stop, self._again_until.get(partition, 0))
        told = [common.rows.applied(), self._dense_applied()]
        self._source.rewind(told)
        starts = self._source.positions()
        if all(start >= self._again_until.get(p, 0) for p, start in starts.items()):
            common.desk.settle(self._index)
        with self._changed:
            self._void, self._owners, self._covered = False, owners, dict(starts)
            self.counts.rewinds += not first

    def _quiet(self) -> bool:
        """Whether nothing is out and nothing in the air; waits a little for it."""
        with self._changed:
            return (
                self._changed.wait_for(lambda: self._closed or (not self._out and self._pusher.idle), LOOK_S)
                and not self._closed
            )

    def _slot(self) -> Slot | None:
        """Memory for one more batch; waits for it, None if the lane is void before there is some."""
        while self._stands():
            with self._changed:
                if self._slots:
                    return self._slots.pop()
                if self._slots_left:
                    self._slots_left -= 1
                    return self._common.maker.slot()
                self._changed.wait(LOOK_S)
        return None

    def _stands(self) -> bool:
        """Whether what was read and looked up still holds: voids it if a bucket has another owner."""
        if self._common.ownership() != self._owners:
            self.void("a bucket has another owner")
        return not self._gone()

    def _gone(self) -> bool:
        return self._void or self._closed

    # --- lookups

    def _look_up(self, flight: _Flight) -> None:
        """Fetch the rows of a batch, however long it takes, unless it is void before."""
        patience = Patience()
        try:
            while flight.epoch == self._epoch and not self._closed:
                self._look_anew(flight)
                try:
                    flight.made.look_up(self._common.rows)
                except Unavailable as error:
                    log.warning(
                        "rows cannot be looked up",
                        lane=self._index,
                        ranges=list(map(str, flight.made.plan.ranges)),
                        reason=str(error),
                        again_in_s=patience.next_s,
                    )
                    patience.rest()
                    continue
                flight.ready = True
                break
        except BaseException as error:
            self._fail(error)
        with self._changed:
            flight.looking = False
            self.counts.lookup_s += self._common.clock.monotonic() - flight.since
            dropped = flight.dropped
        if dropped:
            self._free(flight.slot)
            self._forget(flight)
        self._notify()
        self._common.arrived()

    def _look_anew(self, flight: _Flight) -> None:
        """Its lookup is about to be sent."""
        self._forget(flight)
        if self._common.own is not None and self._common.ahead:
            flight.begun = self._common.own.looking()

    def _forget(self, flight: _Flight) -> None:
        """The flight's rows will not be brought up."""
        with self._changed:
            begun, flight.begun = flight.begun, None
        if self._common.own is not None and begun is not None:
            self._common.own.forget(begun)

    def _look_up_now(self, flight: _Flight, deadline: float) -> bool:
        """Mode `sync`: take the credit and look up on the trainer's thread; False if there is no batch."""
        wait_s = max(0.0, deadline - self._common.clock.monotonic())
        flight.credit = self._common.desk.take(self._index, flight.made.plan.rows, wait_s, self._gone)
        if flight.credit:
            flight.since = self._common.clock.monotonic()
            self._look_up(flight)
        with self._changed:
            flight.looking = False
            if flight.ready and flight.epoch == self._epoch:
                return True
            del self._out[id(flight.batch)]
            if flight.epoch == self._epoch and not self._closed:
                self._ready.appendleft(flight)
                return False
        self._dropped(flight)
        return False

    def _takeable(self) -> bool:
        if self._closed or self._over:
            return True
        return bool(self._ready and (self._ready[0].ready or not self._common.ahead))

    # --- ends of batches

    def _acknowledged(self, flight: _Flight) -> None:
        if flight.push_span is not None:
            end_span(flight.push_span)
        if not flight.made.replayed:
            self._common.recent.add(flight.made.inputs)
        self._common.desk.give_back(flight.credit)
        with self._changed:
            self.counts.push_s += self._common.clock.monotonic() - flight.since
        if self._common.own is not None and flight.write is not None:
            self._common.own.acknowledged(
                flight.write
            )  # frees the slot, at once or when its last reader has gone
        else:
            self._free(flight.slot)

    def _dropped(self, flight: _Flight) -> None:
        self._common.desk.keep(flight.credit)
        with self._changed:
            self.counts.void_rows += flight.made.plan.rows if flight.credit else 0
            flight.dropped = True
            looking = flight.looking
        if looking:
            return  # the lookup frees the slot when it is over
        self._forget(flight)
        if self._common.own is not None and flight.write is not None:
            self._common.own.drop(flight.write)
        else:
            self._free(flight.slot)

    def _free(self, slot: Slot) -> None:
        with self._changed:
            self._slots.append(slot)
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._pusher.drop()
        self._common.failed(error)
