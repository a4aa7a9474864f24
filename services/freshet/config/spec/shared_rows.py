"""Whether features of one table share the rows of equal ids, or each has rows of its own there.

A row belongs to (table, feature, id): device "1" and hour 1 are two rows, although both features name the
table `small`. A table that is `shared` has one row for an id, whichever feature it comes from: the item that
is ranked, and the same item in a user's history. Features without rows of their own keep the table's salt for
their keys; the others get a salt each (`freshet.features.hashing.row_salt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from freshet.config.spec.model import Feature, Spec, Table

__all__ = ["default_sharing", "features_in", "has_own_rows", "with_sharing"]


def features_in(features: Sequence[Feature], table: str) -> tuple[Feature, ...]:
    """The features, without crosses, whose rows lie in the table of that name."""
    return tuple(f for f in features if f.table == table and f.kind != "cross")


def default_sharing(used: Sequence[Feature], generation: int) -> bool:
    """Whether a table that these features use is shared where the spec does not say it.

    History and item are: lists, and at most one id beside them. Hours and buckets never are the ids of a
    list. A table of one feature has nothing to share. Generation 1 shared every table.
    """
    if len(used) < 2:
        return False
    if generation == 1:
        return True
    others = [f.kind for f in used if f.kind != "list"]
    return len(others) < len(used) and others in ([], ["id"])


def with_sharing(tables: Sequence[Table], features: Sequence[Feature], generation: int) -> tuple[Table, ...]:
    """The tables with `shared` filled in; false where at most one feature uses a table: it means nothing."""
    return tuple(_with_sharing(table, features_in(features, table.name), generation) for table in tables)


def _with_sharing(table: Table, used: Sequence[Feature], generation: int) -> Table:
    if len(used) > 1 and table.shared is not None:
        return table
    return replace(table, shared=default_sharing(used, generation))


def has_own_rows(spec: Spec, feature: Feature) -> bool:
    """Whether the feature's ids have other rows than equal ids of the other features of its table.

    False for a feature that is alone in its table, or has none, and for crosses, whose keys are made of their
    parts' names anyway.
    """
    if feature.table is None or feature.kind == "cross" or spec.table(feature.table).shared:
        return False
    return len(features_in(spec.features, feature.table)) > 1
