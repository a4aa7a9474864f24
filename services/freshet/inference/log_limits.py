"""Check, before scoring, that the log accepts the impression of a rank request.

The check uses the encoder of the served log and the joiner's extractor. A request that is answered with
scores therefore has an impression that the joiner can read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from freshet import _native
from freshet.config.avro.schema import (
    SERVED_FIELD,
    Array,
    AvroField,
    Primitive,
    Record,
    Type,
    Union,
    served_schema,
)
from freshet.config.spec.inputs import unit_hint, written_in_larger_unit
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import MAX_ELEMENTS, RecordLimits
from freshet.errors import BadInput, TooLarge
from freshet.features import EventColumns, EventExtractor, JsonTranscoder
from freshet.inference.served_log import placed, places_of
from freshet.json_text import written
from freshet.types import BytesColumn

__all__ = ["Loggable", "NativeRules"]

NativeRules = tuple[_native.WriterSchema | None, _native.EventPlan | None, _native.Program | None, int]
"""Writer schema, event plan, program and latest time in ms, as `RankText.read` takes them."""

_HINT = "a ranking is logged as an impression, and the log's schema needs this; a dry_run logs nothing"

AVRO_GROWTH = 4
"""Most bytes of Avro per byte of JSON, as for `1,1,1` of doubles, without defaults of the schema."""

_SERVED_BYTES, _KEY_BYTES = 48, 1_000
"""Bytes of `freshet_served` without predictions, and of a record's key."""

_WHY = re.compile(r"record \d+: ")


class Loggable:
    """Checks rank requests of one spec against the schema of the served log. Thread-safe."""

    def __init__(self, spec: Spec, served: Record, limits: RecordLimits) -> None:
        """Compile the checks. Raises ConfigError if the schema lacks a field of the spec.

        Args:
            served: the user's schema of served events.
            limits: of records that are derived from events.
        """
        stream = spec.events.served
        self._spec, self._places = spec, places_of(spec)
        logged = served_schema(served, stream.explode)
        self._transcoder = JsonTranscoder(logged, ignore_unknown=True)
        self._extractor = EventExtractor(stream, logged)
        self._max_ahead_ms = spec.join.max_ahead_ms
        self._limits, self._labels = limits, len(spec.labels)
        # RankText writes positions after scoring, so its check uses defaults for them.
        writer, _, _ = JsonTranscoder(
            _with_places(logged, stream.explode, self._places), ignore_unknown=True
        ).native
        self._native = (writer, *self._extractor.native)

    def is_small(self, body_bytes: int, candidates: int) -> bool:
        """Return whether a request is certainly within the limits of size, given AVRO_GROWTH."""
        grown = AVRO_GROWTH * body_bytes
        return (
            grown <= self._limits.event_bytes["served"] // 2
            and grown * candidates * self._labels <= self._limits.expanded_bytes
            and candidates <= MAX_ELEMENTS
        )

    def _refuse_too_large(self, records: BytesColumn, columns: EventColumns) -> None:
        """Raises TooLarge if an event or its samples would exceed the log's limits."""
        limits, more = self._limits, _SERVED_BYTES + 4 * self._labels  # of `freshet_served`
        spans = columns.spans
        sizes = (spans[:, 1::2] - spans[:, ::2]).sum(axis=1) + more
        counts = np.bincount(columns.event_index, minlength=len(records))
        events = np.diff(records.ends, prepend=0) + counts * more + _KEY_BYTES
        together = np.bincount(columns.event_index, sizes, len(records)) * self._labels
        for part, found, most in (
            ("the event that is logged", events, limits.event_bytes["served"]),
            ("a sample: the context and one candidate", sizes, limits.sample_bytes),
            ("samples, which have the context each, together", together, limits.expanded_bytes),
        ):
            if int(found.max(initial=0)) > most:
                raise TooLarge(
                    f"the request: expected at most {most:,} bytes of {part}, found {int(found.max()):,}\n"
                    "  send fewer candidates per request, or a smaller context"
                )
        if int(counts.max(initial=0)) > MAX_ELEMENTS:
            raise TooLarge(f"candidates: expected at most {MAX_ELEMENTS:,}, found {int(counts.max()):,}")

    def native(self, now_ms: int) -> NativeRules:
        """Return the rules by which the fast path makes the same check at `now_ms`."""
        return *self._native, now_ms + self._max_ahead_ms

    def placed(self, candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return candidates as they would be logged in the request's order, with positions."""
        kept = [{k: v for k, v in c.items() if k != SERVED_FIELD} for c in candidates]
        return [placed(c, place, self._places) for place, c in enumerate(kept)]

    def check(self, events: Sequence[Mapping[str, Any]], now_ms: int) -> None:
        """Check a request's events, which are made of `placed` candidates.

        Raises BadInput, with the field, if the log's schema or the joiner refuses an event, and TooLarge if
        an event or its samples exceed the log's limits.
        """
        if self._spec.events.served.explode is None:
            events = [{k: v for k, v in event.items() if k != SERVED_FIELD} for event in events]
        made = self._transcoder.body(written(events, "the request"))
        if made.bad:
            bad = made.bad[0]
            where = bad.path or "the request"
            if len(events) > 1:
                where = f"candidates[{bad.index}] with the context: {where}"
            raise BadInput(f"{where}: expected {bad.expected}, found {bad.found}; {_HINT}")
        columns = self._extractor.extract(made.records, framed=False)
        if len(columns.bad):
            raise BadInput(f"{_WHY.sub('', columns.why[0], count=1)}; {_HINT}")
        self._refuse_too_large(made.records, columns)
        if len(columns):
            self._refuse_wrong_time(int(columns.times_ms.min()), int(columns.times_ms.max()), now_ms)

    def _refuse_wrong_time(self, first_ms: int, last_ms: int, now_ms: int) -> None:
        time, latest_ms = self._spec.events.served.time, now_ms + self._max_ahead_ms
        larger = written_in_larger_unit(first_ms, time.unit, latest_ms)
        if first_ms >= 0 and last_ms <= latest_ms and not larger:
            return
        found_ms = first_ms if larger else last_ms
        raise BadInput(
            f"{time.path}: expected a time from 1970 to {self._max_ahead_ms} ms "
            f"(join.max_ahead) ahead of the server's clock, {now_ms} ms since 1970, found "
            f"{found_ms} ms; the joiner would refuse the impression"
            f"{unit_hint(time, 'served', found_ms, now_ms)}"
        )


def _with_places(logged: Record, explode: str | None, places: Sequence[str]) -> Record:
    """Add a default to each field of an item that holds its position, if it has none."""
    names = {name for name in places if "." not in name}
    if explode is None or "." in explode or not names:
        return logged

    def item(record: Record) -> Record:
        fields = [
            AvroField(f.name, f.type, True, _zero(f.type)) if f.name in names and not f.has_default else f
            for f in record.fields
        ]
        return replace(record, fields=tuple(fields))

    def changed(type_: Type) -> Type:
        if isinstance(type_, Union):
            return Union(tuple(changed(branch) for branch in type_.branches))
        if isinstance(type_, Array) and isinstance(type_.items, Record):
            return Array(item(type_.items))
        return type_

    fields = [replace(f, type=changed(f.type)) if f.name == explode else f for f in logged.fields]
    return replace(logged, fields=tuple(fields))


def _zero(type_: Type) -> Any:
    """Return a default for a position's type, the first branch of which is a number or null."""
    first = type_.branches[0] if isinstance(type_, Union) else type_
    return None if first == Primitive("null") else 0
