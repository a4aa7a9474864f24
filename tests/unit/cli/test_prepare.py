"""`freshet prepare`: missing topics are created, existing ones stay, errors are reported."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from freshet.adapters import open_eventlog, open_rowstore
from freshet.cli.prepare import command
from freshet.config.settings import load_settings
from freshet.config.spec import load_spec
from freshet.config.spec.topics import topics_of
from freshet.demo import DEMO_SPEC
from freshet.errors import Mismatch, Unavailable
from freshet.rows.store import StoreIdentity
from freshet.types import Bucket, BucketMeta, Fence, TimeMs
from tests.fixtures.pages import ROOT

SPEC = DEMO_SPEC


def prepared(folder: Path) -> dict[str, object]:
    result = CliRunner().invoke(
        command, [str(SPEC), "--folder", str(folder), "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0
    said: dict[str, object] = orjson.loads(result.output)
    return said


def test_missing_topics_are_made_once(tmp_path: Path) -> None:
    names = [plan.name for plan in topics_of(load_spec(SPEC)).plans]

    first, second = prepared(tmp_path), prepared(tmp_path)

    assert first == {
        "model": "demo",
        "topics": {"there": len(names), "made": names},
        "rows_of": None,
        "versions": 0,
    }
    assert second["topics"] == {"there": len(names), "made": []}
    log = open_eventlog(load_settings(run_folder=tmp_path).common.log_url)
    assert set(names) <= set(log.topics())
    log.close()


def test_rows_of_another_model_are_refused(tmp_path: Path) -> None:
    prepared(tmp_path)
    rows = open_rowstore(load_settings(run_folder=tmp_path).common.rows_url)
    rows.create(
        StoreIdentity("news", "abc", 1, {}, {}, "log"),
        {Bucket(0): BucketMeta(Fence(0), 0, 0, {}, 0, TimeMs(0))},
    )
    rows.close()

    with pytest.raises(Mismatch, match=r"expected rows of model 'demo'.*found those of 'news'") as raised:
        prepared(tmp_path)

    for way in ("another run folder", "another name at the end of the URL", 'compose.md, "Another model"'):
        assert way in str(raised.value)
    assert "### Another model\n" in (ROOT / "docs" / "compose.md").read_text()


def test_unreachable_store_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_COMMON_ROWS_URL", "redis://127.0.0.1:1/demo")

    with pytest.raises(Unavailable, match="cannot be reached"):
        prepared(tmp_path)
