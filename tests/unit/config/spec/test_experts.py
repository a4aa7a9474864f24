"""Experts that a spec's features cannot feed: absent from the defaults, refused where the spec names them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import parse_schema
from freshet.config.avro.types import Record
from freshet.config.spec.defaults import left_out_experts
from freshet.config.spec.explanation import explain
from freshet.config.spec.identity import identity_hash, render
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.config.spec.schemas import Schemas
from freshet.errors import ConfigError

FEATURES = {
    "user": '{ field = "user", table = "t" }',
    "seen": '{ field = "seen", table = "t", max = 3 }',
    "hour": '{ time = "hour", table = "t" }',
    "size": '{ field = "size", table = "t", buckets = [1, 2] }',
    "age": '{ field = "age", dense = "log1p" }',
    "price": '{ field = "price", dense = "standard", missing = "flag" }',
}
NUMBERS = ("age", "price")
DEFAULTS = {1: ("wide", "fm", "deep"), 2: ("wide", "fast", "fm", "deep", "counts", "stack")}
OF_NUMBERS = {1: ("deep",), 2: ("wide", "deep", "stack")}


def spec_of(features: tuple[str, ...], generation: int = 2, more: str = "", *, table: bool = False) -> Spec:
    lines = [f"{name} = {FEATURES[name]}" for name in features]
    return parsed(lines, generation, more, table=table or any(name not in NUMBERS for name in features))


def parsed(features: list[str], generation: int, more: str, *, table: bool) -> Spec:
    """Parse a spec with these lines of [features], with or without a table."""
    tables = "[tables]\nt = { dim = 4 }\n" if table else ""
    lines = "\n".join(features)
    return parse_spec(
        f"""
name = "shop"
defaults = {generation}
[events]
served = {{ key = ["request"], time = "ts:ms" }}
action = {{ key = ["request"], time = "ts:ms" }}
[labels]
click = {{ on = "action.type == 'click'" }}
{tables}[features]
{lines}
{more}
"""
    )


some_features = st.lists(st.sampled_from(list(FEATURES)), min_size=1, unique=True).map(tuple)


@given(some_features, st.sampled_from([1, 2]))
def test_default_experts_are_those_that_features_feed(features: tuple[str, ...], generation: int) -> None:
    spec = spec_of(features, generation)
    ids = any(name not in NUMBERS for name in features)
    expected = (DEFAULTS if ids else OF_NUMBERS)[generation]
    if generation == 2 and sum(name in ("user", "hour", "size") for name in features) > 1:
        expected = ("wide", "fast", "cross", "fm", "deep", "counts", "stack")

    assert spec.model.experts == expected
    assert left_out_experts(spec) == tuple(e for e in DEFAULTS[generation] if e not in expected)
    assert parse_spec(render(spec)) == spec
    assert identity_hash(parse_spec(render(spec))) == identity_hash(spec)


@pytest.mark.parametrize(
    ("expert", "why"),
    [
        ("fast", "without one, fast has the same weights as wide"),
        ("fm", "fm multiplies vectors of ids"),
        ("counts", "counts weighs ids by how often they were seen"),
    ],
)
def test_a_named_expert_without_ids_is_refused(expert: str, why: str) -> None:
    named = f'[model]\nexperts = ["wide", "{expert}", "stack"]'
    with pytest.raises(ConfigError) as caught:
        spec_of(NUMBERS, more=named)

    assert str(caught.value) == (
        f"freshet.toml: model.experts = ['wide', '{expert}', 'stack']\n"
        f"  expected a feature with ids (an id, list, time or bucket) for {expert}\n"
        f"  {why}; add such a feature, or leave {expert} out"
    )
    assert spec_of(("hour", *NUMBERS), more=named).model.experts == ("wide", expert, "stack")


@pytest.mark.parametrize("features", [NUMBERS, ("user", "age")])
def test_check_lists_the_experts_and_those_left_out(features: tuple[str, ...]) -> None:
    served = ["request", "user"], ["ts", "age", "price"]
    spec = spec_of(features)
    report = explain(spec, Schemas(record(*served), record(["request", "type"], ["ts"])))
    lines = report.text().splitlines()

    if features == NUMBERS:
        assert report.experts_left_out == ("fast", "fm", "counts")
        needed = "fast, fm and counts need a feature with ids: an id, list, time or bucket"
        assert f"experts: wide, deep, stack ({needed})" in lines
        assert any(line.startswith("note: features: none has ids") for line in lines)
    else:
        assert report.experts_left_out == ()
        assert "experts: wide, fast, fm, deep, counts, stack" in lines
        assert not any("none has ids" in line for line in lines)


def record(texts: list[str], numbers: list[str]) -> Record:
    fields = [
        *({"name": n, "type": "string"} for n in texts),
        *({"name": n, "type": "long"} for n in numbers),
    ]
    return parse_schema(json.dumps({"type": "record", "name": "R", "fields": fields}))


def test_experts_that_the_spec_names_are_not_reported_left_out() -> None:
    spec = spec_of(NUMBERS, more='[model]\nexperts = ["deep"]')

    assert spec.model.experts == ("deep",)
    assert left_out_experts(spec) == ()


def test_wide_of_generation_one_needs_ids() -> None:
    named = '[model]\nexperts = ["wide"]'
    with pytest.raises(ConfigError, match="wide has no weights of numbers"):
        spec_of(NUMBERS, 1, named)

    # Such models exist in generation 1 and must continue.
    assert spec_of(NUMBERS, 1, table=True).model.experts == DEFAULTS[1]
    assert spec_of(NUMBERS, 2, table=True).model.experts == OF_NUMBERS[2]


@pytest.mark.parametrize(
    ("kind", "features", "generation", "expected"),
    [
        ("dlrm", NUMBERS, 2, r"a feature with ids \(an id, list, time or bucket\) for dlrm"),
        ("dlrm", ("user",), 2, "two features for dlrm"),
        ("linear", NUMBERS, 1, r"a feature with ids .* for linear with `defaults = 1`"),
    ],
)
def test_a_kind_that_no_feature_feeds_is_refused(
    kind: str, features: tuple[str, ...], generation: int, expected: str
) -> None:
    with pytest.raises(ConfigError, match=f"model.kind = '{kind}'\n  expected {expected}"):
        spec_of(features, generation, f'[model]\nkind = "{kind}"')

    spec_of(("user", "age"), generation, f'[model]\nkind = "{kind}"')


def singles(n: int, more: str = "", generation: int = 2) -> Spec:
    """Return a spec of n features with one id a sample, a list and a number."""
    ids = [f'f{i} = {{ field = "f{i}", table = "t" }}' for i in range(n)]
    others = [f"{name} = {FEATURES[name]}" for name in ("seen", "age")]
    return parsed([*ids, *others], generation, more, table=True)


def test_few_features_are_crossed_in_all_pairs() -> None:
    spec = singles(3)

    assert spec.model.crosses == (("f0", "f1"), ("f0", "f2"), ("f1", "f2"))
    assert spec.model.experts == ("wide", "fast", "cross", "fm", "deep", "counts", "stack")
    assert spec.table("crosses").max_rows == 4_194_304
    assert [len(singles(n).model.crosses) for n in (0, 1, 10, 11)] == [0, 0, 45, 0]


@pytest.mark.parametrize(
    "more",
    [
        "[model]\ncrosses = []",
        '[model]\nexperts = ["wide", "fm"]',
        '[model]\nkind = "mlp"',
        '[model]\nkind = "linear"',
    ],
)
def test_spec_with_crosses_or_experts_gets_no_pairs(more: str) -> None:
    spec = singles(4, more)

    assert spec.model.crosses == ()
    assert parse_spec(render(spec)) == spec


def test_the_first_generation_of_defaults_has_no_pairs() -> None:
    assert singles(4, generation=1).model.crosses == ()


@given(
    st.integers(0, 12),
    st.sampled_from(
        [
            "",
            "[model]\ncrosses = []",
            '[model]\ncrosses = [["f1", "f0"]]',
            '[model]\ncrosses = [["f0", "f1"]]',
            "[tables.crosses]\nmax_rows = 5000",
            '[tables.crosses]\nttl = "1h"\n[model]\ncrosses = [["f0", "f1"]]',
        ],
    ),
)
def test_rendered_pairs_parse_to_the_same_spec(n: int, more: str) -> None:
    n += 2 if more else 0
    if n > 10 and "tables" in more and "model" not in more:
        n = 10
    spec = singles(n, more)

    again = parse_spec(render(spec))

    assert again == spec
    assert identity_hash(again) == identity_hash(spec)


def test_report_counts_default_pairs_and_lists_named_ones() -> None:
    served = parse_schema(
        json.dumps(
            {
                "type": "record",
                "name": "R",
                "fields": [
                    *({"name": n, "type": "string"} for n in ("request", "f0", "f1", "f2")),
                    {"name": "seen", "type": {"type": "array", "items": "string"}},
                    *({"name": n, "type": "long"} for n in ("age", "ts")),
                ],
            }
        )
    )
    schemas = Schemas(served, record(["request", "type"], ["ts"]))
    implied = explain(singles(3), schemas).text()
    named = explain(singles(3, '[model]\ncrosses = [["f0", "f2"]]'), schemas).text()

    assert "cross: all 3 pairs of features with one id a sample (model.crosses = []: none)" in implied
    assert "f0*f1" not in implied
    assert "f0*f2" in named
