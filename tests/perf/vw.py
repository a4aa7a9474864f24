"""Vowpal Wabbit 9.11.9 on the same samples at equal label delay: rows are scored a batch at a time, then
learned.

A batch is `rows` rows or more, and never splits a request: all rows of a request are scored before any
trains, exactly as freshet's lanes do with one lane. Features are the spec's: a namespace each, ids as
`value`, numbers as `value:number`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from vowpalwabbit import Workspace

from freshet.spec.model import Spec
from freshet.types import F32

__all__ = ["CONFIGURATIONS", "Runner", "namespaces"]

BASE = "--quiet --loss_function logistic --link logistic -b 24 --adaptive --normalized --invariant"
CONFIGURATIONS = {"plain": "", "-q ::": "-q ::", "-q :: -l 1": "-q :: -l 1"}
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def namespaces(spec: Spec) -> list[tuple[str, str, bool]]:
    """(letter, feature name, is a number) of each feature, in spec order."""
    return [(LETTERS[i], f.name, f.kind == "dense") for i, f in enumerate(spec.features)]


def line_of(values: Mapping[str, object], names: Sequence[tuple[str, str, bool]]) -> str:
    """One example without its label, in VW's text format."""
    parts = []
    for letter, name, number in names:
        value = values.get(name)
        if value is None or value == "":
            continue
        if number:
            parts.append(f"|{letter} {name}:{math.log1p(max(float(value), 0.0)):.6g}")  # type: ignore[arg-type]
        else:
            parts.append(f"|{letter} {str(value).replace(' ', '_').replace(':', '_').replace('|', '_')}")
    return " ".join(parts)


@dataclass
class Runner:
    """One pass of one configuration."""

    options: str
    predictions: list[float] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._vw = Workspace(f"{BASE} {self.options}")

    def run(self, batches: Iterable[tuple[Sequence[str], Sequence[float]]]) -> None:
        """Score each batch of (lines, labels), then learn it."""
        vw = self._vw
        for lines, labels in batches:
            start = time.perf_counter()
            self.predictions += [vw.predict(line) for line in lines]
            for line, label in zip(lines, labels, strict=True):
                vw.learn(f"{1 if label > 0 else -1} {line}")
            self.seconds += time.perf_counter() - start
            self.labels += labels

    def result(self) -> tuple[F32, F32]:
        """(predictions, labels) of the whole pass."""
        return np.array(self.predictions, np.float32), np.array(self.labels, np.float32)

    def close(self) -> None:
        """Free the workspace."""
        self._vw.finish()
