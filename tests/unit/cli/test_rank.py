"""Answers of `freshet rank` name the rows that a score lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from freshet.cli import cli
from freshet.client import Client, Item, Ranking


@pytest.mark.parametrize("as_json", [False, True])
def test_rows_on_disk_that_were_not_read_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_json: bool
) -> None:
    def rank(*_: Any, **__: Any) -> Ranking:
        item = Item(0, 0.5, {"click": 0.5}, 1.0)
        return Ranking("r", (item,), 3, 70, {"user": 3}, explored=False, defaulted_rows={"late": 2})

    monkeypatch.setattr(Client, "rank", rank)
    request = tmp_path / "request.json"
    request.write_text('{"context": {}, "candidates": [{}]}')
    words = ["rank", str(request), "--url", "http://127.0.0.1:9", *(["--json"] if as_json else [])]

    said = CliRunner().invoke(cli, words, catch_exceptions=False)

    if as_json:
        assert '"defaulted_rows":{"late":2}' in said.output.replace(" ", "")
    else:
        assert "unknown {'user': 3}, of which rows on disk were not read in time {'late': 2}" in said.output
