"""The reference of `freshet.toml`, from the options of the spec's classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from freshet.config import expression
from freshet.config.spec.identity import EFFECTS
from freshet.config.spec.inputs import Parameter
from freshet.config.spec.layout import DEFAULT_ROW_OPTIMIZER, DEFAULT_SCALAR_OPTIMIZER, OPTIMIZERS
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
from freshet.config.spec.parse import KEYS_OF_KIND
from freshet.config.spec.transforms import TRANSFORMS
from ops.reference.markdown import grid, header, option_rows

SOURCE = "services/freshet/config/spec/"

INTRO = """\
One file says what a model is: where its events come from, what it predicts, from what, and how it is
trained and served. It is read once, checked as a whole, and frozen. A key that is not listed here is an
error, and so is one that would have no effect. `freshet init` writes a first spec from Avro schemas,
`freshet check` explains one and says what an edit changes. Two worked examples: [online
retail](../../examples/online-retail/freshet.toml), the least that is needed, and [a video
feed](../../examples/feed/freshet.toml) with three labels on topics that others write.

Editors that know JSON Schema for TOML (taplo, Even Better TOML) complete and check keys by the first line
that `freshet init` writes, `#:schema ./freshet.schema.json`, and the file beside the spec that it names.
Other specs get that line by hand, and the file from `freshet check --json-schema > freshet.schema.json`;
write it anew after an upgrade.

Durations are text, a number and its unit: `"20ms"`, `"30s"`, `"2m"`, `"24h"`, `"30d"`. Paths name fields of
your events, `user.id`; with `explode`, `items.id` is a field of the one element that a sample holds.
"""

SECTIONS = {
    "[events]": """\
`served`, `action` and, if there is one, `shown`: a table each. Served events hold the features as they were
when the model ranked; actions say what was done; shown says what was really seen. Events of all streams are
joined on `key`.""",
    "[join]": "How impressions and actions become samples.",
    "[labels]": """\
A table for each thing to predict, by name. A sample is emitted once for each label, when that label is
decided: with `emit = "early"` as soon as an action makes it true, otherwise `window + grace` after the
impression. When the first positives of a new model come, it has no negatives yet. So the very first of a
partition are held for `window + grace` too, later ones ever shorter, and none from twice that time on. A
held positive weighs 1/2: held ones come twice as fast as they happened.""",
    "[tables]": """\
A table for each family of rows of one dim and optimiser, by name. A row belongs to (table, feature, id):
where several features use a table, device "1" and hour 1 have a row each. `shared = true` gives equal ids one
row, which is the default where lists alone, or lists and one id, use the table: a history of items and the
item. `freshet check` says of each table which it is.

The table `crosses` is made for `model.crosses` and holds scalars only: of its keys `ttl`, `admission`,
`max_rows` and `scalar_optimizer` may be set.""",
    "[features]": "A table for each input, by name. What a feature is follows from its keys:",
    "[model]": 'What is learned. `experts`, `crosses`, `mix`, `hedge_discount` belong to `kind = "hedge"`.',
    "[train]": "How it is learned.",
    "[serve]": "How it is served. `explore` and `gate` are tables of their own.",
    "[retention]": """\
How long the log keeps what. On one machine, records that a restart of joiner, trainer or inference needs are
kept however old they are; Kafka removes them. Claims, schemas and the records of versions stay for ever.""",
    "[files]": """\
How csv files that `freshet backtest` and `freshet replay files` read are written. Parquet and Arrow files say
that themselves. What each column is read as follows from the Avro schema, never from the file.""",
}

MEANING_OF_KIND = {
    "id": "one id: integer, text or truth; null makes no row",
    "list": "a list of ids, pooled to one vector; marked by `max` or `pool`",
    "dense": "a number; marked by `dense`",
    "time": "part of the event's time; marked by `time`",
    "bucket": "a number turned into an id; marked by `buckets`",
}


PARAMETER = ("parameter", "default", "allowed", "meaning")

ORDER = """
Order counts in `[labels]`, `[tables]` and `[features]`: a new order is a new model. The place of a schema
file does not count; that a used field turns from integers to text, or into a list, does.
"""

OPTIMIZER = f"""
`optimizer` steps the vectors, `scalar_optimizer` the linear scalars; each is a name, or a table with a
name and parameters: `optimizer = {{ name = "adam", lr = 0.001 }}`. Both are identity. The defaults are
`{DEFAULT_ROW_OPTIMIZER}` for vectors and `{DEFAULT_SCALAR_OPTIMIZER}` for scalars.
"""

TRANSFORM = """
`dense` is a transform, or a list of them, done in that order; each is a name, or a table with a name and
parameters: `dense = [{ name = "clip", high = 100 }, "log1p", "standard"]`. What is missing stays missing,
unless a transform makes a number of it; what is not finite after it counts as missing. A transform of your
own is a function, `"my_module:my_function"`, found beside your spec or where Python finds it
([how](../extending.md)).
"""

OPTIONS = """
`options` is a table of arguments for a class of your own, `kind = "package.module:Class"` (identity)."""

MORE_ON_EXPRESSIONS = """
A value without a function over actions is that of the last matching action. A score combines predictions
by the names of their labels. An error shows the place in the expression.

A score without a finite result, as `log(watch)` where `watch` is predicted to be 0, is null in the answer,
and its candidate comes last. The impression is logged, joined and trained on as any other, but with
null in `freshet_served`, as it is where a prediction, or the score in fp32, is infinite; measures of served
predictions leave it out. `freshet_inference_not_finite_scores_total` counts such candidates."""


def page() -> str:
    """The whole page."""
    return "\n".join(_page())


def _page() -> Iterator[str]:
    yield header("The feature spec: `freshet.toml`", SOURCE)
    yield INTRO
    yield "## Kinds of keys\n"
    yield from grid([(kind, effect) for kind, effect in EFFECTS.items()], ("kind", "a change of such a key"))
    yield ORDER
    yield "## At the top\n"
    yield from grid(option_rows(Spec))
    yield from _section("[events]", Stream)
    yield from _section("[join]", Join)
    yield from _section("[labels]", Label)
    yield from _section("[tables]", Table)
    yield from _optimizers()
    yield from _section("[features]", Feature)
    yield ""
    keys = [(k, MEANING_OF_KIND[k], ", ".join(f"`{x}`" for x in names)) for k, names in KEYS_OF_KIND.items()]
    yield from grid(keys, ("kind", "is", "keys"))
    yield from _transforms()
    yield from _section("[model]", Model)
    yield OPTIONS
    yield from _section("[train]", Train)
    yield from _section("[serve]", Serve)
    yield ""
    yield from grid([*option_rows(Explore, "explore."), *option_rows(Gate, "gate.")])
    yield from _section("[retention]", Retention)
    yield from _section("[files]", Files)
    yield "\n## Conditions, values and scores\n"
    yield from _expressions()
    yield ""


def _section(name: str, cls: type) -> Iterator[str]:
    yield f"\n## {name}\n"
    yield SECTIONS[name] + "\n"
    yield from grid(option_rows(cls))


def _optimizers() -> Iterator[str]:
    yield OPTIMIZER
    rows: list[tuple[str, ...]] = []
    for rule in OPTIMIZERS.values():
        sizes = ((rule.row_state, "a row"), (rule.float_state, "a float"))
        state = " + ".join(f"{n} {what}" for n, what in sizes if n)
        rows += _with_parameters((f"`{rule.name}`", rule.doc, state or "none"), rule.parameters)
    yield from grid(rows, ("rule", "is", "floats of state", *PARAMETER))


def _transforms() -> Iterator[str]:
    yield TRANSFORM
    rows: list[tuple[str, ...]] = []
    for transform in TRANSFORMS.values():
        first = (f"`{transform.name}`", transform.doc, transform.state or "none")
        rows += _with_parameters(first, transform.parameters)
    yield from grid(rows, ("transform", "is", "state", *PARAMETER))


def _with_parameters(first: tuple[str, ...], parameters: Sequence[Parameter]) -> Iterator[tuple[str, ...]]:
    """A row for each parameter, the first of which says whose they are."""
    if not parameters:
        yield (*first, "", "", "", "")
    for i, p in enumerate(parameters):
        whose = first if i == 0 else ("",) * len(first)
        yield (*whose, f"`{p.name}`", f"`{p.default:g}`", p.expected, p.doc)


def _expressions() -> Iterator[str]:
    summary, _, rest = (expression.__doc__ or "").partition("\n\n")
    yield " ".join(summary.split()) + "\n"
    examples, _, prose = rest.partition("\n\n")
    yield "```\n" + "\n".join(line.removeprefix("    ") for line in examples.splitlines()) + "\n```\n"
    yield prose.strip()
    yield MORE_ON_EXPRESSIONS
