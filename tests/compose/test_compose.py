"""The production shape as `docker compose up` starts it: each service is killed in turn and comes back, all
go down and up again, and everything acknowledged counts once.

`make test-compose` runs it: it needs a docker engine, and builds the images first.
`FRESHET_TEST_STRUCK="kafka shard-0"` kills only those.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from freshet.config.spec import load_spec
from freshet.config.spec.topics import topics_of
from freshet.testing.conditions import wait_until
from tests.compose.auditing import assert_exact
from tests.compose.stack import Stack
from tests.compose.striking import kill_each, learned_past
from tests.fixtures import audit
from tests.fixtures.commands import LEDGER
from tests.fixtures.traffic import Asker, Traffic

SEED = random.SystemRandom().randrange(1, 2**31)
ALL = (
    "gateway-0", "gateway-1", "joiner-0", "shard-0", "shard-1", "embedder-0", "embedder-1", "trainer-0",
    "inference-0", "inference-1", "redis-0", "redis-4", "kafka", "edge", "console", "prometheus",
)  # fmt: skip
STRUCK = os.environ.get("FRESHET_TEST_STRUCK", " ".join(ALL)).split()

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1_800)]


def test_each_service_may_be_killed_and_all_go_down_and_up_again(stack: Stack, tmp_path: Path) -> None:
    spec = load_spec(LEDGER)
    topics = topics_of(spec)
    log = audit.open_log(tmp_path)

    def samples() -> int:
        return sum(audit.ends_of(log, topics.samples).values())

    asker = Asker(stack.inference)
    first = Traffic([stack.gateway], SEED)
    first.start()
    wait_until("samples are trained on", lambda: sum(stack.applied().values()) > 200, within_s=120)
    asker.start()
    kill_each(stack, STRUCK, samples)
    asker.stop()
    first.stop()
    assert not first.errors
    print(f"rank requests: {Counter(outcome for _, _, outcome in asker.answers)}")

    stack.down()
    print(f"down, and all healthy again after {stack.up():.1f} s")
    second = Traffic([stack.gateway], SEED + 1, life="again-", first_seq=1_000_000)
    second.start()
    learned_past(stack, samples() + 500, "after all")
    second.stop()
    assert not second.errors

    impressions, actions = first.impressions | second.impressions, first.actions | second.actions
    assert_exact(stack, spec, tmp_path, impressions, actions)
    failed = [outcome for _, _, outcome in asker.answers if outcome != "200"]
    assert [f for f in failed if not f.startswith("connection")] == [], "only the edge's own kill is seen"
