"""The compose file as `docker compose up` starts it, and with compose.small.yml, for a laptop: each service
is killed in turn and comes back, all go down and up again, and everything acknowledged counts once.

`make test-compose` runs it: it needs a docker engine, and builds the images first.
`FRESHET_TEST_STRUCK="kafka shard-0"` kills only those (of compose.small.yml: those that it has).
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
SMALL = (
    "gateway-0", "joiner-0", "shard-0", "embedder-0", "trainer-0", "inference-0", "redis-0", "kafka", "edge",
    "console", "prometheus",
)  # fmt: skip
WHOLE = (*SMALL, "gateway-1", "shard-1", "embedder-1", "inference-1", "redis-4")
STRUCK = os.environ.get("FRESHET_TEST_STRUCK", " ".join(WHOLE)).split()

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1_800)]


@pytest.mark.parametrize(
    ("stack", "services"),
    [
        pytest.param(False, STRUCK, id="whole"),
        pytest.param(True, [name for name in SMALL if name in STRUCK], id="small"),
    ],
    indirect=["stack"],
)
def test_each_service_may_be_killed_and_all_go_down_and_up_again(
    stack: Stack, services: list[str], tmp_path: Path
) -> None:
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
    kill_each(stack, services, samples)
    asker.stop()
    first.stop()
    assert not first.errors
    outcomes = Counter(outcome for _, _, outcome in asker.answers)
    print(f"rank requests: {outcomes}")

    stack.down()
    print(f"down, and all healthy again after {stack.up():.1f} s")
    second = Traffic([stack.gateway], SEED + 1, life="again-", first_seq=1_000_000)
    asker = Asker(stack.inference)
    second.start()
    asker.start()
    learned_past(stack, samples() + 500, "after all")
    asker.stop()
    second.stop()
    assert not second.errors
    assert {outcome for _, _, outcome in asker.answers} == {"200"}

    impressions, actions = first.impressions | second.impressions, first.actions | second.actions
    assert_exact(stack, spec, tmp_path, impressions, actions)
    if len(stack.of("inference")) > 1:  # else no server stands in for a killed one
        failed = [outcome for outcome in outcomes if outcome != "200"]
        assert [f for f in failed if not f.startswith("connection")] == [], "only the edge's own kill is seen"
