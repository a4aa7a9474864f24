from pathlib import Path

import pytest

from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import load_spec

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.mark.parametrize("name", ["online-retail", "feed"])
def test_an_example_parses_and_has_a_layout(name: str) -> None:
    spec = load_spec(EXAMPLES / name / "freshet.toml")

    assert spec.name == name
    assert layout_of(spec).groups


def test_feed_example_has_the_documented_keys() -> None:
    spec = load_spec(EXAMPLES / "feed" / "freshet.toml")

    assert spec.events.served.key == ("request_id", "items.id")
    assert spec.events.served.explode == "items"
    assert spec.label("watch").window_ms == 600_000
    assert spec.label("buy").given == "click"
    assert spec.table("small").ttl_ms is None
    assert spec.feature("recent").pool == "mean"
    assert spec.feature("position").serve_as == 0
    assert spec.feature("user*item").parts == ("user", "item")
    assert spec.table("crosses").id == 3
    assert spec.table("crosses").dim == 0
    assert (spec.train.batch_rows, spec.train.batch_wait_ms, spec.train.batch_behind_rows) == (256, 20, 1024)
    assert spec.serve.explore.share == 0.02


def test_the_retail_example_trains_on_the_defaults_and_one_cross() -> None:
    spec = load_spec(EXAMPLES / "online-retail" / "freshet.toml")

    assert spec.table("user").optimizer.parameters["lr"] == 0.2
    assert spec.table("user").scalar_optimizer.parameters["initial_accumulator"] == 0.0
    assert spec.model.experts == ("wide", "fast", "cross", "fm", "deep", "counts", "stack")
    assert spec.model.crosses == (("user", "item"),)
    assert spec.join.emit == "window"
    assert spec.feature("price").dense == ("log1p", "standard")
