"""Report of `freshet check` on a spec.

It has the features with their types in the user's schemas, memory per million rows, the time at which each
label is decided, the size of the MLP, and warnings about valid choices that may be mistakes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from freshet.config.avro.schema import field_at, sample_schema, spell
from freshet.config.expression import compile_score
from freshet.config.options import duration_text
from freshet.config.spec.defaults import features_in, has_default_crosses, has_ids, left_out_experts
from freshet.config.spec.layout import CROSSES, Group, Layout, layout_of, rule_of
from freshet.config.spec.model import NEWEST_DEFAULTS, Feature, Label, Spec, Table
from freshet.config.spec.rules import bounds_text
from freshet.config.spec.schemas import Schemas, check_fit

MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class FeatureReport:
    """One feature."""

    name: str
    kind: str
    source: str  # field and type, part of time, or parts of a cross
    table: str | None
    columns: int  # dense columns, with the missing flag
    note: str


@dataclass(frozen=True, slots=True)
class TableReport:
    """One table."""

    name: str
    dim: int
    optimizer: str
    features: tuple[str, ...]
    row_bytes: int  # in memory, with optimiser state
    million_rows_bytes: int  # with the index
    evicted: str
    shared: bool | None  # whether its features share the rows of equal ids; None: at most one feature


@dataclass(frozen=True, slots=True)
class LabelReport:
    """One label."""

    name: str
    loss: str
    positive: str  # when a positive sample is emitted
    negative: str  # when a negative sample is emitted


@dataclass(frozen=True, slots=True)
class Report:
    """Report on a spec."""

    name: str
    features: tuple[FeatureReport, ...]
    tables: tuple[TableReport, ...]
    labels: tuple[LabelReport, ...]
    score: str
    floats_per_sample: int  # width of the model's input
    mlp_parameters: int  # 0: no native MLP
    experts: tuple[str, ...]  # empty for a model without experts
    experts_left_out: tuple[str, ...]  # default experts that no feature can feed
    default_crosses: int  # pairs of features that the expert cross has by default
    warnings: tuple[str, ...]

    def text(self) -> str:
        """Return the report as text, with a table for each part of the spec."""
        return "\n".join(_text(self)) + "\n"


def explain(spec: Spec, schemas: Schemas, where: str = "freshet.toml") -> Report:
    """Check the spec against the schemas and create the report.

    Raises:
        ConfigError: a field is missing from its schema or does not fit.
    """
    check_fit(spec, schemas, where)
    layout = layout_of(spec)
    return Report(
        name=spec.name,
        features=tuple(_feature(spec, schemas, f) for f in spec.features),
        tables=tuple(_table(spec, layout, t) for t in spec.tables),
        labels=tuple(_label(spec, label) for label in spec.labels),
        score=spec.serve.score,
        floats_per_sample=_input_width(spec),
        mlp_parameters=mlp_parameters(spec),
        experts=spec.model.experts,
        experts_left_out=left_out_experts(spec),
        default_crosses=len(spec.model.crosses) if has_default_crosses(spec) else 0,
        warnings=tuple(_warnings(spec, schemas)),
    )


def _feature(spec: Spec, schemas: Schemas, feature: Feature) -> FeatureReport:
    columns = 1 + (feature.missing == "flag") if feature.kind == "dense" else 0
    if feature.kind == "cross":
        return FeatureReport(feature.name, "cross", " and ".join(feature.parts), feature.table, 0, "")
    if feature.field is None:
        source = f"{feature.time} of the event, UTC"
        return FeatureReport(feature.name, "time", source, feature.table, 0, _note(feature))
    found = field_at(sample_schema(schemas.served, spec.events.served.explode), feature.field)
    source = f"{feature.field}: {spell(found.type)}{', may be null' if found.nullable else ''}"
    return FeatureReport(feature.name, feature.kind, source, feature.table, columns, _note(feature))


def _note(feature: Feature) -> str:
    parts = []
    if feature.dense:
        parts.append(", ".join(map(str, feature.dense)))
        parts.append("0 where missing" + (", with a flag beside it" if feature.missing == "flag" else ""))
    if feature.kind == "list":
        parts.append(f"the first {feature.max}, {feature.pool} of their rows")
    if feature.buckets:
        parts.append(f"{len(feature.buckets) + 1} buckets")
    if feature.serve_as is not None:
        parts.append(f"served as {feature.serve_as!r}")
    return "; ".join(parts)


def _table(spec: Spec, layout: Layout, table: Table) -> TableReport:
    group = next(g for g in layout.groups if table.id in g.tables)
    size = row_bytes(group)
    rule = (group.slot("vector") or group.slots[0]).optimizer
    evicted = [
        *([] if table.ttl_ms is None else [f"after {duration_text(table.ttl_ms)} without use"]),
        *([] if table.max_rows is None else [f"the least recently used above {table.max_rows:,} rows"]),
    ]
    return TableReport(
        name=table.name,
        dim=table.dim if group.slot("vector") else 0,
        optimizer=f"{rule.name} {rule.parameters['lr']:.4g}",
        features=tuple(f.name for f in spec.features if f.table == table.name),
        row_bytes=size,
        million_rows_bytes=round((size + INDEX_BYTES) * MILLION),
        evicted=", ".join(evicted) or "for memory only",
        shared=table.shared if len(features_in(spec.features, table.name)) > 1 else None,
    )


def _sharing(tables: Sequence[TableReport]) -> Iterator[str]:
    """Yield a line for each table of several features, on whether they share rows."""
    for table in tables:
        names = f"{', '.join(table.features[:-1])} and {table.features[-1]}" if table.features else ""
        if table.shared:
            yield (
                f"table {table.name}: {names} share rows: an id has one row for all of them "
                "(shared = false: a row for each feature)"
            )
        elif table.shared is False:
            yield (
                f"table {table.name}: {names} have rows of their own: an id has a row for each of them "
                "(shared = true: one row)"
            )


def _without(experts: Sequence[str]) -> str:
    """Return the reason for missing default experts, as the end of a line; "" if none is missing."""
    if not experts:
        return ""
    listed = (
        f"{', '.join(experts[:-1])} and {experts[-1]} need" if len(experts) > 1 else f"{experts[0]} needs"
    )
    return f" ({listed} a feature with ids: an id, list, time or bucket)"


LINE = 64
HEADER_BYTES = 16  # key, table and flags, time of the last use
INDEX_BYTES = 64 / (12 * 0.8 * 0.83)
"""Bytes of the index per row: a chunk of 64 bytes holds 12 rows. An index is at most 80 % full and grows by
1.3 to 1.6, so its mean load is five sixths of that. Measured: 8.1 bytes at 3 to 6 million rows."""


def row_bytes(group: Group) -> int:
    """Return the bytes of a row in memory: header, scalars, state and vector.

    Rows have whole cache lines, and the vector begins its own, where that adds little. A test compares this
    with the native table (`RowLayout` in optim.hpp).
    """
    floats = sum(s.width for s in group.slots[:-1])
    states = sum(rule_of(s.optimizer.name).state_floats(s.width) for s in group.slots)
    head = HEADER_BYTES + 4 * (floats + states)
    last = group.slots[-1]
    tail = last.width * (2 if group.precision == "bf16" and last.name == "vector" else 4)
    close, apart = _up(head + tail, 4), _up(_up(head, LINE) + tail, LINE)
    if close <= LINE and close * 13 >= LINE * 10:
        return LINE
    return apart if apart * 10 <= close * 13 else close


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _label(spec: Spec, label: Label) -> LabelReport:
    end = label.window_ms + spec.join.grace_ms
    parts = f"window {_span(label.window_ms)} + grace {_span(spec.join.grace_ms)}"
    closing = f"{_span(end)} after the impression ({parts})"
    early = spec.join.is_early(label)
    positive = f"as soon as an action comes with {label.on}" if early else closing
    if label.given is not None:
        closing = f"{closing}, if {label.given} is true"
    loss: str = label.loss
    if label.bounds is not None:
        loss += f", {bounds_text(label.bounds)}; others are not learned"
    return LabelReport(label.name, loss, positive, closing)


def _span(ms: int) -> str:
    """Format a duration in several units: 86430000 is "24h 30s"."""
    parts = []
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)):
        if ms // size:
            parts.append(f"{ms // size}{unit}")
        ms %= size
    return " ".join(parts) or "0s"


def _input_width(spec: Spec) -> int:
    dims = sum(spec.table(f.table).dim for f in spec.features if f.table is not None and f.kind != "cross")
    return dims + sum(1 + (f.missing == "flag") for f in spec.features if f.kind == "dense")


def mlp_parameters(spec: Spec) -> int:
    """Return the number of weights and biases of the native MLP; 0 for models without it."""
    hedged = spec.model.kind == "hedge" and "deep" in spec.model.experts
    if not hedged and spec.model.kind != "mlp":
        return 0
    widths = [_input_width(spec), *spec.model.deep, len(spec.labels)]
    return sum((a + 1) * b for a, b in pairwise(widths))


def _warnings(spec: Spec, schemas: Schemas) -> Iterator[str]:
    if spec.defaults < NEWEST_DEFAULTS:
        yield (
            f"defaults: the spec has generation {spec.defaults} of the defaults; a new model learns better "
            f"with {NEWEST_DEFAULTS}, the default of this key"
        )
    used = {f.table for f in spec.features}
    for table in spec.tables:
        written = spec.written.get("tables", {}).get(table.name, {})
        if table.name not in used:
            yield f"tables.{table.name}: no feature uses it"
        elif "shared" in written and len(features_in(spec.features, table.name)) < 2:
            yield f"tables.{table.name}.shared: one feature uses the table, so the key has no effect"
    in_score = compile_score(spec.serve.score).fields()
    for label in spec.labels:
        if label.name not in in_score:
            yield f"serve.score: {label.name} is learned, but does not affect the order"
        if label.loss == "mse" and label.bounds is None:
            yield (
                f"labels.{label.name}: the gradient of mse grows with the value, so one wrong value, such as "
                "1e18, outweighs all others in its rows; bounds = [least, greatest] excludes such values"
            )
    yield from _times(spec)
    if not has_ids(spec.features):
        yield (
            "features: none has ids, so there are no rows, which would be served at once; predictions "
            f"change with each version, every {duration_text(spec.train.version_interval_ms)} "
            "(train.version_interval)"
        )
    sample = sample_schema(schemas.served, spec.events.served.explode)
    for feature in (f for f in spec.features if f.field and f.kind == "dense"):
        if feature.missing == "zero" and field_at(sample, feature.field or "").nullable:
            yield (
                f"features.{feature.name}: {feature.field} may be null and counts as 0; "
                'missing = "flag" distinguishes them'
            )
        if feature.dense == ("raw",):
            yield f"features.{feature.name}: a raw number of unknown size is hard to learn from; use standard"


def _times(spec: Spec) -> Iterator[str]:
    early = [label.window_ms for label in spec.labels if spec.join.is_early(label)]
    if early:
        wait = min(early) + spec.join.grace_ms
        yield (
            f'join.emit: with "early" a new model learns nothing in its first {_span(wait)}, while no '
            f"negatives are known, and learns positives at once after {_span(2 * wait)}; use "
            '"window" for a replay that measures quality'
        )
    needed_ms = 2 * (max(label.window_ms for label in spec.labels) + spec.join.grace_ms)
    if spec.retention.events_ms is not None and spec.retention.events_ms < needed_ms:
        yield (
            "retention.events: on Kafka a restart of the joiner needs events of the last "
            f"{_span(needed_ms)}, 2 * (longest window + grace); an embedded log keeps them"
        )


def _text(report: Report) -> Iterator[str]:
    yield f"{report.name}\n"
    yield from _grid(
        ("feature", "kind", "from", "table", ""),
        [
            (f.name, f.kind, f.source, f.table or "", f.note)
            for f in report.features
            if not (report.default_crosses and f.kind == "cross")
        ],
    )
    if report.tables:
        yield ""
        yield from _grid(
            ("table", "dim", "optimizer", "row", "a million rows", "evicted", "features"),
            [
                (
                    t.name,
                    str(t.dim),
                    t.optimizer,
                    f"{t.row_bytes} B",
                    f"{t.million_rows_bytes / 1e6:.0f} MB",
                    t.evicted,
                    _listed(t, report.default_crosses),
                )
                for t in report.tables
            ],
        )
    yield from _sharing(report.tables)
    yield ""
    yield from _grid(
        ("label", "loss", "true", "not true"),
        [(x.name, x.loss, x.positive, x.negative) for x in report.labels],
    )
    yield f"\nscore: {report.score}"
    mlp = f", an MLP of {report.mlp_parameters:,} parameters" if report.mlp_parameters else ""
    yield f"model: {report.floats_per_sample} numbers a sample{mlp}"
    if report.experts:
        yield f"experts: {', '.join(report.experts)}{_without(report.experts_left_out)}"
    if report.default_crosses:
        yield (
            f"cross: all {report.default_crosses} pairs of features with one id a sample "
            "(model.crosses = []: none)"
        )
    for warning in report.warnings:
        yield f"note: {warning}"


def _listed(table: TableReport, default_crosses: int) -> str:
    """Return the names of the table's features, or the number of default crosses."""
    if table.name == CROSSES and default_crosses:
        return f"{default_crosses} pairs"
    return ", ".join(table.features)


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(r[c]) for r in [head, *rows]) for c in range(len(head))]
    for row in [head, *rows]:
        yield "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
