"""`[tables]` and `[features]` of a spec: what kind a feature is, which keys it takes, what crosses bring
with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from freshet.config.options import Choice, Number, Section, Wrong, nearest_hint, read_object
from freshet.config.spec.forms import NAME
from freshet.config.spec.model import Feature, Model, Optimizer, Table
from freshet.config.spec.optimizers import OPTIMIZERS, complete
from freshet.config.spec.transforms import resolve

__all__ = [
    "CROSSES",
    "DEFAULT_ROW_OPTIMIZER",
    "DEFAULT_SCALAR_OPTIMIZER",
    "KEYS_OF_KIND",
    "check_name",
    "cross_features",
    "has_default_scalars",
    "read_features",
    "read_tables",
]

CROSSES = "crosses"
"""Name of the implicit table that holds the rows of crosses: scalars only, dim 0."""

DEFAULT_ROW_OPTIMIZER = "rowwise_adagrad"
DEFAULT_SCALAR_OPTIMIZER = "adagrad"


MOST_PAIR_ROWS = 1 << 22
"""Rows that the table of crosses may have where the spec names none and so all pairs of ids are crossed: they
are far more than the ids. About 0.15 GB."""


def read_tables(section: Section, *, crossed: bool, most_crosses: int | None = None) -> tuple[Table, ...]:
    """The tables in file order, that of the crosses last; their ids are their positions.

    most_crosses: the `max_rows` of that table if the spec does not say it.
    """
    if len(section.names()) > 254:
        raise section.error(
            "",
            "at most 254 tables",
            "features of equal dim and optimiser may share a table",
            found=len(section.names()),
        )
    if CROSSES in section and not crossed:
        raise section.error(CROSSES, "another name", "the table of this name is made for model.crosses")
    names = [name for name in section.names() if name != CROSSES]
    tables = [_table(section, name, i) for i, name in enumerate(names)]
    return (*tables, _cross_table(section, len(tables), most_crosses)) if crossed else tuple(tables)


def _table(tables: Section, name: str, table_id: int) -> Table:
    check_name(tables, name)
    section = tables.section(name)
    return read_object(
        Table,
        section,
        also=("optimizer", "scalar_optimizer"),
        name=name,
        id=table_id,
        optimizer=_optimizer(section, "optimizer", DEFAULT_ROW_OPTIMIZER),
        scalar_optimizer=_optimizer(section, "scalar_optimizer", DEFAULT_SCALAR_OPTIMIZER),
    )


def _optimizer(table: Section, key: str, default: str) -> Optimizer:
    names = Choice(tuple(OPTIMIZERS))
    if not isinstance(table.raw(key), Mapping):
        return _default(table.take(key, names, default))
    section = table.section(key)
    name = section.take("name", names)
    rule = OPTIMIZERS[name]
    section.only(["name", *(p.name for p in rule.parameters)])
    given = {}
    for parameter in rule.parameters:
        value = section.take(parameter.name, Number(), parameter.default)
        if not parameter.allows(value):
            raise section.error(parameter.name, parameter.expected, f"{parameter.name}: {parameter.doc}")
        given[parameter.name] = value
    return Optimizer(name=name, parameters=complete(name, given))


def _default(name: Any) -> Optimizer:
    return Optimizer(name=name, parameters=complete(name))


CROSSES_KEYS = ("ttl", "admission", "max_rows", "scalar_optimizer")
"""What may be said of the table of the crosses: it holds scalars only."""


def _cross_table(tables: Section, table_id: int, most: int | None) -> Table:
    section = tables.section(CROSSES)
    section.only(CROSSES_KEYS)
    given = {} if "max_rows" in section else {"max_rows": most}
    return read_object(
        Table,
        section,
        also=("scalar_optimizer",),
        name=CROSSES,
        id=table_id,
        dim=0,
        optimizer=_default(DEFAULT_ROW_OPTIMIZER),
        scalar_optimizer=_optimizer(section, "scalar_optimizer", DEFAULT_SCALAR_OPTIMIZER),
        **given,
    )


def has_default_scalars(table: Table) -> bool:
    """Whether the spec says nothing about how the table's scalars are stepped."""
    return table.scalar_optimizer == _default(DEFAULT_SCALAR_OPTIMIZER)


def read_features(section: Section, folder: str = "") -> tuple[Feature, ...]:
    """The features in file order; `folder` is the spec file's, where transforms of the user's may stand."""
    if not 1 <= len(section.names()) <= 1_000:
        raise section.error(
            "", "1 to 1000 features", 'a feature is a table: user = { field = "user_id", table = "user" }'
        )
    return tuple(_feature(section, name, i, folder) for i, name in enumerate(section.names()))


KEYS_OF_KIND = {
    "id": ("field", "table", "serve_as"),
    "list": ("field", "table", "max", "pool"),
    "dense": ("field", "dense", "missing", "serve_as"),
    "time": ("time", "table", "serve_as"),
    "bucket": ("field", "table", "buckets", "serve_as"),
}
"""The keys that each kind of feature takes; a kind is told by `dense`, `time`, `buckets`, `max` or `pool`."""


def _feature(features: Section, name: str, index: int, folder: str) -> Feature:
    check_name(features, name)
    section = features.section(name)
    section.only(key for keys in KEYS_OF_KIND.values() for key in keys)
    kind: Any = next((k for k in ("dense", "time") if k in section), None)
    if kind is None:
        kind = "bucket" if "buckets" in section else "list" if "max" in section or "pool" in section else "id"
    for key in section.names():
        if key not in KEYS_OF_KIND[kind]:
            raise section.error(
                key,
                f"no such key beside {_sign(section, kind)}",
                f"{_article(kind)} feature takes {', '.join(KEYS_OF_KIND[kind])}",
            )
    for key in ("field", "table"):
        if key in KEYS_OF_KIND[kind] and key not in section:
            hint = "tables are declared in [tables]" if key == "table" else f"without it {name} has no input"
            raise section.error(key, "a name" if key == "table" else "the path of a field", hint)
    given: dict[str, Any] = {"name": name, "index": index, "kind": kind}
    if kind == "list":
        given |= {"max": 50} if "max" not in section else {}
        given |= {"pool": "mean"} if "pool" not in section else {}
    feature = read_object(Feature, section, **given)
    return replace(feature, dense=resolve(feature, folder, section.where)) if feature.dense else feature


def _sign(section: Section, kind: str) -> str:
    signs = {"dense": "dense", "time": "time", "bucket": "buckets"}
    if kind == "list":
        return "max" if "max" in section else "pool"
    return signs.get(kind, "field and table")


def _article(kind: str) -> str:
    return f"an {kind}" if kind == "id" else f"a {kind}"


def cross_features(root: Section, model: Model, features: tuple[Feature, ...]) -> list[Feature]:
    """A feature for each cross of the model, behind those of the user."""
    known = [f.name for f in features]
    crosses = []
    for i, parts in enumerate(model.crosses):
        for part in parts:
            if part not in known:
                raise root.section("model").error(
                    f"crosses[{i}]",
                    f"names of features: {', '.join(known)}",
                    nearest_hint(part, known),
                    found=list(parts),
                )
        crosses.append(
            Feature(name="*".join(parts), index=len(features) + i, kind="cross", parts=parts, table=CROSSES)
        )
    return crosses


def check_name(section: Section, name: str) -> None:
    """Refuse a name that expressions and columns could not spell."""
    try:
        NAME.read(name)
    except Wrong as wrong:
        raise section.error("", wrong.expected, found=name) from None
