"""Scripted faults: calls of an adapter that fail, are slow, or fail after they were done (a lost answer).

log = Faulty(log)
log.script("reader", nth=2, error=Unavailable("the network is away"))
writer = Faulty(log.writer())
writer.script("append", nth=1, error=Unavailable("time-out"), after=True)   # written, but not acknowledged
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Faulty"]


@dataclass(frozen=True, slots=True)
class _Fault:
    first: int
    last: int
    error: BaseException | None
    before: Callable[[], object] | None
    after: bool


class Faulty:
    """Passes calls to `inner`, except for scripted ones. Thread-safe."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._faults: dict[str, list[_Fault]] = {}
        self._calls: dict[str, int] = {}

    def script(
        self,
        method: str,
        *,
        nth: int,
        times: int = 1,
        error: BaseException | None = None,
        before: Callable[[], object] | None = None,
        after: bool = False,
    ) -> None:
        """Script the `nth` call from now (1 is the next), and `times` calls in all.

        Args:
            error:  raised instead of the call, or after it if `after` is set.
            before: called before the call, on its thread, to delay it (`event.wait`), move a clock or kill a
                process.

        Raises ValueError if `method` is no method.
        """
        if not callable(getattr(self._inner, method, None)):
            raise ValueError(f"{method} is not a method")
        with self._lock:
            first = self._calls.get(method, 0) + nth
            fault = _Fault(first, first + times - 1, error, before, after)
            self._faults.setdefault(method, []).append(fault)

    def calls(self, method: str) -> int:
        """Return the number of calls so far."""
        with self._lock:
            return self._calls.get(method, 0)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            fault = self._next(name)
            if fault is not None and fault.before is not None:
                fault.before()
            if fault is not None and fault.error is not None and not fault.after:
                raise fault.error
            result = found(*arguments, **named)
            if fault is not None and fault.error is not None:
                raise fault.error
            return result

        return call

    def _next(self, method: str) -> _Fault | None:
        with self._lock:
            number = self._calls.get(method, 0) + 1
            self._calls[method] = number
            faults = self._faults.get(method, ())
            return next((f for f in faults if f.first <= number <= f.last), None)
