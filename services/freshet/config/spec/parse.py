"""Parser of `freshet.toml` into a complete, checked `Spec`; it refuses keys that it does not know.

Forms check single keys (`freshet.config.spec.model`), `freshet.config.spec.rules` checks keys against each
other.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from freshet.config.options import (
    Choice,
    Number,
    Section,
    Wrong,
    key_of,
    nearest_hint,
    options_of,
    read_object,
)
from freshet.config.spec.defaults import crossed, default_crosses, with_experts, with_sharing
from freshet.config.spec.inputs import NAME
from freshet.config.spec.layout import (
    CROSSES,
    DEFAULT_ROW_OPTIMIZER,
    DEFAULT_SCALAR_OPTIMIZER,
    OPTIMIZERS,
    default_optimizer,
)
from freshet.config.spec.model import (
    GENERATION,
    GENERATION_HINT,
    NEWEST_DEFAULTS,
    Events,
    Explore,
    Feature,
    Files,
    Gate,
    Join,
    Label,
    Model,
    Optimizer,
    Retention,
    Serve,
    Spec,
    Stream,
    Table,
    Train,
)
from freshet.config.spec.rules import check_rules
from freshet.config.spec.schemas import read_small
from freshet.config.spec.transforms import resolve
from freshet.errors import ConfigError

TOPICS = {"served": "impressions", "shown": "shown", "action": "actions"}
SECTIONS = ("events", "join", "labels", "tables", "features", "model", "train", "serve", "retention", "files")
SPEC_HINT = "freshet init writes a commented spec from your Avro schemas"


def load_spec(path: str | Path) -> Spec:
    """Read the spec file. Raises ConfigError for an unreadable or invalid file."""
    path = Path(path)
    try:
        text = read_small(path).decode("utf-8").removeprefix("\ufeff")  # byte order mark
    except OSError as error:
        raise ConfigError(
            str(path), "", f"cannot be read: {error.strerror}", "a feature spec", SPEC_HINT
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            str(path), "", f"byte {error.start} is not UTF-8", "a text file in UTF-8"
        ) from error
    return parse_spec(text, where=str(path), folder=str(path.parent))


def parse_spec(text: str, *, where: str = "freshet.toml", folder: str = "") -> Spec:
    """Parse the text of a spec.

    Args:
        text: TOML.
        where: place for errors.
        folder: base of relative paths in the spec.

    Raises:
        ConfigError: the text is invalid; names the key, the value, the expected form and a remedy.
    """
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number of too many digits
        raise ConfigError(where, "", f"not TOML: {error}", "a file in TOML, see https://toml.io") from error
    except RecursionError:
        raise ConfigError(where, "", "not TOML: nested too deeply", "a file in TOML") from None
    return spec_of(values, where=where, folder=folder)


def spec_of(values: Mapping[str, Any], *, where: str = "freshet.toml", folder: str = "") -> Spec:
    """Create the spec from parsed TOML; arguments and errors as for `parse_spec`."""
    # All sections need the generation for the defaults of absent keys.
    generation = Section(where, "", values).read_value(
        "defaults", GENERATION, NEWEST_DEFAULTS, GENERATION_HINT
    )
    spec = _spec(Section(where, "", values, generation), folder)
    check_rules(spec, where)
    return replace(spec, written=values)


def with_defaults(spec: Spec, generation: int) -> Spec:
    """Parse the spec's file again in another generation of defaults.

    Top-level values that were replaced since then are kept. Raises ConfigError if the file is invalid in that
    generation.
    """
    other = spec_of({**spec.written, "defaults": generation}, folder=spec.folder)
    kept = {o.name: getattr(spec, o.name) for o in options_of(Spec) if o.name != "defaults"}
    return replace(other, **kept)


def _spec(root: Section, folder: str) -> Spec:
    root.check_keys([*(key_of(o) for o in options_of(Spec)), *SECTIONS])
    labels = _labels(root.section("labels", required=True, hint="labels: what the model learns to predict"))
    generation = root.defaults or NEWEST_DEFAULTS
    model_section = root.section("model")
    features = read_features(
        root.section("features", required=True, hint="features: the inputs of the model"), folder
    )
    model = _model(model_section, default_crosses(features, generation))
    tables = read_tables(
        root.section("tables"),
        crossed=bool(model.crosses),
        most_crosses=None if "crosses" in model_section else MOST_PAIR_ROWS,
    )
    tables = with_sharing(tables, features, generation)
    model = with_experts(model, model_section, features, tables, generation)
    if model.crosses:
        features = (*features, *cross_features(root, model, features))
    return read_object(
        Spec,
        root,
        also=SECTIONS,
        events=_events(
            root.section("events", required=True, hint="events: where impressions and actions come from")
        ),
        join=read_object(Join, root.section("join")),
        labels=labels,
        tables=tables,
        features=features,
        model=model,
        train=read_object(Train, root.section("train")),
        serve=_serve(root.section("serve"), labels),
        retention=read_object(Retention, root.section("retention")),
        files=read_object(Files, root.section("files")),
        folder=folder,
    )


def _events(section: Section) -> Events:
    section.check_keys(TOPICS)
    return Events(
        served=_stream(section, "served"),
        action=_stream(section, "action"),
        shown=_stream(section, "shown") if "shown" in section else None,
    )


def _stream(events: Section, role: Any) -> Stream:
    section = events.section(
        role,
        required=True,
        hint='for example { schema = "events.avsc", key = ["request_id", "item"], time = "ts:ms" }',
    )
    given: dict[str, Any] = {} if "topic" in section else {"topic": TOPICS[role]}
    stream = read_object(Stream, section, role=role, **given)
    if role != "served" and stream.explode is not None:
        raise section.error("explode", "no such key here", "only served events hold several impressions each")
    return stream


def _labels(section: Section) -> tuple[Label, ...]:
    if not 1 <= len(section.names()) <= 32:
        raise section.error(
            "", "1 to 32 labels", "a label is a table: click = { on = \"action.type == 'click'\" }"
        )
    return tuple(_label(section, name, index) for index, name in enumerate(section.names()))


def _label(labels: Section, name: str, index: int) -> Label:
    check_name(labels, name)
    section = labels.section(name)
    given: dict[str, Any] = {}
    if "value" in section and "loss" not in section:
        given["loss"] = "huber"
    return read_object(Label, section, name=name, index=index, **given)


def _model(section: Section, crosses: tuple[tuple[str, ...], ...]) -> Model:
    """Read `[model]`; `crosses` is the default of a hedge that names neither crosses nor experts."""
    custom = ":" in str(section.raw("kind"))
    if "options" in section and not custom:
        raise section.error(
            "options",
            "no such key without a class of your own",
            'options are passed to kind = "package.module:Class"',
        )
    options = section.section("options")
    for key in options.names():
        if not _is_plain(options.raw(key)):
            raise options.error(key, "text, a finite number, true or false, or lists and tables of these")
    unnamed = "crosses" not in section and "experts" not in section
    model = read_object(
        Model,
        section,
        also=("options",),
        options={key: options.raw(key) for key in options.names()},
        **({"crosses": crosses} if unnamed else {}),
    )
    if model.kind != "hedge":
        for key in ("mix", "experts", "crosses", "hedge_discount"):
            if key in section:
                raise section.error(
                    key, f'no such key beside kind = "{model.kind}"', "only a hedge has experts and crosses"
                )
        if model.kind == "linear" and "deep" in section:
            raise section.error("deep", 'no such key beside kind = "linear"', "a linear model has no MLP")
        return replace(model, experts=(), crosses=())
    if model.crosses and "experts" not in section:
        model = replace(model, experts=crossed(model.experts))
    if "deep" in section and "deep" not in model.experts:
        raise section.error(
            "deep", 'no such key unless experts hold "deep"', "deep: the hidden widths of that expert's MLP"
        )
    if model.crosses and "cross" not in model.experts:
        raise section.error("crosses", 'no such key unless experts hold "cross"')
    if "cross" in model.experts and not model.crosses:
        raise section.error(
            "experts",
            "no expert cross without crosses",
            'name some: crosses = [["user", "item"]]',
            found=list(model.experts),
        )
    return model


def _is_plain(value: Any) -> bool:
    """Return whether a value can be written as JSON, as versions and the identity hash need."""
    if isinstance(value, Mapping):
        return all(_is_plain(v) for v in value.values())
    if isinstance(value, list):
        return all(_is_plain(v) for v in value)
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _serve(section: Section, labels: tuple[Label, ...]) -> Serve:
    explore = section.section("explore")
    given = {} if "score" in section else {"score": labels[0].name}
    serve = read_object(
        Serve,
        section,
        also=("explore", "gate"),
        explore=read_object(Explore, explore),
        gate=read_object(Gate, section.section("gate")),
        **given,
    )
    if serve.explore.policy == "none" and serve.explore.share:
        raise explore.error("share", "0 without a policy", 'set policy = "epsilon" beside it')
    if serve.explore.policy == "epsilon" and not serve.explore.share:
        raise explore.error(
            "share", "a number above 0 and up to 1", "a policy that explores needs a share of requests"
        )
    return serve


MOST_PAIR_ROWS = 1 << 22
"""Bound on rows of crosses by default, where all pairs of ids are crossed: about 0.15 GB."""


def read_tables(section: Section, *, crossed: bool, most_crosses: int | None = None) -> tuple[Table, ...]:
    """Read the tables in file order; their ids are their positions, the table of crosses is last.

    `most_crosses` is the default of `max_rows` of that table. Raises ConfigError for an invalid table, more
    than 254 tables, or a table named like that of the crosses without crosses.
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
        return default_optimizer(table.read_value(key, names, default))
    section = table.section(key)
    name = section.read_value("name", names)
    rule = OPTIMIZERS[name]
    section.check_keys(["name", *(p.name for p in rule.parameters)])
    given = {}
    for parameter in rule.parameters:
        value = section.read_value(parameter.name, Number(), parameter.default)
        if not parameter.allows(value):
            raise section.error(parameter.name, parameter.expected, f"{parameter.name}: {parameter.doc}")
        given[parameter.name] = value
    return Optimizer(name=name, parameters=given)


CROSSES_KEYS = ("ttl", "admission", "max_rows", "scalar_optimizer")
"""Options of the table of crosses, which holds scalars only."""


def _cross_table(tables: Section, table_id: int, most: int | None) -> Table:
    section = tables.section(CROSSES)
    section.check_keys(CROSSES_KEYS)
    given = {} if "max_rows" in section else {"max_rows": most}
    return read_object(
        Table,
        section,
        also=("scalar_optimizer",),
        name=CROSSES,
        id=table_id,
        dim=0,
        optimizer=default_optimizer(DEFAULT_ROW_OPTIMIZER),
        scalar_optimizer=_optimizer(section, "scalar_optimizer", DEFAULT_SCALAR_OPTIMIZER),
        **given,
    )


def read_features(section: Section, folder: str = "") -> tuple[Feature, ...]:
    """Read the features in file order; `folder` is the spec file's, for the user's transforms.

    Raises ConfigError for an invalid feature, none, or more than 1,000.
    """
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
"""Keys of each kind of feature. The presence of `dense`, `time`, `buckets`, `max` or `pool` determines the
kind."""


def _feature(features: Section, name: str, index: int, folder: str) -> Feature:
    check_name(features, name)
    section = features.section(name)
    section.check_keys(key for keys in KEYS_OF_KIND.values() for key in keys)
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
    """Create a feature for each cross of the model, after the others.

    Raises ConfigError for a cross of an unknown feature.
    """
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
    """Check a name that is used in expressions and columns. Raises ConfigError for an invalid one."""
    try:
        NAME.read(name)
    except Wrong as wrong:
        raise section.error("", wrong.expected, found=name) from None
