"""The path from requests to predictions: encode, decode in serving mode, look up, score, explain.

Letters: R requests, B samples (candidates of all requests), L labels, U unique rows of a store group,
S floats of a row, N occurrences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from freshet import _native
from freshet.config.avro.schema import Record
from freshet.config.expression import Expression, compile_score, postfix_of
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.errors import BadInput, TooLarge
from freshet.features import (
    DecodedRequests,
    GroupKeys,
    JsonTranscoder,
    RequestDecoder,
)
from freshet.inference.row_reads import RowsRead, Unread, unread_of
from freshet.inference.schemas import request_schema
from freshet.inference.versions import Scorer
from freshet.json_text import written
from freshet.model.hedge import HedgeDense
from freshet.model.inputs import GroupInputs, ModelInputs, scores_requests
from freshet.tables import PERHAPS_ON_DISK, Plan, UniqueKeys
from freshet.types import F32, I32, I64, U8, U32, Bool, BytesColumn

Unknown = dict[str, int]
"""{feature: values without a row, as new or misspelt}; a shared value counts for each candidate."""


def values_without_row(
    features: Sequence[str],
    inputs: GroupInputs,
    found: U8,
    request_ends: U32 | NDArray[Any],
    out: Sequence[Unknown],
) -> None:
    """Count values of one store group without a row, for each of R requests.

    Args:
        features: names, in the group's order.
        inputs: the looked-up group.
        found: (U,) uint8, 1 where the row exists.
        request_ends: (R,) end of each request's candidates.
        out: (R,) counts to add to.
    """
    if found.all():
        return
    missing = np.append(found == 0, False)[inputs.positions]  # -1, a null, selects the appended False
    sums = np.zeros(len(missing) + 1, np.int64)
    np.cumsum(missing, out=sums[1:])
    before = sums[inputs.feature_starts].tolist()
    shared = [0] * len(features) if inputs.shared is None else inputs.shared.tolist()
    counts = np.diff(request_ends, prepend=0).tolist()
    for f, name in enumerate(features):
        if before[f] == before[f + 1]:
            continue
        lacking = [before[f + 1] - before[f]]
        if len(out) > 1:
            lacking = _of_requests(inputs, f, request_ends, sums)
        for r, n in enumerate(lacking):
            if n:
                out[r][name] = n * counts[r] if shared[f] else n


def _of_requests(inputs: GroupInputs, f: int, request_ends: NDArray[Any], sums: I64) -> list[int]:
    """Return the (R,) values of one feature without a row; `sums` are cumulative over occurrences."""
    lists, last = inputs.list_ends[f], request_ends.astype(np.int64)
    if inputs.shared is not None and inputs.shared[f]:
        last = np.arange(1, len(last) + 1)
    if lists is not None:
        last = np.append(0, lists)[last]
    start = int(inputs.feature_starts[f])
    lacking: list[int] = np.diff(sums[start + last], prepend=sums[start]).tolist()
    return lacking


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRows:
    """Rows of one feature, by candidate."""

    known: I64  # (B,) values that have a row
    of: I64  # (B,) values: the length of a list, else 1; 0 for a null
    touched_s: I64  # (B,) newest event time that one of the rows has learned from, in seconds; 0: unknown


def rows_of_feature(
    positions: I32, list_ends: U32 | None, found: U8, touched_s: U32, candidates: int
) -> FeatureRows:
    """Aggregate a feature's occurrences by candidate.

    Args:
        positions: (N,) int32 row of each occurrence, in the order of candidates; -1: null.
        list_ends: (B,) uint32 end of each candidate's occurrences; None: one per candidate.
        found, touched_s: (U,) uint8 and uint32 of the lookup.
    """
    counts = np.ones(candidates, np.int64) if list_ends is None else np.diff(list_ends, prepend=0)
    owner = np.repeat(np.arange(candidates), counts.astype(np.int64))
    value = positions >= 0
    rows, owner = positions[value], owner[value]
    newest = np.zeros(candidates, np.int64)
    np.maximum.at(newest, owner, touched_s[rows].astype(np.int64))
    return FeatureRows(
        np.bincount(owner, found[rows], candidates).astype(np.int64),
        np.bincount(owner, minlength=candidates).astype(np.int64),
        newest,
    )


def explained(rows: Mapping[str, FeatureRows], index: int, now_ms: int) -> dict[str, dict[str, Any]]:
    """Return `rows` of one item of the answer of `/v1/rank`: {feature: known, of, age in seconds}."""
    out: dict[str, dict[str, Any]] = {}
    for name, feature in rows.items():
        touched_s = int(feature.touched_s[index])
        out[name] = {
            "known": int(feature.known[index]),
            "of": int(feature.of[index]),
            "age_s": max(0, now_ms // 1000 - touched_s) if touched_s else None,
        }
    return out


def finite(scores: F32, predictions: F32) -> Bool:
    """Return (C,) bool: whether the score (C,) of a candidate and all its predictions (C, L) are finite."""
    of_scores: Bool = np.isfinite(scores) & np.isfinite(predictions).all(axis=1)
    return of_scores


def count_not_finite(scores: F32, predictions: F32) -> int:
    """Return how many candidates are not `finite`; 3 us where all of 100 are, a third of that function's."""
    numbers = (scores, predictions)
    if all(np.count_nonzero(np.isfinite(x)) == x.size for x in numbers):
        return 0
    return len(scores) - int(finite(scores, predictions).sum())


STEPS = ("number", "label", "+", "-", "*", "negate")  # ScoreStep::Op in request_scorer.hpp
MOST_OCCURRENCES = 64 << 20
"""Bound of context values copied to each candidate: 256 MiB of positions."""

MOST_STEPS = 31
"""Bound of a native score's steps: more could need more than its stack of 16 numbers."""


class Lookup(Protocol):
    """A table of rows; see `freshet.tables.Store`."""

    def lookup(
        self,
        group: int,
        keys: UniqueKeys,
        out: F32,
        *,
        create: bool = True,
        found: U8 | None = None,
        touched: U32 | None = None,
    ) -> None:
        """Write the rows of U keys into `out` (U, S) float32, zeros if missing; see `Store.lookup`."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A request as Avro."""

    events: BytesColumn  # one, or one per candidate if the spec explodes no array
    candidates: int
    read: RowsRead | None = None  # of its rows on disk; None: they were not read yet

    @property
    def size(self) -> int:
        """Bytes that it holds while it waits."""
        return len(self.events.data)


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Predictions of B samples."""

    predictions: F32  # (B, L)
    scores: F32  # (B,) by the spec's score expression
    unknown: Mapping[str, int]  # {feature: values without a row}
    unread: Unread = frozenset()  # keys whose rows may be on disk: their scores are those of absent rows
    defaulted: Mapping[str, int] = field(default_factory=dict)  # {one of DEFAULTED_WHYS: rows}
    rows: Mapping[str, FeatureRows] | None = None  # by feature; only for `explain`


@dataclass(frozen=True, slots=True, eq=False)
class _LookedUp:
    """One store group's part of a batch."""

    inputs: GroupInputs
    found: U8  # (U,) bool
    unread: Unread
    touched: U32 | None  # (U,); only for `explain`


class Pipeline:
    """Scores requests of one spec. Not thread-safe: requests share plans."""

    def __init__(self, spec: Spec, served: Record) -> None:
        """Compile. Raises ConfigError if the spec does not fit `served`, the schema of served events."""
        request = request_schema(spec, served)
        self._spec, self._layout = spec, layout_of(spec)
        self.transcoder = JsonTranscoder(request, ignore_unknown=True)
        self._decoder = RequestDecoder(spec, self._layout, request)
        self._score = compile_score(spec.serve.score)
        self._labels = [label.name for label in spec.labels]
        self._features = [[spec.features[f].name for f in g.features] for g in self._layout.groups]
        self._names = [name for names in self._features for name in names]
        tables = [[self._table(f) for f in group.features] for group in self._layout.groups]
        self._plans = [Plan(tables=np.array(mine, np.uint8), buckets=spec.buckets) for mine in tables]
        steps = _native_steps(self._score, self._labels)
        self._native = None if steps is None else self._decoder.scorer(tables, steps, spec.buckets)
        self._lane: tuple[HedgeDense, _native.HedgeLane] | None = None  # of the version scored last

    def _table(self, feature: int) -> int:
        name = self._spec.features[feature].table
        assert name is not None, "features of a group have a table"
        return self._spec.table(name).id

    def encoded(self, events: Sequence[Mapping[str, Any]], candidates: int) -> Encoded:
        """Encode a request's served events as Avro. Raises BadInput, with the field, if one does not fit."""
        return Encoded(avro_of(self.transcoder, events), candidates)

    def requests(self, encoded: Sequence[Encoded]) -> DecodedRequests:
        """Decode the candidates of R requests; `bad` of the result names requests with an error."""
        counts = np.array([one.candidates for one in encoded], np.uint32)
        return self._decoder.decode(_joined(encoded), counts)

    def score(
        self, samples: DecodedRequests, table: Lookup, scorer: Scorer, *, explain: bool = False
    ) -> Scored:
        """Score the candidates of one request; `explain`: report existence and age of rows."""
        inputs, groups = self._inputs(samples, table, touched=explain)
        if explain or not scores_requests(scorer):
            _refuse_expanded(inputs)
            inputs = inputs.expanded()
        predictions = scorer.score(inputs)
        (unknown,) = self._unknown(samples, groups)
        facts = self._facts(inputs, groups) if explain else None
        unread = frozenset[tuple[int, int]]().union(*(group.unread for group in groups))
        return Scored(predictions, self._scores(predictions), unknown, unread, rows=facts)

    def request(self, encoded: Encoded) -> DecodedRequests:
        """Decode the candidates of one request. Raises BadInput if that fails, as if its key is null."""
        samples = self.requests([encoded])
        if len(samples.bad):
            raise unreadable(samples.why[0])
        return samples

    def score_all(self, encoded: Sequence[Encoded], table: Lookup, scorer: Scorer) -> list[Scored | BadInput]:
        """Score requests together; each result equals that of `score`, to the bit, or is its error."""
        if len(encoded) > 1 and not scores_requests(scorer):
            return [one for a in encoded for one in self.score_all([a], table, scorer)]
        natively = self._natively(encoded, table, scorer)
        if natively is not None:
            return [*natively]
        samples = self.requests(encoded)
        if len(samples.bad):
            return self._without_bad(encoded, samples, table, scorer)
        if len(encoded) == 1:
            return [self.score(samples, table, scorer)]
        inputs, groups = self._inputs(samples, table, touched=False)
        if any(group.unread for group in groups):  # which request needs which?
            return [one for a in encoded for one in self.score_all([a], table, scorer)]
        predictions = scorer.score(inputs)
        return [*_split(encoded, predictions, self._scores(predictions), self._unknown(samples, groups))]

    def _natively(self, encoded: Sequence[Encoded], table: Lookup, scorer: Scorer) -> list[Scored] | None:
        """Score in one native call; None if rows or model are not native, or a request has an error."""
        store = getattr(table, "native", None)
        if self._native is None or store is None or not isinstance(scorer, HedgeDense):
            return None
        events = _joined(encoded)
        counts = np.array([one.candidates for one in encoded], np.uint32)
        if self._lane is None or self._lane[0] is not scorer:
            self._lane = scorer, scorer.scoring_lane()
        made = self._native.score(store, scorer.native, self._lane[1], events.data, events.ends, counts)
        if made is None:
            return None
        predictions, scores, without_row, on_disk = made
        unknown: list[Unknown] = [{} for _ in encoded]
        if without_row is not None:
            for mine, row in zip(unknown, without_row.tolist(), strict=True):
                mine.update((name, n) for name, n in zip(self._names, row, strict=True) if n)
        scored = _split(encoded, predictions, scores, unknown)
        if on_disk is not None:
            requests, tables, keys = on_disk
            for r in np.unique(requests).tolist():
                of_r = requests == r
                scored[r] = replace(scored[r], unread=unread_of(tables[of_r], keys[of_r]))
        return scored

    def _without_bad(
        self, encoded: Sequence[Encoded], samples: DecodedRequests, table: Lookup, scorer: Scorer
    ) -> list[Scored | BadInput]:
        if len(encoded) == 1:
            return [unreadable(samples.why[0])]
        return [one for a in encoded for one in self.score_all([a], table, scorer)]

    def _inputs(
        self, samples: DecodedRequests, table: Lookup, *, touched: bool
    ) -> tuple[ModelInputs, list[_LookedUp]]:
        groups = [
            self._looked_up(index, keys, samples.shared[index], table, touched=touched)
            for index, keys in enumerate(samples.groups)
        ]
        inputs = [g.inputs for g in groups]
        return ModelInputs(samples.size, inputs, samples.dense, None, samples.request_ends), groups

    def _looked_up(
        self, index: int, keys: GroupKeys, shared: U8, table: Lookup, *, touched: bool
    ) -> _LookedUp:
        plan, group = self._plans[index], self._layout.groups[index]
        count = plan.build(keys.keys, keys.feature_starts)
        rows = np.empty((count, group.width), np.float32)
        found = np.empty(count, np.uint8)
        when = np.empty(count, np.uint32) if touched else None
        table.lookup(index, plan, rows, create=False, found=found, touched=when)
        inputs = GroupInputs(rows, plan.positions, keys.feature_starts, keys.list_ends, shared)
        on_disk = found == PERHAPS_ON_DISK
        found[on_disk] = 0
        return _LookedUp(inputs, found, unread_of(plan.tables[on_disk], plan.keys[on_disk]), when)

    def _scores(self, predictions: F32) -> F32:
        """Return the (B,) scores of (B, L) predictions."""
        columns = dict(zip(self._labels, predictions.T.astype(np.float64), strict=True))
        return self._score.numbers(columns, len(predictions)).astype(np.float32)

    def _unknown(self, samples: DecodedRequests, groups: Sequence[_LookedUp]) -> list[Unknown]:
        """Count values without a row for each request."""
        ends = samples.request_ends
        out: list[Unknown] = [{} for _ in range(len(ends))]
        for names, group in zip(self._features, groups, strict=True):
            values_without_row(names, group.inputs, group.found, ends, out)
        return out

    def _facts(self, inputs: ModelInputs, groups: Sequence[_LookedUp]) -> dict[str, FeatureRows]:
        """Return existence and age of each feature's rows; `inputs` must be expanded."""
        facts: dict[str, FeatureRows] = {}
        for names, one, group in zip(self._features, inputs.groups, groups, strict=True):
            assert group.touched is not None, "the lookup requested it"
            for f, (name, ends) in enumerate(zip(names, one.list_ends, strict=True)):
                mine = one.positions[one.feature_starts[f] : one.feature_starts[f + 1]]
                facts[name] = rows_of_feature(mine, ends, group.found, group.touched, inputs.size)
        return facts


def _refuse_expanded(inputs: ModelInputs) -> None:
    """Raises TooLarge if the context's lists, copied to every candidate, exceed MOST_OCCURRENCES."""
    if inputs.request_ends is None:
        return
    shared = 0
    for group in inputs.groups:
        if group.shared is not None:
            shared += int(np.diff(group.feature_starts)[group.shared.astype(bool)].sum())
    if shared * inputs.size > MOST_OCCURRENCES:
        raise TooLarge(
            f"lists of the context hold {shared:,} values, which are repeated for each of {inputs.size:,} "
            f"candidates: expected at most {MOST_OCCURRENCES:,} together\n"
            "  send fewer candidates per request, or bound lists by `max` in the spec"
        )


def _joined(encoded: Sequence[Encoded]) -> BytesColumn:
    if len(encoded) == 1:
        return encoded[0].events
    columns = [one.events for one in encoded]
    before = np.cumsum([0, *(len(column.data) for column in columns[:-1])])
    return BytesColumn(
        np.concatenate([column.data for column in columns]),
        np.concatenate([column.ends + start for column, start in zip(columns, before, strict=True)]),
    )


def _native_steps(score: Expression, labels: Sequence[str]) -> list[tuple[int, float]] | None:
    """Convert a score to native steps; None if it has other operations than + - * or too many steps."""
    steps = postfix_of(score.node)
    if steps is None or len(steps) > MOST_STEPS:
        return None
    return [
        (STEPS.index(op), float(labels.index(value) if isinstance(value, str) else value))
        for op, value in steps
    ]


def _split(
    encoded: Sequence[Encoded], predictions: F32, scores: F32, unknown: Sequence[Unknown]
) -> list[Scored]:
    """Split (B, L) predictions and (B,) scores by request."""
    if len(encoded) == 1:
        return [Scored(predictions, scores, unknown[0])]
    cuts = np.cumsum([one.candidates for one in encoded[:-1]])
    parts = zip(np.split(predictions, cuts), np.split(scores, cuts), unknown, strict=True)
    return [Scored(p, s, u) for p, s, u in parts]


def unreadable(why: str) -> BadInput:
    """Make the error for a request that cannot be decoded."""
    return BadInput(f"the request cannot be read: {why}")


def avro_of(transcoder: JsonTranscoder, values: Sequence[Mapping[str, Any]]) -> BytesColumn:
    """Encode JSON objects as Avro. Raises BadInput, with row and field, if one does not fit."""
    made = transcoder.body(written(values, "the request"))
    if made.bad:
        first = made.bad[0]
        where = first.path if len(values) == 1 else f"{first.path or 'the whole'} of row {first.index}"
        raise BadInput(f"{where or 'the request'}: expected {first.expected}, found {first.found}")
    return made.records
