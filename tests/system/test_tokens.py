"""A whole run whose endpoints require tokens: events, rankings, the console, and commands that send them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from freshet.apps.local import local
from freshet.http.authenticator import AUTH_METRICS
from tests.fixtures.serving import TOKEN, bearer, write_tokens

pytestmark = pytest.mark.system

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "freshet.toml"
OTHER = "a-token-that-operates"


def freshet(*arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "services")}
    return subprocess.run(
        [sys.executable, "-m", "freshet", *arguments],
        env=path, input=said, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_run_with_tokens_serves_who_shows_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text(TOKEN + "\n")
    tokens = write_tokens(tmp_path / "tokens", ("app", "send,rank", TOKEN), ("ada", "operate", OTHER))
    monkeypatch.setenv("FRESHET_COMMON_TOKENS_FILE", str(tokens))
    monkeypatch.setenv("FRESHET_COMMON_CLIENT_TOKEN_FILE", str(tmp_path / "mine"))
    event = {"event_id": "1", "request_id": "r", "article": "a", "type": "click", "ts": 1_700_000_000_000}
    asked = {"context": {"reader": "u1"}, "candidates": [{"article": "a7", "topic": "music"}]}

    with local(QUICKSTART, folder=tmp_path / "run", console=True, ready_s=120) as run:
        at = {role: f"http://127.0.0.1:{run.ports[role]}" for role in ("gateway", "inference", "console")}
        assert httpx.post(f"{at['gateway']}/v1/actions", json=event, timeout=30).status_code == 401
        assert httpx.post(f"{at['inference']}/v1/rank", json=asked, timeout=30).status_code == 401
        assert len(run.send(actions=[event]).acks) == 1
        assert len(run.rank(asked["context"], asked["candidates"]).items) == 1  # type: ignore[arg-type]
        ranked = freshet("rank", "--folder", str(tmp_path / "run"), "--json", said=json.dumps(asked))
        assert ranked.returncode == 0, ranked.stderr
        tried = f"{at['console']}/api/try"
        assert httpx.post(tried, json=asked, timeout=30).status_code == 401
        assert httpx.post(tried, json=asked, headers=bearer(OTHER), timeout=20).status_code == 200
        moved = httpx.post(
            f"{at['console']}/api/promote", json={"number": 0}, headers=bearer(OTHER), timeout=20
        )
        assert moved.status_code == 200, moved.text
        assert freshet("version", "rollback", "0", "--folder", str(tmp_path / "run")).returncode == 0
        for url in at.values():
            page = httpx.get(f"{url}/metrics", timeout=30).text
            assert [m.exposed for m in AUTH_METRICS if f"# TYPE {m.exposed} " not in page] == []
        told = json.loads(freshet("audit", "--folder", str(tmp_path / "run"), "--json").stdout)["lines"]

    done = [(line["action"], line["outcome"], line["who"]) for line in told]
    assert ("promote", "done", "token:ada") in done
    assert [(a, o) for a, o, who in done if who.startswith("user:")] == [("rollback", "done")]
