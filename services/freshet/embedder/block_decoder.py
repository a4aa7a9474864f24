"""The decoder of sample blocks; it refuses invalid samples and keeps the others (PROTOCOL 3).

Refused samples and blocks go to `<model>.refused` and are counted by reason.

Letters: B good samples, N samples.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.avro.schema import Record
from freshet.config.spec.rules import Bounds, bounds_text, within
from freshet.config.spec.topics import LEAST_TOPIC_BYTES
from freshet.embedder.core import rows_of_blocks
from freshet.errors import Corrupt, Unavailable
from freshet.features import BlockColumns, Decoded, SampleDecoder, read_blocks
from freshet.log import Writer
from freshet.log.records import letter
from freshet.log.schema_ids import SchemaRegistry
from freshet.log.topics import ModelContext
from freshet.observability.metrics import Metric
from freshet.types import F32, I64, U8, U64, Append, Bool, BytesColumn

log = structlog.get_logger("freshet.embedder")

Places = tuple[tuple[int, I64], ...]
"""The origin of a batch's blocks: (partition, offsets of its blocks), in the order of the blocks."""

MOST_PAYLOAD_BYTES = 64 << 10
"""The most bytes of a refused block in its dead letter, which names the block's partition and offset."""


REFUSALS = ("unreadable", "no_schema", "damaged", "label", "label_value", "transform")
"""Reasons of refusals: the bytes do not match the schema; the block's schema is unknown or lacks a field of
the spec; the block fails its checks; the spec has no such label; the label's value is not finite or outside
its bounds; a transform of the spec raises an error."""

BAD_IN_A_ROW = 100
"""Refused samples without a good one between them, from which on the process is not ready."""

LOG_AGAIN_S = 60.0
"""Seconds between two log lines of one reason."""


@dataclass(slots=True)
class RefusedSamples:
    """Writes refused samples to the log and counts them. Thread-safe; the lanes of a process share it."""

    write: Callable[[list[bytes]], None]  # JSON records for `<model>.refused`; durable when it returns
    monotonic: Callable[[], float]  # seconds
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _counts: Counter[str] = field(default_factory=Counter)
    _in_a_row: int = 0
    _last: str = ""
    _logged_s: dict[str, float] = field(default_factory=dict)  # reason -> time of its last log line

    def refuse(self, dead_letters: list[bytes], by_reason: Mapping[str, int], example: str) -> None:
        """Write dead letters, then count their samples.

        Args:
            dead_letters: JSON records, one for each sample or block.
            by_reason: reason of REFUSALS -> samples; a damaged block counts as one.
            example: one of the reasons in full.

        Raises:
            Unavailable: the log cannot be written; nothing is counted.
        """
        self.write(dead_letters)
        now, loud = self.monotonic(), []
        with self._lock:
            self._counts.update(by_reason)
            self._in_a_row += sum(by_reason.values())
            self._last = example
            for reason in by_reason:
                if now - self._logged_s.get(reason, float("-inf")) >= LOG_AGAIN_S:
                    self._logged_s[reason] = now
                    loud.append(reason)
        for reason in loud:
            log.warning("samples were refused", why=reason, records=by_reason[reason], reason=example)

    def accept(self) -> None:
        """Record that good samples were decoded."""
        if self._in_a_row:
            with self._lock:
                self._in_a_row = 0

    def counts(self) -> dict[str, int]:
        """Return {reason: samples} for all of REFUSALS."""
        with self._lock:
            return {reason: self._counts[reason] for reason in REFUSALS}

    def trouble(self) -> str | None:
        """Return why the process is not ready, if the last BAD_IN_A_ROW samples were refused; else None."""
        with self._lock:
            if self._in_a_row < BAD_IN_A_ROW:
                return None
            return f"the last {self._in_a_row} samples were all refused: {self._last}"


def refused_metrics(role: str) -> tuple[Metric, ...]:
    """Return the metrics of refused samples for a role."""
    return (
        Metric(
            f"freshet_{role}_refused",
            "counter",
            "samples",
            "Samples that could not be decoded and went to the topic of refused events, by this process; "
            "after a restart some count again. Reasons: unreadable (the bytes do not match the schema); "
            "no_schema (the block's schema is unknown or lacks a field of the spec); damaged (the block "
            "fails its checks, counted as one); label (the spec has no such label); label_value (not finite, "
            "or outside the label's bounds); transform (one of the spec raises an error).",
            ("reason",),
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class DecodedBatch:
    """The B good samples of a batch; all columns are in the same order."""

    columns: Decoded
    sample_ids: I64
    request_ids: U64
    event_times_ms: I64
    label_index: U8
    label_value: F32
    weight: F32
    block_ends: I64 | None = None  # (blocks,) good samples up to and with each block


@dataclass(slots=True)
class _DeadLetters:
    """The dead letters of one batch, and the counts of their samples by reason."""

    places: list[tuple[int, int]]  # (partition, offset) of each block; empty: write none
    time_ms: int
    records: list[bytes] = field(default_factory=list)
    by_reason: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def add(self, block: int, kind: str, word: str, reason: str, payload: bytes, **more: Any) -> None:
        """Add a refused sample, or a block of `samples` samples."""
        self.by_reason[word] += more.get("samples", 1)
        self.example = self.example or reason
        if not self.places:
            return
        partition, offset = self.places[block]
        record = {
            "v": 1,
            "kind": kind,
            "partition": partition,
            "offset": offset,
            **more,
            "reason": reason,
            "why": word,
            "time_ms": self.time_ms,
        }
        if len(payload) > MOST_PAYLOAD_BYTES:
            record |= {"size": len(payload), "left_out_bytes": len(payload) - MOST_PAYLOAD_BYTES}
        self.records.append(letter(record, payload[:MOST_PAYLOAD_BYTES], max_bytes=LEAST_TOPIC_BYTES))


class BlockDecoder:
    """Decodes the blocks of a lane's batches. Not thread-safe."""

    def __init__(
        self,
        decoder: SampleDecoder,
        labels: int,
        refuse: RefusedSamples | Callable[[list[bytes]], None],
        clock: Clock = SYSTEM_CLOCK,
        bounds: Mapping[int, Bounds] | None = None,
    ) -> None:
        """Decode with `decoder` the samples of a spec with `labels` labels.

        Args:
            decoder: the native decoder.
            labels: labels of the spec.
            refuse: writes JSON records to the topic of refused events; they are durable when it returns.
            clock: for the time of dead letters.
            bounds: {number of a label: bounds of its values}.
        """
        self._bounds = bounds or {}
        self._decoder, self._labels, self._clock = decoder, labels, clock
        self._refused = (
            refuse if isinstance(refuse, RefusedSamples) else RefusedSamples(refuse, clock.monotonic)
        )
        self._schema_id: int | None = None  # of the last blocks
        self._unfit: dict[int, str] = {}  # schema id -> why it cannot be decoded

    def decode(self, blocks: BytesColumn, places: Places = ()) -> DecodedBatch:
        """Decode the good samples of a batch and refuse the others.

        A sample is refused by (partition, offset, index in the block), a block that cannot be read by
        (partition, offset). The caller applies the batch's ranges in any case, so offsets advance.

        Args:
            blocks: (blocks,) records of `samples`.
            places: where they lie; without it no dead letters are written.

        Raises:
            Unavailable: the log cannot be read for a schema, or cannot accept the dead letters; retry later.
        """
        usual = self._decode_usual(blocks)
        if usual is not None:
            self._refused.accept()
            return usual
        return self._decode_any(blocks, places)

    def peek(self, blocks: BytesColumn) -> Decoded | None:
        """Return the columns of blocks that `decode` is given later; refuses and counts nothing. Any thread.

        None if one is damaged or of another schema than the last blocks, or a sample cannot be decoded.
        """
        usual = self._decode_usual(blocks)
        return None if usual is None else usual.columns

    def _decode_usual(self, blocks: BytesColumn) -> DecodedBatch | None:
        """Decode valid blocks of the last schema in one native call; None for any others."""
        if self._schema_id is None:
            return None
        try:
            built = self._decoder.decode_usual(blocks, self._schema_id)
        except (Unavailable, MemoryError):
            raise
        except Exception:  # for example of a transform: `_decode_any` finds the samples
            return None
        if built is None or int(built[1].labels.max(initial=0)) >= self._labels:
            return None
        columns, of = built
        counts = rows_of_blocks(blocks)  # exact for valid blocks
        if not self._allowed(of.labels, of.values).all():
            return None
        ends = counts.cumsum()
        if len(ends) and ends[-1] != columns.size:
            return None
        return DecodedBatch(
            columns, of.sample_ids, of.request_ids, of.event_times_ms, of.labels, of.values, of.weights, ends
        )

    def _decode_any(self, blocks: BytesColumn, places: Places) -> DecodedBatch:
        """Decode any blocks; see `decode`."""
        letters = _DeadLetters(
            [(p, offset) for p, offsets in places for offset in offsets.tolist()], self._clock.now_ms()
        )
        read, numbers = self._read(blocks, letters)
        good = self._refuse_unknown(read, numbers, letters)
        columns, decoded = self._decoded(read, good, numbers, letters)
        if letters.by_reason:
            self._refuse(letters)
        if len(decoded):
            self._refused.accept()
        return DecodedBatch(
            columns=columns,
            sample_ids=read.sample_ids[decoded],
            request_ids=read.request_ids[decoded],
            event_times_ms=read.event_times_ms[decoded],
            label_index=read.labels[decoded],
            label_value=read.values[decoded],
            weight=read.weights[decoded],
            block_ends=numbers[read.block_of[decoded]].searchsorted(np.arange(len(blocks)), side="right"),
        )

    def _refuse(self, letters: _DeadLetters) -> None:
        if letters.places:
            self._refused.refuse(letters.records, letters.by_reason, letters.example)

    def _read(self, blocks: BytesColumn, letters: _DeadLetters) -> tuple[BlockColumns, I64]:
        """Read blocks, one by one if some are damaged; returns the good ones and their indexes."""
        try:
            return read_blocks(blocks), np.arange(len(blocks))
        except Corrupt:
            pass
        kept = []
        for i, block in enumerate(blocks):
            try:
                read_blocks(BytesColumn.of([block]))
            except Corrupt as error:
                letters.add(i, "block", "damaged", str(error), block)
            else:
                kept.append(i)
        return read_blocks(BytesColumn.of([blocks[i] for i in kept])), np.array(kept, np.int64)

    def _refuse_unknown(self, read: BlockColumns, numbers: I64, letters: _DeadLetters) -> I64:
        """Refuse samples with an unknown schema, label or value; returns the indexes of the others."""
        good = np.ones(len(read), np.bool_)
        firsts = np.cumsum(read.counts) - read.counts
        ids = read.schema_ids[firsts] if len(read) else read.schema_ids
        unfit = {int(i): why for i in np.unique(ids) if (why := self._why_unfit(int(i))) is not None}
        for block, (schema_id, first, count) in enumerate(
            zip(ids.tolist(), firsts.tolist(), read.counts.tolist(), strict=True)
        ):
            if schema_id in unfit:
                good[first : first + count] = False
                payload = read.payloads.slice(first, first + count).data.tobytes()
                letters.add(
                    int(numbers[block]),
                    "block",
                    "no_schema",
                    unfit[schema_id],
                    payload,
                    samples=count,
                    schema_id=schema_id,
                )
            else:
                self._schema_id = schema_id
        unknown = good & (read.labels >= self._labels)
        for i in np.flatnonzero(unknown).tolist():
            reason = f"label {int(read.labels[i])}, but the spec has {self._labels} labels"
            self._refuse_sample(read, i, "label", reason, numbers, letters)
        good &= ~unknown
        wrong = good & ~self._allowed(read.labels, read.values)
        for i in np.flatnonzero(wrong).tolist():
            bounds = self._bounds.get(int(read.labels[i]))
            expected = "a finite number" if bounds is None else bounds_text(bounds)
            reason = f"label {int(read.labels[i])} has the value {read.values[i]:g}: expected {expected}"
            self._refuse_sample(read, i, "label_value", reason, numbers, letters)
        return np.flatnonzero(good & ~wrong)

    def _allowed(self, labels: U8, values: F32) -> Bool:
        """Return (N,) flags of samples with a finite value within the bounds of their label."""
        allowed: Bool = np.isfinite(values)
        for label, bounds in self._bounds.items():
            allowed &= (labels != label) | within(bounds, values)
        return allowed

    def _why_unfit(self, schema_id: int) -> str | None:
        """Return why samples of a schema cannot be decoded; None if they can."""
        if schema_id in self._unfit:
            return self._unfit[schema_id]
        try:
            self._decoder.program(schema_id)
        except (Unavailable, MemoryError):
            raise
        except KeyError:  # may be registered later, so it is not cached
            return f"its schema id {schema_id} is not in the topic of schemas"
        except Exception as error:
            self._unfit[schema_id] = str(error) or repr(error)
            return self._unfit[schema_id]
        return None

    def _decoded(
        self, read: BlockColumns, good: I64, numbers: I64, letters: _DeadLetters
    ) -> tuple[Decoded, I64]:
        """Decode samples, refusing those with errors; returns columns and indexes of the others."""
        try:
            columns = self._decode(read, good)
        except (Unavailable, MemoryError):
            raise
        except Exception as error:
            good = self._one_by_one(read, good, numbers, letters)
            try:
                columns = self._decode(read, good)
            except (Unavailable, MemoryError):
                raise
            except Exception:  # samples that fail only together
                for i in good.tolist():
                    self._refuse_sample(read, i, "transform", str(error) or repr(error), numbers, letters)
                good = good[:0]
                columns = self._decode(read, good)
        if not len(columns.bad):
            return columns, good
        for at, why in zip(columns.bad.tolist(), columns.why, strict=True):
            self._refuse_sample(read, int(good[at]), "unreadable", why, numbers, letters)
        fine: Bool = np.ones(len(good), np.bool_)
        fine[columns.bad] = False
        return replace(columns, bad=np.empty(0, np.int64), why=()), good[fine]

    def _one_by_one(self, read: BlockColumns, good: I64, numbers: I64, letters: _DeadLetters) -> I64:
        """Refuse each sample with an error in decoding, such as one of a transform; returns the others."""
        kept = []
        for i in good.tolist():
            try:
                self._decode(read, np.array([i], np.int64))
            except (Unavailable, MemoryError):
                raise
            except Exception as error:
                self._refuse_sample(read, i, "transform", str(error) or repr(error), numbers, letters)
            else:
                kept.append(i)
        return np.array(kept, np.int64)

    def _decode(self, read: BlockColumns, good: I64) -> Decoded:
        if len(good) == len(read):
            return self._decoder.decode(read.payloads, read.schema_ids, read.event_times_ms)
        payloads = BytesColumn.of([read.payloads[i] for i in good.tolist()])
        return self._decoder.decode(payloads, read.schema_ids[good], read.event_times_ms[good])

    @staticmethod
    def _refuse_sample(
        read: BlockColumns, i: int, word: str, reason: str, numbers: I64, letters: _DeadLetters
    ) -> None:
        ends = np.cumsum(read.counts)
        block = int(np.searchsorted(ends, i, side="right"))
        index = i - int(ends[block] - read.counts[block])
        letters.add(int(numbers[block]), "sample", word, reason, read.payloads[i], index=index)


class BlockDecoders:
    """Creates the decoders of a model's lanes, which share schemas and the record of refused samples."""

    def __init__(self, context: ModelContext, writer: Writer, reader: Record | None = None) -> None:
        """Append dead letters by `writer`. `reader`: see `SampleDecoder`."""
        spec, self._context = context.spec, context

        def append(dead_letters: list[bytes]) -> None:
            writer.append([Append(context.topics.refused, 0, BytesColumn.of(dead_letters))])

        self.refused = RefusedSamples(append, context.clock.monotonic)
        self._decoder = SampleDecoder(spec, context.layout, SchemaRegistry(context.log).get_now, reader)

    def __call__(self) -> BlockDecoder:
        """Return the decoder of one lane."""
        spec, clock = self._context.spec, self._context.clock
        return BlockDecoder(self._decoder, len(spec.labels), self.refused, clock, spec.bounds)
