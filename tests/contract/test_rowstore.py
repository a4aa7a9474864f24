from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from freshet.adapters import open_rowstore
from freshet.rows.store import RowStore
from freshet.testing.contracts.rowstore import RowStoreContract
from tests.servers.redis_cluster import RedisCluster, RedisServer

OpenStore = Callable[[], RowStore]


@pytest.fixture
def opened() -> Iterator[Callable[[str], RowStore]]:
    """Open a URL's store; all that were opened are closed in the end."""
    stores: list[RowStore] = []

    def open_it(url: str) -> RowStore:
        stores.append(open_rowstore(url))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()


class TestSqlite(RowStoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path, opened: Callable[[str], RowStore]) -> OpenStore:
        return lambda: opened(f"sqlite:{tmp_path}/rows.sqlite")


class TestRedisCluster(RowStoreContract):
    @pytest.fixture
    def open_store(self, redis_cluster: RedisCluster, opened: Callable[[str], RowStore]) -> OpenStore:
        url = f"redis://{redis_cluster.addresses}/m{uuid4().hex}"
        return lambda: opened(url)


class TestOneRedis(RowStoreContract):
    @pytest.fixture
    def open_store(self, redis_server: RedisServer, opened: Callable[[str], RowStore]) -> OpenStore:
        url = f"redis://{redis_server.address}/m{uuid4().hex}"
        return lambda: opened(url)
