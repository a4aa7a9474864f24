"""`freshet backtest` beside a baseline and Vowpal Wabbit: the same rows, labels equally late, one table."""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import freshet
from freshet.apps.versus import CENTRED, SETTINGS, Learner, Standardized, lines_of
from freshet.cli import cli
from freshet.cli.backtest import curves_svg
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec
from freshet.errors import ConfigError
from freshet.evaluation import LabelKind
from freshet.evaluation.predictions import LearnerPredictions
from freshet.features import Decoded, SampleDecoder
from tests.fixtures.effort import examples

ROWS = 4_000
LEARNERS = [f"vw {name}{form}" for form in ("", CENTRED) for name in SETTINGS]
TEXT = """
name = "shop"
[events]
served = { key = ["request", "item"], time = "ts:ms" }
action = { key = ["request", "item"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'" }
LABELS
[tables]
user = { dim = 4 }
item = { dim = 4 }
[features]
user  = { field = "user", table = "user" }
item  = { field = "item", table = "item" }
seen  = { field = "seen", table = "item", max = 3 }
hour  = { time = "hour", table = "user" }
price = { field = "price", dense = ["log1p", "standard"], missing = "flag" }
band  = { field = "price", buckets = [0.5], table = "user" }
[model]
kind = "linear"
[train]
batch = { rows = 64 }
[serve]
score = "click"
"""
WATCH = 'watch = { on = "action.type == \'watch\'", loss = "mse" }'


def spec_file(folder: Path, text: str = TEXT, labels: str = "") -> Path:
    file = folder / "freshet.toml"
    file.write_text(text.replace("LABELS", labels))
    return file


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(3)
    users, items = rng.integers(0, 60, ROWS), rng.integers(0, 40, ROWS)
    table = pa.table(
        {
            "ts": 1_700_000_000_000 + np.arange(ROWS) * 60_000,
            "request": pa.array([f"r{i // 7}" for i in range(ROWS)]),
            "user": pa.array(users, mask=users < 3),
            "item": pa.array([f"i {i}|:" for i in items]),
            "seen": pa.array([[f"i {j}|:" for j in range(i % 4)] for i in range(ROWS)]),
            "price": pa.array(rng.random(ROWS), mask=rng.random(ROWS) < 0.1),
            "click": (rng.random(ROWS) < 0.1 + 0.6 * (items % 3 == 0)).astype(float),
            "watch": rng.random(ROWS) * 30,
            "part": rng.integers(0, 2, ROWS),
        }
    )
    file = tmp_path_factory.mktemp("versus") / "samples.parquet"
    pq.write_table(table, file)
    return file


def run(*words: object) -> Any:
    return CliRunner().invoke(cli, ["backtest", *map(str, words)])


@pytest.mark.slow
def test_one_command_compares_with_vowpal_wabbit(samples: Path, tmp_path: Path) -> None:
    plot = tmp_path / "curves.svg"

    result = run(spec_file(tmp_path), samples, "--request", "request", "--versus", "vw", "--plot", plot)
    as_json = run(spec_file(tmp_path), samples, "--request", "request", "--versus", "vw", "--json")

    assert (result.exit_code, as_json.exit_code) == (0, 0), result.output
    found = json.loads(as_json.stdout.strip().splitlines()[-1])
    assert list(found["learners"]) == ["freshet", "popularity", *LEARNERS]
    for name, learner in found["learners"].items():
        assert name in result.output
        assert learner["labels"]["click"]["n"] == ROWS
        assert learner["after_first_fifth"]["click"]["n"] == ROWS - ROWS // 5
        assert learner["labels"]["click"]["auc"] > 0.6  # items distinguish two thirds from one third
        assert sum(w["measures"]["n"] for w in learner["curve"]["click"]) == ROWS
    assert found["auc"] == pytest.approx(found["learners"]["freshet"]["labels"]["click"]["auc"], abs=1e-6)
    drawn = ET.fromstring(plot.read_text())
    assert len(drawn.findall(".//{*}polyline")) == 3 * len(found["learners"])


def test_without_an_item_the_baseline_is_the_mean(samples: Path, tmp_path: Path) -> None:
    spec = load_spec(spec_file(tmp_path, TEXT.replace('["request", "item"]', '["request"]')))

    outcome = freshet.backtest(spec, [samples])

    assert list(outcome.learners) == ["freshet", "mean"]
    assert outcome.learners["mean"].all["click"]["auc"] < 0.6
    assert outcome.learners["mean"].all["click"]["calibration"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("request_column", [None, "request"])
def test_passes_by_log_and_in_memory_have_one_table(
    samples: Path, tmp_path: Path, request_column: str | None
) -> None:
    spec = load_spec(spec_file(tmp_path))

    kept = freshet.backtest(spec, [samples], request=request_column, lanes=1, keep=tmp_path / "kept")
    straight = freshet.backtest(spec, [samples], request=request_column)

    for name in ("freshet", "popularity"):
        for found, other in zip(
            (straight.learners[name].all, straight.learners[name].after_first),
            (kept.learners[name].all, kept.learners[name].after_first),
            strict=True,
        ):
            assert found["click"] == pytest.approx(other["click"], rel=1e-6)


def test_figures_over_all_are_those_of_the_measures(samples: Path, tmp_path: Path) -> None:
    outcome = freshet.backtest(load_spec(spec_file(tmp_path)), [samples])

    assert outcome.learners["freshet"].all["click"] == pytest.approx(outcome.measures["click"], rel=1e-6)


@pytest.mark.slow
def test_several_labels_each_have_their_learners(samples: Path, tmp_path: Path) -> None:
    labels = (
        'part = { on = "action.type == \'part\'" }\nwatch = { on = "action.type == \'watch\'", loss = "mse" }'
    )
    spec = load_spec(spec_file(tmp_path, TEXT.replace('kind = "linear"', 'experts = ["wide"]'), labels))

    outcome = freshet.backtest(spec, [samples], versus=["vw"])

    assert list(outcome.learners["freshet"].all) == ["click", "part", "watch"]
    for name in LEARNERS:
        assert outcome.learners[name].all["part"]["calibration"] == pytest.approx(1, abs=0.15)
        assert "watch" not in outcome.learners[name].all
    assert outcome.learners["popularity"].all["watch"]["n"] == ROWS


@pytest.mark.slow
def test_labels_are_as_late_as_in_the_pass(samples: Path, tmp_path: Path) -> None:
    def of_vw(batch: str, keep: str | None) -> list[Mapping[str, float]]:
        spec = load_spec(spec_file(tmp_path, TEXT.replace("rows = 64", batch)))
        outcome = freshet.backtest(
            spec, [samples], lanes=2 if keep == "two" else None, keep=keep and tmp_path / keep, versus=["vw"]
        )
        return [outcome.learners[name].all["click"] for name in LEARNERS]

    by_64, by_256 = of_vw("rows = 64", None), of_vw("rows = 256", None)

    assert by_64 != by_256
    assert of_vw("rows = 64, behind = 256", None) == by_64  # in memory nothing is behind
    assert of_vw("rows = 64, behind = 256", "one") == by_256
    assert of_vw("rows = 128, behind = 128", "two") == by_256  # a lane does not know the other's batch


def test_a_batch_is_predicted_before_any_of_it_is_learned() -> None:
    lines, values = [" |a 1", " |a 1", " |a 1", " |a 1"], np.array([1, 1, 1, 1], np.float32)
    late, prompt = Learner("plain"), Learner("plain")
    try:
        by_two = late.run(lines, values, np.array([2, 4]))
        at_once = prompt.run(lines, values, np.array([1, 2, 3, 4]))
    finally:
        late.close()
        prompt.close()

    assert by_two[0] == by_two[1] == 0.5
    assert by_two[2] == by_two[3] > 0.5
    assert at_once[0] == 0.5
    assert list(at_once) == sorted(set(at_once))


def decoded(spec: Spec, samples: Path) -> Decoded:
    from freshet.apps.sample_files import ready_samples  # noqa: PLC0415 - this helper's alone

    ready = next(ready_samples(spec, [samples], None))
    return SampleDecoder(spec, layout_of(spec), lambda _: ready.schema).decode(
        ready.payloads, 0, ready.times_ms
    )


def test_vowpal_wabbit_sees_every_feature_of_the_spec(samples: Path, tmp_path: Path) -> None:
    spec = load_spec(spec_file(tmp_path))
    rows = pq.read_table(samples).to_pylist()

    found = decoded(spec, samples)
    lines = lines_of(spec, layout_of(spec), found, found.dense)

    namespaces = dict(zip("abcdef", ("user", "item", "seen", "hour", "price", "band"), strict=True))
    seen: dict[str, dict[Any, set[str]]] = {name: {} for name in namespaces.values()}
    for line, row in zip(lines, rows, strict=False):
        parts: Mapping[str, list[str]] = {p[0]: p[1:].split() for p in line.split(" |") if p}
        texts = {name: parts.get(letter, []) for letter, name in namespaces.items()}
        assert len(texts["user"]) == (row["user"] is not None)
        assert len(texts["seen"]) == len(row["seen"])
        assert len(texts["band"]) == (row["price"] is not None)
        if row["price"] is None:
            assert texts["price"] == ["missing"]
        else:
            assert float(texts["price"][0].removeprefix("x:")) == pytest.approx(
                np.log1p(row["price"]), rel=1e-4
            )
        for name in ("user", "item"):
            seen[name].setdefault(row[name], set()).update(texts[name])
    assert all(len(ids) == 1 for key, ids in seen["item"].items())
    assert len({next(iter(ids)) for ids in seen["item"].values()}) == len(seen["item"])


finite = st.floats(-1e6, 1e6, width=32)
numbers = st.lists(
    st.lists(finite | st.just(float("nan")), min_size=2, max_size=2), min_size=1, max_size=40
).map(lambda rows: np.array(rows, np.float32))


@settings(max_examples=examples(40))
@given(numbers, st.data())
def test_numbers_are_standardised_by_the_batches_before(dense: Any, data: st.DataObject) -> None:
    standardized, found, first = Standardized(2), [], 0
    sizes = []
    while first < len(dense):  # in pieces, of batches
        piece = data.draw(st.integers(1, len(dense) - first))
        ends = sorted({piece, *data.draw(st.lists(st.integers(1, piece), max_size=4))})
        found.append(standardized(dense[first : first + piece], np.array(ends, np.int64)))
        sizes += np.diff([0, *ends]).tolist()
        first += piece

    start = 0
    for size in sizes:
        known, batch = dense[:start].astype(np.float64), dense[start : start + size]
        for column in range(2):
            seen = known[np.isfinite(known[:, column]), column]
            shown = np.concatenate(found)[start : start + size, column]
            missing = ~np.isfinite(batch[:, column])
            assert (np.isnan(shown) == missing).all()
            if len(seen) < 2:
                assert not shown[~missing].any()
            elif seen.std() > 1e-3 * max(1.0, np.abs(seen).max()):
                expected = np.clip((batch[:, column] - seen.mean()) / seen.std(), -10, 10)
                assert shown[~missing] == pytest.approx(expected[~missing], rel=1e-3, abs=1e-3)
        start += size


def test_constant_column_is_left_out_for_vowpal_wabbit() -> None:
    found = Standardized(1)(np.full((100, 1), 2_013.0, np.float32), np.arange(1, 101))

    assert not found.any()


def test_without_the_package_the_error_says_how_to_get_it(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vowpalwabbit", None)

    result = run(spec_file(tmp_path), samples, "--versus", "vw")

    assert result.exit_code == 1
    assert "vowpalwabbit is not installed" in str(result.exception)
    assert "pip install vowpalwabbit" in str(result.exception)


def test_numbers_alone_are_not_compared(samples: Path, tmp_path: Path) -> None:
    text = TEXT.replace("click = { on = \"action.type == 'click'\" }", "").replace(
        'score = "click"', 'score = "watch"'
    )
    spec = load_spec(spec_file(tmp_path, text, 'watch = { on = "action.type == \'watch\'", loss = "mse" }'))

    with pytest.raises(ConfigError, match="watch are numbers"):
        freshet.backtest(spec, [samples], versus=["vw"])


def test_a_pipe_cannot_be_read_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "samples.csv"
    os.mkfifo(pipe)

    with pytest.raises(ConfigError, match="is a pipe"):
        freshet.backtest(load_spec(spec_file(tmp_path)), [pipe], versus=["vw"])


@pytest.mark.parametrize("name", ["curves.png", "nowhere/curves.svg", "folder.svg"])
def test_a_plot_that_cannot_be_written_is_refused_first(samples: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.svg").mkdir()

    result = run(spec_file(tmp_path), samples, "--plot", tmp_path / name)

    assert result.exit_code == 1
    assert "--plot" in str(result.exception)
    assert "training" not in result.output


def test_a_plot_on_a_full_disk_loses_no_figure(samples: Path, tmp_path: Path) -> None:
    (tmp_path / "curves.svg").symlink_to("/dev/full")

    result = run(spec_file(tmp_path), samples, "--plot", tmp_path / "curves.svg", "--json")

    assert isinstance(result.exception, OSError)  # `main` prints it and exits with 1
    assert json.loads(result.stdout)["samples"] == ROWS


def test_the_legend_of_many_learners_stays_within_the_page() -> None:
    names = [f"a learner with a long name {i}" for i in range(9)]
    with LearnerPredictions([LabelKind("click", False)]) as scored:
        ids = np.arange(4)
        scored.add_samples(ids, np.array([0, 1, 0, 1], np.float32), ids)
        for name in names:
            scored.add_predictions(name, ids, np.full(4, 0.5, np.float32))
        page = ET.fromstring(curves_svg("title", {name: scored.figures(name) for name in names}))

    texts = [text for text in page.findall(".//{*}text") if text.text in names]
    assert [text.text for text in texts] == names
    assert len({(text.get("x"), text.get("y")) for text in texts}) == len(names)
    for text in texts:
        assert float(text.get("x", "")) + 7 * len(text.text or "") <= float(page.get("width", ""))
    charts = [float(text.get("y", "")) for text in page.findall(".//{*}text") if text.get("font-weight")]
    assert min(charts) > max(float(text.get("y", "")) for text in texts)


def test_curves_of_any_names_and_figures_are_one_document() -> None:
    kinds = [LabelKind("a<&>\"'\x00\u2028", False), LabelKind("watch", True)]
    with LearnerPredictions(kinds) as scored:
        ids = np.arange(6)
        scored.add_samples(ids, np.zeros(6, np.float32), np.full(6, -(1 << 62)))
        scored.add_predictions("x<y>&", ids, np.array([0.5, np.nan, np.inf, 1, 0, 3], np.float32))
        drawn = curves_svg("t<&>\x01", {"x<y>&": scored.figures("x<y>&")})

    assert ET.fromstring(drawn) is not None
    assert "nan" not in drawn
