"""Vowpal Wabbit on samples that freshet has decoded: the same features, the same rows, labels equally late.

Needs the package `vowpalwabbit`. Each feature is a namespace. An id is the low 32 bits of its key, so that
lists, buckets and parts of the time are what freshet makes of them. A dense column is a number after the
spec's transforms, but for `standard`: as it is, since `--normalized` scales numbers, and by further learners
centred, as freshet's own linear weights see it. Which of both ranks better depends on the stream: .021 of AUC
for centred numbers on one, .004 against them on another. Crosses are left out: `-q ::` has every pair.
Letters: B samples, D dense columns.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from freshet.config.spec.layout import Layout
from freshet.config.spec.model import Spec
from freshet.features import ABSENT_KEY, Decoded
from freshet.types import F32, F64, I64

__all__ = ["CENTRED", "SETTINGS", "Learner", "Standardized", "learners_of", "lines_of"]

BASE = "--quiet --loss_function logistic --link logistic -b 24 --adaptive --normalized --invariant"
SETTINGS = {"plain": "", "-q ::": "-q ::", "-q :: -l 1": "-q :: -l 1"}
"""Options by name: no pairs of features, all pairs, and all pairs with twice the default step."""

CENTRED = ", centred"
"""Behind the name of a setting that gets numbers standardised."""

LOW_BITS = np.uint64(0xFFFFFFFF)
"""Longer than the 24 bits of a key by which `-b 24` separates weights."""


VARIANCE_FLOOR = 1e-12
LIMIT = 10.0
"""Standardised numbers are cut to ± this, as freshet's are."""


def learners_of(layout: Layout) -> list[str]:
    """Names of the learners that a model of this layout is compared with: each setting, and, where there are
    numbers, each with numbers centred."""
    return [*SETTINGS, *(f"{name}{CENTRED}" for name in (SETTINGS if layout.dense else ()))]


class Standardized:
    """Dense columns less their mean, over their deviation, both of the batches before."""

    def __init__(self, columns: int) -> None:
        """`columns`: D."""
        self._known = np.zeros((3, columns))  # count, sum and sum of squares of what was seen
        self._origin: F64 | None = None  # sums are of the distances from here

    def __call__(self, dense: F32, ends: I64) -> F32:
        """Standardise the next samples; NaN stays NaN, and a column is 0 until two values of it were seen.

        Args:
            dense: (B, D) numbers, B above 0; what is not finite is missing.
            ends: where each batch ends, rising, the last at B.

        Returns (B, D).
        """
        there = np.isfinite(dense)
        if self._origin is None:
            self._origin = np.where(there[0], dense[0], 0.0)
        away = np.where(there, dense - self._origin, 0.0)
        known = np.cumsum(np.stack([there.astype(np.float64), away, away * away]), axis=1)
        known += self._known[:, None, :]
        starts = np.concatenate([[0], ends[:-1]])
        before = np.concatenate([self._known[:, None, :], known], axis=1)[:, starts]
        self._known = known[:, -1]
        count, total, squares = np.repeat(before, ends - starts, axis=1)
        mean = total / np.maximum(count, 1.0)
        variance = np.maximum(squares / np.maximum(count, 1.0) - mean * mean, 0.0)
        found = np.where(count > 1.0, (away - mean) / np.sqrt(variance + VARIANCE_FLOOR), 0.0)
        return np.where(there, np.clip(found, -LIMIT, LIMIT), np.nan).astype(np.float32)


def lines_of(spec: Spec, layout: Layout, decoded: Decoded, numbers: F32) -> list[str]:
    """(B,) an example a sample in VW's text format, without its label.

    Args:
        spec, layout: of the samples.
        decoded: the samples.
        numbers: (B, D) their dense columns; where one is missing and the feature says `missing = "flag"`,
            the example says so, otherwise it leaves the number out.
    """
    columns = []
    for group, keys in zip(layout.groups, decoded.groups, strict=True):
        for place, index in enumerate(group.features):
            feature = spec.features[index]
            if feature.kind != "cross":
                start, stop = keys.feature_starts[place : place + 2].tolist()
                found, ends = keys.keys[start:stop], keys.list_ends[place]
                texts = _ids(found) if ends is None else _lists(found, ends.tolist())
                columns.append(_named(_namespace(index), texts))
    for column, index in enumerate(layout.dense):
        missing = "missing" if spec.features[index].missing == "flag" else ""
        texts = [f"x:{x:.6g}" if math.isfinite(x) else missing for x in numbers[:, column].tolist()]
        columns.append(_named(_namespace(index), texts))
    return ["".join(parts) for parts in zip(*columns, strict=True)]


def _namespace(index: int) -> str:
    """`-q ::` pairs namespaces by first letters; the number separates those that share a letter."""
    letters = string.ascii_letters
    return f"{letters[index % len(letters)]}{index // len(letters) or ''}"


def _ids(keys: Any) -> list[str]:
    low = (keys & LOW_BITS).tolist()
    return [str(x) if key != ABSENT_KEY else "" for key, x in zip(keys.tolist(), low, strict=True)]


def _lists(keys: Any, ends: Sequence[int]) -> list[str]:
    ids = _ids(keys)
    return [" ".join(filter(None, ids[a:b])) for a, b in zip([0, *ends], ends, strict=False)]


def _named(namespace: str, texts: Sequence[str]) -> list[str]:
    return [f" |{namespace} {text}" if text else "" for text in texts]


class Learner:
    """One learner of one true/false label, by its name of `learners_of`. Close it."""

    def __init__(self, name: str) -> None:
        """Raises ModuleNotFoundError without `vowpalwabbit`, KeyError for a setting that there is not."""
        from vowpalwabbit import Workspace  # noqa: PLC0415 - it is in no default installation

        self._vw = Workspace(f"{BASE} {SETTINGS[name.removesuffix(CENTRED)]}".strip())

    def run(self, lines: Sequence[str], values: F32, ends: I64) -> F32:
        """Predict and learn batch by batch: all rows of a batch are predicted before one of them is learned.

        Args:
            lines: (B,) examples of `lines_of`.
            values: (B,) labels, 0 or 1.
            ends: where each batch ends, rising, the last at B.

        Returns (B,) probabilities.
        """
        vw = self._vw
        out = np.empty(len(lines), np.float32)
        labels = ["1" if value > 0 else "-1" for value in values.tolist()]
        first = 0
        for stop in ends.tolist():
            batch = [vw.parse(labels[i] + lines[i]) for i in range(first, stop)]
            for i, example in enumerate(batch, first):
                out[i] = vw.predict(example)  # the label that an example has is no part of that
            for example in batch:
                vw.learn(example)
                vw.finish_example(example)
            first = stop
        return out

    def close(self) -> None:
        """Free the learner."""
        self._vw.finish()
