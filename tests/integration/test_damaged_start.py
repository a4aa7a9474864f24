"""A trainer whose rows are damaged when it starts: it says so and waits until they are mended."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench import workload
from bench.workload import Arrays, Workload, append, plain_spec
from freshet.apps import services, trainer
from freshet.apps.pipeline import Pipeline
from freshet.cli.rows import command
from freshet.config.settings import load_settings
from freshet.config.spec.model import Spec
from freshet.config.spec.parse import parse_spec
from freshet.errors import Corrupt
from freshet.process.ports import lease_ports
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.testing.conditions import wait_until
from freshet.types import Bucket
from tests.fixtures.shards import write_refused_row

WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def _without_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples are ready: their schema is in the log, and the spec's are no files."""
    monkeypatch.setattr(trainer, "load_schemas", lambda *_: None)
    monkeypatch.setattr(trainer, "sample_reader", lambda *_: None)


def trained(folder: Path) -> Spec:
    """The spec of a run folder that has rows."""
    spec = replace(plain_spec("", ""), buckets=64)  # few, as mending reads each alone
    pipeline = Pipeline(spec, folder, 1)
    append(pipeline, Workload(rows=256, cardinality=40).arrays())
    pipeline.train(lambda _: None)
    pipeline.close()
    return spec


def asked(port: int, path: str) -> tuple[int, str]:
    """(Status, body); 0 while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WITHIN_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def damage(file: Path) -> None:
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        db.execute("UPDATE segments SET body = substr(body, 1, 30) WHERE id = 1")


def test_a_trainer_with_damaged_rows_waits_for_their_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "REPAIR_POLL_S", 0.2)
    spec = trained(tmp_path)
    [port] = lease_ports(1)
    settings = load_settings({"FRESHET_TRAINER_ADMIN_PORT": str(port)}, run_folder=tmp_path)
    damage(tmp_path / "rows" / "rows.sqlite")
    stop, failures = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            services.RUNNERS["trainer"](spec, settings, stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(
            "it says what is wrong",
            lambda: "freshet rows mend" in asked(port, "/health/ready")[1],
            within_s=WITHIN_S,
        )
        assert asked(port, "/health/ready")[0] == 503
        assert asked(port, "/health/live")[0] == 200
        assert "freshet_trainer_damaged 1.0" in asked(port, "/metrics")[1]
        assert thread.is_alive()

        mended = CliRunner().invoke(command, ["mend", "--give-up-rows", "--folder", str(tmp_path), "--json"])
        assert json.loads(mended.output)["damaged"], mended.output

        wait_until("it trains", lambda: asked(port, "/health/ready")[0] == 200, within_s=WITHIN_S)
        assert "freshet_trainer_damaged 0.0" in asked(port, "/metrics")[1]
    finally:
        stop.set()
        thread.join(WITHIN_S)
    assert failures == []


def test_a_trainer_that_waits_for_repair_stops_at_a_signal(tmp_path: Path) -> None:
    spec = trained(tmp_path)
    [port] = lease_ports(1)
    settings = load_settings({"FRESHET_TRAINER_ADMIN_PORT": str(port)}, run_folder=tmp_path)
    damage(tmp_path / "rows" / "rows.sqlite")
    stop = threading.Event()
    thread = threading.Thread(target=services.RUNNERS["trainer"], args=(spec, settings, stop))
    thread.start()
    wait_until(
        "it says what is wrong",
        lambda: "freshet rows mend" in asked(port, "/health/ready")[1],
        within_s=WITHIN_S,
    )
    stop.set()
    thread.join(WITHIN_S)
    assert not thread.is_alive()


def test_a_trainer_takes_rows_with_a_refused_record_as_damaged(tmp_path: Path) -> None:
    spec = trained(tmp_path)
    every = [Bucket(bucket) for bucket in range(spec.buckets)]
    with contextlib.closing(SqliteRowStore(tmp_path / "rows" / "rows.sqlite")) as rows:
        trainer._check_rows(rows, spec)
        write_refused_row(rows, max(bucket for bucket, meta in rows.metas(every).items() if meta.rows))

        with pytest.raises(Corrupt, match="it holds a value that is not finite"):
            trainer._check_rows(rows, spec)


def test_huge_labels_leave_rows_that_a_restart_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient whose square is just finite is taken; their sum must not become infinite."""
    label = "click = { on = \"action.type == 'click'\", "
    valued = f"""{label}value = "max(action.price)", loss = "mse", """
    monkeypatch.setattr(workload, "parse_spec", lambda text: parse_spec(text.replace(label, valued)))
    spec = replace(plain_spec("", ids=2), buckets=16)
    [trained_label] = spec.labels
    assert trained_label.loss == "mse"
    arrays = Workload(rows=4096, cardinality=2).arrays()
    values = np.random.default_rng(1).uniform(1, 10, 4096).astype(np.float32)
    values[600::257] = 3e19
    pipeline = Pipeline(spec, tmp_path, 1)
    append(pipeline, Arrays(arrays.ids, arrays.dense, values))
    assert pipeline.train(lambda _: None).samples == 4096
    pipeline.close()

    again = Pipeline(spec, tmp_path, 1)
    assert again.train(lambda _: None).samples == 0
    again.close()
