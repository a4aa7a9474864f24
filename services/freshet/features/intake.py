"""Bodies of requests to what the log takes: many bodies in one native call, no Python object per event.

A body is taken whole or not at all: one with an event that does not fit, or is dated too late, is left for a
closer look by whoever tells its client why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freshet import _native
from freshet.features.events import EventExtractor
from freshet.features.transcode import JsonTranscoder
from freshet.types import I32, I64, Append, BytesColumn

__all__ = ["EventIntake", "TakenBodies"]


@dataclass(frozen=True, slots=True, eq=False)
class TakenBodies:
    """R bodies, N events of those that are taken, spread over P partitions."""

    counts: I64  # (R,) events of each body; -1: it needs a closer look, nothing of it is here
    partitions: I32  # (N,) of each event, in the order in which they came
    positions: I64  # (N,) of each event among those of its partition
    starts: I64  # (P + 1,) where each partition's rows start in `records` and `keys`
    records: BytesColumn  # (N,) by partition; within one, in the order in which they came
    keys: BytesColumn  # (N,) likewise: the request's id as text

    @property
    def size(self) -> int:
        """Bytes of records and keys."""
        return len(self.records.data) + len(self.keys.data)

    def appends(self, topic: str) -> list[Append]:
        """One append for each partition that gets any, in the order of partitions; they share memory."""
        used = self._used.tolist()
        bounds = self.starts.tolist()
        return [
            Append(
                topic,
                p,
                self.records.slice(bounds[p], bounds[p + 1]),
                self.keys.slice(bounds[p], bounds[p + 1]),
            )
            for p in used
        ]

    def offsets(self, firsts: Sequence[int]) -> I64:
        """(N,) each event's offset. `firsts`: the first offset of each of `appends`."""
        by_partition = np.zeros(len(self.starts) - 1, np.int64)
        by_partition[self._used] = firsts
        return np.asarray(by_partition[self.partitions] + self.positions)

    def answers(self, topic: str, firsts: Sequence[int]) -> list[bytes]:
        """What each body's client is told, as JSON: every event's place in the log; b"" for bodies not taken.

        Args:
            topic: as JSON, quotes included.
            firsts: the first offset of each of `appends`.
        """
        by_partition = np.zeros(len(self.starts) - 1, np.int64)
        by_partition[self._used] = firsts
        return _native.write_acks(topic, self.counts, self.partitions, self.positions, by_partition)

    @property
    def _used(self) -> I64:
        return np.flatnonzero(np.diff(self.starts))


class EventIntake:
    """Takes bodies of one stream, written by one schema, for a topic of so many partitions. Thread-safe."""

    def __init__(
        self, extractor: EventExtractor, *, schema_id: int, partitions: int, max_events: int
    ) -> None:
        """`max_events`: of one body; one with more needs a closer look."""
        self._plan, self._program = extractor.native
        self._schema_id, self._partitions, self._max_events = schema_id, partitions, max_events

    def json(
        self, transcoder: JsonTranscoder, bodies: list[bytes], *, latest_ms: int, keep_text: bool
    ) -> TakenBodies:
        """Bodies of JSON: an object, an array of them, or one a line.

        Args:
            transcoder: to framed Avro of the schema.
            latest_ms: an event that is dated later is not taken.
            keep_text: the log takes each event's text as it came, not its Avro.
        """
        writer, prefix, ignore_unknown = transcoder.native
        made = _native.intake_json(
            self._plan, self._program, writer, bodies, ignore_unknown, prefix, keep_text,
            self._partitions, latest_ms, self._max_events,
        )  # fmt: skip
        return _taken(made)

    def avro(self, bodies: list[bytes], *, latest_ms: int, lengths: bool) -> TakenBodies:
        """Bodies of framed Avro, passed on byte for byte: a record each, or if `lengths` any number, each
        after its length (u32, big-endian)."""
        made = _native.intake_avro(
            self._plan, self._program, self._schema_id, bodies, lengths,
            self._partitions, latest_ms, self._max_events,
        )  # fmt: skip
        return _taken(made)


def _taken(made: _native.IntakeTuple) -> TakenBodies:
    counts, partitions, positions, starts, records, keys = made
    return TakenBodies(counts, partitions, positions, starts, BytesColumn(*records), BytesColumn(*keys))
