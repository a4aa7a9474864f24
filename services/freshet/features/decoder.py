"""Samples to a model's inputs: one program for each writer's schema, one plan for the spec.

Whatever schema a sample was written with, it is read as the spec's schema (`program`); a schema that cannot
be is refused by name. Nothing of a sample becomes a Python object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from freshet import _native
from freshet.config.avro.schema import SERVED_FIELD, Array, Record, Written, field_at, spell
from freshet.config.avro.types import leaf_names
from freshet.config.spec.layout import Layout
from freshet.config.spec.model import Feature, Spec
from freshet.config.spec.transforms import Column, column_of, native_first
from freshet.errors import ConfigError
from freshet.features.blocks import SampleColumns
from freshet.features.hashing import cross_seed, key_of, row_salt
from freshet.features.program import (
    ANY_KEY,
    NUMBERS,
    Compiled,
    Want,
    compile_program,
    explain_all,
)
from freshet.types import F32, I64, U32, U64, Bool, BytesColumn

__all__ = ["ABSENT_KEY", "Columns", "Decoded", "GroupKeys", "SampleDecoder", "columns_of", "steps_of"]

# --- What samples look like once they are decoded: columns of keys, numbers and ids, no object a sample.


ABSENT_KEY = 0
"""The key of a null: it makes no row. The key function never yields it for a value."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupKeys:
    """Keys of one store group, an occurrence each, feature-major (see `freshet.model.inputs.GroupInputs`)."""

    keys: U64  # (N,); ABSENT_KEY: null
    feature_starts: U32  # (F_g + 1,)
    list_ends: Sequence[
        U32 | None
    ]  # per feature: None, or (B,) ends of each sample's occurrences within the feature


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """Samples decoded column by column. B counts the good ones only."""

    size: int  # B
    groups: Sequence[GroupKeys]
    dense: F32  # (B, D) transformed, but for `standard`; NaN where missing
    segments: Mapping[str, U64]  # segment feature -> (B,) keys of values, unsalted
    served: Mapping[str, F32]  # label -> (B,) prediction logged at serving; NaN where none
    explored: Bool  # (B,) whether it was served in random order; False where nothing was logged
    bad: I64  # indexes of input records that could not be decoded; the others keep their order
    why: Sequence[str] = ()  # for each of them, where and why


KEY, LIST, DENSE, BUCKET, SERVED = range(5)  # FeatureSink in feature_decode.hpp
EXPLORED = key_of(True, 0)
_NONE_BAD = np.empty(0, np.int64)
TIME_PARTS = {"hour": 0, "weekday": 1, "hour_of_week": 2}
DEFAULT_MAX = 50


class SampleDecoder:
    """Decodes samples of a spec, by whatever schemas they were written.

    Thread-safe after construction: lanes may share one.
    """

    def __init__(
        self,
        spec: Spec,
        layout: Layout,
        schemas: Callable[[int], Written],
        reader: Record | None = None,
        *,
        names: bool = False,
    ) -> None:
        """Compile nothing yet.

        Args:
            schemas: gives the sample schema of a writer's schema id; called once for each id.
            reader: the sample schema that all of them are read as, of the spec's schema
                (`spec.schemas.sample_reader`); None: each as it is.
            names: whether names of records, enums and fixed must agree, too. Those of events were compared by
                the gateway and the joiner, which let them in; in unions they always count.
        """
        self._spec = spec
        self._schemas, self._reader, self._names = schemas, reader, names
        self._columns = columns_of(spec, layout)
        self._plan = self._columns.plan(spec, layout)
        self._steps = steps_of(spec, layout)
        self._programs: dict[int, Compiled] = {}

    def program(self, schema_id: int) -> Compiled:
        """The program of a writer's schema, compiled at its first use.

        Raises:
            ConfigError: what the spec needs cannot be read from what the schema has.
            What `schemas` raises for an id that it does not know.
        """
        if schema_id not in self._programs:
            schema = self._schemas(schema_id)
            self._programs[schema_id] = self._columns.program(
                self._spec, schema, self._reader, f"schema {schema_id}", names=self._names
            )
        return self._programs[schema_id]

    def decode(
        self, payloads: BytesColumn, schema_id: int | U32, times_ms: I64, *, serving: bool = False
    ) -> Decoded:
        """Decode N samples.

        Args:
            payloads: (N,) Avro bytes of the sample schema, without framing.
            schema_id: of all of them, or (N,) one each.
            times_ms: (N,) event time of each impression.
            serving: take the spec's `serve_as` constants for what is not known before an item is shown.

        Returns:
            Columns of the good samples, in order; the others are named in `bad`, with reasons in `why`.

        Raises:
            ConfigError: as `program`.
        """
        if (
            not isinstance(schema_id, (int, np.integer))
            and len(schema_id)
            and (schema_id == schema_id[0]).all()
        ):
            schema_id = int(schema_id[0])
        if isinstance(schema_id, (int, np.integer)):
            programs = [self.program(int(schema_id))]
            which = np.empty(0, np.int32)
        else:
            ids, inverse = np.unique(schema_id, return_inverse=True)
            programs = [self.program(int(i)) for i in ids]
            which = inverse.astype(np.int32)
        return self._decoded(
            _native.decode_features(
                self._plan,
                [p.native for p in programs],
                which,
                payloads.data,
                payloads.ends,
                np.ascontiguousarray(times_ms, np.int64),
                serving,
            ),
            programs,
        )

    def decode_usual(self, blocks: BytesColumn, schema_id: int) -> tuple[Decoded, SampleColumns] | None:
        """Read blocks of one schema, as `read_blocks` does, and decode their samples, in one native call.

        Returns None where a block is damaged or of another schema, or a sample cannot be decoded: the long
        way says what is wrong. Raises ConfigError as `program`.
        """
        program = self.program(schema_id)
        made = _native.decode_usual_blocks(self._plan, program.native, schema_id, blocks.data, blocks.ends)
        return None if made is None else (self._decoded(made[0], [program]), SampleColumns(*made[1]))

    def _decoded(self, made: _native.DecodedTuple, programs: list[Compiled]) -> Decoded:
        size, groups, list_ends, dense, (*segments, explored), served, failures = made
        dense = dense.reshape(size, self._columns.dense)
        if size:
            for d, column in self._steps:
                dense[:, d] = column.run(dense[:, d])
        return Decoded(
            size=size,
            groups=[
                GroupKeys(keys, starts, [list_ends[i] if i >= 0 else None for i in lists])
                for keys, starts, lists in groups
            ],
            dense=dense,
            segments=dict(zip(self._columns.segments, segments, strict=True)),
            served=dict(
                zip(self._columns.labels, served.reshape(len(self._columns.labels), size), strict=True)
            ),
            explored=explored == EXPLORED,
            bad=failures[:, 0].copy() if len(failures) else _NONE_BAD,
            why=explain_all(failures, programs) if len(failures) else (),
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """Where each feature goes: the key columns, lists and dense columns of a spec."""

    column_of: Mapping[int, int]  # feature index -> key column
    list_of: Mapping[int, int]  # feature index -> list
    dense_of: Mapping[int, int]  # feature index -> dense column
    segments: tuple[str, ...]
    segment_column: Mapping[str, int]
    explored_column: int  # the key of what was logged at serving, after the segments'
    labels: tuple[str, ...]

    @property
    def dense(self) -> int:
        """How many dense columns there are."""
        return len(self.dense_of)

    def plan(self, spec: Spec, layout: Layout) -> _native.DecodePlan:
        """The native plan: what a batch looks like, whatever schema its records have."""
        lists = sorted(self.list_of, key=self.list_of.__getitem__)
        constants = [f for f in spec.features if f.serve_as is not None]
        dense_constants = [f for f in constants if f.kind == "dense"]
        return _native.feature_plan(
            [
                [-1 - self.list_of[f] if f in self.list_of else self.column_of[f] for f in group.features]
                for group in layout.groups
            ],
            [*self.segment_column.values(), self.explored_column],
            self.explored_column + 1,
            [spec.features[f].max or DEFAULT_MAX for f in lists],
            [native_first(spec.features[f]) for f in self.dense_of],
            len(self.labels),
            self._times(spec),
            [
                [self.column_of[f.index], cross_seed(f.table or "", f.parts), *self._parts(spec, f)]
                for f in spec.features
                if f.kind == "cross"
            ],
            [[self.column_of[f.index], _constant_key(spec, f)] for f in constants if f.kind != "dense"],
            [self.dense_of[f.index] for f in dense_constants],
            [float(f.serve_as or 0) for f in dense_constants],
        )

    def _times(self, spec: Spec) -> list[list[int]]:
        timed = [f for f in spec.features if f.kind == "time" and f.time is not None]
        parts = [[self.column_of[f.index], TIME_PARTS[f.time or ""], row_salt(spec, f)] for f in timed]
        return parts + [
            [self.segment_column[f.name], TIME_PARTS[f.time or ""], 0]
            for f in timed
            if f.name in self.segment_column
        ]

    def _parts(self, spec: Spec, cross: Feature) -> list[int]:
        for name in cross.parts:
            if spec.feature(name).index not in self.column_of or spec.feature(name).kind == "cross":
                raise ConfigError(
                    f"features.{cross.name}", "parts", name, "features of one key: id, time or bucket"
                )
        return [self.column_of[spec.feature(name).index] for name in cross.parts]

    def program(
        self, spec: Spec, written: Written, reader: Record | None, where: str, *, names: bool
    ) -> Compiled:
        """The program for records of a writer's schema, read as the reader's."""
        if reader is None:
            if not isinstance(written, Record):
                raise ConfigError(
                    where, "type", spell(written), '"record"', "a sample is a record of named fields"
                )
            reader = written
        wants = [want for f in spec.features for want in self.wants(spec, f, reader, where)]
        path = ".".join(p for p in (spec.events.served.explode, SERVED_FIELD) if p)
        if _has_array(reader, f"{path}.predictions"):
            wants.append(Want(f"{path}.predictions", SERVED, 0, NUMBERS, "served predictions", many=True))
        if _has(reader, f"{path}.explored"):
            found = frozenset({"boolean"})
            wants.append(Want(f"{path}.explored", KEY, self.explored_column, found, "served explored"))
        return compile_program(written, wants, reader=reader, where=where, names=names)

    def wants(self, spec: Spec, f: Feature, schema: Record, where: str) -> list[Want]:
        """What a feature reads of a record."""
        if f.field is None:
            return []
        what, salt = f"feature {f.name!r}", row_salt(spec, f)
        segment = self.segment_column.get(f.name)
        if f.serve_as is not None and f.kind == "id":
            _check_constant(f, schema, where)
        match f.kind:
            case "id":
                wants = [Want(f.field, KEY, self.column_of[f.index], ANY_KEY, what, salt)]
                return wants if segment is None else [*wants, Want(f.field, KEY, segment, ANY_KEY, what)]
            case "list":
                return [Want(f.field, LIST, self.list_of[f.index], ANY_KEY, what, salt, many=True)]
            case "dense":
                return [Want(f.field, DENSE, self.dense_of[f.index], NUMBERS, what)]
            case "bucket":
                column = self.column_of[f.index]
                wants = [Want(f.field, BUCKET, column, NUMBERS, what, salt, edges=f.buckets)]
                again = Want(f.field, BUCKET, segment or 0, NUMBERS, what, edges=f.buckets)
                return wants if segment is None else [*wants, again]
            case _:
                return []


def columns_of(spec: Spec, layout: Layout) -> Columns:
    """Where the features of a spec go. Raises ConfigError for a segment of several values."""
    column_of: dict[int, int] = {}
    list_of: dict[int, int] = {}
    for group in layout.groups:
        for index in group.features:
            into = list_of if spec.features[index].kind == "list" else column_of
            into[index] = len(into)
    for name in spec.train.segments:
        if spec.feature(name).kind not in ("id", "time", "bucket"):
            raise ConfigError(
                "train",
                "segments",
                name,
                "features with one value from a field or the time: id, time or bucket",
            )
    segments = {name: len(column_of) + i for i, name in enumerate(spec.train.segments)}
    dense_of = {index: d for d, index in enumerate(layout.dense)}
    labels = tuple(label.name for label in spec.labels)
    explored = len(column_of) + len(segments)
    return Columns(column_of, list_of, dense_of, spec.train.segments, segments, explored, labels)


def steps_of(spec: Spec, layout: Layout) -> list[tuple[int, Column]]:
    """Dense columns that the native decoder leaves something to do for, with what it is."""
    columns = ((d, column_of(spec.features[f], spec.folder)) for d, f in enumerate(layout.dense))
    return [(d, column) for d, column in columns if column is not None]


def _constant_key(spec: Spec, f: Feature) -> U64 | int:
    salt = row_salt(spec, f)
    if f.kind in ("list", "cross"):
        raise ConfigError(
            f"features.{f.name}", "serve_as", f.serve_as, "a feature of one value, no list or cross"
        )
    if f.kind != "bucket":
        return key_of(f.serve_as, salt)
    if isinstance(f.serve_as, str):
        raise ConfigError(
            f"features.{f.name}", "serve_as", f.serve_as, "a number, as its buckets cut numbers"
        )
    return key_of(sum(edge <= float(f.serve_as or 0) for edge in f.buckets), salt)


def _check_constant(f: Feature, schema: Record, where: str) -> None:
    """A constant of another type than the field's would have another key than the same value in a record."""
    names = leaf_names(field_at(schema, f.field or "", where).type)
    fits = {str: {"string", "bytes", "fixed", "enum"}, float: {"float", "double"}}.get(
        type(f.serve_as), {"boolean", "int", "long"}
    )
    if not names <= fits:
        found = " or ".join(sorted(names))
        raise ConfigError(
            f"features.{f.name}",
            "serve_as",
            f.serve_as,
            f"a value of the field's type, which is {found} in {where}",
        )


def _has(schema: Record, path: str) -> bool:
    try:
        field_at(schema, path)
    except ConfigError:
        return False
    return True


def _has_array(schema: Record, path: str) -> bool:
    return _has(schema, path) and isinstance(field_at(schema, path).type, Array)
