"""Other learners on the samples of a backtest, in a second pass with the same decoder and batches.

Vowpal Wabbit (package `vowpalwabbit`) gets the same features, rows and label delays. Each feature is a
namespace. An id is the low 32 bits of its key, so lists, buckets and parts of the time are those of freshet.
A dense column is a number after the spec's transforms except `standard`, because `--normalized` scales
numbers; further learners get it centred, as freshet's linear weights do. The better choice depends on the
stream: centred numbers gained .021 of AUC on one, lost .004 on another. Crosses are omitted, because `-q ::`
has every pair; those of three and four features it lacks. Letters: B samples, D dense columns, E batches.
"""

from __future__ import annotations

import importlib.util
import math
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from freshet.apps.sample_files import ReadySampleDecoder, block_ends, ready_samples
from freshet.config.spec.layout import Layout, layout_of
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError
from freshet.evaluation.predictions import LearnerPredictions
from freshet.extras import how_to_install
from freshet.features import ABSENT_KEY, Decoded
from freshet.types import F32, F64, I64

VERSUS = ("vw",)
"""Names of the learners that a backtest can be compared with."""


def check_versus(spec: Spec, versus: Sequence[str], files: Sequence[Path]) -> None:
    """Raise ConfigError if a learner is unknown or cannot run on these files and labels."""
    for name in versus:
        if name not in VERSUS:
            raise ConfigError("--versus", "", name, f"one of {', '.join(VERSUS)}", "name one of these")
    if "vw" not in versus:
        return
    if importlib.util.find_spec("vowpalwabbit") is None:
        raise ConfigError(
            "--versus",
            "",
            "vw, and the package vowpalwabbit is not installed",
            "Vowpal Wabbit's Python package beside freshet",
            how_to_install("vowpalwabbit"),
        )
    for file in files:
        if file.exists() and not file.is_file():  # opening a pipe a second time would block for ever
            raise ConfigError(
                "--versus", "", f"{file} is a pipe", "files, which are read twice", "write it to a file first"
            )
    if all(label.loss != "logloss" for label in spec.labels):
        raise ConfigError(
            "--versus",
            "",
            f"vw, and the labels {', '.join(label.name for label in spec.labels)} are numbers",
            "a label that is true or false",
            "leave --versus out",
        )


def run_vw(
    spec: Spec,
    files: Sequence[Path],
    request: str | None,
    scored: LearnerPredictions,
    delay_rows: int,
    progress: Callable[[float], None],
) -> None:
    """Run Vowpal Wabbit with each of its settings over the samples of the true/false labels.

    Args:
        files, request: as of the backtest.
        scored: receives the predictions of learners named `vw NAME`.
        delay_rows: rows that are predicted before the first of them is learned; a request is not split.
        progress: called with the share that is done, from 0 to 1.

    Raises BadInput if a sample cannot be decoded, and the errors of `ready_samples`.
    """
    layout = layout_of(spec)
    labels = [label.index for label in spec.labels if label.loss == "logloss"]
    learners = {(name, label): Learner(name) for name in learners_of(layout) for label in labels}
    standardized = Standardized(len(layout.dense))
    try:
        before, decoder = 0, ReadySampleDecoder(spec)
        for samples in ready_samples(spec, files, request):
            if not len(samples):
                continue
            decoded = decoder.decode(samples)
            ends = block_ends(samples.requests, delay_rows, before)
            lines = {"": lines_of(spec, layout, decoded, decoded.dense)}
            if layout.dense:
                lines[CENTRED] = lines_of(spec, layout, decoded, standardized(decoded.dense, ends))
            before += len(samples)
            for (name, label), learner in learners.items():
                lines_here = lines[CENTRED if name.endswith(CENTRED) else ""]
                mine = np.flatnonzero(samples.labels == label)
                predictions = learner.run(
                    [lines_here[i] for i in mine] if len(labels) > 1 else lines_here,
                    samples.values[mine],
                    np.unique(np.searchsorted(mine, ends)),
                )
                scored.add_predictions(f"vw {name}", samples.sample_ids[mine], predictions)
            progress(samples.share)
    finally:
        for learner in learners.values():
            learner.close()


# --- Vowpal Wabbit.

BASE = "--quiet --loss_function logistic --link logistic -b 24 --adaptive --normalized --invariant"
SETTINGS = {"plain": "", "-q ::": "-q ::", "-q :: -l 1": "-q :: -l 1"}
"""Options by name: no pairs of features, all pairs, and all pairs with twice the default step."""

CENTRED = ", centred"
"""Suffix of the names of settings with standardised numbers."""

LOW_BITS = np.uint64(0xFFFFFFFF)
"""More than the 24 bits by which `-b 24` separates weights."""

VARIANCE_FLOOR = 1e-12
LIMIT = 10.0
"""Bound of standardised numbers, as in freshet."""


def learners_of(layout: Layout) -> list[str]:
    """Return the names of the learners for a layout: each setting, and with dense columns also centred."""
    return [*SETTINGS, *(f"{name}{CENTRED}" for name in (SETTINGS if layout.dense else ()))]


class Standardized:
    """Standardises dense columns by mean and deviation of the earlier batches."""

    def __init__(self, columns: int) -> None:
        """`columns`: D."""
        self._known = np.zeros((3, columns))  # count, sum and sum of squares of earlier values
        self._origin: F64 | None = None  # subtracted from all values before they are summed

    def __call__(self, dense: F32, ends: I64) -> F32:
        """Standardise the next samples; a column is 0 until it had two values.

        Args:
            dense: (B, D) float32 with B > 0; values that are not finite are missing.
            ends: (E,) int64, the rising ends of batches, the last one B.

        Returns (B, D) float32; missing values are NaN.
        """
        finite = np.isfinite(dense)
        if self._origin is None:
            self._origin = np.where(finite[0], dense[0], 0.0)
        shifted = np.where(finite, dense - self._origin, 0.0)
        known = np.cumsum(np.stack([finite.astype(np.float64), shifted, shifted * shifted]), axis=1)
        known += self._known[:, None, :]
        starts = np.concatenate([[0], ends[:-1]])
        before = np.concatenate([self._known[:, None, :], known], axis=1)[:, starts]
        self._known = known[:, -1]
        count, total, squares = np.repeat(before, ends - starts, axis=1)
        mean = total / np.maximum(count, 1.0)
        variance = np.maximum(squares / np.maximum(count, 1.0) - mean * mean, 0.0)
        found = np.where(count > 1.0, (shifted - mean) / np.sqrt(variance + VARIANCE_FLOOR), 0.0)
        return np.where(finite, np.clip(found, -LIMIT, LIMIT), np.nan).astype(np.float32)


def lines_of(spec: Spec, layout: Layout, decoded: Decoded, numbers: F32) -> list[str]:
    """Format samples as B examples of VW, without labels.

    `numbers` is (B, D) float32. A missing number is omitted, or flagged if `missing = "flag"`.
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
    """Return a short unique name. `-q ::` pairs namespaces by the first character."""
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
    """One learner of one true/false label, with a name of `learners_of`. It must be closed."""

    def __init__(self, name: str) -> None:
        """Raises ModuleNotFoundError without `vowpalwabbit`, KeyError if no setting has the name."""
        from vowpalwabbit import Workspace

        self._vw = Workspace(f"{BASE} {SETTINGS[name.removesuffix(CENTRED)]}".strip())

    def run(self, lines: Sequence[str], values: F32, ends: I64) -> F32:
        """Predict all samples of a batch, then learn them, batch by batch.

        Args:
            lines: B examples of `lines_of`.
            values: (B,) float32, labels of 0 or 1.
            ends: (E,) int64, the rising ends of batches, the last one B.

        Returns (B,) float32: probabilities.
        """
        vw = self._vw
        out = np.empty(len(lines), np.float32)
        labels = ["1" if value > 0 else "-1" for value in values.tolist()]
        first = 0
        for stop in ends.tolist():
            batch = [vw.parse(labels[i] + lines[i]) for i in range(first, stop)]
            for i, example in enumerate(batch, first):
                out[i] = vw.predict(example)  # predict() ignores the label
            for example in batch:
                vw.learn(example)
                vw.finish_example(example)
            first = stop
        return out

    def close(self) -> None:
        """Free the learner."""
        self._vw.finish()
