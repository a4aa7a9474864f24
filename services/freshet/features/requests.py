"""Decoder from rank requests to a model's inputs; decodes a request's own fields once, not per candidate.

Uses the programs, keys and plans of samples (`decoder`) on whole served events. A feature of a field outside
of the exploded array, a constant, and a cross of such features have one value per request, all others one per
candidate. If the spec explodes no array, each candidate is an event, and only constants are shared.

Letters: R requests, E events, B candidates of all requests, D dense columns, F_g features of group g.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freshet import _native
from freshet.config.avro.schema import Record
from freshet.config.spec.layout import Layout
from freshet.config.spec.model import Feature, Spec
from freshet.features.decoder import GroupKeys, columns_of, steps_of
from freshet.features.events import IDENTITIES, time_want
from freshet.features.program import Compiled, Want, compile_program, explain_all
from freshet.types import F32, I64, U8, U32, BytesColumn

PART, TIME = 5, 6  # RequestSink in feature_requests.hpp


@dataclass(frozen=True, slots=True, eq=False)
class DecodedRequests:
    """Candidates of R requests, request by request; or the bad events, if there are any."""

    size: int  # B
    request_ends: U32  # (R,) end of each request's candidates
    groups: Sequence[
        GroupKeys
    ]  # one occurrence (or list) per request for shared features, else per candidate
    shared: Sequence[U8]  # per group (F_g,): 1 for features of the request
    dense: F32  # (B, D) as in `Decoded`
    bad: I64  # indexes of events that could not be decoded; if not empty, the other columns have no values
    why: Sequence[str] = ()  # place and reason of each bad event


class RequestDecoder:
    """Decoder of rank requests for one spec and one schema. Thread-safe."""

    def __init__(self, spec: Spec, layout: Layout, schema: Record) -> None:
        """Compile the program for events of `schema`. Raises ConfigError if the spec does not fit it."""
        sides = _Sides(spec)
        columns = columns_of(spec, layout)
        where = f"schema {schema.name!r} of requests"
        self._program: Compiled = compile_program(
            schema,
            [
                *(
                    w
                    for f in spec.features
                    if f.serve_as is None
                    for w in columns.wants(spec, f, schema, where)
                ),
                *sides.envelope(),
            ],
            explode=spec.events.served.explode,
            where=where,
        )
        of_column = dict.fromkeys(range(columns.explored_column + 1), False)
        of_column |= {c: sides.in_element(spec.features[f]) for f, c in columns.column_of.items()}
        of_column |= {c: sides.in_element(spec.feature(n)) for n, c in columns.segment_column.items()}
        self._plan = _native.RequestPlan(
            columns.plan(spec, layout),
            spec.events.served.explode is not None,
            sides.time_in_element,
            [of_column[c] for c in sorted(of_column)],
            [sides.in_element(spec.features[f]) for f in columns.list_of],
            [sides.in_element(spec.features[f]) for f in columns.dense_of],
            sides.parts_in_element,
        )
        self._plan.check(self._program.native)
        self._dense = columns.dense
        self._steps = steps_of(spec, layout)
        self._shared = [
            np.array([not sides.in_element(spec.features[f]) for f in group.features], np.uint8)
            for group in layout.groups
        ]

    def scorer(
        self, tables: Sequence[Sequence[int]], score: Sequence[tuple[int, float]], buckets: int
    ) -> _native.RequestScorer | None:
        """Return a native scorer, which decodes and scores requests in one call.

        Returns None if a dense column has a transform in Python.

        Args:
            tables: Table of each feature, by store group.
            score: Steps of the score, see ScoreStep in request_scorer.hpp.
            buckets: Number of buckets of the model.
        """
        if self._steps:
            return None
        shared = [flags.tolist() for flags in self._shared]
        return _native.RequestScorer(self._plan, self._program.native, tables, shared, score, buckets)

    def decode(self, events: BytesColumn, counts: U32) -> DecodedRequests:
        """Decode the events of R requests, with the spec's `serve_as` constants.

        Args:
            events: (E,) Avro records: one per request, or one per candidate if the spec explodes no array.
            counts: (R,) uint32, candidates of each request.

        Raises:
            ValueError: Events and counts do not agree.
        """
        result = _native.decode_requests(self._plan, self._program.native, events.data, events.ends, counts)
        size, groups, list_ends, dense, failures = result
        dense = dense[: size * self._dense].reshape(size, self._dense)  # 0 rows if any event is bad
        if size:
            for d, column in self._steps:
                dense[:, d] = column.run(dense[:, d])
        return DecodedRequests(
            size=size,
            request_ends=np.cumsum(counts, dtype=np.uint32),
            groups=[
                GroupKeys(keys, starts, [list_ends[i] if i >= 0 else None for i in lists])
                for keys, starts, lists in groups
            ],
            shared=self._shared,
            dense=dense,
            bad=failures[:, 0].copy(),
            why=explain_all(failures, [self._program]),
        )


class _Sides:
    """Side of the exploded array, inside or outside of its elements, of each feature and field."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self._stream = spec, spec.events.served
        self.time_in_element = self._within(self._stream.time.path)
        self.parts_in_element = [self._within(path) for path in self._stream.key]

    def _within(self, path: str) -> bool:
        explode = self._stream.explode
        return explode is None or path == explode or path.startswith(f"{explode}.")

    def in_element(self, f: Feature) -> bool:
        """Return whether a feature may differ between candidates of one request."""
        if f.kind == "time":
            return self.time_in_element
        if f.serve_as is not None:
            return False
        if f.kind == "cross":
            return any(self.in_element(self._spec.feature(name)) for name in f.parts)
        return f.field is not None and self._within(f.field)

    def envelope(self) -> list[Want]:
        """Return the wants for all parts of the event's key, and for its time."""
        stream = self._stream
        parts = [
            Want(path, PART, k, IDENTITIES, "events.served.key", symbols="texts")
            for k, path in enumerate(stream.key)
        ]
        return [*parts, time_want(stream, TIME)]
