"""Popularity: how often an item's label came true so far, the baseline that a model must beat.

It knows of an item what was known when the item was served, as the model did whose predictions it is
compared with. A sample is trained on later, and by then the table holds events that came after the page: the
clicks of the page's other items and, while `emit = "early"`, positives whose negatives are still to come.

Memory is bounded: items share slots by their key. With as many items as slots, 37 % have a slot of their
own; with an eighth, 88 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.types import F32, F64, I64, U8, U64

__all__ = ["Popularity", "Tally"]

SLOTS = 1 << 16
"""For each label: 1 MiB of sums and at most 6 MiB of snapshots of them (`SNAPSHOTS`)."""

SNAPSHOTS = 12
"""How many former states of the table are at hand: 8 bytes a slot and label each."""

SHORTEST_MS = 1_000
"""Snapshots are at least this far apart: the model that serves is about as old."""

PRIOR = 20.0
"""Samples' weight with which an item is taken to be like the mean of all: at a rate of 5 % an item's own
count outweighs it after one true sample."""

NEVER = -(1 << 62)


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Samples counted apart from a table; N of them have an item, L labels."""

    at: I64  # (N,) slot of each
    sums: F64  # (N, 2) w, w y
    overall: F64  # (L, 2) Σ w, Σ w y of all samples
    clock_ms: int  # the newest moment before which one of them cannot have been known

    @classmethod
    def join(cls, tallies: Sequence[Tally]) -> Tally:
        """All of them as one; there is at least one."""
        at = np.concatenate([tally.at for tally in tallies])
        slots, place = np.unique(at, return_inverse=True)
        sums = np.concatenate([tally.sums for tally in tallies])
        columns = [np.bincount(place, sums[:, i], len(slots)) for i in range(2)]
        overall: F64 = np.sum([tally.overall for tally in tallies], axis=0)
        return cls(slots, np.column_stack(columns), overall, max(tally.clock_ms for tally in tallies))


class Popularity:
    """Past rates of items, smoothed towards the mean of all: (Σ w y + PRIOR mean) / (Σ w + PRIOR).

    Single-threaded. Its clock is event time, told by the samples that are added: the newest moment before
    which one of them cannot have been known. A snapshot is taken when the clock has moved on by
    `interval_ms`; one taken at S answers for what was served at S or later, until the next.
    """

    def __init__(self, labels: int, horizon_ms: int, *, slots: int = SLOTS) -> None:
        """`horizon_ms`: how long after it was served a sample may come and still be answered by what was
        known then. `slots`: a power of two."""
        self._mask = np.uint64(slots - 1)
        self._slots = slots
        self._weight, self._labelled = np.zeros(labels * slots), np.zeros(labels * slots)
        self._overall = np.zeros((labels, 2))  # Σ w, Σ w y
        self.interval_ms = max(SHORTEST_MS, -(-horizon_ms // (SNAPSHOTS - 2)))  # one to spare for disorder
        self._clock_ms = NEVER
        self._taken_ms = np.empty(0, np.int64)  # (S,) when each snapshot was taken, rising
        self._place = np.empty(0, np.int64)  # (S,) where it is, in the arrays below
        self._past = np.zeros((SNAPSHOTS, 2, labels * slots), np.float32)  # Σ w, Σ w y
        self._past_overall = np.zeros((SNAPSHOTS, labels, 2))

    def predict(self, items: U64, label: U8, times_ms: I64) -> F32:
        """(B,) rate of each sample's item (key 0: none known) and label as it was known at the time at which
        the sample was served; 0.5 if nothing was, or is not at hand any more."""
        if not len(self._taken_ms):
            return np.full(len(items), 0.5, np.float32)
        snapshot = np.searchsorted(self._taken_ms, times_ms, side="right") - 1
        known, place = snapshot >= 0, self._place[snapshot]
        weight, labelled = self._past_overall[place, label].T * known
        mean = (labelled + 0.5) / (weight + 1)
        own, at = known & (items != 0), self._at(items, label)
        weight, labelled = self._past[place, 0, at] * own, self._past[place, 1, at] * own
        rate: F32 = ((labelled + PRIOR * mean) / (weight + PRIOR)).astype(np.float32)
        return rate

    def add(self, items: U64, label: U8, value: F32, weight: F32, known_ms: I64) -> None:
        """Count B samples; one whose value or weight is not finite does not count.

        Args:
            items: keys (B,), 0: none. label, value, weight: (B,).
            known_ms: (B,) event times, the earliest at which each sample can have been decided: later than
                it was served.
        """
        if len(items):
            self.take(self.tally(items, label, value, weight, known_ms))

    def tally(self, items: U64, label: U8, value: F32, weight: F32, known_ms: I64) -> Tally:
        """What `add` adds, apart: for who counts for others. Of at least one sample."""
        w, wy = weight.astype(np.float64), weight.astype(np.float64) * value
        good = np.isfinite(wy)
        w, wy = np.where(good, w, 0.0), np.where(good, wy, 0.0)
        labels = len(self._overall)
        own = items != 0
        return Tally(
            self._at(items[own], label[own]),
            np.column_stack([w[own], wy[own]]),
            np.column_stack([np.bincount(label, w, labels), np.bincount(label, wy, labels)]),
            int(known_ms.max()),
        )

    def take(self, tally: Tally) -> None:
        """Add what was counted apart, for as many labels and slots."""
        self._overall += tally.overall
        np.add.at(self._weight, tally.at, tally.sums[:, 0])
        np.add.at(self._labelled, tally.at, tally.sums[:, 1])
        self._clock_ms = max(self._clock_ms, tally.clock_ms)
        if not len(self._taken_ms) or self._clock_ms >= self._taken_ms[-1] + self.interval_ms:
            self._take()

    def state(self) -> dict[str, NDArray[Any]]:
        """Slots that were ever used, as arrays; independent of later changes."""
        used = np.flatnonzero(self._weight)
        sums: F64 = np.column_stack([self._weight[used], self._labelled[used]])
        return {
            "slots": np.array([self._slots]),
            "at": used,
            "sums": sums,
            "overall": self._overall.copy(),
            "clock": np.array([self._clock_ms]),
            "taken": self._taken_ms.copy(),
            "past": self._past[:, :, used][self._place],
            "past_overall": self._past_overall[self._place],
        }

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a saved state; one that was written before there were snapshots has none to begin with.

        Raises ValueError if it is not of as many labels and slots.
        """
        shape = (int(state["slots"][0]), state["overall"].shape)
        if shape != (self._slots, self._overall.shape):
            raise ValueError(
                f"expected popularity of {len(self._overall)} labels in {self._slots} slots, "
                f"found {len(state['overall'])} in {shape[0]}: another spec wrote it"
            )
        at = state["at"]
        self._weight[:], self._labelled[:], self._past[:] = 0.0, 0.0, 0.0
        self._weight[at], self._labelled[at] = np.asarray(state["sums"]).T
        self._overall = np.array(state["overall"])
        self._clock_ms = int(state["clock"][0]) if "clock" in state else NEVER
        self._taken_ms = np.array(state.get("taken", ()), np.int64)[-SNAPSHOTS:]
        self._place = np.arange(len(self._taken_ms))
        for place, back in zip(self._place, range(-len(self._place), 0), strict=True):
            self._past[place][:, at] = state["past"][back]
            self._past_overall[place] = state["past_overall"][back]

    def _take(self) -> None:
        """Keep the table as it is, in the oldest snapshot's place if all are in use."""
        full = len(self._place) == SNAPSHOTS
        place = int(self._place[0]) if full else len(self._place)
        used = np.flatnonzero(self._weight)  # those of the snapshot before are among them
        self._past[place, 0, used], self._past[place, 1, used] = self._weight[used], self._labelled[used]
        self._past_overall[place] = self._overall
        self._taken_ms = np.append(self._taken_ms[int(full) :], self._clock_ms)
        self._place = np.append(self._place[int(full) :], place)

    def _at(self, items: U64, label: U8) -> I64:
        at: I64 = label.astype(np.int64) * self._slots + (items & self._mask).astype(np.int64)
        return at
