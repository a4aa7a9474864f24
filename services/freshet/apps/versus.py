"""Other learners on the samples of a backtest, in a second pass with the same decoder and batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from freshet.apps.sample_files import ReadySamples, block_ends, ready_samples
from freshet.config.avro.schema import Record
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.errors import BadInput, ConfigError
from freshet.evaluation.predictions import LearnerPredictions
from freshet.extras import how_to_install
from freshet.features import Decoded, SampleDecoder
from freshet.recordings.vowpal import CENTRED, Learner, Standardized, learners_of, lines_of

__all__ = ["VERSUS", "check_versus", "run_vw"]

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
        before = 0
        for samples, decoded in _decoded(spec, files, request):
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


def _decoded(
    spec: Spec, files: Sequence[Path], request: str | None
) -> Iterator[tuple[ReadySamples, Decoded]]:
    schemas: list[Record] = []
    decoder = SampleDecoder(spec, layout_of(spec), schemas.__getitem__)
    for samples in ready_samples(spec, files, request):
        if not len(samples):
            continue
        if samples.schema not in schemas:
            schemas.append(samples.schema)
        decoded = decoder.decode(samples.payloads, schemas.index(samples.schema), samples.times_ms)
        if len(decoded.bad):
            raise BadInput(f"sample {int(samples.sample_ids[decoded.bad[0]])}: {decoded.why[0]}")
        yield samples, decoded
