"""Partitions on their way to a joiner: a writer of their own opened, their state rebuilt from the log, by
threads, while the partitions that are there already are joined on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event

from freshet.errors import FreshetError, Unavailable
from freshet.joiner.partition import Task
from freshet.log import Writer

__all__ = ["Entered", "Entering"]

_AT_ONCE = 8


@dataclass(slots=True)
class Entered:
    """What became of partitions that share a writer. Either all tasks are there, or `error` says why not."""

    partitions: tuple[int, ...]
    writer: Writer | None = None
    tasks: list[Task] = field(default_factory=list)
    error: FreshetError | None = None


class Entering:
    """Used by one thread, but for `enter`, which threads of its own call."""

    def __init__(
        self,
        writer_of: Callable[[tuple[int, ...]], Writer],
        task_of: Callable[[int, Callable[[], bool]], Task],
    ) -> None:
        """Nothing enters yet.

        Args:
            writer_of: opens the writer of partitions, and fences whoever had it.
            task_of: rebuilds a partition; gives up with Unavailable once the function that it is given says
                so.
        """
        self._writer_of, self._task_of = writer_of, task_of
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: dict[Future[Entered], tuple[tuple[int, ...], Event]] = {}

    def begin(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Let these in, each group with one writer."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="joiner-enter")
        for group in groups:
            given_up = Event()
            self._under_way[self._threads.submit(self.enter, group, given_up)] = (group, given_up)

    @property
    def partitions(self) -> set[int]:
        """Those on their way, without those that were given up."""
        return {p for group, given_up in self._under_way.values() if not given_up.is_set() for p in group}

    def give_up(self, partitions: Collection[int]) -> None:
        """These are another's now. What was opened for them is closed, at the latest when it is there."""
        for group, given_up in self._under_way.values():
            if set(partitions).intersection(group):
                given_up.set()

    def take(self, *, waiting: bool = False) -> list[Entered]:
        """Those that are in, or could not get in, each once; `waiting`: of all."""
        if waiting:
            wait(self._under_way)
        found = []
        for future in [future for future in self._under_way if future.done()]:
            _, given_up = self._under_way.pop(future)
            if not given_up.is_set():
                found.append(future.result())
            elif future.exception() is None and (writer := future.result().writer) is not None:
                writer.close()
        return found

    def close(self) -> None:
        """Give everything up, and wait for it. Idempotent."""
        for _, given_up in self._under_way.values():
            given_up.set()
        self.take(waiting=True)
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def enter(self, group: tuple[int, ...], given_up: Event) -> Entered:
        """Fence earlier owners first: then what the log says of the partitions is their last word."""
        entered = Entered(group)
        try:
            if given_up.is_set():
                raise Unavailable("the partitions went to another before they were opened")
            entered.writer = self._writer_of(group)
            entered.tasks = [self._task_of(p, given_up.is_set) for p in group]
        except FreshetError as error:
            if entered.writer is not None:
                entered.writer.close()
            entered.writer, entered.tasks, entered.error = None, [], error
        return entered
