"""The feature spec as a frozen object: `freshet.toml`, with all defaults.

Each option has a kind: a change of an `identity` key needs a new model or a replay; a `tunable` key may
change during a model's life; `deployment` keys decide where it runs. Durations are integers with the unit in
the name. Only the parser (`freshet.config.spec.parse`) creates these objects.
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
"""Newest generation of defaults; it rises when the default of an identity key changes.

1: releases before the key `defaults`. 2: features that use one table have separate rows, unless it is
`shared`.
"""

GENERATION = Integer(1, NEWEST_DEFAULTS)
GENERATION_HINT = (
    f"defaults: the generation of defaults of the spec; this release supports 1 to {NEWEST_DEFAULTS}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A whole spec. `labels`, `tables` and `features` are in file order, which defines indexes and ids."""

    name: str = option(
        "identity",
        "names the model's topics and store",
        MODEL_NAME,
    )
    defaults: int = option(
        "identity",
        "generation of defaults; 1 continues a model of a release without this key",
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
    folder: str = field(default="", compare=False)  # folder of the spec file; base of its relative paths
    written: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The parsed TOML, to parse the spec again in another generation of defaults."""

    @staticmethod
    def load(path: str | Path) -> Spec:
        """Read a `freshet.toml`. Raises ConfigError for an unreadable or invalid file."""
        from freshet.config.spec.parse import load_spec  # noqa: PLC0415 - parse imports this module

        return load_spec(path)

    def table(self, name: str) -> Table:
        """Return the table of that name. Raises KeyError."""
        return {t.name: t for t in self.tables}[name]

    def feature(self, name: str) -> Feature:
        """Return the feature of that name. Raises KeyError."""
        return {f.name: f for f in self.features}[name]

    @property
    def bounds(self) -> dict[int, tuple[float, float]]:
        """Index of a label -> least and greatest value, for labels with bounds."""
        return {label.index: label.bounds for label in self.labels if label.bounds is not None}

    def label(self, name: str) -> Label:
        """Return the label of that name. Raises KeyError."""
        return {label.name: label for label in self.labels}[name]
