"""What every version store promises, of this one: the suite comes with freshet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from versions_in_one_file import OneFile, open_url

from freshet.testing.contracts.versions import VersionsContract


class TestOneFile(VersionsContract):
    """All of the contract."""

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Callable[[], OneFile]:
        """The same file, opened anew."""
        return lambda: open_url(f"versionfile:{tmp_path}/versions.db")
