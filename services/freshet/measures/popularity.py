"""Popularity: how often an item's label came true so far, the baseline that a model must beat.

Memory is bounded: items share slots by their key. With as many items as slots, 37 % have a slot of their
own; with an eighth, 88 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.types import F32, F64, I64, U8, U64

__all__ = ["Popularity"]

SLOTS = 1 << 16
"""For each label: 1 MB of sums."""

PRIOR = 20.0
"""Samples' weight with which an item is taken to be like the mean of all: at a rate of 5 % an item's own
count outweighs it after one true sample."""


class Popularity:
    """Past rates of items, smoothed towards the mean of all: (Σ w y + PRIOR mean) / (Σ w + PRIOR).

    Progressive: predict a batch, then `add` it. Single-threaded.
    """

    def __init__(self, labels: int, *, slots: int = SLOTS) -> None:
        """`slots`: a power of two."""
        self._mask = np.uint64(slots - 1)
        self._slots = slots
        self._weight, self._labelled = np.zeros(labels * slots), np.zeros(labels * slots)
        self._overall = np.zeros((labels, 2))  # Σ w, Σ w y

    def predict(self, items: U64, label: U8) -> F32:
        """(B,) rate of each sample's item (key 0: none known) and label; 0.5 before the first sample."""
        at = self._at(items, label)
        mean = ((self._overall[:, 1] + 0.5) / (self._overall[:, 0] + 1))[label]
        own = items != 0
        weight, labelled = self._weight[at] * own, self._labelled[at] * own
        rate: F32 = ((labelled + PRIOR * mean) / (weight + PRIOR)).astype(np.float32)
        return rate

    def add(self, items: U64, label: U8, value: F32, weight: F32) -> None:
        """Count B samples; one whose value or weight is not finite does not count."""
        w, wy = weight.astype(np.float64), weight.astype(np.float64) * value
        good = np.isfinite(wy)
        w, wy = np.where(good, w, 0.0), np.where(good, wy, 0.0)
        labels = len(self._overall)
        self._overall += np.column_stack([np.bincount(label, w, labels), np.bincount(label, wy, labels)])
        own = items != 0
        at = self._at(items[own], label[own])
        np.add.at(self._weight, at, w[own])
        np.add.at(self._labelled, at, wy[own])

    def state(self) -> dict[str, NDArray[Any]]:
        """Slots that were ever used, as arrays; independent of later changes."""
        used = np.flatnonzero(self._weight)
        sums: F64 = np.column_stack([self._weight[used], self._labelled[used]])
        return {"slots": np.array([self._slots]), "at": used, "sums": sums, "overall": self._overall.copy()}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a saved state. Raises ValueError if it is not of as many labels and slots."""
        shape = (int(state["slots"][0]), state["overall"].shape)
        if shape != (self._slots, self._overall.shape):
            raise ValueError(
                f"expected popularity of {len(self._overall)} labels in {self._slots} slots, "
                f"found {len(state['overall'])} in {shape[0]}: another spec wrote it"
            )
        self._weight[:], self._labelled[:] = 0.0, 0.0
        self._weight[state["at"]], self._labelled[state["at"]] = np.asarray(state["sums"]).T
        self._overall = np.array(state["overall"])

    def _at(self, items: U64, label: U8) -> I64:
        at: I64 = label.astype(np.int64) * self._slots + (items & self._mask).astype(np.int64)
        return at
