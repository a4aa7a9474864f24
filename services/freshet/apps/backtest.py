"""Progressive validation of a spec on files of ready samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from freshet.apps.native_backtest import has_native_loop, run_native_pass
from freshet.apps.results import Outcome, pass_folder
from freshet.apps.sample_files import (
    ReadySamples,
    block_ends,
    ready_samples,
    sample_times,
)
from freshet.apps.versus import check_versus, run_vw
from freshet.config.spec import Spec
from freshet.errors import BadInput
from freshet.evaluation import SOURCES, LabelKind
from freshet.evaluation.predictions import LearnerPredictions
from freshet.features import SampleColumns, take
from freshet.features.blocks import block_samples, encode_blocks
from freshet.model import NATIVE_KINDS
from freshet.recordings.event_times import EventTimes
from freshet.trainer.quality import PredictionRecorder
from freshet.types import F32, I64, Append, BytesColumn

if TYPE_CHECKING:
    from freshet.apps.pipeline import Pipeline

DAY_MS = 86_400_000
TRAINING, _, _, POPULARITY = (source.name for source in SOURCES)
FRESHET, MEAN = "freshet", "mean"
"""Names of learners; others are `popularity` and those of `freshet.apps.versus`."""


def backtest(
    spec: Spec,
    files: Sequence[str | Path],
    *,
    request: str | None = None,
    lanes: int | None = None,
    keep: str | Path | None = None,
    window_ms: int = DAY_MS,
    progress: Any = None,
    versus: Sequence[str] = (),
) -> Outcome:
    """Run one progressive pass over files of ready samples, with the encoder, decoder, model and measures of
    live events.

    A native model with one lane and without `keep` learns in memory; other passes use the log, the stores and
    the lanes of a live trainer.

    Args:
        files:    csv, Parquet or Arrow, gzip or not, in time order; columns named as the spec's fields and
                  labels, or structs that hold them.
        request:  column with equal values for rows that were served together.
        lanes:    threads that learn concurrently; 1, the default, gives the same result each time.
        keep:     new or empty folder for log, rows and versions; None: they are deleted at the end.
        window_ms: length of a window of measures, in event time.
        progress: called with the share that is done, from 0 to 1.
        versus:   other learners for the same rows, with the same label delay: "vw" is Vowpal Wabbit with
                  three usual settings, and with centred numbers where there are numbers; it needs the
                  package vowpalwabbit.

    Returns the measures over all samples, by window, and by learner also after the first fifth; see
    `freshet.apps.results.Outcome`. The learners include a baseline: `popularity`, the past rate of the item,
    if the key of served events names a feature's field after the request; otherwise `mean`, the running mean
    of the label.
    Raises ConfigError if a column is missing or a learner cannot run, BadInput if a file cannot be read.
    """
    versus = (versus,) if isinstance(versus, str) else tuple(dict.fromkeys(versus))
    check_versus(spec, versus, [Path(f) for f in files])
    options = BacktestOptions(request, lanes, keep, window_ms, progress or (lambda share: None), versus)
    with LearnerPredictions(
        [LabelKind(label.name, label.loss != "logloss") for label in spec.labels]
    ) as scored:
        return backtest_into(scored, spec, [Path(f) for f in files], options)


@dataclass(frozen=True, slots=True)
class BacktestOptions:
    """The options of `backtest`."""

    request: str | None = None
    lanes: int | None = None
    keep: str | Path | None = None
    window_ms: int = DAY_MS
    progress: Callable[[float], None] = lambda share: None
    versus: Sequence[str] = ()

    def in_memory(self, spec: Spec) -> bool:
        """Return whether a pass of this spec needs no log."""
        return self.keep is None and self.lanes in (None, 1) and has_native_loop(spec)


def backtest_into(
    scored: LearnerPredictions, spec: Spec, files: Sequence[Path], options: BacktestOptions
) -> Outcome:
    """Run `backtest` and keep each learner's predictions by sample in `scored`. The caller has run
    `check_versus`; the errors are those of `backtest`."""
    own_share = 1 / (1 + len(options.versus))
    outcome = _train(
        replace(spec, train=replace(spec.train, measure_window_ms=options.window_ms)),
        files,
        replace(options, progress=lambda share: options.progress(share * own_share)),
        _RenamedLearner(scored),
    )
    delay_rows = outcome.lanes * _batch_rows(spec, in_memory=options.in_memory(spec))
    if POPULARITY not in scored.learners:
        scored.add_means(MEAN, delay_rows)
    if "vw" in options.versus:
        run_vw(
            spec,
            files,
            options.request,
            scored,
            delay_rows,
            lambda share: options.progress(own_share + share * (1 - own_share)),
        )
    with ThreadPoolExecutor() as pool:
        figures = pool.map(scored.figures, scored.learners)
        return replace(outcome, learners=dict(zip(scored.learners, figures, strict=True)))


@dataclass(frozen=True, slots=True)
class _RenamedLearner:
    """Recorder that stores the model's predictions under the name `freshet`."""

    scored: LearnerPredictions

    def add_samples(self, ids: I64, values: F32, times_ms: I64) -> None:
        self.scored.add_samples(ids, values, times_ms)

    def add_predictions(self, learner: str, ids: I64, predictions: F32) -> None:
        self.scored.add_predictions(FRESHET if learner == TRAINING else learner, ids, predictions)


def _train(
    spec: Spec, files: Sequence[Path], options: BacktestOptions, recorder: PredictionRecorder
) -> Outcome:
    if options.in_memory(spec):
        return run_native_pass(spec, files, options.request, options.progress, recorder)
    from freshet.apps.pipeline import Pipeline

    with pass_folder(options.keep) as folder:
        pipeline = Pipeline.of_samples(spec, folder, options.lanes)
        try:
            began = time.perf_counter()
            seen = sample_times(spec)
            written = write_samples(pipeline, files, options.request, seen)
            if not written:
                raise BadInput(f"{', '.join(map(str, files))}: expected samples, found none with a label")
            wrote_s = time.perf_counter() - began
            outcome = pipeline.train(options.progress, recorder)
            stages = {"encode and append": written / wrote_s, **outcome.stages}
            return replace(outcome, stages=stages, times={"samples": seen})
        finally:
            pipeline.close()


def _batch_rows(spec: Spec, *, in_memory: bool) -> int:
    """Return the rows of a lane's batch; a lane that reads the log is behind for the whole pass."""
    train = spec.train
    if in_memory:
        return train.batch_rows
    return max(train.batch_rows, train.behind_rows(native_loop=spec.model.kind in NATIVE_KINDS))


def write_samples(
    pipeline: Pipeline, files: Sequence[Path], request: str | None, seen: EventTimes | None = None
) -> int:
    """Append all samples in blocks, round robin over the partitions, so that lanes learn in nearly the order
    of the files; return the number of samples."""
    partitions, turn, total = pipeline.spec.partitions, 0, 0
    most = block_samples(pipeline.spec.train.batch_rows)
    for samples in ready_samples(pipeline.spec, files, request, seen):
        blocks = _blocks(samples, pipeline.registry.register(samples.schema), most, total)
        places = (np.arange(len(blocks)) + turn) % partitions
        turn = (turn + len(blocks)) % partitions
        total += len(samples)
        pipeline.writer.append(
            [
                Append(pipeline.topics.samples, p, take(blocks, np.flatnonzero(places == p)))
                for p in range(partitions)
                if (places == p).any()
            ]
        )
    return total


def _blocks(samples: ReadySamples, schema_id: int, most: int, before: int) -> BytesColumn:
    """Encode samples in blocks of at most `most`; only a request with more makes a longer one."""
    return encode_blocks(
        schema_id,
        SampleColumns(
            sample_ids=samples.sample_ids,
            event_times_ms=samples.times_ms,
            request_ids=samples.requests,
            values=samples.values,
            weights=np.ones(len(samples), np.float32),
            labels=samples.labels,
        ),
        payloads=samples.payloads,
        block_ends=block_ends(samples.requests, most, before),
    )
