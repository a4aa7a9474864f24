from collections.abc import Callable
from pathlib import Path

import obstore.store
import pytest

from freshet.testing.contracts.versions import VersionsContract
from freshet.versions import VersionStore
from freshet.versions.folder import open_url
from freshet.versions.objects import Bucket, ObjectVersionStore
from freshet.versions.objects import open_url as open_objects


class TestFolder(VersionsContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Callable[[], VersionStore]:
        return lambda: open_url(f"file:{tmp_path}/versions")


class TestS3(VersionsContract):
    @pytest.fixture
    def open_store(self, s3_url: str) -> Callable[[], VersionStore]:
        return lambda: open_objects(s3_url)


class TestObjectsInMemory(VersionsContract):
    """Another storage behind the same library: it has versions beside ETags, as Google's has."""

    @pytest.fixture
    def open_store(self) -> Callable[[], VersionStore]:
        store = obstore.store.MemoryStore()
        return lambda: ObjectVersionStore(Bucket(store, "memory:"))
