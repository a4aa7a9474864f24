"""An event loop with virtual time: a sleep ends at once and advances the time by its length."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Skipping(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now

    def spend(self, seconds: float) -> None:
        """Advance the time within a step of the loop, as a long computation would."""
        self._skipping.now += seconds

    @property
    def _clock_resolution(self) -> float:
        return 1e-9

    @_clock_resolution.setter
    def _clock_resolution(self, _: Any) -> None:
        """Ignore the resolution of the system clock, which asyncio sets."""
