"""From requests to predictions: encoded, decoded in serving mode, looked up, scored. One thread's; owns its
scratch memory.

Letters: B samples, L labels, U unique rows of a store group, S floats of a row, N occurrences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import orjson

from freshet.errors import BadInput
from freshet.features import Decoded, EventExtractor, GroupKeys, JsonTranscoder, SampleDecoder
from freshet.inference.explaining import FeatureRows, rows_of_feature
from freshet.inference.fields import request_schema, row_schema
from freshet.inference.oip_rows import inputs_of
from freshet.inference.versions import Scorer
from freshet.model.inputs import GroupInputs, ModelInputs
from freshet.spec.avro import Record, sample_schema
from freshet.spec.expression import compile_score
from freshet.spec.layout import layout_of
from freshet.spec.model import Spec
from freshet.tables import Plan
from freshet.types import F32, I64, U8, U32, U64, BytesColumn

__all__ = ["Lookup", "Pipeline", "Scored"]

_REQUEST, _ROW = 0, 1  # the schemas that samples of a pipeline are written by


class Lookup(Protocol):
    """What is asked of the table of rows: see `freshet.tables.Store.lookup`."""

    def lookup(
        self,
        group: int,
        keys: U64,
        tables: U8,
        bucket_starts: U32,
        out: F32,
        *,
        create: bool = True,
        found: U8 | None = None,
        touched: U32 | None = None,
    ) -> None:
        """Write rows into `out` (U, S), zeros where there is none, which were found, and when they were
        touched."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Predictions of B samples."""

    predictions: F32  # (B, L)
    scores: F32  # (B,) by the spec's score expression
    unknown: Mapping[str, int]  # feature -> values that have no row
    rows: Mapping[str, FeatureRows] | None = None  # by feature; None: not asked


class Pipeline:
    """Requests of one spec. Not thread-safe: plans are reused from request to request."""

    def __init__(self, spec: Spec, served: Record) -> None:
        """`served`: the user's schema of served events. Raises ConfigError if the spec does not fit it."""
        stream = spec.events.served
        request = request_schema(spec, served)
        self._spec, self._layout = spec, layout_of(spec)
        self.inputs = inputs_of(spec, sample_schema(served, stream.explode))
        names = [one.name for one in self.inputs]
        row = row_schema(sample_schema(served, stream.explode), names)
        schemas = {_REQUEST: sample_schema(request, stream.explode), _ROW: row}
        self._requests = JsonTranscoder(
            request, ignore_unknown=True
        )  # fields that no feature reads are logged only
        self._rows = JsonTranscoder(row)
        self._extract = EventExtractor(stream, request)
        self._decoder = SampleDecoder(spec, self._layout, schemas.__getitem__)
        self._score = compile_score(spec.serve.score)
        self._labels = [label.name for label in spec.labels]
        self._plans = [
            Plan(tables=np.array([self._table(f) for f in group.features], np.uint8), buckets=spec.buckets)
            for group in self._layout.groups
        ]

    def _table(self, feature: int) -> int:
        name = self._spec.features[feature].table
        assert name is not None, "features of a group have a table"
        return self._spec.table(name).id

    def candidates(self, events: Sequence[Mapping[str, Any]]) -> Decoded:
        """Samples of served events, one for each impression, in order.

        Raises BadInput naming the field, if an event does not fit the schema or lacks a part of its key.
        """
        encoded = _encoded(self._requests, events)
        found = self._extract.extract(encoded, framed=False)
        if len(found.bad):
            raise BadInput(f"the request cannot be read: {found.why[0]}")
        return self._decoded(found.samples(encoded), _REQUEST, found.times_ms)

    def rows(self, rows: Sequence[Mapping[str, Any]], times_ms: I64) -> Decoded:
        """Samples given field by field, with the event time of each. Raises BadInput."""
        return self._decoded(_encoded(self._rows, rows), _ROW, times_ms)

    def _decoded(self, payloads: BytesColumn, schema: int, times_ms: I64) -> Decoded:
        decoded = self._decoder.decode(payloads, schema, times_ms, serving=True)
        if len(decoded.bad):
            raise BadInput(f"the request cannot be read: {decoded.why[0]}")
        return decoded

    def score(self, samples: Decoded, table: Lookup, scorer: Scorer, *, explain: bool = False) -> Scored:
        """Predict with the rows and weights as they are now; with `explain`, say what the rows are."""
        groups: list[GroupInputs] = []
        unknown: dict[str, int] = {}
        facts: dict[str, FeatureRows] | None = {} if explain else None
        for index, keys in enumerate(samples.groups):
            groups.append(self._looked_up(index, keys, table, unknown, facts))
        predictions = scorer.score(ModelInputs(samples.size, groups, samples.dense, None))
        columns = dict(zip(self._labels, predictions.T.astype(np.float64), strict=True))
        scores = self._score.numbers(columns, samples.size)
        return Scored(predictions, scores.astype(np.float32), unknown, facts)

    def _looked_up(
        self,
        index: int,
        keys: GroupKeys,
        table: Lookup,
        unknown: dict[str, int],
        facts: dict[str, FeatureRows] | None,
    ) -> GroupInputs:
        plan, group = self._plans[index], self._layout.groups[index]
        count = plan.build(keys.keys, keys.feature_starts)
        rows = np.empty((count, group.width), np.float32)
        found = np.empty(count, np.uint8)
        touched = None if facts is None else np.empty(count, np.uint32)
        table.lookup(
            index, plan.keys, plan.tables, plan.bucket_starts, rows,
            create=False, found=found, touched=touched,
        )  # fmt: skip
        positions = plan.positions
        if facts is not None and touched is not None:
            for place, feature in enumerate(group.features):
                mine = positions[keys.feature_starts[place] : keys.feature_starts[place + 1]]
                ends = keys.list_ends[place]
                candidates = len(mine) if ends is None else len(ends)
                facts[self._spec.features[feature].name] = rows_of_feature(
                    mine, ends, found, touched, candidates
                )
        if count and not found.all():
            missing = np.append(found == 0, False)[positions]  # -1, a null, is the last: not missing
            sums = np.zeros(len(positions) + 1, np.int64)
            np.cumsum(missing, out=sums[1:])
            at = sums[keys.feature_starts].tolist()
            for feature, before, after in zip(group.features, at, at[1:], strict=False):
                if after > before:
                    unknown[self._spec.features[feature].name] = after - before
        return GroupInputs(rows, positions, keys.feature_starts, keys.list_ends)


def _encoded(transcoder: JsonTranscoder, values: Sequence[Mapping[str, Any]]) -> BytesColumn:
    made = transcoder.body(orjson.dumps(values))  # an array: its objects are the events
    if made.bad:
        first = made.bad[0]
        where = first.path if len(values) == 1 else f"{first.path or 'the whole'} of row {first.index}"
        raise BadInput(f"{where or 'the request'}: expected {first.expected}, found {first.found}")
    return made.records
