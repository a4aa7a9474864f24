"""Samples and blocks that cannot be decoded: written to `<model>.refused`, counted by reason (PROTOCOL 3)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from freshet.observability.metrics import Metric, Reading

__all__ = ["BAD_IN_A_ROW", "REFUSALS", "RefusedSamples", "refused_metrics", "refused_readings"]

log = structlog.get_logger("freshet.embedder")

REFUSALS = ("unreadable", "no_schema", "damaged", "label", "label_value", "transform")
"""Why samples are refused, in a word: their bytes are not what their schema says; their block's schema is not
known, or lacks what the spec names; their block fails its own checks; their label is none of the spec's; the
value of their label lies outside of the label's bounds, or is no finite number; a transform of the spec
raises an error for them."""

BAD_IN_A_ROW = 100
"""Refused samples without a good one in between, from which on the process says that it is not ready."""

LOG_AGAIN_S = 60.0
"""Between two log lines of one reason."""


@dataclass(slots=True)
class RefusedSamples:
    """Writes refused samples to the log and counts them. Thread-safe: the lanes of a process share one."""

    write: Callable[[list[bytes]], None]  # JSON records for `<model>.refused`; durable when it returns
    monotonic: Callable[[], float]  # seconds
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _counts: Counter[str] = field(default_factory=Counter)
    _in_a_row: int = 0
    _last: str = ""
    _logged_s: dict[str, float] = field(default_factory=dict)  # reason -> when it was logged

    def refuse(self, letters: list[bytes], by_reason: Mapping[str, int], example: str) -> None:
        """Write letters, then count the samples that they stand for.

        Args:
            letters: JSON records, one for each sample or block.
            by_reason: word of REFUSALS -> samples; a damaged block counts as one.
            example: one of the reasons in full.

        Raises:
            Unavailable: the log cannot be written; nothing is counted.
        """
        self.write(letters)
        now, loud = self.monotonic(), []
        with self._lock:
            self._counts.update(by_reason)
            self._in_a_row += sum(by_reason.values())
            self._last = example
            for reason in by_reason:
                if now - self._logged_s.get(reason, float("-inf")) >= LOG_AGAIN_S:
                    self._logged_s[reason] = now
                    loud.append(reason)
        for reason in loud:
            log.warning("samples were refused", why=reason, records=by_reason[reason], reason=example)

    def accept(self) -> None:
        """Note that good samples were decoded."""
        if self._in_a_row:
            with self._lock:
                self._in_a_row = 0

    def counts(self) -> dict[str, int]:
        """{word of REFUSALS: samples}, all words."""
        with self._lock:
            return {reason: self._counts[reason] for reason in REFUSALS}

    def trouble(self) -> str | None:
        """None, or why hardly anything can be learned: the last samples were all refused."""
        with self._lock:
            if self._in_a_row < BAD_IN_A_ROW:
                return None
            return f"the last {self._in_a_row} samples were all refused: {self._last}"


def refused_metrics(role: str) -> tuple[Metric, ...]:
    """What a process of this role tells of samples that it refused."""
    return (
        Metric(
            f"freshet_{role}_refused",
            "counter",
            "samples",
            "Samples that could not be decoded and went to the topic of refused events, by this process; "
            "after a restart some count again. Reasons: unreadable (not what their schema says); no_schema "
            "(of their block: not known, or lacking what the spec names); damaged (a block that fails its "
            "own checks, counted as one); label (none of the spec's); label_value (not finite, or outside "
            "of the label's bounds); transform (one of the spec raises an error).",
            ("reason",),
        ),
    )


def refused_readings(role: str, status: Mapping[str, Any]) -> dict[str, Reading]:
    """Readings of `refused_metrics`, of a status with `refused`."""
    return {
        f"freshet_{role}_refused": {(reason,): float(n) for reason, n in status["refused"].items()},
    }
