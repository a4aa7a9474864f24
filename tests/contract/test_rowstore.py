from collections.abc import Callable
from pathlib import Path

import pytest

from freshet.seams.rowstore import RowStore
from freshet.seams.rowstore.sqlite import open_url
from freshet.testing.contracts.rowstore import RowStoreContract


class TestSqlite(RowStoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Callable[[], RowStore]:
        return lambda: open_url(f"sqlite:{tmp_path}/rows.sqlite")
