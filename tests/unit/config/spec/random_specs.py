"""Strategies for random specs, mostly valid ones."""

import math
from typing import Any

from hypothesis import strategies as st

from freshet.config.options import (
    Boolean,
    Choice,
    Duration,
    Form,
    Integer,
    ListOf,
    Number,
    duration_text,
    key_of,
    options_of,
)
from freshet.config.spec.identity import toml_value
from freshet.config.spec.inputs import StepForm
from freshet.config.spec.layout import OPTIMIZERS
from freshet.config.spec.model import (
    Explore,
    Feature,
    Files,
    Gate,
    Join,
    Label,
    Model,
    Retention,
    Serve,
    Spec,
    Stream,
    Table,
    Train,
)

NAMES = ["user", "item", "click", "buy", "a"]


def values(form: Form) -> st.SearchStrategy[Any]:  # noqa: PLR0911 - one for each form
    """Generate TOML values of a form."""
    match form:
        case Integer(low, high, power_of_two):
            if power_of_two:
                return st.integers(low.bit_length() - 1, high.bit_length() - 1).map(lambda n: 2**n)
            return st.integers(low, high)
        case Number(low, high, _):
            return st.floats(
                low if math.isfinite(low) else -1e9, min(high, 1e9), exclude_min=math.isfinite(low)
            )
        case Boolean():
            return st.booleans()
        case Choice(words):
            return st.sampled_from(words)
        case Duration(low, high, never):
            text = st.integers(low, high).map(duration_text)
            return text | st.just(False) if never else text
        case ListOf(item, low, high, _):
            return st.lists(values(item), min_size=low, max_size=min(high, 3))
        case StepForm():
            return st.sampled_from(["raw", "log1p", "standard"]) | st.fixed_dictionaries(
                {"name": st.sampled_from(["clip", "log1p"])},
                optional={"low": st.integers(-9, 0), "high": st.floats(1, 1e9)},
            )
    if form.expected.startswith("a path and a unit"):
        return st.sampled_from(["ts:ms", "at.x:iso"])
    if form.expected == "an expression":
        return st.sampled_from(["action.type == 'x'", "sum(action.x)", "click", "2 * buy", "1 +"])
    return st.sampled_from(NAMES)


def sections(cls: type) -> st.SearchStrategy[dict[str, Any]]:
    """Generate some options of a class, with mostly valid values."""
    choices = {key_of(o): values(o.metadata["form"]) for o in options_of(cls)}

    def nested(flat: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in flat.items():
            head, _, rest = key.partition(".")
            if rest:
                out.setdefault(head, {})[rest] = value
            else:
                out[head] = value
        return out

    return st.fixed_dictionaries({}, optional=choices).map(nested)


def named(cls: type, most: int) -> st.SearchStrategy[dict[str, Any]]:
    """Generate a table of up to `most` named sections."""
    return st.dictionaries(st.sampled_from(NAMES), sections(cls), min_size=1, max_size=most)


rules = st.sampled_from(list(OPTIMIZERS.values())).flatmap(
    lambda rule: st.fixed_dictionaries(
        {"name": st.just(rule.name)},
        optional={p.name: values(Number(p.low, p.high)) for p in rule.parameters},
    )
)
feature = st.one_of(
    st.just({"field": "user.id", "table": "user"}),
    st.fixed_dictionaries(
        {"field": st.just("price"), "dense": values(options_of(Feature)[4].metadata["form"])}
    ),
    st.fixed_dictionaries({"time": st.sampled_from(["hour", "weekday"]), "table": st.just("user")}),
    st.fixed_dictionaries({"field": st.just("recent"), "table": st.just("user"), "max": st.integers(1, 100)}),
    st.fixed_dictionaries(
        {
            "field": st.just("price"),
            "table": st.just("user"),
            "buckets": st.lists(st.integers(-9, 9), max_size=3),
        }
    ),
    sections(Feature),
)
table = st.tuples(sections(Table), st.fixed_dictionaries({}, optional={"optimizer": rules})).map(
    lambda t: {**t[0], **t[1]}
)


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Generate the parsed TOML of a spec."""
    stream = {"key": ["r", "i"], "time": "ts:ms"}
    label = {"on": "action.type == 'x'"}
    labels = (
        {k: {**label, **v} for k, v in draw(named(Label, 2)).items()}
        if draw(st.booleans())
        else {"click": label}
    )
    out: dict[str, Any] = {
        "name": "shop",
        **draw(sections(Spec)),
        "events": {
            "served": {**draw(sections(Stream)), **stream, "topic": "a"} if draw(st.booleans()) else stream,
            "action": stream,
        },
        "labels": labels,
        "tables": {"user": draw(table)},
        "features": draw(st.dictionaries(st.sampled_from(NAMES), feature, min_size=1, max_size=3)),
    }
    parts = (
        ("join", Join),
        ("model", Model),
        ("train", Train),
        ("serve", Serve),
        ("retention", Retention),
        ("files", Files),
    )
    for key, cls in parts:
        if draw(st.booleans()):
            out[key] = draw(sections(cls))
    if draw(st.booleans()):
        out.setdefault("serve", {})["gate"] = draw(sections(Gate))
    if draw(st.booleans()):
        out.setdefault("serve", {})["explore"] = draw(sections(Explore))
    return out


def text_of(values_: dict[str, Any]) -> str:
    """Return parsed TOML as text."""
    return "\n".join(f"{k} = {toml_value(v)}" for k, v in values_.items())
