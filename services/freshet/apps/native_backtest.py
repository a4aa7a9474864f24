"""A backtest that keeps nothing, of a native model: one lane learns it, and samples stay in memory, without a
log.

What a run folder is for (acknowledged samples that survive a kill, rows for serving, versions, leases) is of
no use to a pass that ends with its figures, and costs a linear model many times what learning does. So
encoder, decoder, rows, model and measures are those of every other pass, and what lies between them is left
out: files are read, encoded and decoded by one thread, learned from by another, measured by a third.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson

from freshet.apps.results import Outcome
from freshet.apps.row_memory import trainer_rows_bytes
from freshet.apps.sample_files import ReadySamples, block_ends, in_order, ready_samples, sample_times
from freshet.batches.stream import TrainBatch
from freshet.config.avro.schema import Record
from freshet.config.settings import load_settings
from freshet.config.spec.layout import item_of, layout_of
from freshet.config.spec.model import Spec
from freshet.errors import BadInput
from freshet.features import Decoded, SampleDecoder
from freshet.model import NATIVE_KINDS
from freshet.model.inputs import Labels, ModelInputs
from freshet.model.native_loop import NativePass
from freshet.recordings.event_times import EventTimes
from freshet.trainer.quality import Observer, Quality
from freshet.types import F32, I64, U64, Fence

__all__ = ["fits", "straight"]

AHEAD = 2
"""Pieces decoded ahead of training, some 10 MB each: neither thread waits for the other's moods."""

EVICT_ROWS = 20_000
"""Rows looked at for eviction after each piece, as a shard does between two flushes."""

CLOSE_EVERY = 16
"""Pieces between two looks for windows that have closed: closing one merges all sums."""

T = TypeVar("T")


def fits(spec: Spec) -> bool:
    """Whether native code goes from batch to batch of this model."""
    return spec.model.kind in NATIVE_KINDS


def straight(
    spec: Spec,
    files: Sequence[Path],
    request: str | None,
    progress: Callable[[float], None],
    observer: Observer | None = None,
) -> Outcome:
    """One pass of one lane over the files, on batches of `train.batch.rows`, as a lane takes that keeps up.

    `observer` receives the predictions by sample.
    Raises as `freshet.apps.backtest.backtest` does.
    """
    began = time.perf_counter()
    spec, busy = in_order(spec), _Busy()
    learner = NativePass(spec, most_bytes=trainer_rows_bytes(load_settings()))
    judge = _Judge(spec, busy)
    judge.quality.observer = observer
    samples, seen = 0, sample_times(spec)
    try:
        for piece in ahead(_decoded(spec, files, request, seen, busy), AHEAD):
            with busy("train"):
                predictions = learner.run(
                    piece.columns.groups, piece.columns.dense, piece.labels, piece.ready.times_ms, piece.ends
                )
                learner.store.make_room(int(piece.ready.times_ms.max(initial=0)), EVICT_ROWS)
            judge.add(piece, predictions)
            samples += len(piece.ready)
            progress(piece.ready.share)
    finally:
        judge.close()
    if not samples:
        raise BadInput(f"{', '.join(map(str, files))}: expected samples, found none with a label")
    seconds = time.perf_counter() - began
    rates = {stage: samples / spent for stage, spent in busy.seconds.items() if spent}
    return Outcome(
        samples=samples,
        seconds=seconds,
        lanes=1,
        measures=judge.quality.summary()["training"],
        stages={**rates, "all, overlapped": samples / seconds},
        windows=judge.windows,
        times={"samples": seen},
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Samples as the model takes them, N of them, and where its batches end."""

    ready: ReadySamples
    columns: Decoded
    labels: Labels
    ends: I64


def _decoded(
    spec: Spec, files: Sequence[Path], request: str | None, seen: EventTimes, busy: _Busy
) -> Iterator[_Piece]:
    schemas: list[Record] = []
    decoder = SampleDecoder(spec, layout_of(spec), schemas.__getitem__)
    read = iter(ready_samples(spec, files, request, seen))
    before = 0
    while True:
        with busy("read and encode"):
            ready = next(read, None)
        if ready is None:
            return
        if not len(ready):
            continue
        with busy("decode"):
            if ready.schema not in schemas:
                schemas.append(ready.schema)
            columns = decoder.decode(ready.payloads, schemas.index(ready.schema), ready.times_ms)
            if len(columns.bad):
                raise BadInput(f"sample {int(ready.sample_ids[columns.bad[0]])}: {columns.why[0]}")
            labels = Labels(ready.labels, ready.values, np.ones(len(ready), np.float32))
            piece = _Piece(ready, columns, labels, block_ends(ready.requests, spec.train.batch_rows, before))
            before += len(ready)
        yield piece


@dataclass
class _Judge:
    """Measures of what was predicted, on a thread of its own, in the order of the samples."""

    spec: Spec
    busy: _Busy
    windows: list[Mapping[str, Any]] = field(default_factory=list)
    pieces: int = 0

    def __post_init__(self) -> None:
        self.quality = Quality(self.spec)
        self._item = item_of(self.spec, layout_of(self.spec))
        self._thread = ThreadPoolExecutor(1, "measures")
        self._last: Future[None] | None = None

    def add(self, piece: _Piece, predictions: F32) -> None:
        """Hand over a piece with its predictions; waits for the one before."""
        self._settle()
        self._last = self._thread.submit(self._add, piece, predictions)

    def close(self) -> None:
        """Wait for the last piece and close what windows it closed. Raises what measuring raised."""
        try:
            self._settle()
            self._close_windows()
        finally:
            self._thread.shutdown()

    def _settle(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _add(self, piece: _Piece, predictions: F32) -> None:
        with self.busy("measure"):
            self.quality.add(_batch(piece, self._items(piece.columns)), predictions)
            self.pieces += 1
            if self.pieces % CLOSE_EVERY == 0:
                self._close_windows()

    def _close_windows(self) -> None:
        closed = self.quality.finished_windows()
        self.windows += orjson.loads(orjson.dumps(closed, option=orjson.OPT_SERIALIZE_NUMPY))

    def _items(self, columns: Decoded) -> U64 | None:
        if self._item is None:
            return None
        group, place = self._item
        start, stop = columns.groups[group].feature_starts[place : place + 2].tolist()
        return columns.groups[group].keys[start:stop]


def _batch(piece: _Piece, items: U64 | None) -> TrainBatch:
    """The piece as measures take it."""
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


class _Busy:
    """Seconds that each stage worked, by its name; a stage belongs to one thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str) -> _Stage:
        return _Stage(self.seconds, stage)


@dataclass(slots=True)
class _Stage:
    seconds: dict[str, float]
    name: str
    began: float = 0.0

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + time.perf_counter() - self.began


def ahead(items: Iterator[T], most: int) -> Iterator[T]:
    """The items, made by a thread of their own that runs at most `most` of them ahead; raises what it raised.

    A caller that stops early stops the thread at its next item.
    """
    made: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(most)
    stopped = threading.Event()

    def offer(item: T | None, error: BaseException | None) -> None:
        while not stopped.is_set():
            try:
                made.put((item, error), timeout=0.1)
            except queue.Full:
                continue
            return

    def make() -> None:
        try:
            for item in items:
                offer(item, None)
                if stopped.is_set():
                    return
        except BaseException as error:
            offer(None, error)
        else:
            offer(None, None)

    maker = threading.Thread(target=make, name="ahead", daemon=True)
    maker.start()
    try:
        while (found := made.get()) != (None, None):
            item, error = found
            if error is not None:
                raise error
            assert item is not None, "an item, an error or the end"
            yield item
    finally:
        stopped.set()
        maker.join()
