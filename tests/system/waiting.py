"""Waiting by conditions with deadlines, never by naps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOK_S = 0.05


def wait_until(what: str, holds: Callable[[], bool], *, within_s: float) -> float:
    """Wait until something holds; returns how many seconds it took. AssertionError names what never did."""
    began = time.monotonic()
    pause = threading.Event()
    while not holds():
        waited = time.monotonic() - began
        assert waited < within_s, f"after {within_s:g} s still not: {what}"
        pause.wait(LOOK_S)
    return time.monotonic() - began
