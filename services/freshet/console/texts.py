"""Texts of segment values that need no event to be known: parts of the time, ranges of numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from freshet.config.spec.model import Feature
from freshet.features import key_of

__all__ = ["fixed_texts", "texts_of_buckets", "texts_of_times"]

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def fixed_texts(feature: Feature) -> Mapping[int, str]:
    """Texts of features whose values need no event to be known."""
    if feature.kind == "time":
        return texts_of_times(feature.time or "")
    return texts_of_buckets(feature.buckets) if feature.kind == "bucket" else {}


def texts_of_times(part: str) -> dict[int, str]:
    """{key: text} of every value of a part of the time (UTC; weeks begin on Monday)."""
    hours = {key_of(h, 0): f"{h:02d}:00" for h in range(24)}
    if part == "hour":
        return hours
    if part == "weekday":
        return {key_of(d, 0): day for d, day in enumerate(WEEKDAYS)}
    return {
        key_of(24 * d + h, 0): f"{day[:3]} {h:02d}:00" for d, day in enumerate(WEEKDAYS) for h in range(24)
    }


def texts_of_buckets(edges: Sequence[float]) -> dict[int, str]:
    """{key: text} of the ranges that edges cut numbers into."""
    texts = [f"below {edges[0]:g}"] if edges else []
    texts += [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    texts += [f"{edges[-1]:g} and more"] if edges else []
    return {key_of(i, 0): text for i, text in enumerate(texts)}
