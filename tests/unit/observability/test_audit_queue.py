"""Refusals on their way to the disk: none is lost, no caller waits, and lines are few."""

from __future__ import annotations

import threading

from freshet.observability.audit import LONGEST_PAUSES, MOST_KINDS, Refusals
from freshet.testing.clock import SettableClock
from freshet.testing.conditions import wait_until


class Disk:
    """Takes lines when it is let; `full` times it fails."""

    def __init__(self, *, full: int = 0) -> None:
        self.lines: list[tuple[str, int]] = []
        self.tried, self.free = threading.Semaphore(0), threading.Event()
        self._full = full
        self.free.set()

    def write(self, refusal: str, more: int) -> bool:
        self.tried.release()
        assert self.free.wait(60)
        if self._full:
            self._full -= 1
            return False
        self.lines.append((refusal, more))
        return True


def test_a_disk_that_hangs_delays_no_caller() -> None:
    disk = Disk()
    disk.free.clear()
    refusals = Refusals(disk.write, pause_s=0.0)
    refusals.add("first")
    assert disk.tried.acquire(timeout=60)

    for i in range(1000):
        refusals.add(f"{i}")
    assert disk.lines == []
    disk.free.set()
    refusals.close()

    assert disk.lines == [("first", 0), ("999", 999)]


def test_refusals_of_a_pause_are_written_after_it() -> None:
    disk = Disk()
    disk.free.clear()
    refusals = Refusals(disk.write, pause_s=0.01)
    refusals.add("first")
    assert disk.tried.acquire(timeout=60)
    refusals.add("second")
    disk.free.set()

    assert disk.tried.acquire(timeout=60)
    refusals.close()
    assert disk.lines == [("first", 0), ("second", 0)]


def test_a_pause_between_lines_ends_at_the_close() -> None:
    disk = Disk()
    refusals = Refusals(disk.write, pause_s=3600.0)
    refusals.add("first")
    assert disk.tried.acquire(timeout=60)
    for i in range(10):
        refusals.add(f"{i}")
    assert not disk.tried.acquire(timeout=0.05)
    refusals.close()

    assert disk.lines == [("first", 0), ("9", 9)]


def test_unwritten_refusals_count_into_the_next_line() -> None:
    disk = Disk(full=1)
    refusals = Refusals(disk.write, pause_s=0.0)
    refusals.add("first")
    assert disk.tried.acquire(timeout=60)
    refusals.add("second")
    assert disk.tried.acquire(timeout=60)
    refusals.close()

    assert disk.lines == [("second", 1)]


def test_unwritten_refusals_are_retried_at_the_close() -> None:
    disk = Disk(full=1)
    refusals = Refusals(disk.write, pause_s=0.0)
    refusals.add("only")
    assert disk.tried.acquire(timeout=60)
    refusals.close()

    assert disk.lines == [("only", 0)]


def test_without_a_refusal_there_is_no_thread() -> None:
    before = threading.active_count()
    refusals = Refusals(Disk().write)

    assert threading.active_count() == before
    refusals.close()
    refusals.close()


def test_the_longer_refusals_go_on_the_fewer_lines_they_are() -> None:
    disk, clock = Disk(), SettableClock()
    refusals = Refusals(disk.write, pause_s=1.0, clock=clock.monotonic)

    def later(seconds: float) -> None:
        with refusals.changed:  # the thread must not wake between the two
            clock.advance(seconds)
            refusals.add("flood", "token_unknown")
        assert disk.tried.acquire(timeout=60), seconds

    later(0.0)
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        clock.advance(pause - 0.5)
        refusals.add("flood", "token_unknown")
        assert not disk.tried.acquire(timeout=0.02), "before the pause is over"
        later(0.5)
    wait_until("the line is written", lambda: len(disk.lines) == 9, within_s=60)
    assert disk.lines == [("flood", 0), *[("flood", 1)] * 8]

    refusals.add("insider", "token_scope")  # another kind is written at once
    assert disk.tried.acquire(timeout=60)
    clock.advance(2 * LONGEST_PAUSES)  # and a flood that was over begins anew
    for pause in (0, 1, 2):
        later(pause)
    refusals.close()

    assert disk.lines[9:] == [("insider", 0), *[("flood", 0)] * 3]


def test_a_full_disk_bounds_kinds_and_counts_all_refusals() -> None:
    disk = Disk(full=1)
    disk.free.clear()
    refusals = Refusals(disk.write, pause_s=3600.0)
    refusals.add("first", "first")
    assert disk.tried.acquire(timeout=60)

    for i in range(3 * MOST_KINDS):
        refusals.add(f"{i}", i)
    disk.free.set()
    refusals.close()

    assert len(disk.lines) <= MOST_KINDS + 2
    assert sum(1 + more for _, more in disk.lines) == 3 * MOST_KINDS + 1
    assert disk.lines[-1][1] >= 2 * MOST_KINDS - 2  # the others


def test_written_kinds_are_replaced_by_others() -> None:
    disk = Disk()
    refusals = Refusals(disk.write, pause_s=3600.0)
    for i in range(2 * MOST_KINDS):
        refusals.add(f"{i}", i)
        assert disk.tried.acquire(timeout=60)
    refusals.close()

    assert disk.lines == [(f"{i}", 0) for i in range(2 * MOST_KINDS)]
