"""Record the state that a release leaves behind, for `test_recorded`.

    python -m tests.system.recorded.record embedded OUT.tar.xz
    python -m tests.system.recorded.record cluster OUT.tar.xz

The ledger's system takes traffic for some seconds; then every process is killed at once (SIGKILL), so that
windows are undecided, rows unflushed, transactions open and leases held. The archive holds:

    acknowledged.json   {"impressions": [[request, item, seq, user, ts]],
                        "actions": [[request, item, [type]]]}
    spec/               the spec and its schemas
    run/                embedded: the run folder
    kafka/, redis/N/    cluster: the broker's log directories; a folder for each node, with `port` in it
    versions/           cluster: the version store
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from freshet.config.settings import RunFolder
from freshet.process.run_state import read_state
from freshet.testing.conditions import wait_until
from tests.fixtures import audit
from tests.fixtures.commands import LEDGER, own_ports
from tests.fixtures.fleet import Fleet
from tests.fixtures.traffic import Traffic
from tests.servers.kafka import Kafka
from tests.servers.processes import Process
from tests.servers.redis_cluster import RedisCluster

PREFIX = "recorded"
COUNTS = {"joiner": 2, "paramserver": 2, "embedder": 1, "trainer": 1, "gateway": 1}
IMPRESSIONS = 400
SEED = 7


def record_embedded(state: Path) -> Traffic:
    """Run `freshet up` in `state`/run until the first samples are in a version, and kill it."""
    run, ports = state / "run", own_ports()
    command = [
        sys.executable,
        "-m",
        "freshet",
        "up",
        str(_spec_of(state)),
        "--folder",
        str(run),
        "--no-console",
    ]
    supervisor = Process(command, state / "up.log", {**os.environ, **ports})
    supervisor.launch()
    gateway = f"http://127.0.0.1:{ports['FRESHET_GATEWAY_PORT']}"
    traffic = Traffic([gateway], SEED)
    traffic.start()
    wait_until("a version exists", lambda: _has_learned(run), within_s=120)
    wait_until("events", lambda: len(traffic.impressions) > IMPRESSIONS, within_s=120)
    traffic.stop()
    supervisor.kill()
    for service in read_state(RunFolder(run)).values():
        _kill(service["pid"])
    (state / "up.log").unlink()
    shutil.rmtree(run / "logs")
    return traffic


def record_cluster(state: Path) -> Traffic:
    """Run services on Kafka and a Redis Cluster until the first samples are in a version, and kill all."""
    versions = state / "versions"
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        kafka, redis = Kafka(work / "broker"), RedisCluster(work / "redis")
        with kafka, redis:
            stores = {
                "FRESHET_COMMON_LOG_URL": f"kafka://{kafka.bootstrap}/{PREFIX}?replication=1",
                "FRESHET_COMMON_ROWS_URL": f"redis://{redis.addresses}/{PREFIX}",
                "FRESHET_COMMON_VERSIONS_URL": f"file:{versions}",
            }
            os.environ.update(stores)
            fleet = Fleet(_spec_of(state), work, stores, COUNTS)
            try:
                fleet.start()
                traffic = Traffic([fleet.url("gateway-0")], SEED)
                traffic.start()
                wait_until("a version exists", lambda: _has_learned(work), within_s=120)
                wait_until("events", lambda: len(traffic.impressions) > IMPRESSIONS, within_s=120)
                traffic.stop()
            finally:
                fleet.kill()
            ports = [node.port for node in redis.nodes]
        shutil.copytree(work / "broker" / "data", state / "kafka")
        for i, port in enumerate(ports):
            shutil.copytree(work / "redis" / str(i), state / "redis" / str(i))
            (state / "redis" / str(i) / "port").write_text(str(port))
    return traffic


def write_archive(state: Path, traffic: Traffic, to: Path) -> None:
    """Add what was acknowledged, and pack all."""
    acknowledged = {
        "impressions": [
            [request, item, seen.seq, seen.user, seen.ts]
            for (request, item), seen in traffic.impressions.items()
        ],
        "actions": [[*key, sorted(types)] for key, types in traffic.actions.items()],
    }
    (state / "acknowledged.json").write_text(json.dumps(acknowledged))
    with tarfile.open(to, "w:xz") as archive:
        archive.add(state, ".", filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _spec_of(state: Path) -> Path:
    return shutil.copytree(LEDGER.parent, state / "spec") / LEDGER.name


def _has_learned(folder: Path) -> bool:
    try:
        return sum(audit.applied_by_newest_version(folder).values()) > IMPRESSIONS // 2
    except IndexError:  # no version yet
        return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def main(arguments: Sequence[str]) -> None:
    """Record one deployment into one archive."""
    form, out = arguments
    with tempfile.TemporaryDirectory() as name:
        state = Path(name)
        traffic = {"embedded": record_embedded, "cluster": record_cluster}[form](state)
        write_archive(state, traffic, Path(out))
    size = Path(out).stat().st_size
    print(f"{len(traffic.impressions)} impressions, {len(traffic.actions)} acted on, {size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
