"""Alerts made to fire on a running stack, by breaking what each is about: how long each took.

    python -m tests.compose.alarms                     # all, about three quarters of an hour
    python -m tests.compose.alarms FreshetDown ...     # these

Needs a docker engine and built images. Breaks stand in groups that do not hide each other's effects; after
each group what was broken is mended, and nothing may fire any more before the next. The last group has a
stack of its own, whose doors ask for tokens and whose shards have hardly any room.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from freshet.seams.open import open_eventlog
from freshet.spec import load_spec
from freshet.spec.topics import topics_of
from freshet.testing.contracts.eventlog import append_to
from freshet.testing.simulator.spec import DEMO_SPEC
from freshet.types import TopicPartition
from tests.compose.prometheus import Prometheus
from tests.compose.stack import Stack
from tests.system.waiting import wait_until

RANKED = json.dumps({
    "context": {"reader": "r-1", "age_group": "18-24", "device": "phone", "hour": 8},
    "candidates": [{"item": "i-1", "topic": "sport", "format": "article", "age_s": 60.0}],
}).encode()  # fmt: skip
HASHES = "/run/freshet/doors/tokens"
FIRES_S = 600.0
RESOLVED_S = 900.0


class Broken:
    """A stack, and the means to break it."""

    def __init__(self, stack: Stack, versions: Path) -> None:
        self.stack, self.versions = stack, versions

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
def stepped_on(broken: Broken) -> Iterator[None]:
    """Versions cannot be written, inference has a fiftieth of a core, an event in some fits no schema, and a
    gateway may have hardly more memory than it uses.
    """
    with ExitStack() as stack:
        broken.versions.chmod(0o555)
        stack.callback(broken.versions.chmod, 0o777)
        stack.enter_context(slowed(broken, 0.02, "inference-0", "inference-1"))
        body = b'{"request_id": "r", "item": 7}'
        stack.enter_context(posting(f"{broken.stack.gateway}/v1/actions", body, 0.05))
        limit = str(int(broken.memory_bytes("gateway-1") * 1.06))
        broken.update("gateway-1", f"--memory={limit}", f"--memory-swap={limit}")
        stack.callback(broken.update, "gateway-1", f"--memory={512 << 20}", f"--memory-swap={512 << 20}")
        yield


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
def without_log(broken: Broken) -> Iterator[None]:
    """Kafka stands still, and some hundred rankings a second are asked for."""
    with ExitStack() as stack:
        stack.enter_context(paused(broken, "kafka"))
        for _ in range(3):
            stack.enter_context(posting(f"{broken.stack.inference}/v1/rank", RANKED, 0.005))
        yield


@contextmanager
def not_loaded(broken: Broken) -> Iterator[None]:
    """Redis stands still while inference starts, and people ask."""
    with paused(broken, *(f"redis-{i}" for i in range(6))):
        broken.stack.kill("inference-0")
        broken.stack.kill("inference-1")
        broken.stack.docker("up", "--detach", "--no-build", "--no-deps", "inference-0", "inference-1")
        with posting(f"{broken.stack.inference}/v1/rank", b'{"context": {}, "candidates": [{}]}', 0.02):
            yield


@contextmanager
def guarded(broken: Broken) -> Iterator[None]:
    """Somebody asks without a token, the file of tokens is damaged, a shard's certificate has ten days to go,
    a damaged record is among the changed rows, and shards have a megabyte for rows.
    """
    broken.stack.in_secrets("sh", "-c", f"chmod u+w {HASHES}; echo nonsense >> {HASHES}")
    renewed = "freshet certs /run/authority shard-1 --days 10 --renew-within 9"
    theirs = "cd /run/freshet/peers && rm -f shard-1.*"
    copied = "cp /run/authority/shard-1.key /run/authority/shard-1.pem ."
    gone = "rm -f /run/authority/shard-1.*"
    broken.stack.in_secrets("sh", "-c", f"{gone} && {renewed} && {theirs} && {copied}")
    log = open_eventlog(f"kafka://{broken.stack.kafka}/freshet?replication=1")
    try:
        where = TopicPartition(topics_of(load_spec(DEMO_SPEC)).rows, 0)
        log.writer().append([append_to(where, [b"damaged"])])
    finally:
        log.close()
    with posting(f"{broken.stack.inference}/v1/rank", b"{}", 0.1):
        yield


Group = tuple[Callable[[Broken], object], tuple[str, ...]]

GUARDED: Group = (
    guarded,
    (
        "FreshetDamagedBytes",
        "FreshetDoor",
        "FreshetTokensFileWrong",
        "FreshetCertificateEnds",
        "FreshetShardFull",
    ),
)
GROUPS: Sequence[Group] = (
    (replaced, ("FreshetFenced",)),
    (
        stepped_on,
        ("FreshetVersionsNotWritten", "FreshetSlowRanking", "FreshetEventsRefused", "FreshetMemory"),
    ),
    (untrained, ("FreshetTrainingBehind",)),
    (unjoined, ("FreshetUnjoined", "FreshetStale")),
    (without_log, ("FreshetEventsRejected", "FreshetServedEventsLost")),
    (not_loaded, ("FreshetServingErrors",)),
    (gone, ("FreshetDown", "FreshetRestarts")),  # last: restarts are remembered for a quarter of an hour
)


def main(wanted: Sequence[str]) -> None:
    """Break, wait, mend; print what fired."""
    plain = [(break_, [name for name in names if not wanted or name in wanted]) for break_, names in GROUPS]
    if any(names for _, names in plain):
        _on_a_stack(plain, "plain")
    names = [name for name in GUARDED[1] if not wanted or name in wanted]
    if names:
        _on_a_stack(
            [(GUARDED[0], names)], "guarded", tokens=True, variables={"STACK_SHARD_BYTES": str(1 << 20)}
        )


def _on_a_stack(
    groups: Sequence[tuple[Callable[[Broken], object], Sequence[str]]], name: str, **how: Any
) -> None:
    with tempfile.TemporaryDirectory(prefix="freshet-alarms-") as made:
        folder = Path(made)
        stack = Stack(DEMO_SPEC.parent, folder, **how)
        stack.down(volumes=True)
        try:
            print(f"{name}: all healthy after {stack.up():.0f} s", flush=True)
            stack.up("simulator")
            prometheus = Prometheus(stack.prometheus)
            learned = 'freshet_trainer_quality{of="served"}'
            wait_until("something is learned", lambda: bool(prometheus.query(learned)), within_s=300)
            broken = Broken(stack, folder / "versions")
            for break_, names in groups:
                if names:
                    _make_fire(broken, prometheus, break_, names, is_last=break_ is groups[-1][0])
        finally:
            (said := Path(tempfile.gettempdir()) / f"alarms-{name}").mkdir(exist_ok=True)
            stack.keep_words(said)
            stack.down(volumes=True)
            stack.close()


def _make_fire(
    broken: Broken,
    prometheus: Prometheus,
    break_: Callable[[Broken], object],
    names: Sequence[str],
    *,
    is_last: bool,
) -> None:
    print(f"{break_.__name__}: {inspect.getdoc(break_)}", flush=True)
    began = time.monotonic()
    seen: dict[str, float] = {}

    def all_fire() -> bool:
        for name in prometheus.firing():
            if name not in seen:
                seen[name] = time.monotonic() - began
                expected = "" if name in names else "  (besides)"
                print(f"  {name:28} fired {seen[name]:4.0f} s after the break{expected}", flush=True)
        return set(names) <= set(seen)

    with break_(broken):  # type: ignore[attr-defined]
        try:
            wait_until("the alerts fire", all_fire, within_s=FIRES_S, look_s=1)
        except AssertionError:
            print(f"  did not fire within {FIRES_S:.0f} s: {sorted(set(names) - set(seen))}", flush=True)
    if is_last:
        return
    try:
        after = wait_until("all is well", lambda: not prometheus.firing(), within_s=RESOLVED_S, look_s=1)
        print(f"  nothing fires {after:.0f} s after it was mended", flush=True)
    except AssertionError:
        print(f"  still firing: {sorted(prometheus.firing())}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
