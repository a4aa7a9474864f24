"""Ways to break a running stack, and the alerts that must fire then.

Each is a context: broken within, mended behind. They stand in groups that do not hide each other's effects.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from freshet.adapters import open_eventlog
from freshet.config.spec import load_spec
from freshet.config.spec.topics import topics_of
from freshet.demo import DEMO_SPEC
from freshet.testing.conditions import wait_until
from freshet.testing.contracts.eventlog import append_to
from freshet.types import TopicPartition
from tests.compose.prometheus import Prometheus
from tests.compose.stack import Stack

CONTEXT = {"reader": "r-1", "age_group": "18-24", "device": "phone", "hour": 8}
MANY = [{"item": f"i-{i}", "topic": "sport", "format": "article", "age_s": 60.0} for i in range(9_500)]
CANDIDATES = MANY[:4]
RANKED = json.dumps({"context": CONTEXT, "candidates": CANDIDATES[:1]}).encode()
LARGE = json.dumps({"context": CONTEXT, "candidates": MANY, "dry_run": True}).encode()
HASHES = "/run/freshet/doors/tokens"


class Broken:
    """A stack, and the means to break it."""

    def __init__(self, stack: Stack, prometheus: Prometheus, versions: Path) -> None:
        self.stack, self.prometheus, self.versions = stack, prometheus, versions

    def container(self, name: str) -> str:
        """A container's id."""
        return self.stack.docker("ps", "--all", "--quiet", name).strip()

    def update(self, name: str, *words: str) -> None:
        """Change a running container's limits."""
        subprocess.run(["docker", "update", *words, self.container(name)], check=True, capture_output=True)

    def memory_bytes(self, name: str) -> int:
        """What a service's process has in memory."""
        page = httpx.get(f"{self.stack.url(name)}/metrics").text
        found = re.search(r"^process_resident_memory_bytes (\S+)$", page, re.MULTILINE)
        assert found is not None, page[:500]
        return int(float(found[1]))


@contextmanager
def paused(broken: Broken, *names: str) -> Iterator[None]:
    broken.stack.docker("pause", *names)
    try:
        yield
    finally:
        broken.stack.docker("unpause", *names)


@contextmanager
def slowed(broken: Broken, cpus: float, *names: str) -> Iterator[None]:
    for name in names:
        broken.update(name, f"--cpus={cpus}")
    try:
        yield
    finally:
        for name in names:
            broken.update(name, "--cpus=0")


@contextmanager
def posting(url: str, body: bytes, every_s: float) -> Iterator[None]:
    """Post a body again and again, whatever is answered."""
    stop = threading.Event()

    def post() -> None:
        with httpx.Client(timeout=5) as client:
            while not stop.wait(every_s):
                with suppress(httpx.HTTPError):
                    client.post(url, content=body, headers={"Content-Type": "application/json"})

    thread = threading.Thread(target=post)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


# --- what is broken, and what must fire then


@contextmanager
def gone(broken: Broken) -> Iterator[None]:
    """A gateway is killed three times, and stays away."""
    for _ in range(3):
        broken.stack.kill("gateway-1")
        broken.stack.up("gateway-1")
    broken.stack.kill("gateway-1")
    yield
    broken.stack.up("gateway-1")


@contextmanager
def replaced(broken: Broken) -> Iterator[None]:
    """A shard stands still for longer than its lease while it is pushed to, and comes back."""
    with paused(broken, "shard-0"):
        time.sleep(8)  # its lease is 3 s
    yield


@contextmanager
def without_spare(broken: Broken) -> Iterator[None]:
    """A replica is stopped, and the other nodes of Redis may have hardly more memory than they use."""

    def let_have(memory: str) -> None:
        each = f"redis-cli --user admin -h redis-$i config set maxmemory {memory}"
        number = "sed -n 's/^used_memory:\\([0-9]*\\).*/\\1/p'"
        used = f"used=$(redis-cli --user admin -h redis-$i info memory | {number})"
        password = "export REDISCLI_AUTH=$(cat /run/freshet/admin/redis.admin-password)"
        script = f"{password}; for i in 0 1 2 3 4; do {used}; {each}; done"
        broken.stack.docker(
            "run", "--rm", "--no-deps", "--no-TTY", "--entrypoint", "sh", "form-cluster", "-c", script
        )

    let_have("$((used * 20 / 19))")
    broken.stack.stop("redis-5")
    try:
        yield
    finally:
        let_have("402653184")
        broken.stack.up("redis-5")


@contextmanager
def stepped_on(broken: Broken) -> Iterator[None]:
    """Versions cannot be written, four rankings a second have thousands of candidates, an event in some fits
    no schema, and a gateway may have hardly more memory than it uses.
    """
    with ExitStack() as stack:
        broken.versions.chmod(0o555)
        stack.callback(broken.versions.chmod, 0o777)
        for _ in range(2):
            stack.enter_context(posting(f"{broken.stack.inference}/v1/rank", LARGE, 0.5))
        body = b'{"request_id": "r", "item": 7}'
        stack.enter_context(posting(f"{broken.stack.gateway}/v1/actions", body, 0.05))
        limit = str(int(broken.memory_bytes("gateway-1") * 1.06))
        broken.update("gateway-1", f"--memory={limit}", f"--memory-swap={limit}")
        stack.callback(broken.update, "gateway-1", f"--memory={512 << 20}", f"--memory-swap={512 << 20}")
        yield


@contextmanager
def unscraped(broken: Broken) -> Iterator[None]:
    """Prometheus scrapes no joiner, as if its line were missing."""
    stack = broken.stack
    told = stack.prometheus_config.read_text()
    stack.prometheus_config.write_text(re.sub(r".*role: joiner.*\n", "", told))
    stack.reload_prometheus()
    try:
        yield
    finally:
        stack.prometheus_config.write_text(told)
        stack.reload_prometheus()


@contextmanager
def untrained(broken: Broken) -> Iterator[None]:
    """The trainer stands still."""
    with paused(broken, "trainer-0"):
        yield


@contextmanager
def unjoined(broken: Broken) -> Iterator[None]:
    """Five thousand clicks a second come, and the joiner has a fiftieth of a core."""
    click = {"request_id": "nobody's", "item": "i-1", "type": "click", "ts": time.time_ns() // 1_000_000}
    clicks = json.dumps([{**click, "event_id": f"e-{i}"} for i in range(500)]).encode()
    with (
        slowed(broken, 0.02, "joiner-0"),
        posting(f"{broken.stack.gateway}/v1/actions", clicks, 0.1),
    ):
        yield


@contextmanager
def misfits(broken: Broken) -> Iterator[None]:
    """A record among the actions is no event, and two hundred clicks a second are an hour old."""
    _append_damaged(broken, topics_of(load_spec(DEMO_SPEC)).action)
    hour_ago_ms = time.time_ns() // 1_000_000 - 3_600_000
    click = {"request_id": "an hour ago", "item": "i-1", "type": "click", "ts": hour_ago_ms}
    clicks = json.dumps([{**click, "event_id": f"o-{i}"} for i in range(20)]).encode()
    with posting(f"{broken.stack.gateway}/v1/actions", clicks, 0.1):
        yield


def _append_damaged(broken: Broken, topic: str) -> None:
    log = open_eventlog(f"kafka://{broken.stack.kafka}/freshet?replication=1")
    try:
        log.writer().append([append_to(TopicPartition(topic, 0), [b"damaged"])])
    finally:
        log.close()


@contextmanager
def without_log(broken: Broken) -> Iterator[None]:
    """Kafka stands still, and clients send some hundred rank requests a second."""
    with ExitStack() as stack:
        stack.enter_context(paused(broken, "kafka"))
        for _ in range(3):
            stack.enter_context(posting(f"{broken.stack.inference}/v1/rank", RANKED, 0.005))
        yield


@contextmanager
def guarded(broken: Broken) -> Iterator[None]:
    """A client sends no token, the file of tokens is damaged, a shard's certificate has ten days to go,
    a damaged record is among the changed rows, and shards have a megabyte for rows.
    """
    broken.stack.in_secrets("sh", "-c", f"chmod u+w {HASHES}; echo nonsense >> {HASHES}")
    renewed = (
        "cd /run/authority && "
        "openssl req -x509 -config openssl.cnf -extensions service -CA ca.pem -CAkey ca.key "
        "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=shard-1 -days 10 "
        "-addext subjectAltName=DNS:shard-1,DNS:localhost,IP:127.0.0.1 -keyout shard-1.key -out shard-1.pem"
    )
    theirs = "cd /run/freshet/peers && rm -f shard-1.*"
    copied = "cp /run/authority/shard-1.key /run/authority/shard-1.pem ."
    broken.stack.in_secrets("sh", "-c", f"{renewed} && {theirs} && {copied}")
    _append_damaged(broken, topics_of(load_spec(DEMO_SPEC)).rows)
    with posting(f"{broken.stack.inference}/v1/rank", b"{}", 0.1):
        yield


@contextmanager
def held_back(broken: Broken) -> Iterator[None]:
    """An older version is pinned, and readers come who click on the first three of four items wherever they
    are shown, while the model scores all of them as if they stood in the fourth place.
    """
    command = ("exec", "--no-TTY", "console", "freshet", "version")
    served = "min(freshet_inference_version)"
    first = float(wait_for(broken.prometheus, f"{served} > 0"))
    wait_for(broken.prometheus, f"{served} > {first}")  # so that there is one to go back to
    stop = threading.Event()
    readers = [threading.Thread(target=_click_by_place, args=(broken, n, stop)) for n in range(2)]
    for reader in readers:
        reader.start()
    broken.stack.docker(*command, "rollback")
    try:
        yield
    finally:
        stop.set()
        newest = int(float(wait_for(broken.prometheus, "max(freshet_trainer_version)")))
        broken.stack.docker(*command, "promote", str(newest))
        for reader in readers:
            reader.join(30)


def _click_by_place(broken: Broken, number: int, stop: threading.Event) -> None:
    asked = json.dumps({"context": {**CONTEXT, "reader": f"by-place-{number}"}, "candidates": CANDIDATES})
    kind = {"Content-Type": "application/json"}
    with httpx.Client(timeout=5) as client:
        while not stop.wait(0.1):
            with suppress(httpx.HTTPError, KeyError):
                page = client.post(f"{broken.stack.inference}/v1/rank", content=asked, headers=kind).json()
                now_ms, request = time.time_ns() // 1_000_000, page["request_id"]
                shown = [CANDIDATES[item["index"]]["item"] for item in page["items"]]
                clicks = [
                    {"event_id": f"{request}-{item}", "request_id": request, "item": item, "type": "click"}
                    for item in shown[:3]
                ]
                body = json.dumps([{**click, "ts": now_ms + 1} for click in clicks])
                client.post(f"{broken.stack.gateway}/v1/actions", content=body, headers=kind)


@contextmanager
def without_rows(broken: Broken) -> Iterator[None]:
    """Redis stands still, a shard is killed, and readers ask no more."""
    room = "freshet_paramserver_room_blocks"
    wait_for(broken.prometheus, f"min(max_over_time({room}[7d:30m])) > 100", within_s=2_400)
    with paused(broken, *(f"redis-{i}" for i in range(6))):
        broken.stack.kill("shard-0")
        broken.stack.docker("up", "--detach", "--no-build", "--no-deps", "shard-0")
        broken.stack.docker("stop", "simulator")
        yield


@contextmanager
def cramped(broken: Broken) -> Iterator[None]:
    """A shard is made anew with memory for about ten thousand rows, and the other one has the rest."""
    _made_anew(broken, "shard-0", "2097152")
    try:
        yield
    finally:
        _made_anew(broken, "shard-0", "335544320")


def _made_anew(broken: Broken, shard: str, room: str) -> None:
    broken.stack.change({"STACK_SHARD_BYTES": room})
    broken.stack.docker("up", "--detach", "--no-build", "--wait", "--no-deps", shard, within_s=300)
    broken.stack.forget(shard)


@contextmanager
def half_loaded(broken: Broken) -> Iterator[None]:
    """A shard and both inference servers are killed and started again, and Redis stands still while they load
    their rows."""
    nodes, again = [f"redis-{i}" for i in range(6)], ("shard-1", "inference-0", "inference-1")
    with slowed(broken, 0.05, *nodes):  # so that they can be met while they load
        broken.stack.kill(*again)
        broken.stack.docker("start", *again)
        for name in again:
            broken.stack.forget(name)
        wait_until("rows are loaded", lambda: _loads(broken, "shard-1"), within_s=120, poll_s=0.05)
        broken.stack.docker("pause", *nodes)
    try:
        yield
    finally:
        broken.stack.docker("unpause", *nodes)


def _loads(broken: Broken, shard: str) -> bool:
    """Has it taken buckets that it has not loaded yet?"""
    with suppress(httpx.HTTPError):
        status = httpx.get(f"{broken.stack.url(shard)}/status", timeout=5).json()
        return int(status["loading"]["buckets"]) > 0
    return False


def wait_for(prometheus: Prometheus, expr: str, within_s: float = 300.0) -> str:
    """The first value that an expression has."""
    found: list[Any] = []

    def has_value() -> bool:
        found[:] = prometheus.query(expr)
        return bool(found)

    wait_until(expr, has_value, within_s=within_s, poll_s=1)
    value: str = found[0]["value"][1]
    return value


@dataclass(frozen=True, slots=True)
class Group:
    """What is broken together, and what must fire then."""

    break_: Callable[[Broken], AbstractContextManager[None]]
    alerts: tuple[str, ...]
    within_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Stacked:
    """Groups that a stack is broken by, one after the other; it starts with what they need, `rows` among
    them."""

    groups: tuple[Group, ...]
    tokens: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    retention: str | None = None
    rows: int = 0


STACKS: dict[str, Stacked] = {
    "plain": Stacked((
        Group(replaced, ("FreshetFenced",)),
        Group(without_spare, ("FreshetStoreReplica", "FreshetStoreFull")),
        Group(
            stepped_on,
            ("FreshetVersionsNotWritten", "FreshetSlowRanking", "FreshetEventsRefused", "FreshetMemory"),
        ),
        Group(unscraped, ("FreshetNotScraped",)),
        Group(untrained, ("FreshetTrainingBehind",)),
        Group(unjoined, ("FreshetUnjoined", "FreshetStale")),
        Group(misfits, ("FreshetDeadLetters", "FreshetLateActions")),
        Group(without_log, ("FreshetEventsRejected", "FreshetServedEventsLost")),
        Group(gone, ("FreshetDown", "FreshetRestarts")),  # last: remembered for a quarter of an hour
    ), variables={"STACK_QUEUE_SERVED": "10000"}),
    "guarded": Stacked(
        (
            Group(
                guarded,
                (
                    "FreshetDamagedBytes",
                    "FreshetDoor",
                    "FreshetTokensFileWrong",
                    "FreshetCertificateEnds",
                    "FreshetShardFull",
                ),
            ),
        ),
        tokens=True,
        variables={"STACK_SHARD_BYTES": str(1 << 20)},
    ),
    "filled": Stacked(
        (
            Group(cramped, ("FreshetShardsUneven",), within_s=1_800),
            Group(half_loaded, ("FreshetLoadingLong", "FreshetServingErrors"), within_s=1_200),
        ),
        rows=600_000,
    ),
    "slow": Stacked(
        (
            Group(held_back, ("FreshetVersionsHeld", "FreshetCalibration"), within_s=1_800),
            Group(
                without_rows,
                (
                    "FreshetRowsNotWritten",
                    "FreshetRetentionNear",
                    "FreshetRequestsStopped",
                ),
                within_s=1_800,
            ),
        ),
        variables={"STACK_RATE": "100", "STACK_RETENTION_CHECK_MS": "10000"},
        retention="8m",
    ),
}  # fmt: skip
