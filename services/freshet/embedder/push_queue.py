"""The queue of a lane's pushes: in order, in the background, several in flight at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from freshet.errors import Refused, Unavailable
from freshet.rows.service import Push, PushesAhead, RowService

log = structlog.get_logger("freshet.embedder")

T = TypeVar("T")

SHORTEST_S, LONGEST_S = 0.01, 0.5
"""Bounds of a sleep. A shard takes seconds to be replaced, so half a second adds little; more than 100
tries a second would load the machine."""

LAST_S = 1.0
"""Seconds for which `PushQueue.close` waits for answers to the pushes that it drops."""


class Backoff:
    """The backoff of one thread; any other thread may interrupt it."""

    def __init__(self) -> None:
        self.next_s = SHORTEST_S
        self._interrupted = threading.Event()

    @property
    def is_first(self) -> bool:
        """Whether the next sleep is the first since a success."""
        return self.next_s == SHORTEST_S

    def sleep(self) -> bool:
        """Sleep, then double the next duration. Returns True if the sleep was interrupted."""
        interrupted = self._interrupted.wait(self.next_s)
        self.next_s = min(2 * self.next_s, LONGEST_S)
        return interrupted

    def reset(self) -> None:
        """Start with the shortest sleep again, after a success, and clear an interruption."""
        self.next_s = SHORTEST_S
        self._interrupted.clear()

    def interrupt(self) -> None:
        """End the present sleep and skip the next ones until `reset`."""
        self._interrupted.set()


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    push: Push
    tag: T
    answer: Future[bool] | None = None  # once it is sent


class PushQueue(Generic[T]):
    """The pushes of one lane, sent by a thread of its own in the order of `add`.

    A row service that `PushesAhead` receives them concurrently, others one by one. Only the answer to the
    oldest unacknowledged push counts, since a later one may be refused because an earlier one was lost. After
    Unavailable the queue awaits all answers and sends all pushes again in order; shards skip those that they
    have applied. It retries until `drop` or `close`, with a backoff.
    """

    def __init__(
        self,
        rows: RowService,
        *,
        name: str,
        acknowledged: Callable[[T], None],
        dropped: Callable[[T], None],
        moved: Callable[[], None],
        refused: Callable[[Refused], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Start the thread, which makes all callbacks without holding a lock of the queue.

        Args:
            rows: the row service.
            name: of the thread.
            acknowledged: called with the tag of a push that all shards have applied.
            dropped: called with the tag of a dropped push that awaits no answer.
            moved: called after either of these; `idle` may have changed.
            refused: called when a push's offsets do not follow the applied offsets; it must call `drop`.
            failed: called for any other error; it must call `drop`.
        """
        self._rows = rows
        self._acknowledged, self._dropped, self._moved = acknowledged, dropped, moved
        self._refused, self._failed = refused, failed
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[_Entry[T]] = deque()
        self._sent: deque[_Entry[T]] = deque()
        self._void = False  # dropped: answers are awaited, nothing is sent
        self._closed = False
        self._backoff = Backoff()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, push: Push, tag: T) -> None:
        """Queue a push; not between `drop` and `idle`.

        Its arrays must not change until it is acknowledged or dropped.
        """
        with self._changed:
            self._waiting.append(_Entry(push, tag))
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether no push is queued or in flight."""
        with self._changed:
            return not self._waiting and not self._sent and not self._void

    def drop(self) -> None:
        """Drop all pushes; `dropped` is called for each once it awaits no answer."""
        with self._changed:
            self._void = bool(self._waiting or self._sent)
            if self._void:  # else no void resets it, and pushes would be repeated without delay
                self._backoff.interrupt()
            self._changed.notify_all()

    def close(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for all pushes, then end; False if some remain. Idempotent."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._waiting and not self._sent, wait_s)
            self._closed = self._void = True
            self._backoff.interrupt()
            self._changed.notify_all()
        self._thread.join(LAST_S)
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._closed and not self._sent and not self._waiting:
                    return
                void = self._void
                head = self._sent[0] if self._sent else None
            if void:
                self._drop_all()
            elif head is not None and head.answer is not None and head.answer.done():
                self._handle_answer(head, head.answer)
            else:
                self._send()

    def _has_work(self) -> bool:
        head = self._sent[0].answer if self._sent else None
        return bool(self._closed or self._void or self._waiting or (head is not None and head.done()))

    def _send(self) -> None:
        with self._changed:
            if not self._waiting:
                return
            entry = self._waiting.popleft()
            self._sent.append(entry)
        entry.answer = self._begin_push(entry.push)
        entry.answer.add_done_callback(self._answered)

    def _begin_push(self, push: Push) -> Future[bool]:
        if isinstance(self._rows, PushesAhead):
            return self._rows.push_soon(push)
        answer: Future[bool] = Future()
        try:
            answer.set_result(self._rows.push(push))
        except Exception as error:
            answer.set_exception(error)
        return answer

    def _answered(self, _: Future[bool]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _handle_answer(self, head: _Entry[T], answer: Future[bool]) -> None:
        """Handle the answer to the oldest push."""
        error = answer.exception()
        if error is None:
            self._backoff.reset()
            self._acknowledged(head.tag)
            with self._changed:
                self._sent.popleft()
                self._changed.notify_all()
            self._moved()
        elif isinstance(error, Unavailable):
            self._resend(error)
        elif isinstance(error, Refused):
            self._refused(error)
        else:
            self._failed(error)

    def _resend(self, error: Unavailable) -> None:
        """Await the pushes in flight, then send them again in order."""
        self._await_sent()
        with self._changed:
            self._waiting.extendleft(reversed(self._sent))
            self._sent.clear()
        log.warning("gradients wait for the shards", reason=str(error), again_in_s=self._backoff.next_s)
        self._backoff.sleep()

    def _drop_all(self) -> None:
        """Await the pushes in flight, then drop all."""
        self._await_sent()
        with self._changed:
            entries = [*self._sent, *self._waiting]
        for entry in entries:
            self._dropped(entry.tag)
        with self._changed:
            self._sent.clear()
            self._waiting.clear()
            self._void = self._closed
            self._backoff.reset()
            self._changed.notify_all()
        self._moved()

    def _await_sent(self) -> None:
        wait([entry.answer for entry in list(self._sent) if entry.answer is not None])
