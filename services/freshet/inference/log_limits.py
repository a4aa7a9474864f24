"""Decides before scoring whether the log can take what a rank request would be logged as.

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
from freshet.config.spec.model import Spec
from freshet.config.spec.time_units import unit_hint, written_in_larger_unit
from freshet.config.spec.topics import MAX_ELEMENTS, RecordLimits
from freshet.errors import BadInput, TooLarge
from freshet.features import EventColumns, EventExtractor, JsonTranscoder
from freshet.inference.served_log import placed, places_of
from freshet.json_text import written
from freshet.types import BytesColumn

__all__ = ["Loggable", "NativeRules"]

NativeRules = tuple[_native.WriterSchema | None, _native.EventPlan | None, _native.Program | None, int]
"""Writer schema, event plan, program and latest time in ms, as `RankText.read` takes them."""

_HINT = "what is ranked is logged as an impression, and the log's schema needs this; a dry_run logs nothing"

AVRO_GROWTH = 4
"""Bytes of Avro for a byte of JSON at most, as in `1,1,1` of doubles; defaults of the schema come on top."""

_SERVED_BYTES, _KEY_BYTES = 48, 1_000
"""Of `freshet_served` without its predictions, and of a record's key."""

_WHY = re.compile(r"record \d+: ")


class Loggable:
    """Checks rank requests of one spec against the schema of the served log. Thread-safe."""

    def __init__(self, spec: Spec, served: Record, limits: RecordLimits) -> None:
        """Compile.

        Args:
            spec: names the stream, and the fields that take an item's place in the answer.
            served: the user's schema of served events.
            limits: of records that are derived from events.

        Raises:
            ConfigError: the schema does not have what the spec names.
        """
        stream = spec.events.served
        self._spec, self._places = spec, places_of(spec)
        logged = served_schema(served, stream.explode)
        self._transcoder = JsonTranscoder(logged, ignore_unknown=True)
        self._extractor = EventExtractor(stream, logged)
        self._max_ahead_ms = spec.join.max_ahead_ms
        self._limits, self._labels = limits, len(spec.labels)
        # RankText writes places after scoring, so its check has defaults in their stead.
        writer, _, _ = JsonTranscoder(
            _with_places(logged, stream.explode, self._places), ignore_unknown=True
        ).native
        self._native = (writer, *self._extractor.native)

    def is_small(self, body_bytes: int, candidates: int) -> bool:
        """Whether a request is so small that `check` need not look at the size of what is logged. Avro is at
        most about AVRO_GROWTH times its JSON, as of numbers of one digit."""
        grown = AVRO_GROWTH * body_bytes
        return (
            grown <= self._limits.event_bytes["served"] // 2
            and grown * candidates * self._labels <= self._limits.expanded_bytes
            and candidates <= MAX_ELEMENTS
        )

    def _refuse_too_large(self, records: BytesColumn, columns: EventColumns) -> None:
        """Raise TooLarge if an event, or samples of it, would exceed what the log takes."""
        limits, more = self._limits, _SERVED_BYTES + 4 * self._labels  # of `freshet_served`
        spans = columns.spans
        sizes = (spans[:, 1::2] - spans[:, ::2]).sum(axis=1) + more
        counts = np.bincount(columns.event_index, minlength=len(records))
        events = np.diff(records.ends, prepend=0) + counts * more + _KEY_BYTES
        together = np.bincount(columns.event_index, sizes, len(records)) * self._labels
        for what, found, most in (
            ("the event that is logged", events, limits.event_bytes["served"]),
            ("a sample: the context and one candidate", sizes, limits.sample_bytes),
            ("samples, which have the context each, together", together, limits.expanded_bytes),
        ):
            if int(found.max(initial=0)) > most:
                raise TooLarge(
                    f"the request: expected at most {most:,} bytes of {what}, found {int(found.max()):,}\n"
                    "  send fewer candidates a request, or a smaller context"
                )
        if int(counts.max(initial=0)) > MAX_ELEMENTS:
            raise TooLarge(f"candidates: expected at most {MAX_ELEMENTS:,}, found {int(counts.max()):,}")

    def native(self, now_ms: int) -> NativeRules:
        """The check as the native reader of plain requests makes it, for requests that come now."""
        return *self._native, now_ms + self._max_ahead_ms

    def placed(self, candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Candidates as they would be logged: in the request's order, places filled in."""
        kept = [{k: v for k, v in c.items() if k != SERVED_FIELD} for c in candidates]
        return [placed(c, place, self._places) for place, c in enumerate(kept)]

    def check(self, events: Sequence[Mapping[str, Any]], now_ms: int) -> None:
        """Check the events that a request stands for, made of `placed` candidates.

        Raises:
            BadInput: names the field that the log's schema or the joiner does not take.
            TooLarge: what would be logged, or samples of it, exceed what the log takes as one record.
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
    """The schema with a default in each field of an item that takes its place, where it has none."""
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
    """A default for a place's type. Places are integers, so the type has a number or a null first."""
    first = type_.branches[0] if isinstance(type_, Union) else type_
    return None if first == Primitive("null") else 0
