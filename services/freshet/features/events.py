"""Extractor of columns from events, for joiner and gateway: identities, times, spans to splice, values for
conditions.

An impression's identity is a 128-bit hash of the parts of its key, equal across streams and schemas: the
served event's `["request_id", "items.id"]` equals the action's `["reqId", "item.id"]` if the values are
equal. Int and long of one value are equal, and so are a string, bytes and an enum's symbol of one text. An
integer and its decimal string differ: the streams of a spec must agree on the type.

Letters: N records, E good events, M impressions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from freshet import _native
from freshet.config.avro.schema import Array, Primitive, Record, Union, Written, field_at, is_null, spell
from freshet.config.avro.types import leaf_names
from freshet.config.spec.inputs import UNIT_NS, unit_hint
from freshet.config.spec.model import Stream
from freshet.config.spec.schemas import wrong_unit
from freshet.errors import ConfigError
from freshet.features.blocks import take
from freshet.features.program import NUMBERS, TEXTS, WHY_TIME, Want, compile_program, explain_all
from freshet.types import F64, I64, U64, Bool, BytesColumn

PART, TIME, ID, NUMBER, HASH, INT = range(6)  # EventSink in feature_events.hpp
UNITS = {"s": 0, "ms": 1, "us": 2, "iso": 3, "ns": 4, "days": 5}
YEAR_2100_MS = 4_102_444_800_000
IDENTITIES = TEXTS | {"int", "long"}


@dataclass(frozen=True, slots=True, eq=False)
class EventColumn:
    """One field of the events, with a value for each impression."""

    values: F64 | I64 | U64
    """(M,) numbers (booleans 0 or 1; int64 if the reader's type is int or long), or `hash_text` of texts; 0
    where null."""
    null: Bool  # (M,)


@dataclass(frozen=True, slots=True, eq=False)
class EventColumns:
    """M impressions (or actions) of E good events; an exploded event has one for each element."""

    events: I64  # (E,) index of the record in the input, ascending
    request_keys: BytesColumn
    """(E,) first part of the key as text (integers in decimal): the record's key on the log."""
    event_index: I64  # (M,) index of the record in the input
    impression: U64  # (M, 2) identity of the impression: 128-bit hash of its key's parts
    request: U64  # (M,) 64-bit hash of the key's first part
    event_id: U64
    """(M, 2) identity of the event: hash of its id field and the element's position, or of its content if the
    stream has no id."""
    times_ms: I64  # (M,) event time
    spans: I64  # (M, 6) [start, end) of prefix, element and suffix as positions in the input's `data`
    columns: Mapping[str, EventColumn]  # path -> values
    bad: I64  # indexes of records that could not be read, ascending
    why: Sequence[str]  # place and reason of each bad record

    def __len__(self) -> int:
        return len(self.event_index)

    def samples(self, values: BytesColumn) -> BytesColumn:
        """Splice the (M,) sample payloads, prefix + element + suffix, from the (N,) extracted records."""
        return BytesColumn(*_native.splice(values.data, self.spans))


class EventExtractor:
    """Extractor for events of one stream, written by one schema. Thread-safe."""

    def __init__(
        self,
        stream: Stream,
        written: Written,
        columns: Sequence[str] = (),
        *,
        reader: Record | None = None,
        checked: Mapping[str, bool] | None = None,
    ) -> None:
        """Compile the program for a writer's schema.

        Args:
            stream: Names the fields of the envelope.
            written: Writer's schema of the events.
            columns: Paths of further scalar fields to extract.
            reader: The spec's schema of the stream, to which paths refer; None uses the writer's.
            checked: Paths of fields that are decoded later, with whether they are read as ids: an event is
                refused if one of them cannot be read so as the reader's schema.

        Raises:
            ConfigError: The reader's schema lacks a field or has it with an unsuitable type, or the writer's
                schema does not resolve to it.
        """
        self.columns = tuple(dict.fromkeys(columns))
        where = f"schema {spell(written)!r} of the {stream.role} events"
        if reader is None:
            if not isinstance(written, Record):
                raise ConfigError(
                    where, "type", spell(written), '"record"', "an event is a record of named fields"
                )
            reader = written
        schema = reader
        explode = stream.explode
        if explode is not None and not isinstance(field_at(schema, explode, where).type, Array):
            raise ConfigError(
                where, explode, spell(field_at(schema, explode).type), "an array, which `explode` names"
            )
        if _inside(stream.key[0], explode):
            raise ConfigError(
                f"events.{stream.role}",
                "key",
                list(stream.key),
                f"a first part outside {explode!r}",
                "the key's first part is the request: it decides the partition of the whole event",
            )
        wrong = wrong_unit(field_at(schema, stream.time.path, where).type, stream.time)
        if wrong is not None:
            written_so = f"{stream.time.path}:{stream.time.unit}"
            raise ConfigError(f"events.{stream.role}", "time", written_so, *wrong)
        kinds = [_column_kind(schema, path, explode, where) for path in self.columns]
        wants = [
            Want(path, PART, k, IDENTITIES, f"events.{stream.role}.key", symbols="texts")
            for k, path in enumerate(stream.key)
        ]
        wants.append(time_want(stream, TIME))
        if stream.id is not None:
            wants.append(Want(stream.id, ID, 0, IDENTITIES, f"events.{stream.role}.id", symbols="texts"))
        for c, (path, kind) in enumerate(zip(self.columns, kinds, strict=True)):
            wants.append(Want(path, kind, c, TEXTS if kind == HASH else NUMBERS, "a condition on events"))
        self._integers = {path for path, kind in zip(self.columns, kinds, strict=True) if kind == INT}
        self._program = compile_program(
            written, wants, reader=schema, explode=explode, checked=checked, where=where
        )
        raw = [replace(want, slot=UNITS["ns"], unit_ns=None) if want.kind == TIME else want for want in wants]
        self._raw_time = cache(
            partial(
                compile_program, written, raw, reader=schema, explode=explode, checked=checked, where=where
            )
        )
        self._stream = stream
        self._plan = _native.event_plan(
            explode is not None,
            stream.id is not None,
            _inside(stream.time.path, explode),
            _inside(stream.id or "", explode),
            [_inside(path, explode) for path in stream.key],
            [kind != NUMBER for kind in kinds],  # 64 bits: a hash, or an integer
            [_inside(path, explode) for path in self.columns],
        )

    @property
    def native(self) -> tuple[_native.EventPlan, _native.Program]:
        """Plan and program, for other native calls of this package."""
        return self._plan, self._program.native

    def extract(self, values: BytesColumn, *, framed: bool) -> EventColumns:
        """Extract N records.

        Args:
            values: (N,) Avro records of this extractor's schema.
            framed: Each record starts with a Confluent frame, which spans leave out. Its id is ignored:
                group records by schema first (`rows_by_id`).

        Returns:
            Columns; `bad` has the indexes of records that cannot be read or lack a part of the envelope.
        """
        result = _native.extract_events(self._plan, self._program.native, values.data, values.ends, framed)
        events, request_keys, index, impression, request, event_id, times, spans, columns, failures = result
        return EventColumns(
            events=events,
            request_keys=BytesColumn(*request_keys),
            event_index=index,
            impression=impression,
            request=request,
            event_id=event_id,
            times_ms=times,
            spans=spans,
            columns={
                path: EventColumn(
                    found.view(np.int64) if path in self._integers else found, null.view(np.bool_)
                )
                for path, (found, null) in zip(self.columns, columns, strict=True)
            },
            bad=failures[:, 0].copy(),
            why=self._explained(values, failures, framed=framed),
        )

    def _explained(self, values: BytesColumn, failures: I64, *, framed: bool) -> list[str]:
        """Describe failures; add the likely unit for a time out of range."""
        why = explain_all(failures, [self._program])
        odd = [i for i, reason in enumerate(why) if WHY_TIME in reason]
        if not odd or self._stream.time.unit == "iso":
            return why
        rows = failures[odd, 0]
        some = take(values, rows)
        result = _native.extract_events(self._plan, self._raw_time().native, some.data, some.ends, framed)
        index, times = result[2], result[6]  # read as nanoseconds, no number is out of range
        tick_ns = UNIT_NS[self._stream.time.unit]
        firsts = dict(reversed(list(zip(index.tolist(), times.tolist(), strict=True))))
        for at, millions in firsts.items():
            hint = unit_hint(self._stream.time, self._stream.role, millions * tick_ns, YEAR_2100_MS)
            why[odd[at]] += hint
        return why


def time_want(stream: Stream, kind: int) -> Want:
    """Return the want for the event's time, a sink of this kind with the unit as its slot."""
    unit = stream.time.unit
    takes = frozenset({"string"}) if unit == "iso" else NUMBERS - {"boolean"}
    name = f"events.{stream.role}.time ({unit})"
    return Want(stream.time.path, kind, UNITS[unit], takes, name, unit_ns=UNIT_NS.get(unit))


def _inside(path: str, explode: str | None) -> bool:
    return explode is not None and (path == explode or path.startswith(f"{explode}."))


def _column_kind(schema: Record, path: str, explode: str | None, where: str) -> int:
    found = field_at(schema, path, where).type
    found = found.items if path == explode and isinstance(found, Array) else found
    names = leaf_names(found)
    if names and all(
        is_null(b) or (isinstance(b, Primitive) and b.name in ("int", "long"))
        for b in (found.branches if isinstance(found, Union) else (found,))
    ):
        return INT
    if names and names <= NUMBERS:
        return NUMBER
    if names and names <= TEXTS:
        return HASH
    raise ConfigError(where, path, spell(found), "a number, or a text, for a condition on events")
