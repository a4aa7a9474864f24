"""Changes of each segment's normalised entropy within the last hour, with confidence intervals. Pure.

Windows add up to spans of half a minute or more; the hour's newer half is compared with its older half. The
interval is by linearisation of the ratio over the spans as units (Cochran 1977, §6.3; here the ratio is
logloss by entropy of the mean label), so that drift within a half widens it, as it should.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from freshet.config.spec.model import Feature
from freshet.console.instances import number
from freshet.features import key_of
from freshet.types import F64

# --- Texts of segment values that follow from the spec: parts of the time, ranges of numbers. Pure.


WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def fixed_texts(feature: Feature) -> Mapping[int, str]:
    """Return {key: text} of a feature's values, if they follow from the spec."""
    if feature.kind == "time":
        return texts_of_times(feature.time or "")
    return texts_of_buckets(feature.buckets) if feature.kind == "bucket" else {}


def texts_of_times(part: str) -> dict[int, str]:
    """Return {key: text} of all values of a part of the time (UTC; weeks begin on Monday)."""
    hours = {key_of(h, 0): f"{h:02d}:00" for h in range(24)}
    if part == "hour":
        return hours
    if part == "weekday":
        return {key_of(d, 0): day for d, day in enumerate(WEEKDAYS)}
    return {
        key_of(24 * d + h, 0): f"{day[:3]} {h:02d}:00" for d, day in enumerate(WEEKDAYS) for h in range(24)
    }


def texts_of_buckets(edges: Sequence[float]) -> dict[int, str]:
    """Return {key: text} of the ranges between edges."""
    texts = [f"below {edges[0]:g}"] if edges else []
    texts += [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    texts += [f"{edges[-1]:g} and more"] if edges else []
    return {key_of(i, 0): text for i, text in enumerate(texts)}


HOUR_MS = 3_600_000
MOST_AHEAD_MS = HOUR_MS
"""What is dated further ahead of now than this comes from a clock that ran ahead."""
SPAN_MS = 30_000
SPANS = HOUR_MS // SPAN_MS
LEAST_SAMPLES = 500
"""Samples of each half, below which the interval is meaningless."""
LEAST_SPANS = 3
MOST_KEYS = 4_000
"""Segments × values × labels × kinds of prediction that are kept; each costs about 4 KB."""

Key = tuple[str, str, str, int]  # of, label, segment, value
Sums = tuple[float, float, float]  # samples, Σ logloss, Σ label


@dataclass(frozen=True, slots=True)
class Change:
    """NE of the newer half minus NE of the older one; low and high bound it with 95 % confidence."""

    n: int  # samples in both halves
    ne: float  # of the newer half
    change: float
    low: float
    high: float


class Segments:
    """Sums of the newest hour's windows by segment."""

    def __init__(self) -> None:
        self._cells: dict[Key, _Ring] = {}
        self._newest = -1
        self._changes: list[dict[str, Any]] | None = []  # None: to be computed anew

    def add(self, record: Mapping[str, Any], now_ms: int) -> None:
        """Add a record of kind window with a segment; other records are ignored."""
        key = (record.get("of"), record.get("label"), record.get("segment"), record.get("value"))
        measures, start_ms = record.get("measures"), record.get("start_ms")
        if not all(isinstance(k, str) for k in key[:3]) or not isinstance(measures, Mapping):
            return
        if type(key[3]) is not int or type(start_ms) is not int or not 0 <= start_ms < 1 << 53:
            return
        n, loss, rate = (number(measures.get(m)) for m in ("n", "logloss", "mean_label"))
        if not n or n < 0 or loss is None or rate is None:
            return
        if key not in self._cells and len(self._cells) >= MOST_KEYS:
            return
        place = start_ms // SPAN_MS
        latest, self._changes = (now_ms + MOST_AHEAD_MS) // SPAN_MS, None
        if not 0 <= self._newest <= latest:  # none yet, or of a clock that ran ahead
            self._newest = place
        elif place <= latest:
            self._newest = max(self._newest, place)
        self._cells.setdefault(key, _Ring()).add(place, (n, n * loss, n * rate), latest)  # type: ignore[arg-type]

    def changes(self) -> list[dict[str, Any]]:
        """Return {of, segment, value, label, n, ne, change, low, high} of segments with enough samples.

        The figures are of served predictions if there are any, else of training.
        """
        if self._changes is None:
            self._changes = self._compute_changes()
        return self._changes

    def _compute_changes(self) -> list[dict[str, Any]]:
        kinds = {key[0] for key in self._cells}
        of = next((kind for kind in ("served", "training") if kind in kinds), None)
        first = self._newest - SPANS + 1
        spans = {key: ring.between(first, self._newest) for key, ring in self._cells.items() if key[0] == of}
        oldest = min((int(rows[0, 0]) for rows in spans.values() if len(rows)), default=first)
        middle = (oldest + self._newest + 1) / 2
        found = []
        for key, rows in spans.items():
            older = rows[:, 0] < middle
            change = change_of(rows[older, 1:], rows[~older, 1:])
            if change is not None:
                _, label, segment, value = key
                where = {"of": of, "segment": segment, "value": value, "label": label}
                found.append({**where, **asdict(change)})
        return found


class _Ring:
    """(SPANS, 4) float64: number of the span, samples, Σ logloss, Σ label.

    A span replaces that of an hour before, and that of a clock that ran ahead.
    """

    def __init__(self) -> None:
        self._rows = np.full((SPANS, 4), -1.0)

    def add(self, place: int, sums: Sums, latest: int) -> None:
        row = self._rows[place % SPANS]
        if place < row[0] <= latest:
            return  # an hour old, or older
        if row[0] != place:
            row[:] = (place, 0.0, 0.0, 0.0)
        row[1:] += sums

    def between(self, first: int, last: int) -> F64:
        places = self._rows[:, 0]
        rows = self._rows[(places >= max(first, 0)) & (places <= last)]
        return rows[np.argsort(rows[:, 0])]


def change_of(older: F64, newer: F64) -> Change | None:
    """Compare two sets of spans, (S, 3) each: samples, Σ logloss, Σ label; None if they are too few."""
    before, after = _ratio(older), _ratio(newer)
    if before is None or after is None:
        return None
    change = after[0] - before[0]
    variance = before[1] ** 2 + after[1] ** 2
    freedom = len(older) + len(newer) - 2
    half = _t975(freedom) * float(np.sqrt(variance))
    n = int(older[:, 0].sum() + newer[:, 0].sum())
    return Change(n, after[0], change, change - half, change + half)


def _ratio(spans: F64) -> tuple[float, float] | None:
    """Return (NE, its standard error); None with too few samples, or if all labels are equal."""
    if len(spans) < LEAST_SPANS:
        return None
    n, loss, labelled = spans.sum(0)
    rate = labelled / n if n else 0.0
    if n < LEAST_SAMPLES or not 0 < rate < 1:
        return None
    entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
    slope = np.log((1 - rate) / rate)  # derivative of the entropy by the rate
    ne = loss / n / entropy
    residual = (
        spans[:, 1] - ne * entropy * spans[:, 0] - ne * slope * (spans[:, 2] - rate * spans[:, 0])
    ) / entropy
    spread = len(spans) / (len(spans) - 1) * float((residual**2).sum())
    return float(ne), float(np.sqrt(spread)) / float(n)


def _t975(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t by Cornish and Fisher's expansion; within 1 % from 4 on."""
    z, v = 1.959964, max(freedom, 1)
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
