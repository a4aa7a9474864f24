"""Appends in progress beside the loop: their partitions, start times and results."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from freshet.errors import Unavailable
from freshet.joiner.appends import Flush, PendingFlushes
from freshet.types import Append


class Slow:
    """A writer that returns, or raises `error`, when the test permits it."""

    def __init__(self, error: Unavailable | None = None) -> None:
        self.go, self._error = threading.Event(), error

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        assert self.go.wait(20)
        if self._error is not None:
            raise self._error
        return [0] * len(appends)

    def close(self) -> None:
        """Do nothing."""


class Nothing(Flush):
    """A flush of one partition without tasks."""

    def __init__(self, writer: Slow, partition: int) -> None:
        super().__init__(writer, [], "dead-letters", 0)
        self._partition = partition

    @property
    def partitions(self) -> list[int]:
        return [self._partition]


def test_an_append_that_takes_long_is_found_by_when_it_began() -> None:
    flushes, slow, slower = PendingFlushes(), Slow(), Slow(Unavailable("away"))
    flushes.begin(Nothing(slower, 3), 10.0)
    flushes.begin(Nothing(slow, 5), 11.0)
    assert flushes.busy == {3, 5}
    assert flushes.begun_before(10.0) == set()
    assert flushes.begun_before(10.5) == {3}
    assert flushes.begun_before(12.0) == {3, 5}
    assert flushes.pop_finished() == []

    slower.go.set()
    [failed] = flushes.pop_finished(flushes.begun_before(10.5))
    assert failed.partitions == [3]
    assert isinstance(failed.error, Unavailable)
    assert flushes.begun_before(12.0) == flushes.busy == {5}
    slow.go.set()
    [done] = flushes.pop_finished([5])
    assert done.error is None
    assert flushes.busy == set()
    flushes.close()
