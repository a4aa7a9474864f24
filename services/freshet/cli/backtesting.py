"""Learning from files of ready samples, once, in order, through the same log and trainer as live events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from freshet.cli.keeping import folder_of_a_pass
from freshet.cli.pipeline import Outcome, Pipeline
from freshet.errors import BadInput
from freshet.features import take
from freshet.features.blocks import MAX_SAMPLES, encode_blocks
from freshet.features.columns import encode_columns, schema_of_columns
from freshet.recordings.files import SampleRows, read_samples
from freshet.spec import Spec
from freshet.types import I64, U64, Append, BytesColumn

__all__ = ["backtest"]

DAY_MS = 86_400_000


def backtest(
    spec: Spec,
    files: Sequence[str | Path],
    *,
    request: str | None = None,
    lanes: int | None = None,
    keep: str | Path | None = None,
    window_ms: int = DAY_MS,
    progress: Any = None,
) -> Outcome:
    """One progressive pass over files of ready samples, through the same log, trainer and measures as live
    events.

    Args:
        files:    csv, csv.gz or parquet, in time order; columns named as the spec's fields and labels.
        request:  column whose equal values mark rows that were served together.
        lanes:    1 gives the same result each time; without it, as live.
        keep:     new or empty folder for log, rows and versions; without it they are deleted at the end.
        window_ms: length of a window of measures, in event time.
        progress: called with the share that is trained, from 0 to 1.

    Returns the measures over all samples and of every window; see `freshet.cli.pipeline.Outcome`.
    Raises ConfigError if a column is missing, BadInput if a file cannot be read.
    """
    spec = replace(spec, train=replace(spec.train, measure_window_ms=window_ms))
    with folder_of_a_pass(keep) as folder:
        pipeline = Pipeline.of_samples(spec, folder, lanes)
        try:
            began = time.perf_counter()
            written = _write(pipeline, [Path(f) for f in files], request)
            if not written:
                raise BadInput(f"{', '.join(map(str, files))}: expected samples, found none with a label")
            wrote_s = time.perf_counter() - began
            outcome = pipeline.train(progress or (lambda share: None))
            return replace(outcome, stages={"encode and append": written / wrote_s, **outcome.stages})
        finally:
            pipeline.close()


@dataclass(slots=True)
class _Turn:
    """The partition that the next block goes to: in turn, so that lanes keep close to the order of the
    file."""

    partition: int = 0


def _write(pipeline: Pipeline, files: Sequence[Path], request: str | None) -> int:
    """Append all rows as blocks of samples; returns how many samples."""
    spec, turn, total = pipeline.spec, _Turn(), 0
    schema_id: int | None = None
    for rows in read_samples(spec, files, request):
        schema = schema_of_columns(rows.columns, "sample")
        payloads = encode_columns(rows.columns, schema, len(rows))
        schema_id = pipeline.registry.register(schema)
        blocks, samples = _blocks(spec, rows, payloads, schema_id)
        total += samples
        places = (np.arange(len(blocks)) + turn.partition) % spec.partitions
        turn.partition = int(places[-1] + 1) % spec.partitions if len(blocks) else turn.partition
        pipeline.writer.append(
            [
                Append(pipeline.topics.samples, p, take(blocks, np.flatnonzero(places == p)))
                for p in range(spec.partitions)
                if (places == p).any()
            ]
        )
    return total


def _blocks(spec: Spec, rows: SampleRows, payloads: BytesColumn, schema_id: int) -> tuple[BytesColumn, int]:
    """Samples (a row for each label that it teaches), cut into blocks that split no request."""
    labels = len(spec.labels)
    known = np.stack([rows.labels[label.name][1] for label in spec.labels], axis=1)  # (N, L)
    values = np.stack([rows.labels[label.name][0] for label in spec.labels], axis=1)
    row, label = np.nonzero(known)
    requests = rows.requests[row]
    if len(row) != len(rows) or labels > 1:
        payloads = take(payloads, row)
    return encode_blocks(
        schema_id,
        sample_ids=(row + rows.first_row) * labels + label,
        event_times_ms=rows.times_ms[row],
        request_ids=requests,
        values=values[row, label],
        weights=np.ones(len(row), np.float32),
        labels=label.astype(np.uint8),
        payloads=payloads,
        block_ends=block_ends(requests),
    ), len(row)


def block_ends(requests: U64) -> I64:
    """Where blocks end: after at most MAX_SAMPLES samples, never within a request."""
    edges = np.flatnonzero(np.diff(requests)) + 1  # samples before each change of request
    edges = np.append(edges, len(requests)) if len(requests) else edges
    ends: list[int] = []
    start = 0
    while start < len(requests):
        fits = int(np.searchsorted(edges, start + MAX_SAMPLES, side="right")) - 1
        if fits < 0 or edges[fits] <= start:  # one request alone is larger than a block
            fits = int(np.searchsorted(edges, start, side="right"))
        start = int(edges[fits])
        ends.append(start)
    return np.array(ends, np.int64)
