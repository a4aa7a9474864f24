"""Layout of a model's rows and columns: store groups, slots of a row with their update rules, dense columns.

The native table, the decoder and the model take their shapes from here. The native table computes the steps
of the update rules (`freshet.tables`); a new rule needs a descriptor here, its step there, and its oracle in
the tests. Shape letters: L labels, S floats of a row, T floats of its optimiser state, D dense columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from freshet.config.spec.defaults import features_in
from freshet.config.spec.inputs import Parameter
from freshet.config.spec.model import Feature, Optimizer, Spec, Table

# --- Update rules.


@dataclass(frozen=True, slots=True)
class Rule:
    """An update rule.

    Its float32 state has `row_state` floats for a slot and `float_state` for each float of the slot.
    """

    name: str
    doc: str
    parameters: tuple[Parameter, ...]
    row_state: int
    float_state: int

    def state_floats(self, width: int) -> int:
        """Return the floats of state of a slot of this width."""
        return self.row_state + self.float_state * width


def _lr(default: float) -> Parameter:
    return Parameter("lr", default, 0.0, 100.0, True, "step size")


def _accumulator(default: float) -> Parameter:
    return Parameter(
        "initial_accumulator", default, 0.0, 1e6, False, "squared gradient assumed before the first step"
    )


def _eps(default: float) -> Parameter:
    return Parameter("eps", default, 0.0, 1.0, True, "added to the root, to avoid a division by 0")


OPTIMIZERS: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("sgd", "plain steps against the gradient", (_lr(0.1),), 0, 0),
        Rule(
            "adagrad",
            "one sum of squared gradients per float (Duchi et al. 2011)",
            (_lr(0.1), _accumulator(0.0), _eps(1e-8)),
            0,
            1,
        ),
        Rule(
            "rowwise_adagrad",
            "one sum per row, of the mean squared gradient (Mudigere et al. 2021)",
            (_lr(0.2), _accumulator(0.1), _eps(1e-8)),
            1,
            0,
        ),
        Rule(
            "rowwise_rmsprop",
            "one decaying mean per row of its squared gradients: step sizes recover, so rows follow drift"
            " (Hinton 2012, by rows)",
            (
                _lr(0.01),
                Parameter("decay", 0.99, 0.0, 0.999999, doc="how slowly the mean squared gradient forgets"),
                _accumulator(0.1),
                _eps(1e-8),
            ),
            1,
            0,
        ),
        Rule(
            "adam",
            "first and second moments per float, steps counted per row (Kingma and Ba 2015)",
            (
                _lr(1e-3),
                Parameter("beta1", 0.9, 0.0, 0.999999, False, "how slowly the mean gradient forgets"),
                Parameter(
                    "beta2", 0.999, 0.0, 0.999999, False, "how slowly the mean squared gradient forgets"
                ),
                _eps(1e-8),
            ),
            1,
            2,
        ),
        Rule(
            "ftrl",
            "FTRL-proximal, sparse through L1 (McMahan et al. 2013)",
            (
                _lr(0.1),
                Parameter("beta", 1.0, 0.0, 1e6, False, "smooths the first steps"),
                Parameter("l1", 0.0, 0.0, 1e6, False, "a float whose evidence stays below this is exactly 0"),
                Parameter("l2", 0.0, 0.0, 1e6, False, "pulls floats towards 0"),
            ),
            0,
            2,
        ),
    )
}
"""Update rules by name."""


COUNT = Rule(
    "count",
    "the value is the number of steps of the row, in buckets, independent of its gradients",
    (),
    1,
    0,
)
"""Rule of the slot of the expert counts. It is not in OPTIMIZERS, as no table may name it."""


def rule_of(name: str) -> Rule:
    """Return the rule of a slot. Raises KeyError."""
    return COUNT if name == COUNT.name else OPTIMIZERS[name]


CROSSES = "crosses"
"""Name of the implicit table with the rows of crosses: scalars only, dim 0."""

DEFAULT_ROW_OPTIMIZER = "rowwise_adagrad"
DEFAULT_SCALAR_OPTIMIZER = "adagrad"


def default_optimizer(name: str) -> Optimizer:
    """Return an update rule with its default parameters. Raises KeyError for an unknown rule."""
    return Optimizer(name=name, parameters={p.name: p.default for p in OPTIMIZERS[name].parameters})


def has_default_scalars(table: Table) -> bool:
    """Return whether the table's scalars have the default optimiser."""
    return table.scalar_optimizer == default_optimizer(DEFAULT_SCALAR_OPTIMIZER)


# --- Rows and columns.


def has_own_rows(spec: Spec, feature: Feature) -> bool:
    """Return whether the feature's ids have other rows than equal ids of other features of its table.

    False for a feature without a table or alone in it, and for crosses: their keys contain the names of the
    parts.
    """
    if feature.table is None or feature.kind == "cross" or spec.table(feature.table).shared:
        return False
    return len(features_in(spec.features, feature.table)) > 1


CROSS_ACCUMULATOR = 1.0
"""Adagrad's initial accumulator for scalars of the expert cross: crosses are many and rare, so first steps
are small."""

WIDE_ACCUMULATOR = 0.1
"""Adagrad's initial accumulator for wide and fast: with rare positives gradients are small, so without it the
first steps of a new id would be too large."""

WIDE_LR, FAST_LR = 0.2125, 0.85
"""Adagrad's step sizes of the experts wide and fast before the division by sqrt(1 + features), as all weights
of a sample move together. The expert cross has that of fast, divided by sqrt(1 + crosses) (ADR 0023)."""

FAST_FACTOR = 4.0
"""Step size of fast divided by the one that a spec states for wide."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Consecutive floats of a row that one optimiser steps."""

    name: str  # "wide", "fast", "cross", "linear" (shared by fm and deep), "count" or "vector"
    start: int  # first float in the row
    width: int  # L for scalars (one a label), dim for the vector
    optimizer: Optimizer
    init: float  # initial values are uniform in ± this; 0: zeros


@dataclass(frozen=True, slots=True)
class Group:
    """Tables of equal layout in one native store group, with the features that have rows there."""

    index: int
    tables: tuple[int, ...]  # table ids
    slots: tuple[Slot, ...]
    precision: str  # of the vector slot in memory
    features: tuple[int, ...]  # indexes of spec.features, in spec order: the order of occurrences

    @property
    def width(self) -> int:
        """S: floats of a row in a lookup or a gradient."""
        return sum(slot.width for slot in self.slots)

    @property
    def scalars(self) -> int:
        """C: floats of a row before its vector, which is the last slot; S if it has no vector."""
        return sum(slot.width for slot in self.slots if slot.name != "vector")

    @property
    def state_floats(self) -> int:
        """T: floats of optimiser state of a row."""
        return sum(rule_of(s.optimizer.name).state_floats(s.width) for s in self.slots)

    def slot(self, name: str) -> Slot | None:
        """Return the slot of that name, or None."""
        return next((s for s in self.slots if s.name == name), None)


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups of a model and its dense columns."""

    groups: tuple[Group, ...]
    dense: tuple[int, ...]  # indexes of spec.features that are dense, in spec order: column d of (B, D)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Floats of a row, and those before its vector, of each group."""
        return tuple((group.width, group.scalars) for group in self.groups)

    @property
    def scalars(self) -> tuple[int, ...]:
        """Floats of a row before its vector, of each group."""
        return tuple(group.scalars for group in self.groups)


def layout_of(spec: Spec) -> Layout:
    """Derive the layout from the spec's identity keys."""
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
    own_class = ":" in spec.model.kind  # receives the linear terms and may ignore them
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
    """Return the place of the item's keys: (store group, position among its features), or None.

    The item is the second field of the key of served events, after the request.
    """
    for path in spec.events.served.key[1:2]:
        for group in layout.groups:
            for place, index in enumerate(group.features):
                feature = spec.features[index]
                if feature.kind == "id" and feature.field == path:
                    return group.index, place
    return None
