"""Atomic appends of decided samples, dead dead_letter_records and commits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from freshet.errors import FreshetError
from freshet.joiner.partition import Outputs, Task
from freshet.log import Writer
from freshet.observability.spans import record_joined_samples
from freshet.types import Append, BytesColumn

__all__ = ["Flush", "PendingFlushes"]

_AT_ONCE = 16


class Flush:
    """The appends and commits of the tasks of one writer, written in one atomic append."""

    def __init__(self, writer: Writer, tasks: Sequence[Task], dead_letters: str, now_ms: int) -> None:
        """Flush the tasks. Unless `append` succeeds afterwards, the tasks are void."""
        self._writer, self._appends = writer, list[Append]()
        self.done: list[tuple[Task, Outputs]] = []
        self._commits: list[int] = []  # indices among the appends
        self._offsets: Sequence[int] = ()
        self.error: FreshetError | None = None  # why the append is not known to be written
        dead_letter_records: list[bytes] = []
        for task in tasks:
            output = task.flush(now_ms)
            self._appends += output.appends
            dead_letter_records += output.dead_letters
            self.done.append((task, output))
            self._commits.append(len(self._appends) - 1)
        if dead_letter_records:
            self._appends.append(Append(dead_letters, 0, BytesColumn.of(dead_letter_records)))

    @property
    def partitions(self) -> list[int]:
        """Partitions of the tasks."""
        return [task.partition for task, _ in self.done]

    def append(self) -> None:
        """Append, on any thread. An error of `Writer.append` is stored in `error`, not raised."""
        try:
            self._offsets = self._writer.append(self._appends)
        except FreshetError as error:
            self.error = error

    def report_appended(self) -> None:
        """Record in the tasks, on their thread, that the append is written."""
        for (task, output), at in zip(self.done, self._commits, strict=True):
            task.on_appended(output, int(self._offsets[at]))
            if output.joined:
                samples = at - len(output.appends) + 1  # index of the append of samples on time
                topic, where = task.topics.samples, task.topics.samples_partition(task.partition)
                record_joined_samples(output.joined, topic, where, int(self._offsets[samples]))


class PendingFlushes:
    """PendingFlushes in progress, each appended by a thread: a transaction mostly waits for brokers, and its
    tasks can join further records meanwhile. Used by one thread."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: dict[Future[None], Flush] = {}
        self._begun: dict[Future[None], float] = {}

    def begin(self, flush: Flush, now: float) -> None:
        """Append a flush in the background; its partitions must not be `busy`. `now`: monotonic seconds."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="joiner-append")
        future = self._threads.submit(flush.append)
        self._under_way[future], self._begun[future] = flush, now

    @property
    def busy(self) -> set[int]:
        """Partitions of flushes that `pop_finished` has not returned yet."""
        return {p for flush in self._under_way.values() for p in flush.partitions}

    def begun_before(self, then: float) -> set[int]:
        """Partitions of flushes that began before an instant of the monotonic clock."""
        return {p for f, flush in self._under_way.items() if self._begun[f] < then for p in flush.partitions}

    def pop_finished(self, waiting_for: Collection[int] = ()) -> list[Flush]:
        """Return finished flushes, each once, after waiting for those of the partitions `waiting_for`."""
        wanted = set(waiting_for)
        wait([future for future, flush in self._under_way.items() if wanted.intersection(flush.partitions)])
        ended = [future for future in self._under_way if future.done()]
        flushes = [self._under_way.pop(future) for future in ended]
        for future in ended:
            del self._begun[future]
            future.result()  # raises any error that `Flush.append` does not store
        return flushes

    def close(self) -> None:
        """Wait for the flushes in progress and discard their results. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._under_way.clear()
        self._begun.clear()
