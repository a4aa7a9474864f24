"""Atomic appends of what partitions have decided: one by one, or many at once where each has a writer of its
own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from freshet.errors import FreshetError
from freshet.joiner.task import Outputs, Task
from freshet.seams.eventlog import Writer
from freshet.types import Append, BytesColumn

__all__ = ["Flush", "FlushThreads"]

_AT_ONCE = 16


class Flush:
    """The output and the commits of the tasks of one writer, in one atomic append."""

    def __init__(self, writer: Writer, tasks: Sequence[Task], dead_letters: str, now_ms: int) -> None:
        """Let the tasks decide. Unless `append` succeeds after it they are void."""
        self._writer, self._appends = writer, list[Append]()
        self.done: list[tuple[Task, Outputs]] = []
        self._commits: list[int] = []  # where among the appends
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
        """Append; `error` says if it failed, as `Writer.append` does."""
        try:
            offsets = self._writer.append(self._appends)
        except FreshetError as error:
            self.error = error
            return
        for (task, output), at in zip(self.done, self._commits, strict=True):
            task.appended(output, int(offsets[at]))


class FlushThreads:
    """Appends several flushes at once: a transaction is mostly waiting for brokers."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def append(self, flushes: Sequence[Flush]) -> None:
        """Append all of them, and wait."""
        if len(flushes) == 1:
            flushes[0].append()
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="joiner-append")
        list(self._threads.map(Flush.append, flushes))

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
