"""A whole run that listens on another address than 127.0.0.1: all parts find each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from freshet.apps.local import local
from freshet.process.ports import lease_ports
from freshet.testing.conditions import wait_until

pytestmark = pytest.mark.system

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "freshet.toml"


def freshet(*arguments: str, said: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "freshet", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "services")},
        input=said, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("bound", "host"), [("::1", "[::1]"), ("127.0.0.2", "127.0.0.2")])
def test_a_run_is_found_at_the_address_that_it_listens_on(
    bound: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (events, scores) = tmp_path / "run", lease_ports(2)
    monkeypatch.setenv("FRESHET_COMMON_BIND_ADDRESS", bound)
    monkeypatch.setenv("FRESHET_GATEWAY_GRPC_PORT", str(events))
    monkeypatch.setenv("FRESHET_INFERENCE_GRPC_PORT", str(scores))
    asked = {"context": {"reader": "u1"}, "candidates": [{"article": "a7", "topic": "music"}]}

    with local(QUICKSTART, folder=folder, console=True, ready_s=120) as run:
        for port in (events, scores):
            with grpc.insecure_channel(f"{host}:{port}") as channel:
                grpc.channel_ready_future(channel).result(60)
        monkeypatch.delenv("FRESHET_COMMON_BIND_ADDRESS")  # who looks need not know how it was started
        assert run.console == f"http://{host}:{run.ports['console']}"
        assert len(run.rank(asked["context"], asked["candidates"]).items) == 1  # type: ignore[arg-type]
        ranked = freshet("rank", "--folder", str(folder), "--json", said=json.dumps(asked))
        assert len(json.loads(ranked)["items"]) == 1

        def told() -> dict[str, str]:
            services = json.loads(freshet("status", "--folder", str(folder), "--json"))["services"]
            return {name: one["state"] for name, one in services.items()}

        wait_until("it is told of all", lambda: told() == dict.fromkeys(run.ports, "ready"), within_s=60)

        def seen() -> dict[str, str]:
            state = httpx.get(f"{run.console}/api/state", timeout=30).raise_for_status().json()
            return {one["name"]: one["state"] for one in state["services"]}

        wait_until("the console sees all of them", lambda: set(seen().values()) == {"ready"}, within_s=60)
        assert seen().keys() >= {"gateway", "joiner", "trainer", "inference"}
