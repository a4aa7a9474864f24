from dataclasses import fields, is_dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from freshet.config.avro.schema import parse_schema
from freshet.config.options import MISSING
from freshet.config.spec import model, parse_spec
from freshet.config.spec.identity import diff, identity_hash
from freshet.config.spec.layout import OPTIMIZERS
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec
from freshet.config.spec.schemas import Schemas, field_kinds, load_schemas
from freshet.errors import ConfigError

EXAMPLES = Path(__file__).parents[4] / "examples"
FEED = (EXAMPLES / "feed" / "freshet.toml").read_text()


def feed(old: str = "", new: str = "") -> Spec:
    assert old in FEED
    return parse_spec(FEED.replace(old, new, 1), folder=str(EXAMPLES / "feed"))


@pytest.mark.parametrize(
    ("old", "new", "key", "kind"),
    [
        ("user  = { dim = 16", "user  = { dim = 32, precision = 'bf16'", "tables.user.dim", "identity"),
        ('window = "2m"', 'window = "3m"', "labels.click.window", "identity"),
        ('emit = "early"', 'emit = "window"', "join.emit", "identity"),
        ('time = "ts:ms"', 'time = "ts:s"', "events.served.time", "identity"),
        ("deep = [256, 128]", "deep = [256]", "model.deep", "identity"),
        ('ttl = "14d"', 'ttl = "15d"', "tables.item.ttl", "tunable"),
        ('wait = "20ms"', 'wait = "30ms"', "train.batch.wait", "tunable"),
        ("share = 0.02", "share = 0.03", "serve.explore.share", "tunable"),
        ("ne_worse = 0.01", "ne_worse = 0.02", "serve.gate.ne_worse", "tunable"),
        ('topic = "feed.ranked"', 'topic = "feed.ranked.v2"', "events.served.topic", "deployment"),
        ('schema = "ranked.avsc"', 'schema = "moved/ranked.avsc"', "events.served.schema", "deployment"),
    ],
)
def test_edit_has_its_kind_and_only_identity_changes_the_hash(
    old: str, new: str, key: str, kind: str
) -> None:
    # all dims stay equal, as the feed multiplies vectors
    before, after = feed(), feed(old, new) if "dim = 32" not in new else _all_wider()

    changes = {c.key: c for c in diff(before, after)}

    assert changes[key].kind == kind
    assert (identity_hash(before) != identity_hash(after)) == (kind == "identity")


def _all_wider() -> Spec:
    return parse_spec(FEED.replace("dim = 16", "dim = 32"), folder=str(EXAMPLES / "feed"))


def test_added_feature_is_one_change() -> None:
    after = feed("[model]", 'weekday = { time = "weekday", table = "small" }\n[model]')

    changes = diff(feed(), after)

    assert [c.key for c in changes] == ["features.weekday"]
    assert changes[0].old is MISSING
    assert changes[0].new["time"] == "weekday"
    assert str(changes[0]).startswith("features.weekday: nothing -> {")


@pytest.mark.parametrize("option", ["optimizer", "scalar_optimizer"])
def test_another_optimizer_changes_keys_of_its_table_only(option: str) -> None:
    old_text = "user  = { dim = 16"
    specs = {
        name: feed(old_text, f'user  = {{ {option} = {{ name = "{name}" }}, dim = 16') for name in OPTIMIZERS
    }
    for old, new in permutations(OPTIMIZERS, 2):
        changes = {c.key: c for c in diff(specs[old], specs[new])}

        prefix = f"tables.user.{option}."
        assert (changes[f"{prefix}name"].old, changes[f"{prefix}name"].new) == (old, new)
        assert all(key.startswith(prefix) for key in changes), changes
        one_sided = {key.removeprefix(prefix) for key, c in changes.items() if MISSING in (c.old, c.new)}
        before, after = ({p.name for p in OPTIMIZERS[name].parameters} for name in (old, new))
        assert one_sided == before ^ after
        assert {c.kind for c in changes.values()} == {"identity"}


def test_order_of_tables_is_identity() -> None:
    a, b = (
        "user  = { dim = 16 }\n",
        'item  = { dim = 16, ttl = "14d", admission = 2 }    # videos come and go\n',
    )
    swapped = parse_spec(FEED.replace(a + b, b + a))

    assert identity_hash(swapped) != identity_hash(feed())
    assert [c.key for c in diff(feed(), swapped)] == ["tables (order)"]


def test_equal_specs_have_no_changes_and_one_hash() -> None:
    assert diff(feed(), feed()) == []
    assert identity_hash(feed()) == identity_hash(feed("# A video feed", "# Another comment"))


def test_stated_default_does_not_change_the_hash() -> None:
    assert identity_hash(feed("[model]", "[model]\nseed = 0")) == identity_hash(feed())


def test_hash_of_an_unchanged_spec_never_changes() -> None:
    """Check the hash that stores are tied to: a release that changes it breaks every existing model.

    tests/unit/cli/test_former_defaults.py holds the hashes of `defaults = 1`.
    """
    spec = load_spec(EXAMPLES / "quickstart" / "freshet.toml")

    assert identity_hash(spec) == HASH
    assert identity_hash(spec, load_schemas(spec)) == HASH_WITH_SCHEMAS


HASH = "1cfa9e01aceeb351e2af47106ea2887d3525f18b8d7b69f9d49a816006798c4d"
HASH_WITH_SCHEMAS = "9a90cd3816e211e2cbc4f298f076cc29ebcd570e38527645fcba361279e8051e"


def edited(change: dict[str, Any]) -> Schemas:
    spec = feed()
    schemas = load_schemas(spec)
    text = (EXAMPLES / "feed" / "ranked.avsc").read_text()
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new, 1)
    return replace(schemas, served=parse_schema(text))


def test_field_of_another_kind_is_another_model() -> None:
    spec, schemas = feed(), load_schemas(feed())
    text_ids = edited({'{"name": "id", "type": "long"}': '{"name": "id", "type": "string"}'})

    changes = diff(spec, spec, schemas, text_ids)

    assert [(c.key, c.old, c.new) for c in changes] == [("field served.user.id", "integer", "text")]
    assert identity_hash(spec, schemas) != identity_hash(spec, text_ids)


@pytest.mark.parametrize(
    "change",
    [
        {'{"name": "pos", "type": "int"}': '{"name": "pos", "type": "long"}'},
        {'"age_s", "type": "float"}': '"age_s", "type": ["null", "double"], "default": null}'},
        {'{"name": "device"': '{"name": "locale", "type": "string"},\n    {"name": "device"'},
    ],
)
def test_a_schema_may_widen_and_grow(change: dict[str, Any]) -> None:
    spec = feed()

    assert identity_hash(spec, edited(change)) == identity_hash(spec, load_schemas(spec))


def test_field_kinds_come_from_the_schemas() -> None:
    spec = feed()

    kinds = field_kinds(spec, load_schemas(spec))

    assert kinds["served.user.last_items"] == "list of integer"
    assert kinds["served.items.ctr_1h"] == "fraction"
    assert kinds["served.user.country"] == "text"
    assert kinds["action.seconds"] == "fraction"
    assert kinds["shown.item.id"] == "integer"


def test_missing_schema_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"events.served.schema = 'moved.avsc'"):
        load_schemas(feed('schema = "ranked.avsc"', 'schema = "moved.avsc"'))
    with pytest.raises(ConfigError, match="a file that can be read"):
        load_schemas(feed('schema = "ranked.avsc"', 'schema = "a\\u0000b"'))
    with pytest.raises(ConfigError, match=r"events.served.schema = None"):
        load_schemas(feed('schema = "ranked.avsc", ', ""))


NOUNS = [c for c in vars(model).values() if isinstance(c, type) and is_dataclass(c)]


@pytest.mark.parametrize("cls", NOUNS)
def test_every_option_has_kind_and_meaning(cls: type) -> None:
    for f in fields(cls):
        if "kind" in f.metadata:
            assert f.metadata["kind"] in ("identity", "tunable", "deployment")
            assert f.metadata["doc"]
