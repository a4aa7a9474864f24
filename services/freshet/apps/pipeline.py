"""Log, stores and trainer in one process, without servers, for replays and backtests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import structlog

from freshet.adapters import open_eventlog, open_rowstore, open_versions
from freshet.apps.batch_sources import OwnRows
from freshet.apps.results import Outcome
from freshet.apps.row_memory import trainer_rows_bound
from freshet.apps.sample_files import with_window_emission
from freshet.apps.trainer import TrainerOptions, TrainerProcess
from freshet.clock import SYSTEM_CLOCK
from freshet.config.settings import RunFolder, load_settings
from freshet.config.spec.identity import identity_hash
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import Schemas, sample_reader
from freshet.log.schema_ids import SchemaRegistry
from freshet.log.topics import ModelContext
from freshet.observability.logging import configure_logging
from freshet.process.lifecycle import Cleanup
from freshet.trainer.quality import PredictionRecorder
from freshet.types import TopicPartition

POLL_S = 0.1


class Pipeline:
    """Log, stores and topics of a model in one folder, and the trainer on them."""

    def __init__(self, spec: Spec, folder: Path, lanes: int | None, schemas: Schemas | None = None) -> None:
        """Open log and stores. `schemas`: as of live services; None (ready samples): the identity of the
        stores depends on the spec alone."""
        if not structlog.is_configured():
            configure_logging("freshet", level="warning", form="text")
        self._reader = None if schemas is None else sample_reader(spec, schemas)
        self.spec, self.lanes = spec, lanes
        settings = load_settings({}, run_folder=folder).common
        RunFolder(folder).create()
        with Cleanup() as cleanup:
            self.log = open_eventlog(settings.log_url)
            cleanup.add("log", self.log.close)
            self.rows = open_rowstore(settings.rows_url)
            cleanup.add("rows", self.rows.close)
            self.versions = open_versions(settings.versions_url)
            cleanup.add("versions", self.versions.close)
            self.context = ModelContext.open(spec, identity_hash(spec, schemas), self.log, SYSTEM_CLOCK)
            self.topics = self.context.topics
            self.registry = SchemaRegistry(self.log)
            self.writer = self.log.writer()
            cleanup.add("writer", self.writer.close)
            self._cleanup = cleanup.pop_all()

    @classmethod
    def of_samples(cls, spec: Spec, folder: Path, lanes: int | None) -> Pipeline:
        """Open a pipeline for ready samples, with a partition per lane (1 by default), so that a lane reads
        its rows in the order of the file."""
        lanes = lanes or 1  # a lane predicts without the other lanes' last batches
        return cls(replace(spec, partitions=lanes), folder, lanes)

    def trainer(self) -> TrainerProcess:
        """Open a trainer of the log's samples."""
        context = self.context
        if self._reader is None:
            context = replace(context, spec=with_window_emission(self.spec))
        bound = trainer_rows_bound(load_settings())
        source = partial(OwnRows, rows=self.rows, bound=bound, reader=self._reader)
        return TrainerProcess(context, self.versions, source, TrainerOptions(lanes=self.lanes))

    def train(self, progress: Callable[[float], None], recorder: PredictionRecorder | None = None) -> Outcome:
        """Train on all samples of the log; `recorder` receives the predictions by sample."""
        training = self.trainer()
        training.quality.recorder = recorder
        behind = max(1, training.lag())
        done = threading.Event()

        def report_progress() -> None:
            while not done.wait(POLL_S):
                progress(1 - training.lag() / behind)

        reporter = threading.Thread(target=report_progress, name="progress", daemon=True)
        reporter.start()
        began = time.perf_counter()
        try:
            training.run_to_the_end()
        finally:
            seconds = time.perf_counter() - began
            done.set()
            reporter.join()
        progress(1.0)
        samples = training.trainer.progress.samples
        return Outcome(
            samples=samples,
            seconds=seconds,
            lanes=training.lanes,
            measures=training.quality.summary()["training"],
            stages={"train": samples / seconds if seconds else 0.0},
            windows=self._windows(),
            outliers=training.quality.outliers,
        )

    def _windows(self) -> list[Mapping[str, Any]]:
        at = TopicPartition(self.topics.measures, 0)
        bounds = self.log.bounds(at)
        reader, windows, position = self.log.reader(), list[Mapping[str, Any]](), bounds.start
        reader.assign({at: position})
        while position < bounds.end:
            for _, records in reader.poll(10_000, 1.0):
                windows += [orjson.loads(value) for value in records.values]
                position = records.next_offset
        reader.close()
        return windows

    def close(self) -> None:
        """Close log and stores."""
        self._cleanup.run()
