"""Requests to a model's inputs: what a request says once is decoded once, not once for each candidate.

The same programs, keys and plans as for samples (`decoder`), run over whole served events: a feature of a
field outside of the exploded array, a constant, and a cross of such, has one value a request; others have one
a candidate. In a spec that explodes no array each candidate is an event, and only constants are shared.

Letters: R requests, B candidates of all of them, D dense columns.
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

__all__ = ["DecodedRequests", "RequestDecoder"]

PART, TIME = 5, 6  # RequestSink in feature_requests.hpp


@dataclass(frozen=True, slots=True, eq=False)
class DecodedRequests:
    """Candidates of R requests, one request after the other; or, if any cannot be read, which and why."""

    size: int  # B
    request_ends: U32  # (R,) where each request's candidates end
    groups: Sequence[
        GroupKeys
    ]  # of a shared feature one occurrence (or list) a request, else one a candidate
    shared: Sequence[U8]  # per group (F_g,) 1 for features of the request
    dense: F32  # (B, D) as in `Decoded`
    bad: I64  # indexes of records that could not be decoded; if there are any, nothing else is filled
    why: Sequence[str] = ()  # for each of them, where and why


class RequestDecoder:
    """Decodes events to be ranked, of one spec and one schema. Thread-safe after construction."""

    def __init__(self, spec: Spec, layout: Layout, schema: Record) -> None:
        """`schema`: of the events; fields may be null. Raises ConfigError if the spec does not fit it."""
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
        """Native code that decodes requests and scores them in one call; None if some of the decoding is
        Python, as a transform of the user's.

        Args:
            tables: of each feature of each store group.
            score: steps of the score, see ScoreStep in request_scorer.hpp.
        """
        if self._steps:
            return None
        shared = [flags.tolist() for flags in self._shared]
        return _native.RequestScorer(self._plan, self._program.native, tables, shared, score, buckets)

    def decode(self, events: BytesColumn, counts: U32) -> DecodedRequests:
        """Decode the events of R requests, written by the schema, as they are served.

        Args:
            events: an event a request, or (in a spec that explodes no array) one a candidate.
            counts: (R,) candidates of each request.

        Raises:
            ValueError: events and counts do not agree.
        """
        made = _native.decode_requests(self._plan, self._program.native, events.data, events.ends, counts)
        size, groups, list_ends, dense, failures = made
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
    """On which side of the exploded array things stand."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self._stream = spec, spec.events.served
        self.time_in_element = self._within(self._stream.time.path)
        self.parts_in_element = [self._within(path) for path in self._stream.key]

    def _within(self, path: str) -> bool:
        explode = self._stream.explode
        return explode is None or path == explode or path.startswith(f"{explode}.")

    def in_element(self, f: Feature) -> bool:
        """Whether a feature may differ from candidate to candidate."""
        if f.kind == "time":
            return self.time_in_element
        if f.serve_as is not None:
            return False
        if f.kind == "cross":
            return any(self.in_element(self._spec.feature(name)) for name in f.parts)
        return f.field is not None and self._within(f.field)

    def envelope(self) -> list[Want]:
        """What an event needs beside features: all parts of its key, and its time."""
        stream = self._stream
        parts = [
            Want(path, PART, k, IDENTITIES, "events.served.key", symbols="texts")
            for k, path in enumerate(stream.key)
        ]
        return [*parts, time_want(stream, TIME)]
