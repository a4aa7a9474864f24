"""Files of ready samples as Avro samples, in pieces, for backtests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from freshet.config.avro.schema import Record
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.errors import BadInput
from freshet.features import Decoded, SampleDecoder, take
from freshet.recordings.event_times import EventTimes
from freshet.recordings.sample_files import SampleRows, read_samples
from freshet.types import F32, I64, U8, U64, BytesColumn


@dataclass(frozen=True, slots=True, eq=False)
class ReadySamples:
    """N samples, one for each known label of a row, in the order of the rows."""

    schema: Record
    payloads: BytesColumn  # (N,) Avro of `schema`, without framing
    sample_ids: I64  # (N,)
    times_ms: I64  # (N,)
    requests: U64  # (N,) equal for samples that were served together
    values: F32  # (N,)
    labels: U8  # (N,)
    share: float  # part of the files that is read, 0 to 1

    def __len__(self) -> int:
        return len(self.sample_ids)


def ready_samples(
    spec: Spec, files: Sequence[Path], request: str | None, seen: EventTimes | None = None
) -> Iterator[ReadySamples]:
    """Yield the samples of the files, tens of thousands at a time, and collect their times in `seen`. Raises
    the errors of `read_samples`."""
    for rows in read_samples(spec, files, request, seen):
        yield _taught(spec, rows)


class ReadySampleDecoder:
    """Decodes the samples of one pass."""

    def __init__(self, spec: Spec) -> None:
        self._schemas: list[Record] = []
        self._decoder = SampleDecoder(spec, layout_of(spec), self._schemas.__getitem__)

    def decode(self, samples: ReadySamples) -> Decoded:
        """Return the columns of the samples. Raises BadInput if one cannot be decoded."""
        if samples.schema not in self._schemas:
            self._schemas.append(samples.schema)
        schema_id = self._schemas.index(samples.schema)
        decoded = self._decoder.decode(samples.payloads, schema_id, samples.times_ms)
        if len(decoded.bad):
            raise BadInput(f"sample {int(samples.sample_ids[decoded.bad[0]])}: {decoded.why[0]}")
        return decoded


def with_window_emission(spec: Spec) -> Spec:
    """Return the spec without early emission: ready samples are learned in the order of their rows."""
    return replace(spec, join=replace(spec.join, emit="window"))


def sample_times(spec: Spec) -> EventTimes:
    """Return an empty collector of the times of ready samples."""
    time = spec.events.served.time
    return EventTimes(f"{time.path}:{time.unit}", time.unit)


def _taught(spec: Spec, rows: SampleRows) -> ReadySamples:
    labels = len(spec.labels)
    known = np.stack([rows.labels[label.name][1] for label in spec.labels], axis=1)  # (rows, L)
    values = np.stack([rows.labels[label.name][0] for label in spec.labels], axis=1)
    if labels == 1 and known.all():
        first = rows.first_row
        return ReadySamples(
            schema=rows.schema,
            payloads=rows.payloads,
            sample_ids=np.arange(first, first + len(rows)),
            times_ms=rows.times_ms,
            requests=rows.requests,
            values=values[:, 0],
            labels=np.zeros(len(rows), np.uint8),
            share=rows.share,
        )
    row, label = np.nonzero(known)
    return ReadySamples(
        schema=rows.schema,
        payloads=take(rows.payloads, row),
        sample_ids=(row + rows.first_row) * labels + label,
        times_ms=rows.times_ms[row],
        requests=rows.requests[row],
        values=values[row, label],
        labels=label.astype(np.uint8),
        share=rows.share,
    )


def block_ends(requests: U64, most: int, before: int = 0) -> I64:
    """Return the (B,) int64 ends of blocks, or batches, of at most `most` samples that do not split requests.

    `requests`: (N,) uint64; `before`: number of earlier samples of the pass. See `choose_ends`.
    """
    if not len(requests):
        return np.empty(0, np.int64)
    return choose_ends(np.append(np.flatnonzero(np.diff(requests)) + 1, len(requests)), most, before)


def choose_ends(edges: I64, most: int, before: int = 0) -> I64:
    """Choose ends of pieces among the rising `edges`, (E,) int64; return them, (B,) int64.

    Each piece is as long as possible: at most `most`, and at most one sample longer than all before it, as in
    the label-delay warm-up. Only two edges that are further apart make a longer piece.
    """
    kept: list[int] = []
    start = at = 0
    while at < len(edges):
        fits = int(np.searchsorted(edges, start + min(most, before + start + 1), side="right")) - 1
        at = max(fits, at)
        start = int(edges[at])
        kept.append(start)
        at += 1
    return np.array(kept, np.int64)
