"""The lane with prefetched lookups and asynchronous pushes.

Letters: U rows of a group, G gradients of a group, S floats of a row.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from freshet.batches.read_my_writes import LookupStart, Write
from freshet.batches.stream import TrainBatch
from freshet.embedder.batch_builder import BuiltBatch, Slot
from freshet.embedder.block_decoder import BlockDecoder
from freshet.embedder.core import BatchPlan
from freshet.embedder.lane import Lane, LaneContext, LanePartitions
from freshet.embedder.push_queue import Backoff, PushQueue
from freshet.errors import Refused, Unavailable
from freshet.observability.spans import start_rows_call
from freshet.observability.tracing import context_of, end_span
from freshet.rows.service import LookupsAfter
from freshet.types import F32, U32, OffsetRange

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = structlog.get_logger("freshet.embedder")

POLL_S = 0.05
"""Seconds of one wait: an idle lane checks for a change of owners after each."""

ROWS_WAIT_S = 0.25
"""Seconds for which `next_batch` waits for a batch's first lookup in mode `sync`, even beyond `wait_s`: a
lane with a batch must not miss the step for a few milliseconds, but a rank counts as lost after seconds."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A batch from its lookup to its acknowledgement."""

    built: BuiltBatch
    slot: Slot
    batch: TrainBatch
    epoch: int  # of the lane at its creation; the batch is void in a later epoch
    permit: int = 0  # 0: none yet (mode `sync`)
    in_lookup: bool = False  # a lookup writes to its slot
    early: bool = False  # the lane's thread looks it up beside the push before (mode `sync`)
    ready: bool = False
    dropped: bool = False
    step: int = 0  # `StalenessLimiter.steps` before its lookup (mode `sync`)
    rows_by: float = 0.0  # until then `next_batch` waits for its rows (mode `sync`); 0: no lookup yet
    since: float = 0.0  # begin of the present lookup or push
    begun: LookupStart | None = None  # its lookup, until pending gradients are applied
    write: Write | None = None  # its gradients, once returned
    push_span: Span | None = None  # of its push, if it is traced


class PrefetchLane(Lane):
    """A lane with threads of its own: one prefetches batches, another pushes gradients (`PushQueue`).

    A batch is in one state at a time: ready (it has a permit; its rows are present or requested), out (at the
    trainer), in the push queue, or done. `void` drops ready batches and pushes. Once no batch is out and no
    push in flight, the lane reads the applied offsets and restarts there (PROTOCOL 6 and 7).
    """

    def __init__(
        self,
        index: int,
        mine: LanePartitions,
        decoder: BlockDecoder,
        context: LaneContext,
        *,
        slots: int,
    ) -> None:
        """Start no thread yet; `slots` bounds the batches in memory, of any size."""
        super().__init__(index, mine, decoder, context)
        self._slots_left = slots
        self._ahead = context.ahead
        self._changed = threading.Condition()  # guards all below
        self._ready: deque[_Flight] = deque()
        self._out: dict[int, _Flight] = {}  # id() of the batch, which the flight keeps alive -> flight
        self._slots: list[Slot] = []
        self._covered: dict[int, int] = {}  # {partition: end of the batches taken}
        self._pushed: tuple[OffsetRange, ...] = ()  # ranges of the last push since the last rewind
        self._epoch = 0
        self._void = True  # no offsets are assigned
        self._closed = False
        self._over = False  # a lane of the stream failed: `next_batch` returns None
        self._owners = 0
        self._reissue_until: dict[int, int] = {}
        self._backoff = Backoff()
        self._push_queue: PushQueue[_Flight] = PushQueue(
            context.rows,
            name=f"push-{index}",
            acknowledged=self._acknowledged,
            dropped=self._drop,
            moved=self._notify,
            refused=self._refused,
            failed=self._fail,
        )
        self._thread = threading.Thread(target=self._run, name=f"ahead-{index}", daemon=True)

    def start(self) -> None:
        """Start the thread, which reads and looks up."""
        self._thread.start()

    # --- the trainer's side

    def next_batch(self, wait_s: float) -> TrainBatch | None:
        """Return the next batch with its rows; None if there is none within `wait_s`."""
        deadline = self._clock.monotonic() + wait_s
        with self._changed:
            if not self._changed.wait_for(self._can_take, wait_s) or self._closed or self._over:
                return None
            flight = self._ready.popleft()
            self._out[id(flight.batch)] = flight
        if not self._ahead and not self._look_up_now(flight, deadline):
            return None
        with self._changed:
            begun, flight.begun = flight.begun, None
        if self._context.own is not None and begun is not None:
            flight.built.apply_pending(self._context.own, begun)
        with self._changed:
            self._covered.update({r.partition: r.stop for r in flight.batch.ranges})
            self.counts.batches += 1
        return flight.batch

    def push_gradients(
        self, batch: TrainBatch, gradients: Sequence[F32] | None, counts: Sequence[U32] | None = None
    ) -> None:
        """Queue the push of gradients, (G, S) float32 and counts (U,) uint32 a group.

        A void batch, or one without gradients, is issued again. Raises ValueError if the batch is not out.
        """
        self._context.limiter.end_step()
        with self._changed:
            flight = self._out.get(id(batch))
        if flight is None:
            raise ValueError(f"a batch of {batch.ranges} is returned that is not out")
        copies = flight.slot.copy_gradients(gradients) if gradients is not None else None
        with self._changed:
            del self._out[id(batch)]
            void = flight.epoch != self._epoch or self._closed
            if copies is not None and not void:
                flight.since = self._clock.monotonic()
                push = flight.built.push(self._fence, copies, counts)
                if self._context.own is not None and not flight.built.replayed:
                    flight.write = self._context.own.add(
                        batch.ranges, push.groups, copies, partial(self._free, flight.slot)
                    )
                flight.push_span = start_rows_call(flight.built.traced, "Push")
                if flight.push_span is not None:
                    push = replace(push, span=context_of(flight.push_span))
                self._push_queue.add(push, flight)
                self._pushed = batch.ranges
                self._changed.notify_all()
                return
        self._drop(flight)
        if not void:
            self.void("the trainer returned a batch unused")

    def abandon(self, batches: Sequence[TrainBatch]) -> None:
        """Issue batches again that the lost trainer holds.

        Those that a call of `next_batch` or `push_gradients` is working on are not among them: the call finds
        them void.
        """
        with self._changed:
            left = [self._out.pop(id(batch)) for batch in batches]
        for flight in left:
            self._drop(flight)
        self.void("the trainer disconnected")

    def flush(self, wait_s: float) -> bool:
        """Wait until all pushes are acknowledged; False if some are not within `wait_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._push_queue.idle, wait_s)

    def covered(self) -> dict[int, int]:
        """Return {partition: end of the taken batches, past trailing markers}; empty before a rewind."""
        with self._changed:
            handed, read = dict(self._covered), self._reader.covered()
            assembled = self._reader.positions()
        return {
            p: max(stop, read.get(p, 0)) if assembled.get(p) == stop else stop for p, stop in handed.items()
        }

    def void(self, why: str) -> None:
        """Drop every batch that is not out, and restart at the applied offsets. Any thread."""
        with self._changed:
            if self._void or self._closed:
                return
            log.info("a lane restarts at the applied offsets", lane=self._index, reason=why)
            self._void, self._epoch = True, self._epoch + 1
            dropped = list(self._ready)
            self._ready.clear()
            self._push_queue.drop()
            self._changed.notify_all()
        for flight in dropped:
            self._drop(flight)
        self._context.limiter.wake()

    def end(self) -> None:
        """Return no batches any more: the stream has failed."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def close(self, wait_s: float) -> None:
        """Push queued gradients for at most `wait_s`, then end. Idempotent."""
        with self._changed:
            self._closed = True
            self._backoff.interrupt()
            self._changed.notify_all()
        self._context.limiter.wake()
        if not self._push_queue.close(wait_s):
            log.warning("gradients were not acknowledged; their samples are issued again", lane=self._index)
        if self._thread.ident is not None:
            self._thread.join()
        self._reader.close()

    # --- the lane's thread

    def _run(self) -> None:
        try:
            while not self._closed:
                try:
                    self._step()
                    self._backoff.reset()
                except Unavailable as error:
                    if self._backoff.is_first:  # one line an outage
                        log.warning(
                            "a lane waits for the log, the shards or the trainer",
                            lane=self._index,
                            reason=str(error),
                        )
                    self.void("the log, the shards or the trainer are unavailable")
                    self._backoff.sleep()
        except BaseException as error:  # `next_batch` raises it
            self._fail(error)

    def _step(self) -> None:
        if self._void:
            if not self._is_drained():
                return
            self._rewind()
        elif not self._is_valid():
            return
        self.stages.begin()
        plan = self._reader.assemble(self._clock.monotonic() + POLL_S)
        self.stages.mark("read")
        if plan is not None and (slot := self._slot()) is not None:
            self._prepare(plan, slot)

    def _prepare(self, plan: BatchPlan, slot: Slot) -> None:
        """Decode a batch; if the stream prefetches, acquire a permit and submit the lookup."""
        epoch = self._epoch
        try:
            self.stages.begin()
            built = self._build(plan, slot)
        except BaseException:  # for example Unavailable while dead letters cannot be written
            self._free(slot)
            raise
        flight = _Flight(built, slot, built.batch(self._fence, looked=self._context.own is None), epoch)
        if self._ahead:
            flight.permit = self._permit(plan)
            self.stages.mark("credit")
        with self._changed:
            void = self._is_void() or epoch != self._epoch
            if not void:
                flight.early = self._context.after is not None
                flight.in_lookup = self._ahead
                flight.since = self._clock.monotonic()
                self._ready.append(flight)
                self._changed.notify_all()
        if void:
            self._drop(flight)
        elif self._ahead:
            self._context.lookups.submit(self._look_up, flight)
        elif self._context.after is not None:
            self._look_up_after(flight, self._context.after)

    def _permit(self, plan: BatchPlan) -> int:
        """Wait for a permit; 0 if the lane becomes void before."""
        if all(r.start >= self._reissue_until.get(r.partition, 0) for r in plan.ranges):
            self._context.limiter.release_held(self._index)
        permit = 0
        while not permit and self._is_valid():
            permit = self._context.limiter.acquire(self._index, plan.rows, POLL_S, self._is_void)
        return permit

    def _rewind(self) -> None:
        """Restart at the offsets that shards and trainer have applied; Unavailable if one is unknown."""
        owners, context = self._context.ownership(), self._context
        first = not self._reissue_until
        for partition, stop in self._reader.positions().items():
            self._reissue_until[partition] = max(stop, self._reissue_until.get(partition, 0))
        self._reader.rewind([context.rows.applied(), self._dense_applied()])
        starts = self._reader.positions()
        if all(start >= self._reissue_until.get(p, 0) for p, start in starts.items()):
            context.limiter.release_held(self._index)
        with self._changed:
            self._void, self._owners, self._covered, self._pushed = False, owners, dict(starts), ()
            self.counts.rewinds += not first

    def _is_drained(self) -> bool:
        """Wait briefly until no batch is out and no push in flight; return whether that is so."""
        with self._changed:
            return (
                self._changed.wait_for(
                    lambda: self._closed or (not self._out and self._push_queue.idle), POLL_S
                )
                and not self._closed
            )

    def _slot(self) -> Slot | None:
        """Wait for the memory of a batch; None if the lane becomes void before."""
        while self._is_valid():
            with self._changed:
                if self._slots:
                    return self._slots.pop()
                if self._slots_left:
                    self._slots_left -= 1
                    return self._context.builder.slot()
                self._changed.wait(POLL_S)
        return None

    def _is_valid(self) -> bool:
        """Return whether the lane is valid; voids it if a bucket has another owner."""
        if self._context.ownership() != self._owners:
            self.void("a bucket has another owner")
        return not self._is_void()

    def _is_void(self) -> bool:
        return self._void or self._closed

    # --- lookups

    def _look_up(self, flight: _Flight) -> None:
        """Look up the rows of a batch; retry until it succeeds, or the batch is void or loses its permit."""
        backoff = Backoff()
        try:
            while flight.permit and not self._is_over(flight):
                self._begin_lookup(flight)
                try:
                    flight.built.look_up(self._context.rows)
                except Unavailable as error:
                    log.warning(
                        "rows cannot be looked up",
                        lane=self._index,
                        ranges=list(map(str, flight.built.plan.ranges)),
                        reason=str(error),
                        again_in_s=backoff.next_s,
                    )
                    backoff.sleep()
                    continue
                flight.ready = True
                break
        except BaseException as error:  # `next_batch` raises it
            self._fail(error)
        with self._changed:
            flight.in_lookup = False
            self.counts.lookup_s += self._clock.monotonic() - flight.since
            dropped = flight.dropped
        if dropped:
            self._free(flight.slot)
            self._end_lookup(flight)
        self._notify()
        self._context.arrived()

    def _begin_lookup(self, flight: _Flight) -> None:
        """Record the begin of a lookup for read-my-writes."""
        self._end_lookup(flight)
        if self._context.own is not None and self._ahead:
            flight.begun = self._context.own.begin_lookup()

    def _end_lookup(self, flight: _Flight) -> None:
        """End the flight's lookup without applying pending gradients."""
        with self._changed:
            begun, flight.begun = flight.begun, None
        if self._context.own is not None and begun is not None:
            self._context.own.end_lookup(begun)

    def _look_up_after(self, flight: _Flight, rows: LookupsAfter) -> None:
        """Look a batch up beside the push of the batch before it (mode `sync`).

        The shards answer once they have applied that push, so the rows are those that a lookup after its
        answer would find. If that fails, the batch is looked up when it is taken.
        """
        try:
            while self._is_valid():
                with self._changed:
                    is_next = self._changed.wait_for(lambda: self._is_next(flight), POLL_S)
                    pushed, flight.since = self._pushed, self._clock.monotonic()
                    flight.step = self._context.limiter.steps
                if is_next:
                    flight.built.look_up_after(rows, pushed)
                    flight.ready = True
                    break
        except Unavailable as error:
            log.info("rows are looked up after the push", lane=self._index, reason=str(error))
        finally:
            with self._changed:
                flight.early = False
                self.counts.lookup_s += self._clock.monotonic() - flight.since
                dropped = flight.dropped
            if dropped:
                self._free(flight.slot)
            self._notify()
            self._context.arrived()

    def _is_next(self, flight: _Flight) -> bool:
        """Return whether all batches before this one are pushed. Needs the lock."""
        others = [other for other in self._out.values() if other is not flight]
        return not others and (
            id(flight.batch) in self._out or bool(self._ready and self._ready[0] is flight)
        )

    def _look_up_now(self, flight: _Flight, deadline: float) -> bool:
        """Acquire a permit and wait for the rows (mode `sync`); False if there is no batch in time.

        The batch then goes back without its permit, so that no other lane waits for it.
        """
        limiter, wait_s = self._context.limiter, max(0.0, deadline - self._clock.monotonic())
        step = limiter.steps  # before the permit: a step that ends meanwhile makes the rows old
        flight.permit = limiter.acquire(self._index, flight.built.plan.rows, wait_s, self._is_void)
        with self._changed:
            if flight.permit and self._await_rows(flight, step, deadline):
                return True
            del self._out[id(flight.batch)]
            void = flight.epoch != self._epoch or self._closed
            if not void:
                limiter.release(flight.permit)
                flight.permit = 0
                self._ready.appendleft(flight)
                self._changed.notify_all()
        if void:
            self._drop(flight)
        return False

    def _await_rows(self, flight: _Flight, step: int, deadline: float) -> bool:
        """Have the rows looked up under the permit; False if they are not there in time. Needs the lock.

        A lookup that began in an earlier call counts if no gradients came back since (PROTOCOL 16).
        """
        clock, now = self._clock, self._context.limiter.steps
        begun = False

        def ended() -> bool:
            return not (flight.in_lookup or flight.early) or self._is_over(flight)

        while self._changed.wait_for(ended, max(0.0, max(deadline, flight.rows_by) - clock.monotonic())):
            if self._is_over(flight):
                return False
            if flight.ready and (begun or flight.step == now):
                return True
            flight.since = clock.monotonic()
            if flight.ready or not flight.rows_by:  # not after a failure
                flight.rows_by = flight.since + ROWS_WAIT_S
            begun, flight.step, flight.ready, flight.in_lookup = True, step, False, True
            self._context.lookups.submit(self._look_up, flight)
        return False

    def _is_over(self, flight: _Flight) -> bool:
        return flight.epoch != self._epoch or self._closed or self._over

    def _can_take(self) -> bool:
        if self._closed or self._over:
            return True
        return bool(self._ready and (self._ready[0].ready if self._ahead else not self._out))

    # --- ends of batches

    def _acknowledged(self, flight: _Flight) -> None:
        if flight.push_span is not None:
            end_span(flight.push_span)
        if not flight.built.replayed:
            self._context.recent.add(flight.built.inputs)
        self._context.limiter.release(flight.permit)
        with self._changed:
            self.counts.push_s += self._clock.monotonic() - flight.since
        if self._context.own is not None and flight.write is not None:
            self._context.own.acknowledge(flight.write)  # frees the slot, after its last reader
        else:
            self._free(flight.slot)

    def _refused(self, refused: Refused) -> None:
        if self._closed:
            reason = str(refused)
            log.warning(
                "gradients were refused; their samples are issued again", lane=self._index, reason=reason
            )
        self.void(f"a push was refused: {refused}")
        self._push_queue.drop()  # a closed lane is not made void

    def _drop(self, flight: _Flight) -> None:
        self._context.limiter.hold(flight.permit)
        with self._changed:
            self.counts.void_rows += flight.built.plan.rows if flight.permit else 0
            flight.dropped = True
            in_lookup = flight.in_lookup or flight.early
        if in_lookup:
            return  # the end of the lookup frees the slot
        self._end_lookup(flight)
        if self._context.own is not None and flight.write is not None:
            self._context.own.drop(flight.write)
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
        self._push_queue.drop()
        self._context.failed(error)
