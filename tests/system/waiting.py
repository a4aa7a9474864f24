"""Waiting by conditions with deadlines, never by naps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

LOOK_S = 0.05


def wait_until(what: str, holds: Callable[[], bool], *, within_s: float, look_s: float = LOOK_S) -> float:
    """Wait until something holds, which is looked at every `look_s`; returns how many seconds it took.
    AssertionError names what never did."""
    began = time.monotonic()
    pause = threading.Event()
    while not holds():
        waited = time.monotonic() - began
        assert waited < within_s, f"after {within_s:g} s still not: {what}"
        pause.wait(look_s)
    return time.monotonic() - began


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until a condition holds that needs no name."""
    wait_until("what the test waits for", condition, within_s=seconds)


def wait_until_nothing_differs(differences: Callable[[], Iterable[str]], *, within_s: float) -> None:
    """Wait until a comparison finds no difference; AssertionError shows the last ones."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while found := list(differences()):
        assert time.monotonic() < deadline, "\n".join(found[:20])
        pause.wait(LOOK_S)
