"""A backtest of a native model in memory, by one lane.

Durable samples, versions and leases cost a linear model many times the learning itself, and a pass that only
reports figures does not need them. Encoder, decoder, rows, model and measures are those of other passes. One
thread reads, encodes and decodes files, a second trains, a third measures.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson

from freshet.apps.results import Outcome
from freshet.apps.row_memory import trainer_rows_bound
from freshet.apps.sample_files import (
    ReadySampleDecoder,
    ReadySamples,
    block_ends,
    ready_samples,
    sample_times,
    with_window_emission,
)
from freshet.batches.stream import TrainBatch
from freshet.config.settings import load_settings
from freshet.config.spec.layout import item_of, layout_of
from freshet.config.spec.model import Spec
from freshet.embedder.batch_builder import item_keys
from freshet.errors import BadInput
from freshet.features import Decoded
from freshet.model import NATIVE_KINDS
from freshet.model.inputs import Labels, ModelInputs
from freshet.model.native_loop import NativePass
from freshet.recordings.event_times import EventTimes
from freshet.trainer.quality import PredictionRecorder, Quality
from freshet.types import F32, I64, U64, Fence

PREFETCH_PIECES = 2
"""Pieces decoded ahead of training, about 10 MB each."""

EVICT_ROWS = 20_000
"""Rows examined for eviction after each piece, as by a shard between two flushes."""

CLOSE_EVERY = 16
"""Pieces between two checks for closed windows; closing a window merges all sums, which is slow."""

T = TypeVar("T")


def has_native_loop(spec: Spec) -> bool:
    """Return whether native code iterates over the batches of this model."""
    return spec.model.kind in NATIVE_KINDS


def run_native_pass(
    spec: Spec,
    files: Sequence[Path],
    request: str | None,
    progress: Callable[[float], None],
    recorder: PredictionRecorder | None = None,
) -> Outcome:
    """Run one pass over the files with batches of `train.batch.rows`; `recorder` receives the predictions by
    sample. Raises BadInput if the files hold no label, and the errors of `freshet.apps.backtest.backtest`."""
    began = time.perf_counter()
    spec, stage_times = with_window_emission(spec), _StageTimes()
    learner = NativePass(spec, bound=trainer_rows_bound(load_settings()))
    measurer = _Measurer(spec, stage_times)
    measurer.quality.recorder = recorder
    samples, seen = 0, sample_times(spec)
    try:
        for piece in prefetched(_decoded(spec, files, request, seen, stage_times), PREFETCH_PIECES):
            with stage_times("train"):
                predictions = learner.run(
                    piece.columns.groups, piece.columns.dense, piece.labels, piece.ready.times_ms, piece.ends
                )
                learner.store.make_room(int(piece.ready.times_ms.max(initial=0)), EVICT_ROWS)
            measurer.add(piece, predictions)
            samples += len(piece.ready)
            progress(piece.ready.share)
    finally:
        measurer.close()
    if not samples:
        raise BadInput(f"{', '.join(map(str, files))}: expected samples, found none with a label")
    seconds = time.perf_counter() - began
    rates = {stage: samples / spent for stage, spent in stage_times.seconds.items() if spent}
    return Outcome(
        samples=samples,
        seconds=seconds,
        lanes=1,
        measures=measurer.quality.summary()["training"],
        stages={**rates, "all, overlapped": samples / seconds},
        windows=measurer.windows,
        times={"samples": seen},
        outliers=measurer.quality.outliers,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """N samples as inputs of the model, and the ends of its batches."""

    ready: ReadySamples
    columns: Decoded
    labels: Labels
    ends: I64


def _decoded(
    spec: Spec, files: Sequence[Path], request: str | None, seen: EventTimes, stage_times: _StageTimes
) -> Iterator[_Piece]:
    decoder = ReadySampleDecoder(spec)
    read = iter(ready_samples(spec, files, request, seen))
    before = 0
    while True:
        with stage_times("read and encode"):
            ready = next(read, None)
        if ready is None:
            return
        if not len(ready):
            continue
        with stage_times("decode"):
            columns = decoder.decode(ready)
            labels = Labels(ready.labels, ready.values, np.ones(len(ready), np.float32))
            piece = _Piece(ready, columns, labels, block_ends(ready.requests, spec.train.batch_rows, before))
            before += len(ready)
        yield piece


@dataclass
class _Measurer:
    """Measures predictions on a thread of its own, in the order of the samples."""

    spec: Spec
    stage_times: _StageTimes
    windows: list[Mapping[str, Any]] = field(default_factory=list)
    pieces: int = 0

    def __post_init__(self) -> None:
        self.quality = Quality(self.spec)
        self._item = item_of(self.spec, layout_of(self.spec))
        self._thread = ThreadPoolExecutor(1, "measures")
        self._last: Future[None] | None = None

    def add(self, piece: _Piece, predictions: F32) -> None:
        """Submit a piece with its (N,) predictions, after the previous one is measured."""
        self._await_last()
        self._last = self._thread.submit(self._add, piece, predictions)

    def close(self) -> None:
        """Wait for the last piece and close windows. Raises the errors of measuring."""
        try:
            self._await_last()
            self._close_windows()
        finally:
            self._thread.shutdown()

    def _await_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _add(self, piece: _Piece, predictions: F32) -> None:
        with self.stage_times("measure"):
            self.quality.add(_batch(piece, item_keys(piece.columns, self._item)), predictions)
            self.pieces += 1
            if self.pieces % CLOSE_EVERY == 0:
                self._close_windows()

    def _close_windows(self) -> None:
        closed = self.quality.finished_windows()
        self.windows += orjson.loads(orjson.dumps(closed, option=orjson.OPT_SERIALIZE_NUMPY))


def _batch(piece: _Piece, items: U64 | None) -> TrainBatch:
    """Return the piece as the batch that measures expect."""
    ready, columns = piece.ready, piece.columns
    return TrainBatch(
        ranges=(),
        fence=Fence(0),
        inputs=ModelInputs(len(ready), [], columns.dense, piece.labels),
        sample_ids=ready.sample_ids,
        request_ids=ready.requests,
        event_times_ms=ready.times_ms,
        segments=columns.segments,
        served=columns.served,
        explored=columns.explored,
        items=items,
        ends=piece.ends,
    )


class _StageTimes:
    """Stopwatch by stage; each stage belongs to one thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began


def prefetched(items: Iterator[T], most: int) -> Iterator[T]:
    """Yield items that another thread produces, at most `most` ahead; raise its errors. When the caller stops
    early, the thread ends at its next item."""
    produced: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(most)
    stopped = threading.Event()

    def put(item: T | None, error: BaseException | None) -> None:
        while not stopped.is_set():
            try:
                produced.put((item, error), timeout=0.1)
            except queue.Full:
                continue
            return

    def produce() -> None:
        try:
            for item in items:
                put(item, None)
                if stopped.is_set():
                    return
        except BaseException as error:
            put(None, error)
        else:
            put(None, None)

    producer = threading.Thread(target=produce, name="prefetch", daemon=True)
    producer.start()
    try:
        while (found := produced.get()) != (None, None):
            item, error = found
            if error is not None:
                raise error
            assert item is not None, "an item, an error or the end"
            yield item
    finally:
        stopped.set()
        producer.join()
