from collections.abc import Callable
from pathlib import Path

import pytest

from freshet.seams.eventlog import EventLog
from freshet.seams.eventlog.sqlite import open_url
from freshet.testing.contracts.eventlog import EventLogContract


class TestSqlite(EventLogContract):
    @pytest.fixture
    def open_log(self, tmp_path: Path) -> Callable[[], EventLog]:
        return lambda: open_url(f"sqlite:{tmp_path}/log")
