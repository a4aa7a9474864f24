"""`freshet.toml` to a `Spec`: read once, complete, checked as a whole; nothing is accepted and ignored.

Single keys are read by their forms (`freshet.config.spec.model`); what several keys must agree on is in
`freshet.config.spec.rules`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from freshet.config.options import Section, key_of, options_of, read_object
from freshet.config.spec.experts import crossed, default_crosses, with_experts
from freshet.config.spec.layout import with_sharing
from freshet.config.spec.model import (
    GENERATION,
    GENERATION_HINT,
    NEWEST_DEFAULTS,
    Events,
    Explore,
    Files,
    Gate,
    Join,
    Label,
    Model,
    Retention,
    Serve,
    Spec,
    Stream,
    Train,
)
from freshet.config.spec.parse_inputs import (
    MOST_PAIR_ROWS,
    check_name,
    cross_features,
    read_features,
    read_tables,
)
from freshet.config.spec.rules import check_rules
from freshet.config.spec.schemas import read_small
from freshet.errors import ConfigError

__all__ = ["load_spec", "parse_spec", "spec_of", "with_defaults"]

TOPICS = {"served": "impressions", "shown": "shown", "action": "actions"}
SECTIONS = ("events", "join", "labels", "tables", "features", "model", "train", "serve", "retention", "files")
SPEC_HINT = "freshet init writes a commented spec from your Avro schemas"


def load_spec(path: str | Path) -> Spec:
    """Read the spec file. Raises ConfigError, for a file that cannot be read too."""
    path = Path(path)
    try:
        text = read_small(path).decode("utf-8").removeprefix("\ufeff")  # the mark of some editors
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
        where:  what errors name as the place.
        folder: what paths in the spec are relative to.

    Raises:
        ConfigError: for the first thing that is wrong, with key, value, what is allowed and the way out.
    """
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number of too many digits
        raise ConfigError(where, "", f"not TOML: {error}", "a file in TOML, see https://toml.io") from error
    except RecursionError:
        raise ConfigError(where, "", "not TOML: nested too deeply", "a file in TOML") from None
    return spec_of(values, where=where, folder=folder)


def spec_of(values: Mapping[str, Any], *, where: str = "freshet.toml", folder: str = "") -> Spec:
    """The spec that parsed TOML says; arguments and errors as of `parse_spec`."""
    # The generation comes first: by it the absent keys of all sections are filled in.
    generation = Section(where, "", values).take("defaults", GENERATION, NEWEST_DEFAULTS, GENERATION_HINT)
    spec = _spec(Section(where, "", values, generation), folder)
    check_rules(spec, where)
    return replace(spec, written=values)


def with_defaults(spec: Spec, generation: int) -> Spec:
    """The spec as its file reads in another generation of defaults.

    Values of the top that were changed since the file was read stay. Raises ConfigError where the file is not
    a spec of that generation.
    """
    other = spec_of({**spec.written, "defaults": generation}, folder=spec.folder)
    kept = {o.name: getattr(spec, o.name) for o in options_of(Spec) if o.name != "defaults"}
    return replace(other, **kept)


def _spec(root: Section, folder: str) -> Spec:
    root.only([*(key_of(o) for o in options_of(Spec)), *SECTIONS])
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
        train=_train(root.section("train")),
        serve=_serve(root.section("serve"), labels),
        retention=read_object(Retention, root.section("retention")),
        files=read_object(Files, root.section("files")),
        folder=folder,
    )


def _events(section: Section) -> Events:
    section.only(TOPICS)
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
    """`crosses`: those of a hedge that names neither crosses nor experts."""
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
    """Whether JSON can say it: what versions carry and the identity is made of."""
    if isinstance(value, Mapping):
        return all(_is_plain(v) for v in value.values())
    if isinstance(value, list):
        return all(_is_plain(v) for v in value)
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _train(section: Section) -> Train:
    return read_object(Train, section)


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
