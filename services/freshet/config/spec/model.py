"""The feature spec as frozen objects: what `freshet.toml` says, with every default filled in.

Each field carries its kind: `identity` changes the model's meaning (a new model, or a replay), `tunable`
may change while it runs, `deployment` says where it runs. Only identity keys make the hash that a store is
tied to. Beside the kind stand the key of `freshet.toml` (if not the field's name), the form of its value
and what it means: the parser, the errors, the reference in the docs and `freshet check` all follow from
these. Durations are integers with their unit in the name. Only the parser (`freshet.config.spec.parse`) makes
these objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freshet.config.options import Integer, Kind, Text, option
from freshet.config.spec.events import Events, Files, Join, Label, Retention, Stream, TimeField
from freshet.config.spec.inputs import Feature, Optimizer, Table
from freshet.config.spec.learning import Explore, Gate, Model, Serve, Train

__all__ = [
    "GENERATION",
    "GENERATION_HINT",
    "MODEL_NAME",
    "NEWEST_DEFAULTS",
    "Events",
    "Explore",
    "Feature",
    "Files",
    "Gate",
    "Join",
    "Kind",
    "Label",
    "Model",
    "Optimizer",
    "Retention",
    "Serve",
    "Spec",
    "Stream",
    "Table",
    "TimeField",
    "Train",
]


MODEL_NAME = Text(
    "a name of a-z, 0-9, - and _, starting with a letter, at most 64 long", r"[a-z][a-z0-9_-]{0,63}"
)

NEWEST_DEFAULTS = 2
"""The newest generation of defaults: rises when a default of an identity key changes its value or meaning.

1: releases before the key `defaults`. 2: features have rows of their own in a table that they share, unless
it is `shared`.
"""

GENERATION = Integer(1, NEWEST_DEFAULTS)
GENERATION_HINT = (
    f"defaults: the generation of defaults that the spec means; this release knows up to {NEWEST_DEFAULTS}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A whole spec. `labels`, `tables` and `features` are in file order; their indexes and ids are
    positions.
    """

    name: str = option(
        "identity",
        "names the model's topics and store",
        MODEL_NAME,
    )
    defaults: int = option(
        "identity",
        "generation of defaults that the spec means; 1 goes on with a model of a release without this key",
        GENERATION,
        default=NEWEST_DEFAULTS,
        hint=GENERATION_HINT,
    )
    events: Events
    join: Join
    labels: tuple[Label, ...]
    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    model: Model
    train: Train
    serve: Serve
    retention: Retention
    partitions: int = option("identity", "of impressions, actions and samples", Integer(1, 256), default=8)
    buckets: int = option(
        "identity",
        "of the parameter server, the unit of ownership",
        Integer(2, 65_536, power_of_two=True),
        default=1024,
    )
    files: Files = field(default_factory=Files)
    folder: str = field(default="", compare=False)  # where the spec file lies; its paths are relative to this
    written: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The file as parsed TOML, from which the spec follows in another generation of defaults."""

    @staticmethod
    def load(path: str | Path) -> Spec:
        """Read a `freshet.toml`. Raises ConfigError, which says what to mend."""
        from freshet.config.spec.parse import load_spec  # noqa: PLC0415 - the parser makes these objects

        return load_spec(path)

    def table(self, name: str) -> Table:
        """The table of that name. Raises KeyError."""
        return {t.name: t for t in self.tables}[name]

    def feature(self, name: str) -> Feature:
        """The feature of that name. Raises KeyError."""
        return {f.name: f for f in self.features}[name]

    @property
    def bounds(self) -> dict[int, tuple[float, float]]:
        """Label's number -> its least and greatest value, of labels that state bounds."""
        return {label.index: label.bounds for label in self.labels if label.bounds is not None}

    def label(self, name: str) -> Label:
        """The label of that name. Raises KeyError."""
        return {label.name: label for label in self.labels}[name]
