"""What follows from a spec for rows and columns: store groups, slots of a row, order of occurrences and dense
columns.

The one place that decides it; the native table, the decoder and the model all take their shapes from here.
Letters: L labels, S float slots of a row, D dense columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from freshet.config.spec.model import Feature, Optimizer, Spec, Table
from freshet.config.spec.optimizers import COUNT, rule_of
from freshet.config.spec.parse_inputs import has_default_scalars

__all__ = [
    "Group",
    "Layout",
    "Slot",
    "default_sharing",
    "features_in",
    "has_own_rows",
    "item_of",
    "layout_of",
    "with_sharing",
]

# --- Whether features of one table share the rows of equal ids, or each has rows of its own there.
#
# A row belongs to (table, feature, id): device "1" and hour 1 are two rows, although both features
# name the table `small`. A table that is `shared` has one row for an id, whichever feature it comes
# from: the item that is ranked, and the same item in a user's history. Features without rows of their
# own keep the table's salt for their keys; the others get a salt each
# (`freshet.features.hashing.row_salt`).


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


CROSS_ACCUMULATOR = 1.0
"""Adagrad's starting accumulator for the cross expert's scalars: crosses are many and rare, so they start
cautiously."""

WIDE_ACCUMULATOR = 0.1
"""That of wide and fast: where positives are rare, gradients are small, and a new id would step far."""

WIDE_LR, FAST_LR = 0.2125, 0.85
"""Adagrad's step sizes of the experts wide and fast, divided by the root of a sample's number of features and
one: all of a sample's weights move together. cross has fast's, divided by the root of the number of crosses
and one. The same for all streams (ADR 0023)."""

FAST_FACTOR = 4.0
"""The step size of fast, in that which a spec gives for wide."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A run of floats of a row that one optimiser steps."""

    name: str  # "wide", "fast", "cross", "linear" (shared by fm and deep), "count" or "vector"
    start: int  # first float in the row
    width: int  # L for scalars (one a label), dim for the vector
    optimizer: Optimizer
    init: float  # initial values are uniform in ± this; 0: zeros


@dataclass(frozen=True, slots=True)
class Group:
    """Tables of equal layout, which share one native store group, and the features whose rows live there."""

    index: int
    tables: tuple[int, ...]  # table ids
    slots: tuple[Slot, ...]
    precision: str  # of the vector slot in memory
    features: tuple[int, ...]  # indexes of spec.features, in spec order: the order of occurrences

    @property
    def width(self) -> int:
        """S: floats of a row as looked up and as a gradient."""
        return sum(slot.width for slot in self.slots)

    @property
    def state_floats(self) -> int:
        """T: floats of optimiser state of a row."""
        return sum(rule_of(s.optimizer.name).state_floats(s.width) for s in self.slots)

    def slot(self, name: str) -> Slot | None:
        """The slot of that name, if rows of this group have it."""
        return next((s for s in self.slots if s.name == name), None)


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups of a model and its dense columns."""

    groups: tuple[Group, ...]
    dense: tuple[int, ...]  # indexes of spec.features that are dense, in spec order: column d of (B, D)


def layout_of(spec: Spec) -> Layout:
    """Derive the layout; a pure function of the spec's identity keys."""
    features_of: dict[int, list[int]] = {}
    for feature in spec.features:
        if feature.table is not None:
            features_of.setdefault(spec.table(feature.table).id, []).append(feature.index)
    crossed = {spec.table(f.table).id for f in spec.features if f.kind == "cross" and f.table is not None}
    by_layout: dict[tuple[tuple[Slot, ...], str], list[int]] = {}
    for table in spec.tables:
        key = (_slots(spec, table, only_cross=table.id in crossed), table.precision)
        by_layout.setdefault(key, []).append(table.id)
    groups = tuple(
        Group(
            i,
            tuple(tables),
            slots,
            precision,
            tuple(sorted(f for t in tables for f in features_of.get(t, ()))),
        )
        for i, ((slots, precision), tables) in enumerate(by_layout.items())
    )
    return Layout(groups, tuple(f.index for f in spec.features if f.kind == "dense"))


def _slots(spec: Spec, table: Table, *, only_cross: bool) -> tuple[Slot, ...]:
    labels = len(spec.labels)
    scalars = [name for name in _scalar_names(spec) if not only_cross or name == "cross"]
    slots: list[Slot] = []
    start = 0
    for name in scalars:
        slots.append(Slot(name, start, labels, _scalar_optimizer(spec, table, name), 0.0))
        start += labels
    if not only_cross and spec.model.kind == "hedge" and "counts" in spec.model.experts:
        slots.append(Slot("count", start, 1, Optimizer(name=COUNT.name, parameters={}), 0.0))
        start += 1
    if not only_cross and table.dim and spec.model.kind != "linear":
        slots.append(Slot("vector", start, table.dim, table.optimizer, table.init))
    return tuple(slots)


def _scalar_names(spec: Spec) -> tuple[str, ...]:
    if spec.model.kind == "hedge":
        experts = spec.model.experts
        shared = ("linear",) if "fm" in experts or "deep" in experts else ()
        return tuple(e for e in ("wide", "fast", "cross") if e in experts) + shared
    own_class = ":" in spec.model.kind  # it is given the linear terms, to use or not
    return ("linear",) if own_class or spec.model.kind in ("linear", "deepfm") else ()


def _scalar_optimizer(spec: Spec, table: Table, name: str) -> Optimizer:
    given = table.scalar_optimizer
    if name == "linear" or "lr" not in given.parameters:
        return given
    own = {**given.parameters}
    if has_default_scalars(table) and spec.defaults > 1:
        features = 1 + sum((feature.kind == "cross") == (name == "cross") for feature in spec.features)
        own["lr"] = (WIDE_LR if name == "wide" else FAST_LR) / math.sqrt(features)
        own["initial_accumulator"] = WIDE_ACCUMULATOR
    elif name == "fast":
        own["lr"] *= FAST_FACTOR
    if name == "cross" and "initial_accumulator" in own:
        own["initial_accumulator"] = CROSS_ACCUMULATOR
    return replace(given, parameters=own)


def item_of(spec: Spec, layout: Layout) -> tuple[int, int] | None:
    """Where the item's keys stand, (store group, place among its features); None if no feature has them.

    The item is what the key of served events names second, after the request.
    """
    for path in spec.events.served.key[1:2]:
        for group in layout.groups:
            for place, index in enumerate(group.features):
                feature = spec.features[index]
                if feature.kind == "id" and feature.field == path:
                    return group.index, place
    return None
