"""Vowpal Wabbit on samples that freshet has decoded: the same features, the same rows, labels equally late.

Needs the package `vowpalwabbit`. Each feature is a namespace. An id is the low 32 bits of its key, so that
lists, buckets and parts of the time are what freshet makes of them; a dense column is a number after the
spec's transforms, but for `standard`, which `--normalized` stands for. Crosses are left out: `-q ::` has
every pair. Letters: B samples, D dense columns.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from freshet.features import ABSENT_KEY, Decoded
from freshet.spec.layout import Layout
from freshet.spec.model import Spec
from freshet.types import F32, I64

__all__ = ["SETTINGS", "Learner", "lines_of"]

BASE = "--quiet --loss_function logistic --link logistic -b 24 --adaptive --normalized --invariant"
SETTINGS = {"plain": "", "-q ::": "-q ::", "-q :: -l 1": "-q :: -l 1"}
"""Options by name: no pairs of features, all pairs, and all pairs with twice the default step."""

LOW_BITS = np.uint64(0xFFFFFFFF)
"""Longer than the 24 bits of a key by which `-b 24` separates weights."""


def lines_of(spec: Spec, layout: Layout, decoded: Decoded) -> list[str]:
    """(B,) an example a sample in VW's text format, without its label."""
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
        numbers = decoded.dense[:, column].tolist()
        texts = [f"x:{x:.6g}" if math.isfinite(x) else "" for x in numbers]
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
    """One learner of one true/false label by one of `SETTINGS`. Close it."""

    def __init__(self, setting: str) -> None:
        """Raises ModuleNotFoundError without `vowpalwabbit`, KeyError for a setting that there is not."""
        from vowpalwabbit import Workspace  # noqa: PLC0415 - it is in no default installation

        self._vw = Workspace(f"{BASE} {SETTINGS[setting]}".strip())

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
