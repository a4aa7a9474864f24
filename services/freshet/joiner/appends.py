"""Atomic appends of what partitions have decided: one by one, or many at once where each has a writer of its
own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from freshet.errors import FreshetError
from freshet.joiner.partition import Outputs, Task
from freshet.log import Writer
from freshet.observability.spans import record_joined_samples
from freshet.types import Append, BytesColumn

__all__ = ["Flush", "Flushes"]

_AT_ONCE = 16


class Flush:
    """The output and the commits of the tasks of one writer, in one atomic append."""

    def __init__(self, writer: Writer, tasks: Sequence[Task], dead_letters: str, now_ms: int) -> None:
        """Let the tasks decide. Unless `append` succeeds after it they are void."""
        self._writer, self._appends = writer, list[Append]()
        self.done: list[tuple[Task, Outputs]] = []
        self._commits: list[int] = []  # where among the appends
        self._offsets: Sequence[int] = ()
        self.error: FreshetError | None = None  # why it is not known to be written
        letters: list[bytes] = []
        for task in tasks:
            output = task.flush(now_ms)
            self._appends += output.appends
            letters += output.dead_letters
            self.done.append((task, output))
            self._commits.append(len(self._appends) - 1)
        if letters:
            self._appends.append(Append(dead_letters, 0, BytesColumn.of(letters)))

    @property
    def partitions(self) -> list[int]:
        """Of its tasks."""
        return [task.partition for task, _ in self.done]

    def append(self) -> None:
        """Append, on any thread; `error` says if it failed, as `Writer.append` does."""
        try:
            self._offsets = self._writer.append(self._appends)
        except FreshetError as error:
            self.error = error

    def settle(self) -> None:
        """Tell the tasks, on their thread, that it is written."""
        for (task, output), at in zip(self.done, self._commits, strict=True):
            task.appended(output, int(self._offsets[at]))
            if output.joined:
                samples = at - len(output.appends) + 1  # its first append, if it has samples on time
                topic, where = task.topics.samples, task.topics.samples_partition(task.partition)
                record_joined_samples(output.joined, topic, where, int(self._offsets[samples]))


class Flushes:
    """Flushes under way, each appended by a thread: a transaction is mostly waiting for brokers, while its
    tasks can join on. Used by one thread."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: dict[Future[None], Flush] = {}
        self._begun: dict[Future[None], float] = {}

    def begin(self, flush: Flush, now: float) -> None:
        """Append it in the background; none of its partitions may be `busy`. `now`: monotonic, in seconds."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="joiner-append")
        future = self._threads.submit(flush.append)
        self._under_way[future], self._begun[future] = flush, now

    @property
    def busy(self) -> set[int]:
        """Partitions whose flush has begun and was not taken yet."""
        return {p for flush in self._under_way.values() for p in flush.partitions}

    def begun_before(self, then: float) -> set[int]:
        """Partitions whose flush is under way since before that instant."""
        return {p for f, flush in self._under_way.items() if self._begun[f] < then for p in flush.partitions}

    def take(self, waiting_for: Collection[int] = ()) -> list[Flush]:
        """Those that came to an end, each once; those of the partitions `waiting_for` are waited for."""
        wanted = set(waiting_for)
        wait([future for future, flush in self._under_way.items() if wanted.intersection(flush.partitions)])
        ended = [future for future in self._under_way if future.done()]
        flushes = [self._under_way.pop(future) for future in ended]
        for future in ended:
            del self._begun[future]
            future.result()  # what is no error of ours is raised here
        return flushes

    def close(self) -> None:
        """Wait for what is under way, without a look at what became of it. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._under_way.clear()
        self._begun.clear()
