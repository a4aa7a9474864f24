"""Popularity: the past rate of an item's label, the baseline that a model must beat.

A prediction uses only samples known when the item was served, as the model's did. The current table would be
unfair: by the time a sample is trained on, it holds later events, such as clicks on other items of the same
page and, with `emit = "early"`, positives before their negatives.

Memory is bounded, as items share slots by key. With as many items as slots, 37 % have a slot of their own;
with an eighth as many, 88 %. Shape letters: B samples, L labels, N samples with an item, P snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.types import F32, F64, I64, U8, U64

SLOTS = 1 << 16
"""Slots of each label: 1 MiB of sums, and at most 6 MiB of snapshots (`SNAPSHOTS`)."""

SNAPSHOTS = 12
"""Snapshots kept; each takes 8 bytes for each slot and label."""

SHORTEST_MS = 1_000
"""Shortest time between snapshots; the model that serves is about as old."""

PRIOR = 20.0
"""Weight, in samples, of the mean rate in an item's rate: 20 samples at a rate of 5 % hold one true
sample."""

NEVER, NEVER_AHEAD = -(1 << 62), 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Sums of samples that are not in a table yet."""

    at: I64  # (N,) slots
    sums: F64  # (N, 2) w, w y
    overall: F64  # (L, 2) Σ w, Σ w y of all samples
    clock_ms: int  # newest `known_ms` of a sample

    @classmethod
    def join(cls, tallies: Sequence[Tally]) -> Tally:
        """Merge one or more tallies."""
        at = np.concatenate([tally.at for tally in tallies])
        slots, place = np.unique(at, return_inverse=True)
        sums = np.concatenate([tally.sums for tally in tallies])
        columns = [np.bincount(place, sums[:, i], len(slots)) for i in range(2)]
        overall: F64 = np.sum([tally.overall for tally in tallies], axis=0)
        return cls(slots, np.column_stack(columns), overall, max(tally.clock_ms for tally in tallies))


class Popularity:
    """Past rates of items, smoothed towards the mean of all: (Σ w y + PRIOR mean) / (Σ w + PRIOR).

    Not thread-safe. Its clock is event time: the newest `known_ms` of the added samples. It takes a snapshot
    each time the clock has advanced by `interval_ms`. A snapshot serves the predictions for samples served at
    its time or later, up to the time of the next snapshot.
    """

    def __init__(self, labels: int, horizon_ms: int, *, slots: int = SLOTS) -> None:
        """Create an empty table.

        Args:
            labels: number of labels.
            horizon_ms: snapshots cover samples that are at most this old when they are learned.
            slots: slots of each label, a power of two.
        """
        self._mask = np.uint64(slots - 1)
        self._slots = slots
        self._weight, self._labelled = np.zeros(labels * slots), np.zeros(labels * slots)
        self._overall = np.zeros((labels, 2))  # Σ w, Σ w y
        # Two snapshots to spare: one for the current interval, one for samples out of order.
        self.interval_ms = max(SHORTEST_MS, -(-horizon_ms // (SNAPSHOTS - 2)))
        self._clock_ms = NEVER
        self._taken_ms = np.empty(0, np.int64)  # (P,) times of the snapshots, rising
        self._place = np.empty(0, np.int64)  # (P,) their indexes in the arrays below
        self._past = np.zeros((SNAPSHOTS, 2, labels * slots), np.float32)  # Σ w, Σ w y
        self._past_overall = np.zeros((SNAPSHOTS, labels, 2))

    def predict(self, items: U64, label: U8, times_ms: I64) -> F32:
        """Return the rates (B,) of items (B,) and labels (B,) as known when served, at `times_ms` (B,).

        An item of key 0 is unknown and gets the mean of its label. The rate is 0.5 where no snapshot is old
        enough.
        """
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
        """Count B samples, without those that have a value or weight that is not finite.

        Args:
            items: (B,) keys; 0: none.
            label: (B,) indexes of the labels.
            value, weight: (B,).
            known_ms: (B,) event times at which each sample's label can have been decided at the earliest,
                after the sample was served.
        """
        if len(items):
            self.take(self.tally(items, label, value, weight, known_ms))

    def tally(self, items: U64, label: U8, value: F32, weight: F32, known_ms: I64) -> Tally:
        """Return the sums that `add` would add, for one or more samples; arguments (B,) as for `add`.

        Another process, or another thread, adds them with `take`.
        """
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

    def take(self, tally: Tally, latest_ms: int = NEVER_AHEAD) -> None:
        """Add a tally made with the same labels and slots; one older by more than the horizon sets a clock
        after `latest_ms`, the latest possible time, back, and dates later snapshots before the horizon."""
        self._overall += tally.overall
        np.add.at(self._weight, tally.at, tally.sums[:, 0])
        np.add.at(self._labelled, tally.at, tally.sums[:, 1])
        span_ms = (SNAPSHOTS - 2) * self.interval_ms
        if self._clock_ms > max(latest_ms, tally.clock_ms + span_ms):
            ahead, self._clock_ms = self._taken_ms > tally.clock_ms, tally.clock_ms
            self._taken_ms[ahead] = max([tally.clock_ms - span_ms, *self._taken_ms[~ahead]])
        self._clock_ms = max(self._clock_ms, tally.clock_ms)
        if not len(self._taken_ms) or self._clock_ms >= self._taken_ms[-1] + self.interval_ms:
            self._take_snapshot()

    def state(self) -> dict[str, NDArray[Any]]:
        """Return copies of the used slots and the snapshots, as arrays."""
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
        """Restore the arrays of `state`, of the shapes it returns.

        Raises ValueError if the number of labels or slots differs.
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
        self._clock_ms = int(state["clock"][0])
        self._taken_ms = np.array(state["taken"])[-SNAPSHOTS:]
        self._place = np.arange(len(self._taken_ms))
        for place, back in zip(self._place, range(-len(self._place), 0), strict=True):
            self._past[place][:, at] = state["past"][back]
            self._past_overall[place] = state["past_overall"][back]

    def _take_snapshot(self) -> None:
        """Copy the table; it replaces the oldest snapshot if there are SNAPSHOTS."""
        full = len(self._place) == SNAPSHOTS
        place = int(self._place[0]) if full else len(self._place)
        used = np.flatnonzero(self._weight)  # includes all slots of the replaced snapshot
        self._past[place, 0, used], self._past[place, 1, used] = self._weight[used], self._labelled[used]
        self._past_overall[place] = self._overall
        self._taken_ms = np.append(self._taken_ms[int(full) :], self._clock_ms)
        self._place = np.append(self._place[int(full) :], place)

    def _at(self, items: U64, label: U8) -> I64:
        at: I64 = label.astype(np.int64) * self._slots + (items & self._mask).astype(np.int64)
        return at
