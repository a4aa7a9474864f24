"""The containers of the compose file, for a test each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.stack import Stack
from tests.system.running import LEDGER


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """All of the compose file, healthy, with the ledger's spec; the test's process sees their stores."""
    made = Stack(LEDGER.parent, tmp_path)
    made.down(volumes=True)
    try:
        print(f"\nall healthy after {made.up():.1f} s")
        password = tmp_path / "redis.password"
        password.write_text(made.secret("redis.password"))
        monkeypatch.setenv("FRESHET_COMMON_LOG_URL", f"kafka://{made.kafka}/freshet?replication=1")
        monkeypatch.setenv(
            "FRESHET_COMMON_ROWS_URL", f"redis://{made.redis}/freshet?user=freshet&password_file={password}"
        )
        monkeypatch.setenv("FRESHET_COMMON_VERSIONS_URL", f"file:{tmp_path / 'versions'}")
        yield made
    finally:
        made.keep_words(tmp_path)
        made.down(volumes=True)
        made.close()
