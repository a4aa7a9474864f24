"""Records without a value (Kafka's tombstones): readers pass them over; this process counts them by topic."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

__all__ = ["count_tombstones", "tombstones"]

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def count_tombstones(topic: str, records: int) -> None:
    """Count records that a reader of this process passed over. Thread-safe."""
    with _lock:
        _counts[topic] += records


def tombstones() -> Mapping[str, int]:
    """{topic: records without a value that were passed over}, since the process began."""
    with _lock:
        return dict(_counts)
