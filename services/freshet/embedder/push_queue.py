"""Gradients on their way to the shards: in order, in the background, several in the air at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from freshet.embedder.backoff import Patience
from freshet.errors import Refused, Unavailable
from freshet.rows.service import Push, PushesAhead, RowService

__all__ = ["Pusher"]

log = structlog.get_logger("freshet.embedder")

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Parcel(Generic[T]):
    push: Push
    of: T
    answer: Future[bool] | None = None  # once it is sent


class Pusher(Generic[T]):
    """Pushes of one lane, from a thread of its own, in the order in which they were given.

    A row service that `PushesAhead` gets them all at once, others one by one. Only the answer to the oldest
    push that is not yet acknowledged counts: a younger one may be refused because an older was lost on its
    way. So after Unavailable all that are in the air are awaited and sent again, in order; shards that have
    them skip them. Waits grow up to half a second, and nothing is ever given up but by `drop` or `close`.
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
        """The calls come from the pusher's thread and hold none of its locks.

        Args:
            acknowledged: all shards have it.
            dropped: it was given up, and no answer to it is awaited any more.
            moved: after either of these; `idle` may be true now.
            refused: it does not continue what is applied; who is called calls `drop`.
            failed: anything else; likewise.
        """
        self._rows = rows
        self._acknowledged, self._dropped, self._moved = acknowledged, dropped, moved
        self._refused, self._failed = refused, failed
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[_Parcel[T]] = deque()
        self._sent: deque[_Parcel[T]] = deque()
        self._void = False  # what is sent is only awaited
        self._closed = False
        self._patience = Patience()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def give(self, push: Push, of: T) -> None:
        """Push this after all that were given before; not between `drop` and `idle`.

        Its arrays must not change until it is acknowledged or dropped.
        """
        with self._changed:
            self._waiting.append(_Parcel(push, of))
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether nothing waits and no answer is awaited."""
        with self._changed:
            return not self._waiting and not self._sent and not self._void

    def drop(self) -> None:
        """Give up what was given so far: `dropped` is called for each, once its answer cannot matter."""
        with self._changed:
            self._void = bool(self._waiting or self._sent)
            self._patience.cut()
            self._changed.notify_all()

    def close(self, wait_s: float) -> bool:
        """Push what waits for so long at most, then end; False if something was left. Idempotent."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._waiting and not self._sent, wait_s)
            self._closed = self._void = True
            self._patience.cut()
            self._changed.notify_all()
        self._thread.join(wait_s + 1.0)
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._something_to_do)
                if self._closed and not self._sent and not self._waiting:
                    return
                void = self._void
                head = self._sent[0] if self._sent else None
            if void:
                self._empty()
            elif head is not None and head.answer is not None and head.answer.done():
                self._take(head, head.answer)
            else:
                self._send()

    def _something_to_do(self) -> bool:
        head = self._sent[0].answer if self._sent else None
        return bool(self._closed or self._void or self._waiting or (head is not None and head.done()))

    def _send(self) -> None:
        with self._changed:
            if not self._waiting:
                return
            parcel = self._waiting.popleft()
            self._sent.append(parcel)
        parcel.answer = self._begin(parcel.push)
        parcel.answer.add_done_callback(self._answered)

    def _begin(self, push: Push) -> Future[bool]:
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

    def _take(self, head: _Parcel[T], answer: Future[bool]) -> None:
        """What the oldest push's answer means."""
        error = answer.exception()
        if error is None:
            self._patience.renew()
            self._acknowledged(head.of)
            with self._changed:
                self._sent.popleft()
                self._changed.notify_all()
            self._moved()
        elif isinstance(error, Unavailable):
            self._again(error)
        elif isinstance(error, Refused):
            self._refused(error)
        else:
            self._failed(error)

    def _again(self, error: Unavailable) -> None:
        """Await what is in the air, and send it again in order: shards skip what they have."""
        self._await_sent()
        with self._changed:
            self._waiting.extendleft(reversed(self._sent))
            self._sent.clear()
        log.warning("gradients wait for the shards", reason=str(error), again_in_s=self._patience.next_s)
        self._patience.rest()

    def _empty(self) -> None:
        """Forget everything, once what is in the air was answered."""
        self._await_sent()
        with self._changed:
            given_up = [*self._sent, *self._waiting]
        for parcel in given_up:
            self._dropped(parcel.of)
        with self._changed:
            self._sent.clear()
            self._waiting.clear()
            self._void = self._closed
            self._patience.renew()
            self._changed.notify_all()
        self._moved()

    def _await_sent(self) -> None:
        wait([parcel.answer for parcel in list(self._sent) if parcel.answer is not None])
