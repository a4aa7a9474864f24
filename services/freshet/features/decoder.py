"""Decoder from samples to a model's inputs: one program for each writer's schema, one plan for the spec.

Each sample is read as the spec's schema (`program`); a writer's schema that does not resolve to it is refused
by name. No sample becomes a Python object.

Letters: N input records, B good samples, D dense columns, F_g features of group g.
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

# --- Decoded samples: columns of keys, numbers and ids


ABSENT_KEY = 0
"""The key of a null: it makes no row. No value has this key."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupKeys:
    """Keys of one store group, one per occurrence, feature-major (see `freshet.model.inputs.GroupInputs`)."""

    keys: U64  # (occurrences,); ABSENT_KEY: null
    feature_starts: U32  # (F_g + 1,)
    list_ends: Sequence[U32 | None]
    """Per feature: (B,) ends of each sample's occurrences within a list feature; None for other features."""


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """Samples decoded column by column."""

    size: int  # B
    groups: Sequence[GroupKeys]
    dense: F32  # (B, D) transformed, except by `standard`; NaN where missing
    segments: Mapping[str, U64]  # segment feature -> (B,) keys of values, unsalted
    served: Mapping[str, F32]  # label -> (B,) prediction logged at serving; NaN where none
    explored: Bool  # (B,) served in random order; False where serving logged nothing
    bad: I64  # indexes of input records that could not be decoded; the others keep their order
    why: Sequence[str] = ()  # place and reason of each bad record


KEY, LIST, DENSE, BUCKET, SERVED = range(5)  # FeatureSink in feature_decode.hpp
EXPLORED = key_of(True, 0)
_NONE_BAD = np.empty(0, np.int64)
TIME_PARTS = {"hour": 0, "weekday": 1, "hour_of_week": 2}
DEFAULT_MAX = 50


class SampleDecoder:
    """Decoder of a spec's samples, written by any schemas. Thread-safe: lanes may share one."""

    def __init__(
        self,
        spec: Spec,
        layout: Layout,
        schemas: Callable[[int], Written],
        reader: Record | None = None,
        *,
        names: bool = False,
    ) -> None:
        """Create a decoder; programs are compiled at the first use of a schema.

        Args:
            spec: Model spec.
            layout: Layout of the spec.
            schemas: Returns the sample schema of a writer's schema id; called once for each id.
            reader: Sample schema that all samples are read as (`spec.schemas.sample_reader`); None reads each
                by its writer's schema.
            names: Require equal names of records, enums and fixed outside of unions, too. Gateway and joiner
                have compared the names of events already.
        """
        self._spec = spec
        self._schemas, self._reader, self._names = schemas, reader, names
        self._columns = columns_of(spec, layout)
        self._plan = self._columns.plan(spec, layout)
        self._steps = steps_of(spec, layout)
        self._programs: dict[int, Compiled] = {}

    def program(self, schema_id: int) -> Compiled:
        """Return the program of a writer's schema; compile it at the first use.

        Raises ConfigError if the schema does not resolve to the fields that the spec needs, and the errors of
        `schemas` for an unknown id.
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
            payloads: (N,) Avro records of the sample schema, without framing.
            schema_id: Schema id of all records, or (N,) ids.
            times_ms: (N,) event time of each impression.
            serving: Use the spec's `serve_as` constants for features that are unknown before an item is
                shown.

        Returns:
            Columns of the good samples, in order; `bad` has the indexes of the others, `why` the reasons.

        Raises:
            ConfigError: As `program`.
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
        """Read blocks of one schema and decode their samples in one native call.

        Returns None if a block is damaged or has another schema, or a sample cannot be decoded; `read_blocks`
        and `decode` then give the reason. Raises ConfigError as `program`.
        """
        program = self.program(schema_id)
        result = _native.decode_usual_blocks(self._plan, program.native, schema_id, blocks.data, blocks.ends)
        return None if result is None else (self._decoded(result[0], [program]), SampleColumns(*result[1]))

    def _decoded(self, result: _native.DecodedTuple, programs: list[Compiled]) -> Decoded:
        size, groups, list_ends, dense, (*segments, explored), served, failures = result
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
    """Key column, list or dense column of each feature of a spec."""

    column_of: Mapping[int, int]  # feature index -> key column
    list_of: Mapping[int, int]  # feature index -> list
    dense_of: Mapping[int, int]  # feature index -> dense column
    segments: tuple[str, ...]
    segment_column: Mapping[str, int]
    explored_column: int  # key column of the flag `explored`, after those of the segments
    labels: tuple[str, ...]

    @property
    def dense(self) -> int:
        """Number of dense columns."""
        return len(self.dense_of)

    def plan(self, spec: Spec, layout: Layout) -> _native.DecodePlan:
        """Build the native plan, the layout of a batch, which all writers' schemas share."""
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
        """Compile the program for records of a writer's schema, read as the reader's.

        Raises ConfigError if the schema is no record or lacks a field that a feature needs.
        """
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
        """Return the values of a record that a feature needs."""
        if f.field is None:
            return []
        name, salt = f"feature {f.name!r}", row_salt(spec, f)
        segment = self.segment_column.get(f.name)
        if f.serve_as is not None and f.kind == "id":
            _check_constant(f, schema, where)
        match f.kind:
            case "id":
                wants = [Want(f.field, KEY, self.column_of[f.index], ANY_KEY, name, salt)]
                return wants if segment is None else [*wants, Want(f.field, KEY, segment, ANY_KEY, name)]
            case "list":
                return [Want(f.field, LIST, self.list_of[f.index], ANY_KEY, name, salt, many=True)]
            case "dense":
                return [Want(f.field, DENSE, self.dense_of[f.index], NUMBERS, name)]
            case "bucket":
                column = self.column_of[f.index]
                wants = [Want(f.field, BUCKET, column, NUMBERS, name, salt, edges=f.buckets)]
                unsalted = Want(f.field, BUCKET, segment or 0, NUMBERS, name, edges=f.buckets)
                return wants if segment is None else [*wants, unsalted]
            case _:
                return []


def columns_of(spec: Spec, layout: Layout) -> Columns:
    """Assign columns to the features of a spec. Raises ConfigError for a segment of several values."""
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
    """Return the dense columns with a transform in Python, with the transform."""
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
    """Refuse a constant of another type than its field, as its key would differ."""
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
