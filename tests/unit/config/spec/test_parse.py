"""Mistakes in a spec with the whole text of their errors, and the parsed results of valid specs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.spec.identity import diff, identity_hash, render
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import load_spec, parse_spec
from freshet.errors import ConfigError

HEAD = """
name = "shop"
[events]
served = { schema = "i.avsc", key = ["request_id", "item"], time = "ts:ms" }
action = { schema = "a.avsc", key = ["request_id", "item"], time = "ts:ms" }
"""
LABELS = """
[labels]
click = { on = "action.type == 'click'" }
"""
TABLES = """
[tables]
user = { dim = 16 }
"""
FEATURES = """
[features]
user = { field = "user_id", table = "user" }
"""
WHOLE = HEAD + LABELS + TABLES + FEATURES


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_spec(text)
    return str(caught.value)


def test_the_smallest_spec_is_complete() -> None:
    spec = parse_spec(WHOLE)

    assert spec.events.served.topic == "impressions"
    assert spec.events.action.topic == "actions"
    assert spec.join.grace_ms == 30_000
    assert spec.label("click").window_ms == 120_000
    assert spec.serve.score == "click"
    assert (spec.partitions, spec.buckets) == (8, 1024)
    assert spec.table("user").ttl_ms is None
    assert parse_spec(f"defaults = 1\n{WHOLE}").table("user").ttl_ms == 30 * 86_400_000
    assert hash(spec.table("user")) == hash(parse_spec(WHOLE).table("user"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            WHOLE.replace("dim = 16", "dim = 0"),
            "freshet.toml: tables.user.dim = 0\n"
            "  expected an integer from 1 to 4096\n"
            "  a table's dim is the length of its embedding vectors; 16 is a good start",
        ),
        (
            WHOLE.replace("dim = 16", "dmi = 16"),
            "freshet.toml: tables.user.dmi = 16\n"
            "  expected one of admission, dim, init, max_rows, optimizer, precision, scalar_optimizer, "
            "shared, ttl\n"
            '  did you mean "dim"?',
        ),
        (
            WHOLE.replace("dim = 16", 'ttl = "30 days"'),
            "freshet.toml: tables.user.ttl = '30 days'\n"
            "  expected a duration from 1m to 3650d, or false\n"
            '  a duration is a number and its unit: "20ms", "30s", "2m", "24h", "30d"',
        ),
        (
            WHOLE.replace("dim = 16", 'optimizer = "adagard"'),
            "freshet.toml: tables.user.optimizer = 'adagard'\n"
            '  expected one of "sgd", "adagrad", "rowwise_adagrad", "rowwise_rmsprop", "adam", "ftrl"\n'
            '  did you mean "adagrad"?',
        ),
        (
            WHOLE.replace("dim = 16", 'optimizer = { name = "adam", lr = 0 }'),
            "freshet.toml: tables.user.optimizer.lr = 0\n"
            "  expected a number above 0, up to 100\n"
            "  lr: step size",
        ),
        (
            WHOLE.replace("dim = 16", 'optimizer = { name = "sgd", beta1 = 0.9 }'),
            "freshet.toml: tables.user.optimizer.beta1 = 0.9\n"
            "  expected one of lr, name\n"
            "  there is no such key",
        ),
        (
            WHOLE.replace('name = "shop"', ""),
            "freshet.toml: name = (missing)\n"
            "  expected a name of a-z, 0-9, - and _, starting with a letter, at most 64 long\n"
            "  name: names the model's topics and store",
        ),
        (
            WHOLE.replace('"ts:ms" }\naction', '"ts" }\naction'),
            "freshet.toml: events.served.time = 'ts'\n"
            '  expected a path and a unit, "field:ms", the unit one of s, ms, us, ns, days, iso\n'
            "  time: field that holds the event's time, and its unit",
        ),
        (
            WHOLE.replace('a.avsc", key = ["request_id", "item"]', 'a.avsc", key = ["request_id"]'),
            "freshet.toml: events.action.key = ['request_id']\n"
            "  expected 2 fields, as events.served.key has\n"
            "  events of all streams are joined on these values, in this order",
        ),
        (
            WHOLE.replace('"i.avsc",', '"i.avsc", explode = "items",'),
            "freshet.toml: events.served.key = ['request_id', 'item']\n"
            "  expected a field of the exploded array among them, items.…\n"
            "  without one, all items of a request would be the same impression",
        ),
        (
            WHOLE.replace('table = "user" }', 'table = "usr" }'),
            "freshet.toml: features.user.table = 'usr'\n  expected one of user\n  did you mean \"user\"?",
        ),
        (
            HEAD + LABELS + FEATURES,
            "freshet.toml: features.user.table = 'user'\n"
            "  expected the name of a table, of which there is none\n"
            "  declare it: [tables] user = { dim = 16 }",
        ),
        (
            WHOLE.replace('table = "user" }', 'dense = "log1p", table = "user" }'),
            "freshet.toml: features.user.table = 'user'\n"
            "  expected no such key beside dense\n"
            "  a dense feature takes field, dense, missing, serve_as",
        ),
        (
            WHOLE.replace('field = "user_id", table', 'time = "minute", table'),
            "freshet.toml: features.user.time = 'minute'\n"
            '  expected one of "hour", "weekday", "hour_of_week"\n'
            "  time: part of the event's time (UTC) used as an id",
        ),
        (
            WHOLE.replace("[labels]", '[labels]\nbuy = { on = "action.type == \'buy\'", given = "clik" }'),
            "freshet.toml: labels.buy.given = 'clik'\n"
            "  expected one of buy, click\n"
            '  did you mean "click"?',
        ),
        (
            WHOLE.replace(
                "'click'\" }",
                '\'click\'", given = "buy" }\nbuy = { on = "action.type == \'buy\'", given = "click" }',
            ),
            "freshet.toml: labels.click.given = 'buy'\n"
            "  expected a label that does not depend on this one\n"
            "  click given buy given click",
        ),
        (
            WHOLE + '[serve]\nscore = "clik * 2"',
            "freshet.toml: serve.score = 'clik * 2'\n"
            "  expected names of labels: click\n"
            '  did you mean "click"?',
        ),
        (
            WHOLE + '[train]\nsegments = ["user", "country"]',
            "freshet.toml: train.segments[1] = 'country'\n  expected one of user",
        ),
        (
            WHOLE + "[train]\nbatch = { rows = 512, behind = 256 }",
            "freshet.toml: train.batch.behind = 256\n"
            "  expected at least batch.rows, 512\n"
            "  behind: rows a lane takes when it is behind",
        ),
        (
            WHOLE + "[train]\nbatch = { row = 512 }",
            "freshet.toml: train.batch.row = 512\n"
            "  expected one of behind, rows, steps, wait\n"
            '  did you mean "rows"?',
        ),
        (
            WHOLE + '[model]\nexperts = ["wide", "cross"]',
            "freshet.toml: model.experts = ['wide', 'cross']\n"
            "  expected no expert cross without crosses\n"
            '  name some: crosses = [["user", "item"]]',
        ),
        (
            WHOLE + '[model]\ncrosses = [["user", "itme"]]',
            "freshet.toml: model.crosses[0] = ['user', 'itme']\n  expected names of features: user",
        ),
        (
            WHOLE + '[model]\nkind = "dlrm"\nexperts = ["wide"]',
            "freshet.toml: model.experts = ['wide']\n"
            '  expected no such key beside kind = "dlrm"\n'
            "  only a hedge has experts and crosses",
        ),
        (
            WHOLE + '[join]\nrequire = "shown"',
            "freshet.toml: join.require = 'shown'\n"
            "  expected a stream events.shown\n"
            "  declare it, or drop join.require",
        ),
        (
            WHOLE + "[serve]\nexplore = { share = 0.02 }",
            "freshet.toml: serve.explore.share = 0.02\n"
            "  expected 0 without a policy\n"
            '  set policy = "epsilon" beside it',
        ),
        (
            "buckets = 1000\n" + WHOLE,
            "freshet.toml: buckets = 1000\n"
            "  expected a power of two from 2 to 65536\n"
            "  buckets: of the parameter server, the unit of ownership",
        ),
        (
            WHOLE + "[tabels]\n",
            "freshet.toml: tabels = {}\n"
            "  expected one of buckets, defaults, events, features, files, join, labels, model, name, "
            "partitions, retention, serve, tables, train\n"
            '  did you mean "tables"?',
        ),
    ],
)
def test_mistake_is_refused_with_the_allowed_values(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[labels]", '[labels]\nand = { on = "action.a" }', "another name"),
        (
            "'click'\" }",
            '\'click\'", value = "action.x", loss = "logloss" }',
            '"huber" or "mse" beside a value',
        ),
        ("'click'\" }", "'click'\", bounds = [0, 1] }", "no bounds beside logloss"),
        (
            "'click'\" }",
            '\'click\'", loss = "mse", bounds = [5, 5] }',
            "the least value, then a greater one",
        ),
        ("'click'\" }", '\'click\'", loss = "mse", bounds = [1] }', "a list of 2 values"),
        ("[tables]", "[tables]\ncrosses = {}", "another name"),
        ("[tables]", '[tables]\n"a b" = {}', "a name of letters, digits and _, starting with a letter"),
        ("[tables]", "[tables]\nother = 3", "a table, [...] or { ... }"),
        (
            "[features]",
            '[features]\nage = { field = "age", dense = ["standard", "log1p"] }',
            '"standard" as the last transform',
        ),
        (
            "[features]",
            '[features]\nage = { field = "age", buckets = [3, 1], table = "user" }',
            "rising edges",
        ),
        ("[features]", '[features]\nage = { field = "age", dense = "raw", serve_as = "x" }', "a number"),
        (
            "[features]",
            '[features]\nh = { time = "hour", table = "user", serve_as = 24 }',
            "an integer from 0 to 23",
        ),
        (
            "[features]",
            '[features]\nx = { field = "x", table = "user", serve_as = 1.5 }',
            "text or an integer",
        ),
        ("[features]", '[features]\nx = { field = "x" }', "a name"),
        ("[features]", '[features]\nx = { field = "é", table = "user" }', "the path of a field"),
        (
            "[features]",
            '[features]\nx = { field = "x", table = "user", serve_as = nan }',
            "text, an integer of 64",
        ),
        (
            "[features]",
            '[features]\nx = { field = "x", table = "user", serve_as = true }',
            "text, an integer of 64",
        ),
        ("[features]", '[features]\nx = { table = "user" }', "the path of a field"),
        ("[features]", '[features]\nx = { field = "x.", table = "user" }', "the path of a field"),
        (
            "[features]",
            '[features]\nx = { field = "x", max = 5, serve_as = 1, table = "user" }',
            "no such key beside max",
        ),
        ("[events]", "[events]\nclicked = {}", "one of action, served, shown"),
        ('"a.avsc",', '"a.avsc", explode = "x",', "no such key here"),
        ('"a.avsc",', '"a.avsc", topic = "impressions",', "a topic of its own for each stream"),
        ('"a.avsc", key = ["request_id", "item"]', '"a.avsc", key = ["item", "item"]', "each field once"),
        (
            "[tables]\nuser = { dim = 16 }",
            '[tables]\nuser = {}\ni = { dim = 8 }\n[model]\ncrosses = [["user", "user"]]',
            "different features",
        ),
    ],
)
def test_broken_rule_names_the_expectation(old: str, new: str, expected: str) -> None:
    assert old in WHOLE
    with pytest.raises(ConfigError) as caught:
        parse_spec(WHOLE.replace(old, new, 1))

    assert caught.value.expected.startswith(expected)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("[serve]\nexplore = { policy = 'epsilon' }", "a number above 0 and up to 1"),
        ("[serve]\ngate = { calibration = [1.1, 1.2] }", "two rising numbers around 1"),
        ("[serve]\ngate = { calibration = [0.9] }", "a list of 2 values"),
        ("[model]\nexperts = ['wide']\ndeep = [8]", 'no such key unless experts hold "deep"'),
        (
            "[model]\nexperts = ['wide']\ncrosses = [['user', 'user']]",
            'no such key unless experts hold "cross"',
        ),
        ("[model]\nexperts = ['wide', 'wide']", "each expert once"),
        ("[model]\nexperts = ['fast', 'counts']", "wide beside counts, which reads its weights"),
        ("[model]\nexperts = ['counts']", "wide beside counts, which reads its weights"),
        ("[model]\nexperts = ['stack']", "another expert beside stack, which sums others"),
        ("[model]\nkind = 'linear'\ndeep = [8]", 'no such key beside kind = "linear"'),
        ("[model]\noptions = { a = 1 }", "no such key without a class of your own"),
        ("[model]\nkind = 'a.b:C'\noptions = { a = [1979-05-27] }", "text, a finite number, true or false"),
        (f"[model]\ndense_lr = 1{'0' * 400}", "a number above 0, up to 1"),
        (f"[model]\nseed = 1{'0' * 400}", "an integer from 0 to"),
        ("[model]\ndeep = [256, 0]", "an integer from 1 to 8192"),
        ("[train]\nsegments = ['user', 'user']", "each feature once"),
        ("[train]\nbatch = { wait = 20 }", "a duration from 0ms to 1m"),
        ("[train]\nbatch = { wait = '0.5ms' }", "a duration from 0ms to 1m"),
        ("[join]\nnegatives = 0", "a number above 0, up to 1"),
        ("[join]\nnegatives = nan", "a number above 0, up to 1"),
    ],
)
def test_invalid_section_names_the_expectation(tail: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(WHOLE + tail)

    assert caught.value.expected.startswith(expected)


@pytest.mark.parametrize(
    ("gate", "floor", "samples"),
    [("samples = 50", 100, 50), ("samples = 50, floor = 51", 51, 50), ("floor = 2001", 2001, 2000)],
)
def test_a_floor_above_the_samples_is_refused(gate: str, floor: int, samples: int) -> None:
    """A default floor is not lowered in silence: the message names it, and the key to set."""
    assert refusal(f"{WHOLE}[serve]\ngate = {{ {gate} }}") == (
        f"freshet.toml: serve.gate.floor = {floor}\n"
        f"  expected at most serve.gate.samples, {samples}\n"
        "  a higher floor holds every version; where samples is below the default of floor, set floor, too"
    )


def test_a_floor_equal_to_the_samples_is_accepted() -> None:
    gate = parse_spec(WHOLE + "[serve]\ngate = { samples = 50, floor = 50 }").serve.gate
    assert (gate.samples, gate.floor) == (50, 50)


def test_multiplied_vectors_must_have_one_length() -> None:
    text = (
        WHOLE.replace("[tables]", "[tables]\nitem = { dim = 8 }")
        + 'item = { field = "item", table = "item" }\n'
    )

    assert refusal(text) == (
        "freshet.toml: tables.item.dim = 8\n"
        "  expected 16, as table user has\n"
        "  the expert fm multiplies vectors of different features with each other"
    )
    assert parse_spec(text + '[model]\nexperts = ["wide", "deep"]').table("item").dim == 8
    assert parse_spec(text + '[model]\nkind = "dcnv2"').table("item").dim == 8
    assert "dlrm multiplies vectors" in refusal(text + '[model]\nkind = "dlrm"')


EXPLODED = WHOLE.replace(
    '"i.avsc", key = ["request_id", "item"]', '"i.avsc", explode = "items", key = ["request_id", "items.id"]'
)


@pytest.mark.parametrize(
    ("old", "new", "key", "expected"),
    [
        (
            'key = ["request_id", "items.id"]',
            'key = ["items.id", "request_id"]',
            "events.served.key",
            "a field of the whole event first: the request's id",
        ),
        ('"ts:ms"', '"items.ts:ms"', "events.served.time", "a field of the whole event"),
        ('field = "user_id"', 'field = "items"', "features.user.field", "a field of one element, items.…"),
    ],
)
def test_event_fields_must_not_be_inside_the_exploded_array(
    old: str, new: str, key: str, expected: str
) -> None:
    parse_spec(EXPLODED)
    with pytest.raises(ConfigError) as caught:
        parse_spec(EXPLODED.replace(old, new, 1))

    assert (caught.value.key, caught.value.expected) == (key, expected)


def test_cross_needs_features_with_one_id() -> None:
    text = (
        WHOLE + 'recent = { field = "r", table = "user", max = 9 }\n[model]\ncrosses = [["user", "recent"]]'
    )

    assert refusal(text).endswith("expected features with one id a sample\n  recent is a list feature")


def test_label_may_depend_on_an_invalid_label() -> None:
    labels = """
[labels]
buy = { on = "action.type == 'buy'", given = "click" }
click = { on = "action.type == 'click'", given = "none" }
"""
    assert refusal(HEAD + labels + TABLES + FEATURES).startswith("freshet.toml: labels.click.given = 'none'")


@pytest.mark.parametrize(
    ("section", "what"), [("labels", "1 to 32 labels"), ("features", "1 to 1000 features")]
)
def test_a_model_needs_labels_and_features(section: str, what: str) -> None:
    whole = {"labels": LABELS, "features": FEATURES} | {section: f"[{section}]\n"}

    assert f"expected {what}" in refusal(HEAD + whole["labels"] + TABLES + whole["features"])


def test_more_than_254_tables_are_refused() -> None:
    many = "".join(f"t{i} = {{}}\n" for i in range(254))

    assert "freshet.toml: tables = 255\n  expected at most 254 tables" in refusal(
        WHOLE.replace("[features]", many + "[features]")
    )


EXPERTS = {1: ("wide", "fm", "deep"), 2: ("wide", "fast", "fm", "deep", "counts", "stack")}


@pytest.mark.parametrize("generation", EXPERTS)
def test_a_hedge_has_the_experts_of_its_generation(generation: int) -> None:
    experts = EXPERTS[generation]
    top = f"defaults = {generation}\n"

    assert parse_spec(top + WHOLE).model.experts == experts
    assert parse_spec(top + CROSSED).model.experts == tuple(
        name for expert in experts for name in (("cross", "fm") if expert == "fm" else (expert,))
    )
    for text in (top + WHOLE, top + CROSSED):
        assert parse_spec(render(parse_spec(text))) == parse_spec(text)
    other = parse_spec(f"defaults = {3 - generation}\n{WHOLE}")
    assert identity_hash(parse_spec(top + WHOLE)) != identity_hash(other)


def test_each_expert_counts_for_identity() -> None:
    experts = list(EXPERTS[2])
    hashes = {identity_hash(parse_spec(WHOLE))}
    for left_out in experts:
        rest = [name for name in experts if name != left_out]
        if left_out != "wide":  # which counts reads
            hashes.add(identity_hash(parse_spec(f"{WHOLE}[model]\nexperts = {rest}\n")))
    assert len(hashes) == len(experts)


@pytest.mark.parametrize(
    ("experts", "widths"),
    [
        (["wide"], {"wide": 2, "vector": 16}),
        (["fast", "stack"], {"fast": 2, "vector": 16}),
        (["counts", "wide"], {"wide": 2, "count": 1, "vector": 16}),
        (["deep", "fm", "stack"], {"linear": 2, "vector": 16}),
        (list(EXPERTS[2]), {"wide": 2, "fast": 2, "linear": 2, "count": 1, "vector": 16}),
    ],
)
def test_rows_hold_what_the_experts_of_each_label_read(experts: list[str], widths: dict[str, int]) -> None:
    labels = WHOLE.replace("[tables]", "buy = { on = \"action.type == 'buy'\" }\n[tables]")
    score = "[serve]\nscore = 'click'\n"
    (group,) = layout_of(parse_spec(f"{labels}[model]\nexperts = {experts}\n{score}")).groups

    assert {slot.name: slot.width for slot in group.slots} == widths
    assert [slot.start for slot in group.slots] == [
        sum(list(widths.values())[:i]) for i in range(len(widths))
    ]


@given(st.integers(1, 40))
def test_wide_and_fast_step_by_the_root_of_feature_count(features: int) -> None:
    more = "".join(f'more{i} = {{ field = "m{i}", dense = ["raw"] }}\n' for i in range(features - 1))
    (group,) = layout_of(parse_spec(WHOLE + more)).groups
    rates = {
        slot.name: slot.optimizer.parameters["lr"] for slot in group.slots if slot.name in ("wide", "fast")
    }

    assert rates == pytest.approx({name: r / (1 + features) ** 0.5 for name, r in RATES.items()})


RATES = {"wide": 0.2125, "fast": 0.85}


def test_stated_step_size_is_that_of_wide_and_fast_takes_four() -> None:
    text = WHOLE.replace("user = {", 'user = { scalar_optimizer = { name = "adagrad", lr = 0.3 },', 1)
    (group,) = layout_of(parse_spec(text)).groups
    rates = {slot.name: slot.optimizer.parameters.get("lr") for slot in group.slots}

    assert rates == {"wide": 0.3, "fast": pytest.approx(1.2), "linear": 0.3, "count": None, "vector": 0.2}


def test_crosses_add_their_table_features_and_expert() -> None:
    text = WHOLE + 'item = { field = "item", table = "user" }\n[model]\ncrosses = [["user", "item"]]'

    spec = parse_spec(text)

    assert spec.model.experts == ("wide", "fast", "cross", "fm", "deep", "counts", "stack")
    assert spec.feature("user*item").index == 2
    assert spec.feature("user*item").kind == "cross"
    assert [(t.name, t.id, t.dim) for t in spec.tables] == [("user", 0, 16), ("crosses", 1, 0)]


CROSSED = WHOLE + 'item = { field = "item", table = "user" }\n[model]\ncrosses = [["user", "item"]]'
OF_CROSSES = 'crosses = { ttl = "1h", scalar_optimizer = { name = "adagrad", lr = 0.4 } }'


def test_table_of_crosses_takes_options() -> None:
    spec = parse_spec(CROSSED.replace("[tables]", f"[tables]\n{OF_CROSSES}"))

    table = spec.table("crosses")
    assert (table.id, table.dim, table.ttl_ms) == (1, 0, 3_600_000)
    assert (table.scalar_optimizer.name, table.scalar_optimizer.parameters["lr"]) == ("adagrad", 0.4)
    assert parse_spec(render(spec)) == spec


def test_the_table_of_the_crosses_holds_no_vectors() -> None:
    assert "one of admission, max_rows, scalar_optimizer, ttl" in refusal(
        CROSSED.replace("[tables]", "[tables]\ncrosses = { dim = 8 }")
    )


def test_optimizer_of_crosses_is_identity_but_ttl_is_tunable() -> None:
    plain = parse_spec(CROSSED)
    lived = parse_spec(CROSSED.replace("[tables]", '[tables]\ncrosses = { ttl = "1h" }'))
    stepped = parse_spec(CROSSED.replace("[tables]", '[tables]\ncrosses = { scalar_optimizer = "ftrl" }'))

    assert identity_hash(plain) == identity_hash(lived) != identity_hash(stepped)
    assert [(c.key, c.kind) for c in diff(plain, lived)] == [("tables.crosses.ttl", "tunable")]
    assert {c.kind for c in diff(plain, stepped)} == {"identity"}


def test_custom_class_takes_options() -> None:
    spec = parse_spec(WHOLE + '[model]\nkind = "shop.nets:Tower"\noptions = { heads = 4 }')

    assert spec.model.options == {"heads": 4}
    assert spec.model.experts == ()


def test_a_value_without_a_loss_is_learned_with_huber() -> None:
    assert (
        parse_spec(WHOLE.replace("'click'\" }", '\'click\'", value = "sum(action.s)" }')).labels[0].loss
        == "huber"
    )


def test_invalid_toml_names_the_line() -> None:
    assert refusal("name = \n").startswith("freshet.toml: not TOML: Invalid value (at line 1, column 8)")


def test_deep_nesting_is_refused() -> None:
    assert "freshet.toml" in refusal("x = " + "[" * 100_000)


def test_missing_file_is_refused_with_the_command_to_create_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_spec(tmp_path / "none.toml")

    assert str(caught.value).endswith(
        "none.toml: cannot be read: No such file or directory\n"
        "  expected a feature spec\n"
        "  freshet init writes a commented spec from your Avro schemas"
    )


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"name = '\xff'")

    with pytest.raises(ConfigError, match="byte 8 is not UTF-8"):
        load_spec(tmp_path / "x.toml")


def test_folder_of_a_spec_does_not_affect_equality() -> None:
    assert parse_spec(WHOLE, folder="/a") == parse_spec(WHOLE, folder="/b")
