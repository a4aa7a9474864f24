from dataclasses import asdict, replace
from pathlib import Path

import pytest

from freshet.config.avro.schema import parse_schema
from freshet.config.spec.explanation import explain, mlp_parameters, row_bytes
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec, parse_spec
from freshet.config.spec.schemas import Schemas, check_fit, load_schemas
from freshet.errors import ConfigError

EXAMPLES = Path(__file__).parents[4] / "examples"
FEED = (EXAMPLES / "feed" / "freshet.toml").read_text()


def feed(old: str = "", new: str = "") -> Spec:
    assert old in FEED
    return parse_spec(FEED.replace(old, new, 1), folder=str(EXAMPLES / "feed"))


def schemas() -> Schemas:
    return load_schemas(feed())


@pytest.mark.parametrize("name", ["online-retail", "feed"])
def test_an_example_fits_its_schemas(name: str) -> None:
    spec = load_spec(EXAMPLES / name / "freshet.toml")

    report = explain(spec, load_schemas(spec))

    assert [f.name for f in report.features] == [f.name for f in spec.features]
    assert report.text().startswith(f"{name}\n")
    assert asdict(report)["labels"][0]["name"] == spec.labels[0].name


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'field = "user.country"',
            'field = "user.contry"',
            "freshet.toml: features.country.field = 'user.contry'\n"
            "  expected a field of user: id, country, last_items\n"
            '  did you mean "user.country"?',
        ),
        (
            'field = "user.country"',
            'field = "country"',
            "freshet.toml: features.country.field = 'country'\n"
            "  expected a field of feed.Ranked: request_id, ts, user, device, items, experiment\n"
            '  did you mean "user.country"?',
        ),
        (
            'table = "small", serve_as = 0',
            'table = "small", max = 5',
            "freshet.toml: features.position.field = 'items.pos'\n"
            "  expected an array, found int\n"
            "  without max and pool it is one id",
        ),
        (
            ', max = 50, pool = "mean"',
            "",
            "freshet.toml: features.recent.field = 'user.last_items'\n"
            "  expected one value, found array of long\n"
            '  a list of ids is a feature with max and pool: max = 50, pool = "mean"',
        ),
        (
            'field = "items.age_s"',
            'field = "user.country"',
            "freshet.toml: features.age.field = 'user.country'\n"
            "  expected a field of integers, fractions, truths, found string\n"
            "  text is an id: give it a table",
        ),
        (
            'field = "items.pos"',
            'field = "items.age_s"',
            "freshet.toml: features.position.field = 'items.age_s'\n"
            "  expected a field of integers, text, truths, found float\n"
            "  a fraction is a number: use dense, or buckets to make ids of it",
        ),
        (
            "serve_as = 0",
            'serve_as = "top"',
            "freshet.toml: features.position.serve_as = 'top'\n"
            "  expected a value of integer, as items.pos is",
        ),
        (
            'field = "user.country"',
            'field = "user"',
            "freshet.toml: features.country.field = 'user'\n"
            "  expected a field of integers, text, truths, found record feed.User",
        ),
        (
            'time = "ts:ms"',
            'time = "ts:iso"',
            "freshet.toml: events.served.time = 'ts:iso'\n"
            "  expected a field of text, found long\n"
            "  iso is for text, the other units are for numbers",
        ),
        (
            'key = ["reqId", "item.id"], time = "at:iso" }\naction',
            'key = ["at", "item.id"], time = "at:iso" }\naction',
            "freshet.toml: events.shown.key[0] = 'at'\n"
            "  expected a field of integer, as request_id of served events is; found text\n"
            '  the number 7 and the text "7" are different ids',
        ),
        (
            'explode = "items", key = ["request_id", "items.id"]',
            'key = ["request_id", "items.id"]',
            "freshet.toml: events.served.key[1] = 'items.id'\n"
            "  expected one value an event\n"
            "  it stands inside an array; explode makes each element an impression",
        ),
        (
            'explode = "items", key = ["request_id", "items.id"]',
            'explode = "user", key = ["request_id", "user.id"]',
            "freshet.toml: events.served.explode = 'user'\n"
            "  expected an array of records, found record feed.User\n"
            "  each of its elements is an impression",
        ),
        (
            "action.type == 'click'",
            "action.typ == 'click'",
            "freshet.toml: labels.click.on = \"action.typ == 'click'\"\n"
            "  expected a field that exists: eventId, reqId, item.id, type, seconds, at\n"
            "  action.typ == 'click'\n"
            '  ^ did you mean "type"?',
        ),
        (
            "sum(action.seconds)",
            "sum(action.type)",
            "freshet.toml: labels.watch.value = 'sum(action.type)'\n"
            "  expected a number here: sum() is over numbers\n"
            "  sum(action.type)\n"
            "      ^ this is a text",
        ),
        (
            'id = "eventId"',
            'id = "seconds"',
            "freshet.toml: events.action.id = 'seconds'\n"
            "  expected a field of integers or text, found double",
        ),
    ],
)
def test_misfit_names_the_key_of_the_spec(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_fit(feed(old, new), schemas())

    assert str(caught.value) == message


def test_unknown_enum_symbol_is_refused_with_the_nearest() -> None:
    spec = load_spec(EXAMPLES / "online-retail" / "freshet.toml")
    label = replace(spec.labels[0], on="action.type in ['bye', 'buy']")

    with pytest.raises(ConfigError) as caught:
        check_fit(replace(spec, labels=(label,)), load_schemas(spec))

    assert caught.value.expected == "a symbol of type: buy, cancel, adjust"
    assert caught.value.hint == 'did you mean "buy"?'


def test_nullable_time_is_refused() -> None:
    text = (EXAMPLES / "feed" / "ranked.avsc").read_text()
    nullable = parse_schema(
        text.replace('{"name": "ts", "type": "long"', '{"name": "ts", "type": ["null", "long"]')
    )

    with pytest.raises(ConfigError, match="one time an event, never null"):
        check_fit(feed(), replace(schemas(), served=nullable))


def test_labels_say_when_they_are_decided() -> None:
    click, watch, buy = explain(feed(), schemas()).labels

    assert click.positive == "as soon as an action comes with action.type == 'click'"
    assert click.negative == "2m 30s after the impression (window 2m + grace 30s)"
    assert watch.positive == "10m 30s after the impression (window 10m + grace 30s)"
    assert buy.negative == "24h 30s after the impression (window 24h + grace 30s), if click is true"


def test_probable_mistakes_are_noted() -> None:
    spec = feed("[features]", "spare = { dim = 16 }\n[features]")
    spec = replace(spec, serve=replace(spec.serve, score="click"))
    ctr = replace(spec.feature("ctr_1h"), missing="zero", dense=("raw",))
    spec = replace(spec, features=tuple(ctr if f.name == "ctr_1h" else f for f in spec.features))

    assert explain(spec, schemas()).warnings == (
        "tables.spare: no feature uses it",
        "serve.score: watch is learned, but does not affect the order",
        "serve.score: buy is learned, but does not affect the order",
        'join.emit: with "early" a new model learns nothing in its first 2m 30s, while no negatives are '
        'known, and learns positives at once after 5m; use "window" for a replay that measures quality',
        'features.ctr_1h: items.ctr_1h may be null and counts as 0; missing = "flag" distinguishes them',
        "features.ctr_1h: a raw number of unknown size is hard to learn from; use standard",
    )


@pytest.mark.parametrize(("events", "noted"), [('"48h"', True), ('"49h"', False), ("false", False)])
def test_retention_too_short_for_a_restart_is_noted(events: str, noted: bool) -> None:
    notes = explain(feed("[features]", f"[retention]\nevents = {events}\n[features]"), schemas()).warnings

    assert [note for note in notes if note.startswith("retention")] == (
        [
            "retention.events: on Kafka a restart of the joiner needs events of the last 48h 1m, "
            "2 * (longest window + grace); an embedded log keeps them"
        ]
        if noted
        else []
    )


@pytest.mark.parametrize(
    ("keys", "noted"),
    [('loss = "mse"', True), ('loss = "mse", bounds = [0, 3600]', False), ('loss = "huber"', False)],
)
def test_mse_without_bounds_is_noted(keys: str, noted: bool) -> None:
    notes = explain(feed('loss = "huber"', keys), schemas()).warnings

    assert [note for note in notes if note.startswith("labels.watch: ")] == (
        [
            "labels.watch: the gradient of mse grows with the value, so one wrong value, such as 1e18, "
            "outweighs all others in its rows; bounds = [least, greatest] excludes such values"
        ]
        if noted
        else []
    )


def test_mlp_parameters_include_biases() -> None:
    spec = load_spec(EXAMPLES / "online-retail" / "freshet.toml")

    assert mlp_parameters(spec) == (98 + 1) * 256 + 257 * 128 + 129
    assert mlp_parameters(replace(spec, model=replace(spec.model, experts=("wide",)))) == 0


def test_a_row_of_the_default_model_is_two_cache_lines() -> None:
    spec = load_spec(EXAMPLES / "online-retail" / "freshet.toml")

    assert row_bytes(layout_of(spec).groups[0]) == 128


OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dim", [1, 5, 16, 64])
def test_the_native_table_agrees_on_the_size_of_a_row(optimizer: str, precision: str, dim: int) -> None:
    pytest.importorskip("freshet._native", reason="the native core is not built")
    from freshet.tables import Store  # noqa: PLC0415 - needs the native core

    table = f'{{ dim = {dim}, optimizer = "{optimizer}", precision = "{precision}" }}'
    text = FEED
    for old in (
        "user  = { dim = 16 }",
        'item  = { dim = 16, ttl = "14d", admission = 2 }',
        "small = { dim = 16 }",
    ):
        assert old in text
        text = text.replace(old, f"{old.split()[0]} = {table}")
    layout = layout_of(parse_spec(text))
    store = Store(layout, buckets=2, partitions=1, seed=0)

    assert [store.resident_bytes(t) for g in layout.groups for t in g.tables] == [
        row_bytes(g) for g in layout.groups for _ in g.tables
    ]
