from collections.abc import Callable
from pathlib import Path

import pytest

from freshet.seams.versions import VersionStore
from freshet.seams.versions.folder import open_url
from freshet.testing.contracts.versions import VersionsContract


class TestFolder(VersionsContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Callable[[], VersionStore]:
        return lambda: open_url(f"file:{tmp_path}/versions")
