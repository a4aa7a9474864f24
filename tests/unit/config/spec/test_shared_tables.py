"""Features of a table that share the rows of equal ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.spec.explanation import explain
from freshet.config.spec.identity import diff, identity_hash, render
from freshet.config.spec.layout import has_own_rows
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec, parse_spec, with_defaults
from freshet.config.spec.schemas import load_schemas
from freshet.errors import ConfigError

EXAMPLES = Path(__file__).parents[4] / "examples"

KINDS = {
    "id": '{ field = "x", table = "t" }',
    "time": '{ time = "hour", table = "t" }',
    "bucket": '{ field = "x", table = "t", buckets = [1, 2] }',
    "list": '{ field = "xs", table = "t", max = 5 }',
    "dense": '{ field = "x", dense = "raw" }',
}


def spec_of(*kinds: str, table: str = "", top: str = "") -> Spec:
    """Parse a spec with one table and features f0, f1, ... of these kinds."""
    features = "\n".join(f"f{i} = {KINDS[kind]}" for i, kind in enumerate(kinds))
    return parse_spec(f"""{top}
name = "shop"
[events]
served = {{ key = ["r", "i"], time = "ts:ms" }}
action = {{ key = ["r", "i"], time = "ts:ms" }}
[labels]
click = {{ on = "action.type == 'x'" }}
[tables]
t = {{ {table} }}
[features]
{features}
""")


def own(spec: Spec) -> list[str]:
    return [f.name for f in spec.features if has_own_rows(spec, f)]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["id"], []),
        (["list"], []),
        (["dense", "id"], []),
        (["id", "id"], ["f0", "f1"]),
        (["id", "time", "bucket"], ["f0", "f1", "f2"]),
        (["id", "list"], []),  # an item and its history
        (["list", "id", "list"], []),
        (["list", "list"], []),
        (["bucket", "list"], ["f0", "f1"]),  # values of the list are no buckets
        (["list", "time"], ["f0", "f1"]),
        (["id", "list", "time"], ["f0", "f1", "f2"]),
        (["id", "dense", "id"], ["f0", "f2"]),
    ],
)
def test_only_item_and_history_share_rows_by_default(kinds: list[str], expected: list[str]) -> None:
    assert own(spec_of(*kinds)) == expected
    assert own(spec_of(*kinds, table="shared = true")) == []
    assert own(with_defaults(spec_of(*kinds), 1)) == []
    several = [name for name, kind in zip(["f0", "f1", "f2"], kinds, strict=False) if kind != "dense"]
    assert own(spec_of(*kinds, table="shared = false")) == (several if len(several) > 1 else [])


some_kinds = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4)
some_tables = st.sampled_from(["", "shared = true", "shared = false"])


@given(some_kinds, some_tables, some_tables, st.sampled_from([1, 2]))
def test_shared_changes_the_hash_only_if_rows_differ(
    kinds: list[str], one: str, other: str, generation: int
) -> None:
    top = f"defaults = {generation}"
    a, b = spec_of(*kinds, table=one, top=top), spec_of(*kinds, table=other, top=top)

    assert (identity_hash(a) == identity_hash(b)) == (own(a) == own(b))
    assert (diff(a, b) == []) == (own(a) == own(b))
    assert parse_spec(render(a)) == a
    assert with_defaults(with_defaults(a, 3 - generation), generation) == a


@given(some_kinds)
def test_generation_one_shares_every_table(kinds: list[str]) -> None:
    default, stated = (spec_of(*kinds, table=t, top="defaults = 1") for t in ("", "shared = true"))

    assert default == stated
    assert own(default) == []


def test_crosses_never_share_rows() -> None:
    text = (EXAMPLES / "feed" / "freshet.toml").read_text()

    with pytest.raises(ConfigError, match=r"tables\.crosses\.shared"):
        parse_spec(text.replace("[tables]", "[tables]\ncrosses = { shared = true }"))


def test_check_lists_features_that_share_rows_by_table() -> None:
    spec = load_spec(EXAMPLES / "feed" / "freshet.toml")
    schemas = load_schemas(spec)
    lines = explain(spec, schemas).text().splitlines()
    former = explain(with_defaults(spec, 1), schemas).text().splitlines()

    assert (
        "table item: item and recent share rows: an id has one row for all of them "
        "(shared = false: a row for each feature)"
    ) in lines
    assert (
        "table small: country, hour and position have rows of their own: an id has a row for each of them "
        "(shared = true: one row)"
    ) in lines
    assert sum(line.startswith("table small: country, hour and position share rows") for line in former) == 1
    assert not any(line.startswith("table user") for line in lines)


def test_check_notes_that_newer_defaults_exist() -> None:
    spec = load_spec(EXAMPLES / "feed" / "freshet.toml")
    schemas = load_schemas(spec)

    warned = [w for w in explain(with_defaults(spec, 1), schemas).warnings if w.startswith("defaults: ")]

    assert len(warned) == 1
    assert not any(w.startswith("defaults: ") for w in explain(spec, schemas).warnings)


def test_check_notes_that_shared_has_no_effect_for_one_feature() -> None:
    text = (EXAMPLES / "feed" / "freshet.toml").read_text()
    spec = parse_spec(
        text.replace("user  = { dim = 16", "user  = { shared = true, dim = 16"), folder=str(EXAMPLES / "feed")
    )

    report = explain(spec, load_schemas(spec))

    said = "tables.user.shared: one feature uses the table, so the key has no effect"
    assert said in report.warnings
