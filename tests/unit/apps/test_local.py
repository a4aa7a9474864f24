"""`freshet.local` without services: a failed start ends the process that it started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freshet.apps import local as module
from freshet.errors import ConfigError

SPEC = Path(__file__).parents[2] / "system" / "ledger" / "freshet.toml"


def test_failed_client_leaves_no_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def idle(_command: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(600)"], **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", idle)
    monkeypatch.setenv("FRESHET_COMMON_CLIENT_TOKEN_FILE", str(tmp_path / "missing"))
    try:
        with pytest.raises(ConfigError, match="missing"), module.local(SPEC, folder=tmp_path / "run"):
            pass
        assert [process.poll() is not None for process in started] == [True]
    finally:
        for process in started:
            process.kill()
            process.wait()
