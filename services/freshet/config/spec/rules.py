"""Rules between the keys of a spec: references, and constraints that span sections.

A violation raises ConfigError with the key to change. `freshet.config.spec.schemas` has the rules that
need the user's Avro schemas. Shape letter: N values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
from freshet.config.spec.schemas import Requirements, streams_of
from freshet.types import F32, Bool

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


class _Rules(Requirements):
    """The rules for one spec; a method checks one section."""

    def __init__(self, spec: Spec, where: str) -> None:
        super().__init__(where)
        self.spec = spec

    def known(self, key: str, name: str, names: Sequence[str], noun: str, hint: str = "") -> None:
        listed = f"one of {', '.join(names)}" if names else f"the name of a {noun}, of which there is none"
        self.require(name in names, key, name, listed, nearest_hint(name, names) or hint)

    def streams(self) -> None:
        served = self.spec.events.served
        streams = list(streams_of(self.spec))
        topics = [s.topic for s in streams]
        for stream in streams:
            prefix, key = f"events.{stream.role}", stream.key
            alone = topics.count(stream.topic) == 1
            self.require(alone, f"{prefix}.topic", stream.topic, "a topic of its own for each stream")
            self.require(
                len(key) == len(served.key), f"{prefix}.key", key,
                f"{len(served.key)} fields, as events.served.key has",
                "events of all streams are joined on these values, in this order",
            )  # fmt: skip
            self.require(len(set(key)) == len(key), f"{prefix}.key", key, "each field once")
        if served.explode is not None:
            self._explode(served, served.explode)

    def _explode(self, served: Stream, explode: str) -> None:
        inside = [p for p in served.key if p.startswith(explode + ".")]
        self.require(
            bool(inside), "events.served.key", served.key,
            f"a field of the exploded array among them, {explode}.…",
            "without one, all items of a request would be the same impression",
        )  # fmt: skip
        self.require(
            served.key[0] not in inside, "events.served.key", served.key,
            "a field of the whole event first: the request's id",
            f"{served.key[0]} belongs to one item of the request",
        )  # fmt: skip
        for key, path in (("time", served.time.path), ("id", served.id or "")):
            self.require(
                path != explode and not path.startswith(explode + "."), f"events.served.{key}", path,
                "a field of the whole event", "one event, one time, one id",
            )  # fmt: skip

    def join(self) -> None:
        required = self.spec.join.require
        found = required != "shown" or self.spec.events.shown is not None
        self.require(
            found, "join.require", required, "a stream events.shown", "declare it, or drop join.require"
        )

    def label(self, label: Label) -> None:
        key, plain = f"labels.{label.name}", label.loss == "logloss"
        self.require(
            label.name not in RESERVED, "labels", label.name,
            "another name", "it is a word of the expression language of serve.score",
        )  # fmt: skip
        compile_condition(label.on, where=self.where, key=f"{key}.on")
        if label.value is not None:
            compile_value(label.value, where=self.where, key=f"{key}.value")
            self.require(
                not plain, f"{key}.loss", label.loss,
                '"huber" or "mse" beside a value', "logloss is for labels that are true or not",
            )  # fmt: skip
        if label.bounds is not None:
            self.require(
                not plain, f"{key}.bounds", label.bounds,
                "no bounds beside logloss", "logloss takes 0 and 1 and nothing between",
            )  # fmt: skip
            self.require(
                label.bounds[0] < label.bounds[1], f"{key}.bounds", label.bounds,
                "the least value, then a greater one", "bounds = [0, 100] allows 0 to 100",
            )  # fmt: skip
        if label.given is not None:
            self.known(f"{key}.given", label.given, [x.name for x in self.spec.labels], "label")
            self._acyclic(label)

    def _acyclic(self, label: Label) -> None:
        seen, at = [label.name], label
        while at.given is not None:
            self.require(
                at.given not in seen, f"labels.{label.name}.given", label.given,
                "a label that does not depend on this one", " given ".join([*seen, at.given]),
            )  # fmt: skip
            if at.given not in [x.name for x in self.spec.labels]:
                return  # reported by that label itself
            at = self.spec.label(at.given)
            seen.append(at.name)

    def feature(self, feature: Feature) -> None:
        key = f"features.{feature.name}"
        explode = self.spec.events.served.explode
        self.require(
            feature.field is None or feature.field != explode, f"{key}.field", feature.field,
            f"a field of one element, {explode}.…", "the array is exploded: a sample holds one element",
        )  # fmt: skip
        if feature.table is not None and feature.kind != "cross":
            names = [t.name for t in self.spec.tables if t.dim]
            hint = f"declare it: [tables] {feature.table} = {{ dim = 16 }}"
            self.known(f"{key}.table", feature.table, names, "table", hint)
        self.require(
            all(a < b for a, b in pairwise(feature.buckets)), f"{key}.buckets", feature.buckets,
            "rising edges", "a value falls into the bucket after the last edge ≤ it",
        )  # fmt: skip
        self._serve_as(feature)

    def _serve_as(self, feature: Feature) -> None:
        value, key = feature.serve_as, f"features.{feature.name}.serve_as"
        if value is None:
            return
        if feature.time is not None:
            count = TIME_VALUES[feature.time]
            among = isinstance(value, int) and 0 <= value < count
            self.require(among, key, value, f"an integer from 0 to {count - 1}", f"time: {feature.time}")
        elif feature.kind in ("dense", "bucket"):
            hint = f"{feature.name} is a number that serving does not know"
            self.require(not isinstance(value, str), key, value, "a number", hint)
        else:
            hint = f"{feature.name} is an id"
            self.require(not isinstance(value, float), key, value, "text or an integer", hint)

    def model(self) -> None:
        model = self.spec.model
        experts, key = model.experts, "model.experts"
        self.require(len(set(experts)) == len(experts), key, experts, "each expert once")
        fed = "counts" not in experts or "wide" in experts
        self.require(fed, key, experts, "wide beside counts, which reads its weights")
        self.require(experts != ("stack",), key, experts, "another expert beside stack, which sums others")
        seen = set()
        for i, parts in enumerate(model.crosses):
            key = f"model.crosses[{i}]"
            new = len(set(parts)) == len(parts) and frozenset(parts) not in seen
            self.require(new, key, parts, "different features, and each combination once")
            seen.add(frozenset(parts))
            for part in parts:
                kind = self.spec.feature(part).kind
                hint = f"{part} is a {kind} feature"
                self.require(kind in SINGLE, key, parts, "features with one id a sample", hint)
        self._one_dim()
        self._fed()

    def _fed(self) -> None:
        """Check that the features suit the kind of model; `with_experts` checks experts."""
        kind, features = self.spec.model.kind, self.spec.features
        if has_ids(features):
            self.require(
                kind != "dlrm" or len(features) > 1, "model.kind", kind,
                "two features for dlrm", "it learns from products of two features",
            )  # fmt: skip
            return
        self.require(
            kind != "dlrm", "model.kind", kind,
            "a feature with ids (an id, list, time or bucket) for dlrm",
            "it multiplies vectors of ids; hedge, mlp, linear, deepfm and dcnv2 learn from numbers alone",
        )  # fmt: skip
        self.require(
            kind != "linear" or self.spec.defaults > 1, "model.kind", kind,
            "a feature with ids (an id, list, time or bucket) for linear with `defaults = 1`",
            "a linear model of that generation has no weights of numbers",
        )  # fmt: skip

    def _one_dim(self) -> None:
        """Check that dims are equal where FM or interactions multiply vectors of different features."""
        model = self.spec.model
        multiplied = {"dlrm": "dlrm", "deepfm": "deepfm"}.get(model.kind, "")
        if model.kind == "hedge" and "fm" in model.experts:
            multiplied = "the expert fm"
        used = [
            self.spec.table(f.table) for f in self.spec.features if f.table is not None and f.kind != "cross"
        ]
        for table in used:
            self.require(
                table.dim == used[0].dim or not multiplied, f"tables.{table.name}.dim", table.dim,
                f"{used[0].dim}, as table {used[0].name} has",
                f"{multiplied} multiplies vectors of different features with each other",
            )  # fmt: skip

    def train(self) -> None:
        train = self.spec.train
        behind = train.batch_behind_rows
        self.require(
            behind is None or behind >= train.batch_rows, "train.batch.behind", behind,
            f"at least batch.rows, {train.batch_rows}", "behind: rows a lane takes when it is behind",
        )  # fmt: skip
        model, others = self.spec.model, "fp32, auto, int8, int4 or adaquantfl"
        without = {"linear": True, "hedge": "deep" not in model.experts}
        named = f"model.kind {model.kind!r}" + (" without the expert deep" if model.kind == "hedge" else "")
        self.require(
            train.reduce not in ("1bit-adam", "dct") or not without.get(model.kind), "train.reduce",
            train.reduce, others, f"it needs Adam's moments, and {named} has none",
        )  # fmt: skip
        self.require(
            model.dense_optimizer == "adam" or model.kind not in ("hedge", "mlp", "linear"),
            "model.dense_optimizer", model.dense_optimizer, "adam",
            f"lamb steps networks of torch, and model.kind {model.kind!r} is native code",
        )  # fmt: skip
        one_bit = f"1bit-{model.dense_optimizer}"
        needs = {"1bit-adam": "adam", "dct": "adam", "1bit-lamb": "lamb"}
        self.require(
            needs.get(train.reduce) in (None, model.dense_optimizer), "train.reduce", train.reduce,
            f"{one_bit}, {others}", f"model.dense_optimizer is {model.dense_optimizer!r}",
        )  # fmt: skip
        self.require(
            train.mode != "async" or train.reduce in ("fp32", "int8"), "train.reduce", train.reduce,
            "fp32 or int8 in mode async",
            "in mode async it is the codec of averagings; the others are of sums of gradients",
        )  # fmt: skip
        names = [f.name for f in self.spec.features if f.kind in SINGLE]
        for i, name in enumerate(train.segments):
            key = f"train.segments[{i}]"
            self.known(key, name, names, "feature with one id a sample")
            self.require(name not in train.segments[:i], key, name, "each feature once")

    def serve(self) -> None:
        serve, served = self.spec.serve, self.spec.events.served
        names = [label.name for label in self.spec.labels]
        for name in compile_score(serve.score, where=self.where, key="serve.score").fields():
            hint = nearest_hint(name, names) or f'there is no label "{name}"'
            expected = f"names of labels: {', '.join(names)}"
            self.require(name in names, "serve.score", serve.score, expected, hint)
        self.require(
            not serve.log_served or not served.external, "serve.log_served", serve.log_served,
            f"false, as only external writers use the format {served.format} of events.served",
            "log served items where they are shown, or use avro or json, which inference can write too",
        )  # fmt: skip
        low, high = serve.gate.calibration
        self.require(
            low <= 1 <= high and low != high, "serve.gate.calibration", serve.gate.calibration,
            "two rising numbers around 1", "calibration: allowed mean prediction / mean label",
        )  # fmt: skip
        self.require(
            serve.gate.floor <= serve.gate.samples, "serve.gate.floor", serve.gate.floor,
            f"at most serve.gate.samples, {serve.gate.samples}",
            "a higher floor holds every version; where samples is below the default of floor, set floor, too",
        )  # fmt: skip
