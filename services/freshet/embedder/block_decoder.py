"""Blocks of samples to columns; what cannot be decoded is refused and the rest is kept (PROTOCOL 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.spec.rules import Bounds, bounds_text, within
from freshet.config.spec.topics import LEAST_TOPIC_BYTES
from freshet.embedder.core import rows_of_blocks
from freshet.embedder.partition_reader import RefusedSamples
from freshet.errors import Corrupt, Unavailable
from freshet.features import BlockColumns, Decoded, SampleDecoder, read_blocks
from freshet.log.dead_letters import letter
from freshet.types import F32, I64, U8, U64, Bool, BytesColumn

__all__ = ["BlockDecoder", "DecodedBatch", "Places"]

Places = tuple[tuple[int, I64], ...]
"""Where the blocks of a batch come from: (partition, offsets of its blocks), in the order of the blocks."""

LETTER_BYTES = 64 << 10
"""Bytes of a refused block that its letter holds; the rest is read at the letter's partition and offset."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedBatch:
    """The good samples of a batch; B of them, all columns in the same order."""

    columns: Decoded
    sample_ids: I64
    request_ids: U64
    event_times_ms: I64
    label_index: U8
    label_value: F32
    weight: F32
    block_ends: I64 | None = None  # (blocks,) good samples up to and with each block that was given


@dataclass(slots=True)
class _Letters:
    """Letters of one batch, and the samples that they stand for by reason."""

    places: list[tuple[int, int]]  # (partition, offset) of each block; empty: no letters are made
    time_ms: int
    records: list[bytes] = field(default_factory=list)
    by_reason: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def add(self, block: int, kind: str, word: str, reason: str, payload: bytes, **more: Any) -> None:
        """Refuse one sample, or a block of `samples` samples."""
        self.by_reason[word] += more.get("samples", 1)
        self.example = self.example or reason
        if not self.places:
            return
        partition, offset = self.places[block]
        said = {
            "v": 1,
            "kind": kind,
            "partition": partition,
            "offset": offset,
            **more,
            "reason": reason,
            "why": word,
            "time_ms": self.time_ms,
        }
        if len(payload) > LETTER_BYTES:
            said |= {"size": len(payload), "left_out_bytes": len(payload) - LETTER_BYTES}
        self.records.append(letter(said, payload[:LETTER_BYTES], max_bytes=LEAST_TOPIC_BYTES))


class BlockDecoder:
    """Decodes the blocks of a batch. One a lane: not thread-safe."""

    def __init__(
        self,
        decoder: SampleDecoder,
        labels: int,
        refuse: RefusedSamples | Callable[[list[bytes]], None],
        clock: Clock = SYSTEM_CLOCK,
        bounds: Mapping[int, Bounds] | None = None,
    ) -> None:
        """`refuse` takes JSON records for the topic of refused events; they are durable when it returns.
        `bounds` says by a label's number within which its values must lie.
        """
        self._bounds = bounds or {}
        self._decoder, self._labels, self._clock = decoder, labels, clock
        self._refused = (
            refuse if isinstance(refuse, RefusedSamples) else RefusedSamples(refuse, clock.monotonic)
        )
        self._schema_id: int | None = None  # of the last blocks
        self._unfit: dict[int, str] = {}  # schema id -> why no program can be compiled for it

    def decode(self, blocks: BytesColumn, places: Places = ()) -> DecodedBatch:
        """Decode the good samples of a batch and refuse the others.

        A sample is refused by (partition, offset, index in the block), a block that cannot be read by
        (partition, offset). The caller applies the batch's ranges whatever was refused, so offsets go on.

        Args:
            blocks: (blocks,) records of `samples`.
            places: where they lie; without it no letters are written.

        Raises:
            Unavailable: the log cannot be asked for a schema, or cannot take the letters. Try again.
        """
        usual = self._usual(blocks)
        if usual is not None:
            self._refused.accept()
            return usual
        return self._any(blocks, places)

    def _usual(self, blocks: BytesColumn) -> DecodedBatch | None:
        """Decode blocks of the same schema as the last ones in one native call; None for anything else."""
        if self._schema_id is None:
            return None
        try:
            made = self._decoder.decode_usual(blocks, self._schema_id)
        except (Unavailable, MemoryError):
            raise
        except Exception:  # a transform's, say: `_any` decodes again and finds the samples
            return None
        if made is None or int(made[1].labels.max(initial=0)) >= self._labels:
            return None
        columns, of = made
        counts = rows_of_blocks(blocks)  # of sound blocks these are the headers' own
        if not self._allowed(of.labels, of.values).all():
            return None
        ends = counts.cumsum()
        if len(ends) and ends[-1] != columns.size:
            return None
        return DecodedBatch(
            columns, of.sample_ids, of.request_ids, of.event_times_ms, of.labels, of.values, of.weights, ends
        )

    def _any(self, blocks: BytesColumn, places: Places) -> DecodedBatch:
        """As `decode`, of any blocks."""
        letters = _Letters(
            [(p, offset) for p, offsets in places for offset in offsets.tolist()], self._clock.now_ms()
        )
        read, numbers = self._read(blocks, letters)
        good = self._of_the_spec(read, numbers, letters)
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

    def _refuse(self, letters: _Letters) -> None:
        if letters.places:
            self._refused.refuse(letters.records, letters.by_reason, letters.example)

    def _read(self, blocks: BytesColumn, letters: _Letters) -> tuple[BlockColumns, I64]:
        """Read blocks one by one where some cannot be read; returns the good ones and their indexes."""
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

    def _of_the_spec(self, read: BlockColumns, numbers: I64, letters: _Letters) -> I64:
        """Indexes of samples whose schema and label are known; the others are refused."""
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
        """Which of (N,) samples have a finite value within the bounds of their label."""
        allowed: Bool = np.isfinite(values)
        for label, bounds in self._bounds.items():
            allowed &= (labels != label) | within(bounds, values)
        return allowed

    def _why_unfit(self, schema_id: int) -> str | None:
        """None, or why samples of this schema cannot be decoded."""
        if schema_id in self._unfit:
            return self._unfit[schema_id]
        try:
            self._decoder.program(schema_id)
        except (Unavailable, MemoryError):
            raise
        except KeyError:  # may be registered later: asked for again
            return f"its schema id {schema_id} is not in the topic of schemas"
        except Exception as error:
            self._unfit[schema_id] = str(error) or repr(error)
            return self._unfit[schema_id]
        return None

    def _decoded(self, read: BlockColumns, good: I64, numbers: I64, letters: _Letters) -> tuple[Decoded, I64]:
        """Decode samples; returns columns of those that can be, and their indexes."""
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
            except Exception:  # not one alone, but all together
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

    def _one_by_one(self, read: BlockColumns, good: I64, numbers: I64, letters: _Letters) -> I64:
        """Refuse each sample for which decoding raises an error, such as one of a transform; returns the
        others."""
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
        read: BlockColumns, i: int, word: str, reason: str, numbers: I64, letters: _Letters
    ) -> None:
        ends = np.cumsum(read.counts)
        block = int(np.searchsorted(ends, i, side="right"))
        index = i - int(ends[block] - read.counts[block])
        letters.add(int(numbers[block]), "sample", word, reason, read.payloads[i], index=index)
