"""Row services with faults: delayed, lost or refused requests and answers."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from freshet.errors import Refused, Unavailable
from freshet.rows.service import KeyGroup, Push, RowStates
from freshet.testing.contracts.rowservice import PARTITIONS, WIDTH
from freshet.testing.reference import ReferenceRowService
from freshet.types import F32


class HeldRows(ReferenceRowService):
    """Lookups and pushes block until the test releases them; `asked` counts them."""

    def __init__(self) -> None:
        super().__init__([WIDTH], dict.fromkeys(range(PARTITIONS), 0))
        self.lookups, self.pushes = threading.Semaphore(0), threading.Semaphore(0)
        self.lookups_asked = self.pushes_asked = 0
        self.changed = threading.Condition()

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        with self.changed:
            self.lookups_asked += 1
            self.changed.notify_all()
        self.lookups.acquire()
        super().lookup(groups, out, create=create, states=states)

    def push(self, push: Push) -> bool:
        with self.changed:
            self.pushes_asked += 1
            self.changed.notify_all()
        self.pushes.acquire()
        return super().push(push)


class LossyRows:
    """Pushes ahead over a link that loses requests and answers; shards that are replaced by what was flushed.

    A random flush is what a successor starts from, so that all since is lost with its memory (PROTOCOL 7).
    """

    def __init__(self, seed: int, *, losses: float, deaths: float) -> None:
        self._random, self._losses, self._deaths = random.Random(seed), losses, deaths
        self._lock = threading.Lock()
        self._applied = dict.fromkeys(range(PARTITIONS), 0)
        self._counts: dict[int, int] = {}  # key -> pushes that touched it
        self._flushed = dict(self._applied), dict(self._counts)
        self._owners = 0
        self._inbox: queue.Queue[tuple[Push, Future[bool]] | None] = queue.Queue()
        self.quiet = threading.Event()  # set: no fault any more
        self.refused = self.lost = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        if self._chance(self._losses):
            raise Unavailable("the link is down")
        for rows in out:
            rows[:] = 0

    def push(self, push: Push) -> bool:
        raise AssertionError("pushes go ahead here")

    def push_soon(self, push: Push) -> Future[bool]:
        answer: Future[bool] = Future()
        self._inbox.put((push, answer))
        return answer

    def applied(self) -> Mapping[int, Sequence[int]]:
        if self._chance(self._losses):
            raise Unavailable("a bucket has no owner")
        with self._lock:
            return {p: [offset] for p, offset in self._applied.items()}

    def ownership(self) -> int:
        return self._owners

    def counts(self) -> dict[int, int]:
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _chance(self, of: float) -> bool:
        return not self.quiet.is_set() and self._random.random() < of

    def _serve(self) -> None:
        while (taken := self._inbox.get()) is not None:
            push, answer = taken
            if self._chance(self._deaths):
                self._die()
            if self._chance(self._losses):
                self.lost += 1
                answer.set_exception(Unavailable("the request was lost"))
                continue
            try:
                done = self._apply(push)
            except Exception as error:
                answer.set_exception(error)
                continue
            if self._chance(self._losses):
                self.lost += 1
                answer.set_exception(Unavailable("the answer was lost"))
            else:
                answer.set_result(done)

    def _apply(self, push: Push) -> bool:
        with self._lock:
            if self._chance(0.2):
                self._flushed = dict(self._applied), dict(self._counts)
            if all(self._applied[r.partition] >= r.stop for r in push.ranges):
                return False
            if not all(self._applied[r.partition] == r.start for r in push.ranges):
                self.refused += 1
                raise Refused("not next", dict(self._applied))
            for group, gradients in zip(push.groups, push.gradients, strict=True):
                for key, gradient in zip(group.keys.tolist(), gradients[:, 0].tolist(), strict=True):
                    self._counts[key] = self._counts.get(key, 0) + int(gradient)
            self._applied.update({r.partition: r.stop for r in push.ranges})
            return True

    def _die(self) -> None:
        with self._lock:
            self._applied, self._counts = dict(self._flushed[0]), dict(self._flushed[1])
            self._owners += 1
