from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from freshet.clock import SYSTEM_CLOCK
from freshet.paramserver.server import identity_of, serve_rows
from freshet.paramserver.shard import Shard
from freshet.runtime.grpc_server import GrpcServer
from freshet.seams.eventlog.sqlite import SqliteEventLog
from freshet.seams.rowservice import RowService
from freshet.seams.rowservice.owners import Owners
from freshet.seams.rowservice.remote import RemoteRows, Served
from freshet.seams.rowstore.sqlite import SqliteRowStore
from freshet.seams.transport import MIB, Transport
from freshet.spec.layout import layout_of
from freshet.spec.model import Spec
from freshet.spec.parse import parse_spec
from freshet.spec.topics import Topics, topics_of
from freshet.testing.contracts.rowservice import BUCKETS, PARTITIONS, WIDTH, RowServiceContract
from freshet.testing.reference import ReferenceRowService
from freshet.types import Fence
from freshet.wire.row_frames import Described

TRANSPORT = Transport(token="sesame-of-the-suite", max_message_bytes=MIB)

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


def topics_made(log: SqliteEventLog, spec: Spec) -> Topics:
    topics = topics_of(spec)
    for plan in topics.plans:
        log.create_topic(
            plan.name, partitions=plan.partitions, retention_ms=plan.retention_ms, group=plan.group
        )
    return topics


def shard_of(spec: Spec, log: SqliteEventLog, rows: SqliteRowStore, topics: Topics) -> Shard:
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
    return shard


class TestShard(RowServiceContract):
    @pytest.fixture
    def service(self, tmp_path: Path) -> Iterator[RowService]:
        spec = parse_spec(SPEC)
        log, rows = SqliteEventLog(tmp_path / "log"), SqliteRowStore(tmp_path / "rows.sqlite")
        yield shard_of(spec, log, rows, topics_made(log, spec))
        rows.close()
        log.close()


class Remote(RowServiceContract):
    """Shards in this process, reached over gRPC on the loopback."""

    shards = 1

    @pytest.fixture
    def service(self, tmp_path: Path) -> Iterator[RowService]:
        spec = parse_spec(SPEC)
        layout = layout_of(spec)
        log = SqliteEventLog(tmp_path / "log")
        topics = topics_made(log, spec)
        share = BUCKETS // self.shards
        owned: dict[str, range] = {}
        with ExitStack() as stack:
            stack.callback(log.close)
            for i in range(self.shards):
                rows = SqliteRowStore(tmp_path / f"rows-{i}.sqlite")
                stack.callback(rows.close)
                shard = shard_of(spec, log, rows, topics)
                mine = range(i * share, (i + 1) * share)
                for bucket in set(range(BUCKETS)) - set(mine):
                    shard.store.drop_bucket(bucket)
                server = GrpcServer("127.0.0.1:0", TRANSPORT, identity=identity_of("contract", "hash"))
                widths = tuple(group.width for group in layout.groups)
                described = Described(f"shard-{i}", "contract", "hash", BUCKETS, PARTITIONS, widths)
                serve_rows(server, shard, described)
                server.start()
                stack.callback(server.stop, 0.0)
                owned[f"127.0.0.1:{server.port}"] = mine
            owners = Owners.of(owned, buckets=BUCKETS)
            remote = RemoteRows(Served("contract", "hash"), lambda: owners, TRANSPORT)
            stack.callback(remote.close)
            yield remote


class TestOneRemoteShard(Remote):
    pass


class TestTwoRemoteShards(Remote):
    shards = 2


del Remote  # not a suite of its own
