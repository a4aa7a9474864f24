"""`freshet late`: its output and its refusals."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from freshet.cli.late import command
from freshet.config.settings import RunFolder
from freshet.config.spec import load_spec
from freshet.errors import ConfigError
from freshet.joiner.commit import Commit
from freshet.joiner.core import Joiner
from freshet.joiner.start import make
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.process.process_info import birth_of
from freshet.process.run_state import RunState, write_run
from freshet.types import Append, BytesColumn

HOUR_MS = 3_600_000
SPEC = Path(__file__).parents[3] / "examples" / "quickstart" / "freshet.toml"


@pytest.fixture
def run_folder(tmp_path: Path) -> Iterator[RunFolder]:
    """A run whose event time is an hour ahead in all partitions."""
    run = RunFolder(tmp_path / "run").create()
    log = SqliteEventLog(run.log)
    context = make(load_spec(SPEC), log).context
    now = time.time_ns() // 1_000_000
    streams = context.topics.inputs
    for partition in context.partitions:
        commit = Commit(
            next=dict.fromkeys(streams, 0),
            low=dict.fromkeys(streams, 0),
            watermark_ms=now + HOUR_MS,
            clocks=dict.fromkeys(streams, now + HOUR_MS),
            since=-1,
            start=dict.fromkeys(streams, 0),
            log_ids=context.topics.log_ids,
            ledger=Joiner(context.plan).ledger(),
            written_ms=now,
            began_ms=None,
        )
        log.writer().append([Append(context.topics.joiner, partition, BytesColumn.of([commit.encode()]))])
    yield run
    log.close()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments])


def said(*arguments: object) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.output)
    return answer


def test_a_dry_run_says_the_same_and_changes_nothing(run_folder: RunFolder) -> None:
    arguments = ("set-back", SPEC, "--folder", run_folder.path)
    dry = said(*arguments, "--dry-run")["partitions"]
    assert [one["changed"] for one in dry] == [True] * len(dry)
    text = run(*arguments, "--dry-run").output
    assert "nothing was changed" in text
    done = said(*arguments)["partitions"]
    assert [one["was_ms"] for one in done] == [one["was_ms"] for one in dry]
    assert all(one["watermark_ms"] <= time.time() * 1_000 for one in done)
    assert "not ahead of this machine's clock in any partition" in run(*arguments).output


def test_it_refuses_beside_a_joiner_that_runs(run_folder: RunFolder) -> None:
    pid = os.getpid()
    joiner = {"pid": pid, "birth": birth_of(pid), "host": "127.0.0.1", "port": 1, "since_s": 0.0}
    write_run(run_folder, RunState(pid, {"joiner": joiner}, birth=birth_of(pid)))

    done = run("set-back", SPEC, "--folder", run_folder.path)
    assert isinstance(done.exception, ConfigError)
    assert "the joiner runs" in str(done.exception)


def test_a_log_without_the_model_is_refused_and_stays_empty(tmp_path: Path) -> None:
    run_ = RunFolder(tmp_path / "other").create()
    SqliteEventLog(run_.log).close()
    done = run("set-back", SPEC, "--folder", run_.path)

    assert isinstance(done.exception, ConfigError)
    log = SqliteEventLog(run_.log)
    assert not log.topics()
    log.close()


def test_without_late_impressions_nothing_is_joined(run_folder: RunFolder) -> None:
    arguments = ("join", SPEC, "--folder", run_folder.path)
    found = said(*arguments)["partitions"]

    assert {(one["start"], one["stop"], one["read"]) for one in found} == {(0, 0, 0)}
    assert "0 samples joined" in run(*arguments).output
    assert "nothing was appended" in run(*arguments, "--dry-run").output
