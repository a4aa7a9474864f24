from collections.abc import Iterator
from pathlib import Path

import pytest

from freshet.clock import SYSTEM_CLOCK
from freshet.paramserver.shard import Shard
from freshet.seams.eventlog.sqlite import SqliteEventLog
from freshet.seams.rowservice import RowService
from freshet.seams.rowstore.sqlite import SqliteRowStore
from freshet.spec.layout import layout_of
from freshet.spec.parse import parse_spec
from freshet.spec.topics import topics_of
from freshet.testing.contracts.rowservice import BUCKETS, PARTITIONS, WIDTH, RowServiceContract
from freshet.testing.reference import ReferenceRowService
from freshet.types import Fence

SPEC = f"""
name = "contract"
partitions = {PARTITIONS}
buckets = {BUCKETS}
[events]
served = {{ schema = "i.avsc", key = ["id"], time = "ts:ms" }}
action = {{ schema = "a.avsc", key = ["id"], time = "ts:ms" }}
[labels]
click = {{ on = "action.type == 'click'" }}
[tables]
user = {{ dim = {WIDTH}, optimizer = {{ name = "sgd", lr = 1.0 }} }}
item = {{ dim = {WIDTH}, optimizer = {{ name = "sgd", lr = 1.0 }} }}
[features]
user = {{ field = "user", table = "user" }}
item = {{ field = "item", table = "item" }}
[model]
kind = "dlrm"
"""


class TestReference(RowServiceContract):
    @pytest.fixture
    def service(self) -> RowService:
        return ReferenceRowService([WIDTH], dict.fromkeys(range(PARTITIONS), 0))


class TestShard(RowServiceContract):
    checks_fences_of_pushes = False

    @pytest.fixture
    def service(self, tmp_path: Path) -> Iterator[RowService]:
        spec = parse_spec(SPEC)
        log, rows = SqliteEventLog(tmp_path / "log"), SqliteRowStore(tmp_path / "rows.sqlite")
        topics = topics_of(spec)
        for plan in topics.plans:
            log.create_topic(
                plan.name, partitions=plan.partitions, retention_ms=plan.retention_ms, group=plan.group
            )
        shard = Shard(
            spec=spec,
            layout=layout_of(spec),
            spec_hash="hash",
            topics=topics,
            log=log,
            rows=rows,
            fence=Fence(10),
            clock=SYSTEM_CLOCK,
            held=lambda: True,
        )
        shard.load()
        yield shard
        rows.close()
        log.close()
