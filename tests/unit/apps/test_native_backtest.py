"""Backtests in memory: they learn the same as backtests by the log."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freshet
from freshet.apps import native_backtest
from freshet.apps.native_backtest import has_native_loop, prefetched
from freshet.apps.results import outcome_text
from freshet.apps.sample_files import block_ends, choose_ends
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec
from freshet.errors import BadInput
from freshet.model.inputs import Labels
from freshet.model.native_loop import NativePass
from freshet.tables import bounds, store

TEXT = """
name = "shop"
[events]
served = { key = ["request"], time = "ts:ms" }
action = { key = ["request"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'" }
buy = { on = "action.type == 'buy'" }
[tables]
user = { dim = 4, ttl = false, scalar_optimizer = "ftrl" }
item = { dim = 4, ttl = false }
[features]
user  = { field = "user", table = "user" }
item  = { field = "item", table = "item" }
seen  = { field = "seen", table = "item", max = 3 }
hour  = { time = "hour", table = "user" }
price = { field = "price", dense = ["log1p", "standard"] }
[model]
MODEL
[train]
segments = ["hour"]
batch = { rows = ROWS }
staleness_rows = 0
[serve]
score = "click"
"""
ROWS = 3_000


def spec_of(folder: Path, model: str, rows: int = 256) -> Spec:
    file = folder / "freshet.toml"
    file.write_text(TEXT.replace("MODEL", model).replace("ROWS", str(rows)))
    return load_spec(file)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pyarrow as pa  # noqa: PLC0415 - slow to import
    import pyarrow.parquet as pq  # noqa: PLC0415

    rng = np.random.default_rng(7)
    users, items = rng.integers(0, 60, ROWS), rng.integers(0, 40, ROWS)
    click = (rng.random(ROWS) < 0.2 + 0.5 * (items % 3 == 0)).astype(float)
    click[rng.random(ROWS) < 0.05] = np.nan  # such a row teaches the other label alone
    table = pa.table(
        {
            "ts": 1_700_000_000_000 + np.arange(ROWS) * 60_000,
            "request": pa.array([f"r{i // 7}" for i in range(ROWS)]),
            "user": pa.array(users, mask=users < 3),
            "item": pa.array([f"i{i}" for i in items]),
            "seen": pa.array([[f"i{j}" for j in range(i % 4)] for i in range(ROWS)]),
            "price": pa.array(rng.random(ROWS), mask=rng.random(ROWS) < 0.1),
            "click": click,
            "buy": rng.integers(0, 2, ROWS),
        }
    )
    file = tmp_path_factory.mktemp("straight") / "samples.parquet"
    pq.write_table(table, file)
    return file


@pytest.mark.parametrize("request_column", [None, "request"])
@pytest.mark.parametrize(
    "model",
    [
        'kind = "linear"',
        'experts = ["wide", "cross", "fm"]\ncrosses = [["user", "item"]]',
        "deep = [32, 16]",
        'kind = "mlp"\ndeep = [16]',
    ],
)
def test_pass_in_memory_learns_the_same_as_by_log(
    samples: Path, tmp_path: Path, model: str, request_column: str | None
) -> None:
    spec = spec_of(tmp_path, model)

    kept = freshet.backtest(spec, [samples], request=request_column, lanes=1, keep=tmp_path / "kept")
    in_memory = freshet.backtest(spec, [samples], request=request_column)

    assert in_memory.samples == kept.samples
    assert in_memory.measures == {
        label: pytest.approx(dict(measures), rel=1e-9) for label, measures in kept.measures.items()
    }


def test_it_gives_the_same_result_each_time(samples: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, 'kind = "linear"')

    first, second = (freshet.backtest(spec, [samples]) for _ in range(2))

    assert (first.measures, first.windows) == (second.measures, second.windows)
    assert first.windows


@pytest.mark.parametrize("keep", [False, True])
def test_an_outlier_among_labels_is_reported(tmp_path: Path, samples: Path, keep: bool) -> None:
    import pyarrow as pa  # noqa: PLC0415 - slow to import
    import pyarrow.parquet as pq  # noqa: PLC0415

    spec = spec_of(tmp_path, 'kind = "linear"')
    click, buy = spec.labels
    spec = replace(spec, labels=(replace(click, loss="mse", value="sum(action.amount)"), buy))
    table = pq.read_table(samples)
    spent = np.random.default_rng(1).uniform(1, 9, len(table))
    spent[2_500] = 1e9
    index = table.column_names.index("click")
    pq.write_table(table.set_column(index, "click", pa.array(spent)), tmp_path / "spent.parquet")

    outcome = freshet.backtest(spec, [tmp_path / "spent.parquet"], keep=tmp_path / "kept" if keep else None)

    assert outcome.outliers == outcome.as_json()["outliers"] == 1
    assert "measures leave out 1 label far beyond the others" in outcome_text(outcome)
    assert outcome.measures["click"]["not_finite"] == 0


@pytest.mark.parametrize("keep", [False, True])
def test_a_full_temporary_disk_is_an_error_and_nothing_is_kept(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    def full(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    spec, kept = spec_of(tmp_path, 'kind = "linear"'), tmp_path / "kept"

    with pytest.raises(OSError, match="No space left on device"):
        freshet.backtest(spec, [samples], keep=kept if keep else None)
    assert not kept.exists()


def test_rows_of_a_backtest_are_bounded_by_memory(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "LEAST_ROWS", 20)
    made: list[NativePass] = []

    class Watched(NativePass):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            made.append(self)

    monkeypatch.setattr(native_backtest, "NativePass", Watched)
    spec = spec_of(tmp_path, 'kind = "linear"')

    freshet.backtest(spec, [samples])
    monkeypatch.setenv("FRESHET_TRAINER_MEMORY_BYTES", "1000")
    freshet.backtest(spec, [samples])

    unbounded, bounded = (sum(learner.store.rows().values()) for learner in made)
    assert unbounded == 60 - 3 + 24 + 40  # users and hours, items that were seen too
    assert bounded <= 2 * 20 * store.OVERFULL


def test_every_native_model_learns_in_memory(tmp_path: Path) -> None:
    assert all(has_native_loop(spec_of(tmp_path, f'kind = "{kind}"')) for kind in ("hedge", "mlp", "linear"))
    assert not has_native_loop(spec_of(tmp_path, 'kind = "deepfm"'))


def test_progress_ends_at_one(samples: Path, tmp_path: Path) -> None:
    told: list[float] = []

    freshet.backtest(spec_of(tmp_path, 'kind = "linear"'), [samples, samples], progress=told.append)

    assert told == sorted(told)
    assert told[-1] == 1.0


def test_invalid_utf8_in_the_reading_thread_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(
        b"ts,user,item,seen,price,click,buy\n1700000000000,1,\xff,a,1.5,1,0\n"
    )

    with pytest.raises(BadInput):
        freshet.backtest(spec_of(tmp_path, 'kind = "linear"'), [tmp_path / "rows.csv"])


def test_batches_that_do_not_end_with_the_samples_are_refused(
    tmp_path: Path,
) -> None:
    learner = NativePass(spec_of(tmp_path, 'kind = "linear"'))
    labels = Labels(np.zeros(2, np.uint8), np.ones(2, np.float32), np.ones(2, np.float32))

    with pytest.raises(ValueError, match="batches that end with the samples, found"):
        learner.run([], np.zeros((2, 1), np.float32), labels, np.zeros(2, np.int64), np.array([1], np.int64))

    assert sum(learner.store.memory().rows.values()) == 0


def test_pieces_are_maximal_and_split_no_request() -> None:
    requests = np.repeat(np.arange(5, dtype=np.uint64), [100, 100, 100, 300, 20])

    assert block_ends(requests, 256, before=1_000).tolist() == [200, 300, 600, 620]
    assert block_ends(requests, 64, before=1_000).tolist() == [100, 200, 300, 600, 620]
    assert choose_ends(np.array([200, 300, 600, 620]), 320, before=1_000).tolist() == [300, 620]
    assert choose_ends(np.array([200, 300, 600, 620]), 100, before=1_000).tolist() == [200, 300, 600, 620]
    assert block_ends(requests[:0], 256).tolist() == []


def test_the_first_batches_of_a_pass_are_short() -> None:
    alone = np.arange(200, dtype=np.uint64)

    assert block_ends(alone, 64).tolist() == [1, 3, 7, 15, 31, 63, 127, 191, 200]
    assert block_ends(alone[:10], 64, before=3).tolist() == [4, 10]


def test_prefetched_items_are_in_order_and_the_error_last() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise BadInput("row 5")

    seen: list[int] = []
    with pytest.raises(BadInput, match="row 5"):
        seen.extend(prefetched(items(), 2))
    made = list(prefetched(iter(range(5)), 2))

    assert made == [0, 1, 2, 3, 4]


def test_early_stop_ends_the_prefetching_thread() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(1_000):
            made.append(i)
            yield i

    taken = prefetched(items(), 2)
    assert next(taken) == 0
    taken.close()  # type: ignore[attr-defined]

    assert len(made) < 10
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}
