"""Defaults of a spec that depend on its other keys: experts and crosses of a hedge, sharing of rows.

An expert that needs ids is no default where no feature has ids, and is refused where such a spec names it. So
a model of numbers alone has wide, deep and stack, and `freshet check` reports that. A model of few features
has the expert cross by default, with all pairs of them (ADR 0023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, replace
from itertools import combinations
from typing import Any

from freshet.config.options import Section, default_of, options_of
from freshet.config.spec.model import Feature, Model, Spec, Table

SINGLE = ("id", "time", "bucket")
"""Kinds of features with one id a sample; only these may be parts of crosses and segments."""

MOST_PAIRED = 10
"""Most features with one id a sample for which the default crosses all pairs: at most 45 more lookups a
sample."""

NEEDS_IDS = {
    "fast": "without one, fast has the same weights as wide",
    "fm": "fm multiplies vectors of ids",
    "counts": "counts weighs ids by how often they were seen",
}
"""Experts that need a feature with ids, with the reason. A cross names such features itself."""


def has_ids(features: Sequence[Feature]) -> bool:
    """Return whether a feature has rows: an id, a list, a time or a bucket."""
    return any(feature.table is not None and feature.kind != "cross" for feature in features)


def default_crosses(features: Sequence[Feature], generation: int) -> tuple[tuple[str, ...], ...]:
    """Return the default crosses: all pairs of few features, or none."""
    names = [feature.name for feature in features if feature.kind in SINGLE]
    return tuple(combinations(names, 2)) if generation > 1 and len(names) <= MOST_PAIRED else ()


def crossed(experts: Sequence[str]) -> tuple[str, ...]:
    """Return default experts with cross inserted before fm."""
    first = experts.index("fm")
    return (*experts[:first], "cross", *experts[first:])


def has_default_crosses(spec: Spec) -> bool:
    """Return whether the crosses, experts and bound of a spec equal the defaults for its features."""
    pairs = default_crosses(spec.features, spec.defaults)
    experts = default_of(_option("experts"), spec.defaults)
    if not pairs or spec.model.crosses != pairs or spec.model.experts != crossed(experts):
        return False
    return all(table.max_rows is not None for table in spec.tables if table.name == "crosses")


def with_experts(
    model: Model, section: Section, features: Sequence[Feature], tables: Sequence[Table], generation: int
) -> Model:
    """Remove the default experts that the features cannot feed; other models are returned unchanged.

    Args:
        model: with the default experts where the spec names none.
        section: `[model]` of the spec, for errors.
        features: features of the spec, with or without crosses.
        tables: tables of the spec.
        generation: generation of the defaults. In generation 1 wide has no weights of numbers, and a table
            enables all experts even if no feature uses it.

    Raises:
        ConfigError: the spec names an expert that its features cannot feed.
    """
    if model.kind != "hedge" or has_ids(features):
        return model
    missing = {e: why for e, why in NEEDS_IDS.items() if e in model.experts}
    if generation == 1:
        if tables:
            return model
        missing |= (
            {"wide": "with `defaults = 1`, wide has no weights of numbers"} if "wide" in model.experts else {}
        )
    if "experts" not in section:
        return replace(model, experts=tuple(e for e in model.experts if e not in missing))
    for expert, why in missing.items():
        raise section.error(
            "experts",
            f"a feature with ids (an id, list, time or bucket) for {expert}",
            f"{why}; add such a feature, or leave {expert} out",
            found=list(model.experts),
        )
    return model


def left_out_experts(spec: Spec) -> tuple[str, ...]:
    """Return the default experts that no feature can feed; none if the spec names its own experts."""
    if spec.model.kind != "hedge" or "experts" in spec.written.get("model", {}):
        return ()
    return tuple(e for e in default_of(_option("experts"), spec.defaults) if e not in spec.model.experts)


def _option(name: str) -> Field[Any]:
    return next(o for o in options_of(Model) if o.name == name)


# --- Sharing of rows between the features of a table.
#
# A row belongs to (table, feature, id): device "1" and hour 1 are two rows, although both features name the
# table `small`. A `shared` table has one row for an id of any feature, such as the ranked item and the same
# item in a user's history. Keys of features that share rows have the table's salt; other features have a salt
# each (`freshet.features.hashing.row_salt`).


def features_in(features: Sequence[Feature], table: str) -> tuple[Feature, ...]:
    """Return the features with rows in a table, without crosses."""
    return tuple(f for f in features if f.table == table and f.kind != "cross")


def default_sharing(used: Sequence[Feature], generation: int) -> bool:
    """Return the default of `shared` for a table that these features use.

    It is true for a history and its item: lists, with at most one id beside them. Times and buckets have
    other ids than a list. A table of one feature has nothing to share. Generation 1 shared every table.
    """
    if len(used) < 2:
        return False
    if generation == 1:
        return True
    others = [f.kind for f in used if f.kind != "list"]
    return len(others) < len(used) and others in ([], ["id"])


def with_sharing(tables: Sequence[Table], features: Sequence[Feature], generation: int) -> tuple[Table, ...]:
    """Set `shared` of tables without it; a table with at most one feature gets the default, false."""
    return tuple(_with_sharing(table, features_in(features, table.name), generation) for table in tables)


def _with_sharing(table: Table, used: Sequence[Feature], generation: int) -> Table:
    if len(used) > 1 and table.shared is not None:
        return table
    return replace(table, shared=default_sharing(used, generation))
