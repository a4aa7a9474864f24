"""Models of one kind of feature, and of constant values: each learns, and predicts finite values."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import freshet
from freshet.config.spec.parse import load_spec

TEXT = """
name = "shop"
defaults = GENERATION
[events]
served = { key = ["request"], time = "ts:ms" }
action = { key = ["request"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'"VALUE }
[tables]
t = { dim = 4 }
[features]
FEATURES
[model]
MODEL
"""
ROWS = 300
FEATURES = {
    "id": 'user = { field = "user", table = "t" }',
    "list": 'seen = { field = "seen", table = "t", max = 3 }',
    "time": 'hour = { time = "hour", table = "t" }',
    "bucket": 'size = { field = "age", table = "t", buckets = [0.0, 0.5] }',
    "number": 'age = { field = "age", dense = "standard", missing = "flag" }',
    "constant number": 'same = { field = "same", dense = "raw" }',
    "empty text": 'empty = { field = "empty", table = "t" }',
    "empty list": 'nothing = { field = "nothing", table = "t", max = 3 }',
}
FEATURES["numbers"] = FEATURES["number"] + "\n" + FEATURES["constant number"]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pyarrow as pa  # noqa: PLC0415 - slow to import
    import pyarrow.parquet as pq  # noqa: PLC0415

    rng = np.random.default_rng(3)
    age = rng.normal(size=ROWS)
    table = pa.table(
        {
            "ts": 1_700_000_000_000 + np.arange(ROWS) * 60_000,
            "request": pa.array([f"r{i}" for i in range(ROWS)]),
            "user": pa.array([f"u{i % 20}" for i in range(ROWS)]),
            "seen": pa.array([[f"i{j}" for j in range(i % 4)] for i in range(ROWS)]),
            "age": pa.array(age, mask=rng.random(ROWS) < 0.1),
            "same": pa.array([7.0] * ROWS),
            "empty": pa.array([""] * ROWS),
            "nothing": pa.array([[]] * ROWS, pa.list_(pa.string())),
            "click": (rng.random(ROWS) < 1 / (1 + np.exp(-age))).astype(float),
            "never": np.zeros(ROWS),
            "always": np.ones(ROWS),
        }
    )
    file = tmp_path_factory.mktemp("few") / "samples.parquet"
    pq.write_table(table, file)
    return file


@pytest.mark.parametrize("model", ["", 'kind = "mlp"', 'kind = "linear"', 'experts = ["deep", "stack"]'])
@pytest.mark.parametrize("features", FEATURES)
def test_a_model_of_one_kind_of_feature_learns(
    samples: Path, tmp_path: Path, features: str, model: str
) -> None:
    learned(samples, tmp_path, features, model=model)


@pytest.mark.parametrize("features", FEATURES)
def test_a_number_is_learned_from_one_kind_of_feature(samples: Path, tmp_path: Path, features: str) -> None:
    learned(samples, tmp_path, features, value='value = "action.amount"')


@pytest.mark.parametrize("label", ["never", "always"])
@pytest.mark.parametrize("features", ["id", "number", "list"])
def test_a_label_that_never_changes_is_learned(
    samples: Path, tmp_path: Path, features: str, label: str
) -> None:
    assert learned(samples, tmp_path, features, label=label) < 0.1


@pytest.mark.parametrize("features", ["number", "id"])
def test_the_first_defaults_learn_from_one_kind_of_feature(
    samples: Path, tmp_path: Path, features: str
) -> None:
    learned(samples, tmp_path, features, generation=1)


def test_a_kept_model_of_numbers_alone_learns_the_same(samples: Path, tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, "numbers"))

    in_memory = freshet.backtest(spec, [samples])
    kept = freshet.backtest(spec, [samples], lanes=1, keep=tmp_path / "kept")

    assert kept.measures == {k: pytest.approx(dict(v), rel=1e-9) for k, v in in_memory.measures.items()}


def write(
    folder: Path,
    features: str,
    *,
    model: str = "",
    label: str = "click",
    value: str = "",
    generation: int = 2,
) -> Path:
    text = TEXT.replace("FEATURES", FEATURES[features]).replace("MODEL", model)
    text = text.replace("click = {", f"{label} = {{").replace("GENERATION", str(generation))
    file = folder / "freshet.toml"
    file.write_text(text.replace("VALUE", f", {value}" if value else ""))
    return file


def learned(samples: Path, folder: Path, features: str, **keys: str | int) -> float:
    """Learn from the samples, check that every prediction is finite, and return the mean loss."""
    spec = load_spec(write(folder, features, **keys))  # type: ignore[arg-type]  # keys of `write`
    found = freshet.backtest(spec, [samples])
    (measures,) = found.measures.values()

    assert found.samples == ROWS
    assert measures["not_finite"] == 0
    loss = measures["mse" if "value" in keys else "logloss"]
    assert loss is not None
    assert math.isfinite(loss)
    return loss
