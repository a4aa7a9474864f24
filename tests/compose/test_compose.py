"""The production shape as `docker compose up` starts it: each service is killed in turn and comes back, all
go down and up again, and everything acknowledged counts once.

`make test-compose` runs it: it needs a docker engine, and builds the images first.
`FRESHET_TEST_STRUCK="kafka shard-0"` kills only those.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from freshet.spec import load_spec
from freshet.spec.topics import topics_of
from tests.compose.stack import Stack
from tests.system import audit
from tests.system.members import read_to
from tests.system.running import LEDGER
from tests.system.traffic import Asker, Traffic
from tests.system.waiting import wait_until, wait_until_nothing_differs

SEED = random.SystemRandom().randrange(1, 2**31)
ALL = (
    "gateway-0", "gateway-1", "joiner-0", "shard-0", "shard-1", "embedder-0", "embedder-1", "trainer-0",
    "inference-0", "inference-1", "redis-0", "redis-4", "kafka", "edge", "console", "prometheus",
)  # fmt: skip
STRUCK = os.environ.get("FRESHET_TEST_STRUCK", " ".join(ALL)).split()
ON_S = 90.0
"""For the work to go on after one of them was killed."""

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1_800)]


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """All of the compose file, healthy, with the ledger's spec; the test's process sees their stores."""
    made = Stack(LEDGER.parent, tmp_path)
    made.down(volumes=True)
    try:
        print(f"\nall healthy after {made.up():.1f} s")
        password = tmp_path / "redis.password"
        password.write_text(made.secret("redis.password"))
        monkeypatch.setenv("FRESHET_COMMON_LOG_URL", f"kafka://{made.kafka}/freshet?replication=1")
        monkeypatch.setenv(
            "FRESHET_COMMON_ROWS_URL", f"redis://{made.redis}/freshet?user=freshet&password_file={password}"
        )
        monkeypatch.setenv("FRESHET_COMMON_VERSIONS_URL", f"file:{tmp_path / 'versions'}")
        yield made
    finally:
        said = tmp_path / "containers.log"
        said.write_text(made.docker("ps", "--all") + made.docker("logs"))
        print(f"what the containers said: {said}")
        made.down(volumes=True)
        made.close()


def test_each_service_may_be_killed_and_all_go_down_and_up_again(stack: Stack, tmp_path: Path) -> None:
    spec = load_spec(LEDGER)
    topics = topics_of(spec)
    log = audit.open_log(tmp_path)
    asker = Asker(stack.inference)
    first = Traffic([stack.gateway], SEED)
    first.start()
    wait_until("samples are trained on", lambda: sum(stack.applied().values()) > 200, within_s=120)
    asker.start()
    for name in STRUCK:
        before = sum(audit.ends_of(log, topics.samples).values())
        stack.kill(name)
        back_s = stack.up(name)
        on_s = wait_until(
            f"learning goes on after {name}", partial(_learned_past, stack, before), within_s=ON_S
        )
        print(f"{name:12} healthy {back_s:5.1f} s after the kill; {on_s:4.1f} s later learning was past it")
    asker.stop()
    first.stop()
    assert not first.errors
    print(f"rank requests: {Counter(outcome for _, _, outcome in asker.answers)}")

    stack.down()
    print(f"down, and all healthy again after {stack.up():.1f} s")
    second = Traffic([stack.gateway], SEED + 1, life="again-", first_seq=1_000_000)
    second.start()
    before = sum(audit.ends_of(log, topics.samples).values())
    wait_until("learning goes on", lambda: sum(stack.applied().values()) > before + 500, within_s=ON_S)
    second.stop()
    assert not second.errors

    impressions, actions = first.impressions | second.impressions, first.actions | second.actions
    stack.drain(log, topics, tmp_path, len(impressions))
    books = audit.read_books(log, topics)
    print(f"{len(impressions)} impressions, {len(books.samples)} samples")
    for name in stack.of("inference"):
        wait_until_nothing_differs(partial(audit.against_serving, books, stack.url(name)), within_s=30)
    ledger, ends = stack.joined()["ledger"], read_to(log, topics.samples)
    log.close()
    for role in ("gateway", "joiner", "trainer", "embedder", "shard"):  # what shards hold is flushed
        stack.docker("stop", *stack.of(role))
    late = ledger["events"]
    assert list(audit.against_joiner(books, ledger, len(impressions) - late["impressions_late"])) == []
    excused = late["actions_late"] + late["actions_orphan"] + late["impressions_late"]
    labels = tuple(label.name for label in spec.labels)
    assert list(audit.against_acknowledged(books, impressions, actions, labels, excused=excused)) == []
    assert list(audit.against_offsets(ends, tmp_path, spec)) == []
    assert list(audit.against_rows(books, tmp_path, spec)) == []
    assert list(audit.against_dense(books, tmp_path)) == []
    failed = [outcome for _, _, outcome in asker.answers if outcome != "200"]
    assert [f for f in failed if not f.startswith("connection")] == [], "only the edge's own kill is seen"


def _learned_past(stack: Stack, offset: int) -> bool:
    return sum(stack.applied().values()) > offset
