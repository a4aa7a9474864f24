"""Conditions that a test waits for, each with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

POLL_S = 0.05


def wait_until(name: str, holds: Callable[[], bool], *, within_s: float, poll_s: float = POLL_S) -> float:
    """Wait until a condition holds; returns how many seconds that took.

    Args:
        name: the condition in words, for the error.
        holds: is called every `poll_s`.

    Raises:
        AssertionError: the condition did not hold within `within_s`.
    """
    began = time.monotonic()
    pause = threading.Event()
    while not holds():
        waited = time.monotonic() - began
        assert waited < within_s, f"after {within_s:g} s still not: {name}"
        pause.wait(poll_s)
    return time.monotonic() - began


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until a condition holds that the line of the failed test explains. Raises AssertionError."""
    wait_until("the condition of this line", condition, within_s=seconds)


def wait_until_nothing_differs(differences: Callable[[], Iterable[str]], *, within_s: float) -> None:
    """Wait until a comparison finds no difference. Raises AssertionError with the first 20."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while found := list(differences()):
        assert time.monotonic() < deadline, "\n".join(found[:20])
        pause.wait(POLL_S)
