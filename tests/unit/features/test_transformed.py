"""Transforms of the user's behind the decoder: the same in training, serving and backtests."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest

import freshet
from freshet.config.avro.schema import Record, parse_schema
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec
from freshet.features import Decoded, JsonTranscoder, SampleDecoder
from freshet.types import F32

TEXT = """
name = "offers"
[events]
served = { key = ["request_id", "offer"], time = "ts:ms" }
action = { key = ["request_id", "offer"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'" }
[tables]
offer = { dim = 2 }
[features]
offer = { field = "offer", table = "offer" }
ctr = { field = "ctr", dense = ["log1p", "own_seen:doubled"], missing = "flag" }
place = { field = "place", dense = [{ name = "clip", high = 3 }, "own_seen:doubled", "log1p"], serve_as = 9 }
[model]
deep = [4]
[join]
emit = "window"
"""
CODE = """
seen = 0
def doubled(x):
    "Twice the number."
    global seen
    seen += len(x)
    return x + x
"""
SCHEMA = {
    "type": "record",
    "name": "Offer",
    "fields": [
        {"name": "offer", "type": "string"},
        {"name": "ctr", "type": ["null", "double"]},
        {"name": "place", "type": "double"},
    ],
}


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spec:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_seen", raising=False)
    (tmp_path / "own_seen.py").write_text(CODE)
    (tmp_path / "freshet.toml").write_text(TEXT)
    return load_spec(tmp_path / "freshet.toml")


def decode(spec: Spec, rows: list[dict[str, object]], *, serving: bool = False) -> Decoded:
    schema = parse_schema(SCHEMA)
    assert isinstance(schema, Record)
    made = JsonTranscoder(schema).body(orjson.dumps(rows))
    assert not made.bad
    decoder = SampleDecoder(spec, layout_of(spec), lambda _: schema)
    return decoder.decode(made.records, 1, np.zeros(len(rows), np.int64), serving=serving)


ROWS: list[dict[str, object]] = [
    {"offer": f"o{i}", "ctr": None if i % 7 == 3 else i / 10, "place": i % 6} for i in range(100)
]


def expected(place: float | None = None) -> F32:
    rows = []
    for row in ROWS:
        ctr, at = row["ctr"], row["place"] if place is None else place
        assert isinstance(at, (int, float))
        first = math.nan if not isinstance(ctr, float) else 2 * math.log1p(ctr)
        rows.append((first, math.log1p(2 * min(at, 3))))
    return np.array(rows, np.float32)


def test_steps_run_in_order_and_missing_values_stay_missing(spec: Spec) -> None:
    np.testing.assert_allclose(decode(spec, ROWS).dense, expected(), rtol=1e-6)


def test_constants_of_serving_are_transformed_like_what_is_known(spec: Spec) -> None:
    np.testing.assert_allclose(decode(spec, ROWS, serving=True).dense, expected(9.0), rtol=1e-6)


def test_a_sample_becomes_the_same_in_a_batch_and_alone(spec: Spec) -> None:
    together = decode(spec, ROWS).dense
    alone = np.concatenate([decode(spec, [row]).dense for row in ROWS])

    np.testing.assert_array_equal(together, alone)


def test_no_sample_is_no_call(spec: Spec) -> None:
    assert decode(spec, []).dense.shape == (0, 2)


def test_a_backtest_goes_the_same_way(spec: Spec, tmp_path: Path) -> None:
    lines = ["ts,offer,ctr,place,click"]
    lines += [f"{1_700_000_000_000 + i},o{i % 5},{i / 100},{i % 6}.0,{i % 2}" for i in range(60)]
    (tmp_path / "samples.csv").write_text("\n".join(lines) + "\n")
    before = sys.modules["own_seen"].seen

    outcome = freshet.backtest(spec, [tmp_path / "samples.csv"], lanes=1)

    assert outcome.samples == 60
    assert sys.modules["own_seen"].seen - before >= 2 * 60
