"""Ledger of the joiner: exact counts of the outcomes of all impressions, labels, actions and shown events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from freshet import _native
from freshet.types import I64

__all__ = ["EVENT_COUNTERS", "LABEL_COUNTERS", "Ledger"]

_names: tuple[list[str], list[str]] = _native.join_counters()
LABEL_COUNTERS: tuple[str, ...] = tuple(_names[0])
"""Final outcomes of (impression, label): trained_positive, trained_negative, not_shown, given_false,
sampled_out, no_value, late.
"""

EVENT_COUNTERS: tuple[str, ...] = tuple(_names[1])
"""Outcomes of events: impressions*, actions_*, shown_*."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts since the model began. Each impression is, for each label, in exactly one of the label's counts.

    `no_value` counts numeric labels without a number (the maximum of no actions), or with one out of the
    label's bounds. Actions are counted as matched (they changed a label), again (the label was true already),
    late, outside (of all windows), repeated, orphan (no impression within the grace) or no_label; those that
    still wait for their impression are in `waiting`.
    """

    labels: Mapping[str, Mapping[str, int]]  # label -> LABEL_COUNTERS and "pending"
    events: Mapping[str, int]  # EVENT_COUNTERS
    waiting: (
        int  # actions and shown events without an impression yet; orphans stay until the grace has passed
    )
    refused: int  # events that became dead letters

    def unexplained(self) -> Mapping[str, int]:
        """Return, for each label, the impressions that its counts do not explain: always 0."""
        seen = self.events["impressions"] + self.events["impressions_late"]
        return {label: seen - sum(counts.values()) for label, counts in self.labels.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the object of commits and of `freshet status --json`."""
        return {
            "labels": {label: dict(counts) for label, counts in self.labels.items()},
            "events": dict(self.events),
            "waiting": self.waiting,
            "refused": self.refused,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Ledger:
        """Read the object of `to_json`. Raises KeyError or TypeError if it is something else."""
        labels = {
            str(label): {name: int(counts.get(name, 0)) for name in (*LABEL_COUNTERS, "pending")}
            for label, counts in record["labels"].items()
        }
        events = {name: int(record["events"].get(name, 0)) for name in EVENT_COUNTERS}
        return cls(labels, events, int(record["waiting"]), int(record["refused"]))

    @classmethod
    def of(cls, names: Sequence[str], counters: I64, pending: I64, waiting: int, refused: int) -> Ledger:
        """Make a ledger from the native core's counters.

        Args:
            names: of the L labels.
            counters: (L * label counters + event counters,) int64.
            pending: (L,) int64 undecided impressions.
            waiting: events without an impression yet.
            refused: events that became dead letters.
        """
        width = len(LABEL_COUNTERS)
        labels = {}
        for i, name in enumerate(names):
            counts = counters[i * width : (i + 1) * width].tolist()
            labels[name] = {**dict(zip(LABEL_COUNTERS, counts, strict=True)), "pending": int(pending[i])}
        events = dict(zip(EVENT_COUNTERS, counters[len(names) * width :].tolist(), strict=True))
        return cls(labels, events, waiting, refused)

    def counters(self) -> I64:
        """Return the counters as `of` takes them: (L * label counters + event counters,) int64."""
        flat = [counts[name] for counts in self.labels.values() for name in LABEL_COUNTERS]
        return np.array(flat + [self.events[name] for name in EVENT_COUNTERS], np.int64)

    def __add__(self, other: Ledger) -> Ledger:
        """Add the counts of other partitions, of the same labels."""
        return Ledger(
            {label: _sum(counts, other.labels[label]) for label, counts in self.labels.items()},
            _sum(self.events, other.events),
            self.waiting + other.waiting,
            self.refused + other.refused,
        )

    @classmethod
    def empty(cls, names: Sequence[str]) -> Ledger:
        """Make a ledger of zeros for labels of these names."""
        width = len(names) * len(LABEL_COUNTERS) + len(EVENT_COUNTERS)
        return cls.of(names, np.zeros(width, np.int64), np.zeros(len(names), np.int64), 0, 0)

    @staticmethod
    def total(ledgers: Sequence[Ledger]) -> Ledger:
        """Return the sum of ledgers; at least one."""
        return reduce(lambda a, b: a + b, ledgers)


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
