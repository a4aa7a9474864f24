"""`freshet rows`: damaged rows are found, and removed only with the option."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from freshet.cli.rows import command
from freshet.errors import ConfigError, Corrupt
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.log.topics import ensure_topics
from freshet.rows.sqlite.row_store import SqliteRowStore
from freshet.testing.contracts.rowstore import BUCKETS, rows_of
from freshet.types import Bucket, Fence
from tests.fixtures.bucket_owner import Owner
from tests.fixtures.shards import PARSED, SPEC, push, shard_of, write_refused_row


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rows.sqlite"
    store = SqliteRowStore(path)
    Owner(store, 5).flush()
    store.close()
    monkeypatch.setenv("FRESHET_COMMON_ROWS_URL", f"sqlite:{path}")
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, [*arguments])


def json_of(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(*arguments, "--json").output)
    return answer


def damage(file: Path, change: str) -> None:
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        db.execute(change)


def test_a_sound_store_is_said_to_be_sound(file: Path) -> None:
    done = run("check")

    assert done.exit_code == 0, done.output
    assert f"all {BUCKETS} buckets can be read" in done.output
    assert json_of("mend") == {"buckets": BUCKETS, "damaged": [], "records_checked": False}


@pytest.mark.parametrize("to", ["x''", "substr(body, 1, 30)", "randomblob(900)"])
def test_damaged_rows_are_named_and_nothing_is_changed(file: Path, to: str) -> None:
    damage(file, f"UPDATE segments SET body = {to} WHERE id = 1")
    before = file.read_bytes()

    done, found = run("check"), json_of("check")["damaged"]

    assert done.exit_code == 1
    assert 0 < len(found) < BUCKETS
    assert all(one["lost"] == one["rows"] > 0 and "segments 1" in one["damage"][0] for one in found)
    assert run("mend").exit_code == 1
    assert file.read_bytes() == before


def test_damaged_rows_are_given_up_and_the_bucket_works(file: Path) -> None:
    damage(file, "UPDATE segments SET body = x'' WHERE id = 1")
    (bucket, *_) = [one["bucket"] for one in json_of("check")["damaged"]]
    store = SqliteRowStore(file)
    meta = store.metas([Bucket(bucket)])[Bucket(bucket)]
    with pytest.raises(Corrupt):
        rows_of(store, bucket)

    done = run("mend", "--give-up-rows")

    assert done.exit_code == 0, done.output
    assert json_of("check")["damaged"] == []
    mended = store.metas([Bucket(bucket)])[Bucket(bucket)]
    assert (mended.rows, mended.applied, mended.fence) == (0, meta.applied, meta.fence)
    assert mended.seq > meta.seq + 1, "an owner that still has the rows writes them whole"
    assert len(rows_of(store, bucket)) == 0
    store.close()


def test_damaged_meta_is_reported_and_not_repaired(file: Path) -> None:
    damage(file, "UPDATE metas SET applied = 'x' WHERE bucket = 2")

    assert [(one["bucket"], one["rows"]) for one in json_of("check")["damaged"]] == [(2, None)]
    done = run("mend", "--give-up-rows")
    assert isinstance(done.exception, Corrupt)


def test_rows_that_shards_refuse_are_named_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, spec = tmp_path / "learned.sqlite", tmp_path / "freshet.toml"
    spec.write_text(SPEC)
    monkeypatch.setenv("FRESHET_COMMON_ROWS_URL", f"sqlite:{url}")
    every = [Bucket(bucket) for bucket in range(PARSED.buckets)]
    with (
        contextlib.closing(SqliteRowStore(url)) as store,
        contextlib.closing(SqliteEventLog(tmp_path)) as log,
    ):
        ensure_topics(log, PARSED)
        shard = shard_of(log, store, "former")
        shard.buckets.create()
        shard.buckets.claim(every, Fence(1), whole=True)
        push(shard, 0, 0)
        shard.flush()
        before = store.metas(every)
        key = write_refused_row(store, 6)

        assert "values and optimiser state were not checked" in run("check").output
        [found] = json_of("check", "--spec", str(spec))["damaged"]
        done = run("mend", "--give-up-rows", "--spec", str(spec))

        assert (found["bucket"], found["rows"], found["lost"]) == (6, before[every[6]].rows, 1)
        assert f"bucket 6, key {key}: it holds a value that is not finite" in found["damage"][0]
        assert done.exit_code == 0, done.output
        assert json_of("check", "--spec", str(spec))["damaged"] == []
        stored = sum(meta.rows for meta in before.values())
        assert shard_of(log, store, "heir").buckets.claim(every, Fence(2), whole=True) == stored - 1


def test_records_are_not_checked_by_another_models_spec(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(SPEC)

    done = run("check", "--spec", str(other))

    assert isinstance(done.exception, ConfigError)
    assert "pass the spec of m by --spec" in str(done.exception)
