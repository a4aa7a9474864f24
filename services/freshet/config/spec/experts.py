"""The experts of a hedge: what each needs of a spec, and which of the defaults a spec cannot have.

An expert that needs ids is left out of the defaults where no feature has ids, and refused where the spec
names it. So a model of numbers alone has wide, deep and stack, and `freshet check` says so. A model of few
features has the expert cross, with all pairs of them (ADR 0023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, replace
from itertools import combinations
from typing import Any

from freshet.config.options import Section, default_of, options_of
from freshet.config.spec.model import Feature, Model, Spec, Table

__all__ = [
    "SINGLE",
    "crossed",
    "default_crosses",
    "has_default_crosses",
    "has_ids",
    "left_out_experts",
    "with_experts",
]

SINGLE = ("id", "time", "bucket")
"""Kinds of features with one id a sample: what crosses and segments may name."""

MOST_PAIRED = 10
"""Features with one id a sample that a model may have for the default to cross all pairs of them: 45 lookups
a sample more at most."""

NEEDS_IDS = {
    "fast": "without one, fast has the same weights as wide",
    "fm": "fm multiplies vectors of ids",
    "counts": "counts weighs ids by how often they were seen",
}
"""Experts that nothing but ids feed, and why. cross is not among them: a cross already names features."""


def has_ids(features: Sequence[Feature]) -> bool:
    """Whether a feature has rows: an id, a list, a time or a bucket."""
    return any(feature.table is not None and feature.kind != "cross" for feature in features)


def default_crosses(features: Sequence[Feature], generation: int) -> tuple[tuple[str, ...], ...]:
    """The crosses of a spec that names neither crosses nor experts: all pairs of few features, or none."""
    names = [feature.name for feature in features if feature.kind in SINGLE]
    return tuple(combinations(names, 2)) if generation > 1 and len(names) <= MOST_PAIRED else ()


def crossed(experts: Sequence[str]) -> tuple[str, ...]:
    """Default experts with cross among them."""
    first = experts.index("fm")
    return (*experts[:first], "cross", *experts[first:])


def has_default_crosses(spec: Spec) -> bool:
    """Whether a spec that names neither crosses nor experts would have those of this one, and their bound."""
    pairs = default_crosses(spec.features, spec.defaults)
    experts = default_of(_option("experts"), spec.defaults)
    if not pairs or spec.model.crosses != pairs or spec.model.experts != crossed(experts):
        return False
    return all(table.max_rows is not None for table in spec.tables if table.name == "crosses")


def with_experts(
    model: Model, section: Section, features: Sequence[Feature], tables: Sequence[Table], generation: int
) -> Model:
    """The model with the experts that it has; a model that is no hedge has none and stays as it is.

    Args:
        model:      as read, with the default experts where the spec names none.
        section:    `[model]` of the spec, for errors.
        features:   of the spec, with or without crosses.
        tables:     of the spec.
        generation: of the defaults. In generation 1 wide had no weights of numbers, and a table that no
                    feature uses was enough for it.

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
    """The default experts that no feature can feed; none where the spec names its own experts."""
    if spec.model.kind != "hedge" or "experts" in spec.written.get("model", {}):
        return ()
    return tuple(e for e in default_of(_option("experts"), spec.defaults) if e not in spec.model.experts)


def _option(name: str) -> Field[Any]:
    return next(o for o in options_of(Model) if o.name == name)
