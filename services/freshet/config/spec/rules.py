"""Rules between the keys of a spec: references, and constraints that span sections.

A violation raises ConfigError with the key to change. `freshet.config.spec.schemas` has the rules that
need the user's Avro schemas. Shape letter: N values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from freshet.config.expression import (
    RESERVED,
    compile_condition,
    compile_score,
    compile_value,
)
from freshet.config.options import nearest_hint
from freshet.config.spec.defaults import SINGLE, has_ids
from freshet.config.spec.model import Feature, Label, Spec, Stream
from freshet.errors import ConfigError
from freshet.types import F32, Bool

__all__ = ["Bounds", "bounds_text", "check_rules", "within"]

Bounds = tuple[float, float]
"""The least and the greatest value, both allowed."""


def within(bounds: Bounds, values: F32) -> Bool:
    """Return the mask (N,) of values (N,) within the bounds; NaN is outside.

    Values of labels have 32 bits, so the bounds are rounded to 32 bits too: a value equal to a bound is
    within.
    """
    low, high = np.float32(bounds[0]), np.float32(bounds[1])
    allowed: Bool = (values >= low) & (values <= high)
    return allowed


def bounds_text(bounds: Bounds) -> str:
    """Format bounds, such as `a number from 0 to 5`."""
    return f"a number from {bounds[0]:.9g} to {bounds[1]:.9g}"


TIME_VALUES = {"hour": 24, "weekday": 7, "hour_of_week": 168}


def check_rules(spec: Spec, where: str) -> None:
    """Check the rules in order. Raises ConfigError for the first that the spec breaks."""
    rules = _Rules(spec, where)
    rules.streams()
    rules.join()
    for label in spec.labels:
        rules.label(label)
    for feature in spec.features:
        rules.feature(feature)
    rules.model()
    rules.train()
    rules.serve()


class _Rules:
    """The rules for one spec; a method checks one section."""

    def __init__(self, spec: Spec, where: str) -> None:
        self.spec, self.where = spec, where

    def error(self, key: str, found: Any, expected: str, hint: str = "") -> ConfigError:
        return ConfigError(self.where, key, found, expected, hint)

    def known(self, key: str, name: str, names: Sequence[str], noun: str, hint: str = "") -> None:
        if name not in names:
            expected = (
                f"one of {', '.join(names)}" if names else f"the name of a {noun}, of which there is none"
            )
            raise self.error(key, name, expected, nearest_hint(name, names) or hint)

    def streams(self) -> None:
        events = self.spec.events
        streams: list[Stream] = [s for s in (events.served, events.shown, events.action) if s is not None]
        topics = [s.topic for s in streams]
        for stream in streams:
            if topics.count(stream.topic) > 1:
                raise self.error(
                    f"events.{stream.role}.topic", stream.topic, "a topic of its own for each stream"
                )
            if len(stream.key) != len(events.served.key):
                raise self.error(
                    f"events.{stream.role}.key",
                    list(stream.key),
                    f"{len(events.served.key)} fields, as events.served.key has",
                    "events of all streams are joined on these values, in this order",
                )
            if len(set(stream.key)) != len(stream.key):
                raise self.error(f"events.{stream.role}.key", list(stream.key), "each field once")
        self._explode(events.served)

    def _explode(self, served: Stream) -> None:
        if served.explode is None:
            return
        inside = [p for p in served.key if p.startswith(served.explode + ".")]
        if not inside:
            raise self.error(
                "events.served.key",
                list(served.key),
                f"a field of the exploded array among them, {served.explode}.…",
                "without one, all items of a request would be the same impression",
            )
        if served.key[0] in inside:
            raise self.error(
                "events.served.key",
                list(served.key),
                "a field of the whole event first: the request's id",
                f"{served.key[0]} belongs to one item of the request",
            )
        for key, path in (("time", served.time.path), ("id", served.id or "")):
            if path == served.explode or path.startswith(served.explode + "."):
                raise self.error(
                    f"events.served.{key}", path, "a field of the whole event", "one event, one time, one id"
                )

    def join(self) -> None:
        if self.spec.join.require == "shown" and self.spec.events.shown is None:
            raise self.error(
                "join.require", "shown", "a stream events.shown", "declare it, or drop join.require"
            )

    def label(self, label: Label) -> None:
        key = f"labels.{label.name}"
        if label.name in RESERVED:
            raise self.error(
                "labels", label.name, "another name", "it is a word of the expression language of serve.score"
            )
        compile_condition(label.on, where=self.where, key=f"{key}.on")
        if label.value is not None:
            compile_value(label.value, where=self.where, key=f"{key}.value")
            if label.loss == "logloss":
                raise self.error(
                    f"{key}.loss",
                    "logloss",
                    '"huber" or "mse" beside a value',
                    "logloss is for labels that are true or not",
                )
        if label.bounds is not None:
            self._bounds(f"{key}.bounds", label.bounds, label.loss)
        if label.given is not None:
            self.known(f"{key}.given", label.given, [x.name for x in self.spec.labels], "label")
            self._acyclic(label)

    def _bounds(self, key: str, bounds: tuple[float, float], loss: str) -> None:
        if loss == "logloss":
            raise self.error(
                key, list(bounds), "no bounds beside logloss", "logloss takes 0 and 1 and nothing between"
            )
        if not bounds[0] < bounds[1]:
            raise self.error(
                key, list(bounds), "the least value, then a greater one", "bounds = [0, 100] allows 0 to 100"
            )

    def _acyclic(self, label: Label) -> None:
        seen, at = [label.name], label
        while at.given is not None:
            if at.given in seen:
                chain = " given ".join([*seen, at.given])
                raise self.error(
                    f"labels.{label.name}.given",
                    label.given,
                    "a label that does not depend on this one",
                    chain,
                )
            if at.given not in [x.name for x in self.spec.labels]:
                return  # reported by that label itself
            at = self.spec.label(at.given)
            seen.append(at.name)

    def feature(self, feature: Feature) -> None:
        key = f"features.{feature.name}"
        explode = self.spec.events.served.explode
        if feature.field is not None and feature.field == explode:
            raise self.error(
                f"{key}.field",
                feature.field,
                f"a field of one element, {explode}.…",
                "the array is exploded: a sample holds one element",
            )
        if feature.table is not None and feature.kind != "cross":
            names = [t.name for t in self.spec.tables if t.dim]
            self.known(
                f"{key}.table",
                feature.table,
                names,
                "table",
                f"declare it: [tables] {feature.table} = {{ dim = 16 }}",
            )
        if any(a >= b for a, b in zip(feature.buckets, feature.buckets[1:], strict=False)):
            raise self.error(
                f"{key}.buckets",
                list(feature.buckets),
                "rising edges",
                "a value falls into the bucket after the last edge ≤ it",
            )
        self._serve_as(feature)

    def _serve_as(self, feature: Feature) -> None:
        value, key = feature.serve_as, f"features.{feature.name}.serve_as"
        if value is None:
            return
        if feature.time is not None:
            if not isinstance(value, int) or not 0 <= value < TIME_VALUES[feature.time]:
                raise self.error(
                    key,
                    value,
                    f"an integer from 0 to {TIME_VALUES[feature.time] - 1}",
                    f"time: {feature.time}",
                )
        elif feature.kind in ("dense", "bucket"):
            if isinstance(value, str):
                raise self.error(
                    key, value, "a number", f"{feature.name} is a number that serving does not know"
                )
        elif isinstance(value, float):
            raise self.error(key, value, "text or an integer", f"{feature.name} is an id")

    def model(self) -> None:
        model = self.spec.model
        if len(set(model.experts)) != len(model.experts):
            raise self.error("model.experts", list(model.experts), "each expert once")
        if "counts" in model.experts and "wide" not in model.experts:
            raise self.error(
                "model.experts", list(model.experts), "wide beside counts, which reads its weights"
            )
        if model.experts == ("stack",):
            raise self.error(
                "model.experts", list(model.experts), "another expert beside stack, which sums others"
            )
        seen = set()
        for i, parts in enumerate(model.crosses):
            if len(set(parts)) != len(parts) or frozenset(parts) in seen:
                raise self.error(
                    f"model.crosses[{i}]", list(parts), "different features, and each combination once"
                )
            seen.add(frozenset(parts))
            for part in parts:
                if self.spec.feature(part).kind not in SINGLE:
                    raise self.error(
                        f"model.crosses[{i}]",
                        list(parts),
                        "features with one id a sample",
                        f"{part} is a {self.spec.feature(part).kind} feature",
                    )
        if model.kind in ("hedge", "dlrm", "deepfm", "dcnv2"):
            self._one_dim()
        self._fed()

    def _fed(self) -> None:
        """Check that the features suit the kind of model; `with_experts` checks experts."""
        kind, features = self.spec.model.kind, self.spec.features
        if has_ids(features):
            if kind == "dlrm" and len(features) < 2:
                raise self.error(
                    "model.kind", kind, "two features for dlrm", "it learns from products of two features"
                )
        elif kind == "dlrm":
            raise self.error(
                "model.kind",
                kind,
                "a feature with ids (an id, list, time or bucket) for dlrm",
                "it multiplies vectors of ids; hedge, mlp, linear, deepfm and dcnv2 learn from numbers alone",
            )
        elif kind == "linear" and self.spec.defaults == 1:
            raise self.error(
                "model.kind",
                kind,
                "a feature with ids (an id, list, time or bucket) for linear with `defaults = 1`",
                "a linear model of that generation has no weights of numbers",
            )

    def _one_dim(self) -> None:
        """Check that dims are equal where FM or interactions multiply vectors of different features."""
        used = [
            self.spec.table(f.table) for f in self.spec.features if f.table is not None and f.kind != "cross"
        ]
        if (
            set(self.spec.model.experts) <= {"wide", "fast", "cross", "counts", "stack"}
            and self.spec.model.kind == "hedge"
        ):
            return
        for table in used:
            if table.dim != used[0].dim and self._interacts():
                raise self.error(
                    f"tables.{table.name}.dim",
                    table.dim,
                    f"{used[0].dim}, as table {used[0].name} has",
                    f"{self._interacts()} multiplies vectors of different features with each other",
                )

    def _interacts(self) -> str:
        if self.spec.model.kind == "hedge":
            return "the expert fm" if "fm" in self.spec.model.experts else ""
        return self.spec.model.kind if self.spec.model.kind in ("dlrm", "deepfm") else ""

    def train(self) -> None:
        train = self.spec.train
        if train.batch_behind_rows is not None and train.batch_behind_rows < train.batch_rows:
            raise self.error(
                "train.batch.behind",
                train.batch_behind_rows,
                f"at least batch.rows, {train.batch_rows}",
                "behind: rows a lane takes when it is behind",
            )
        names = [f.name for f in self.spec.features if f.kind in SINGLE]
        for i, name in enumerate(train.segments):
            self.known(f"train.segments[{i}]", name, names, "feature with one id a sample")
            if name in train.segments[:i]:
                raise self.error(f"train.segments[{i}]", name, "each feature once")

    def serve(self) -> None:
        serve = self.spec.serve
        score = compile_score(serve.score, where=self.where, key="serve.score")
        names = [label.name for label in self.spec.labels]
        for name in score.fields():
            if name not in names:
                raise self.error(
                    "serve.score",
                    serve.score,
                    f"names of labels: {', '.join(names)}",
                    nearest_hint(name, names) or f'there is no label "{name}"',
                )
        stream = self.spec.events.served
        if serve.log_served and stream.external:
            raise self.error(
                "serve.log_served",
                True,
                f"false, as only external writers use the format {stream.format} of events.served",
                "log served items where they are shown, or use avro or json, which inference can write too",
            )
        low, high = serve.gate.calibration
        if not low <= 1 <= high or low == high:
            raise self.error(
                "serve.gate.calibration",
                [low, high],
                "two rising numbers around 1",
                "calibration: allowed mean prediction / mean label",
            )
