"""Doing the next step while this one is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

__all__ = ["ahead"]

T = TypeVar("T")
_END: Final = object()


def ahead(steps: Iterable[T]) -> Iterator[T]:
    """The same things in the same order, each made in a thread while the one before is used.

    What making one raises is raised in its place. Closed early, it waits for the one that is being made.
    """
    making = iter(steps)
    with ThreadPoolExecutor(1, "ahead") as thread:
        waiting: Future[T | object] = thread.submit(next, making, _END)
        while (one := waiting.result()) is not _END:
            waiting = thread.submit(next, making, _END)
            yield one  # type: ignore[misc]
