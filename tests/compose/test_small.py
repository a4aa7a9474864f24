"""The compose file with compose.small.yml, for a laptop: one of each service, and one Redis. Each is killed
in turn, which nothing stands in for, all go down and up again, and everything acknowledged counts once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from freshet.config.spec import load_spec
from freshet.config.spec.topics import topics_of
from freshet.testing.conditions import wait_until
from tests.compose.auditing import assert_exact
from tests.compose.stack import EXACT, Stack
from tests.compose.striking import ON_S, kill_each, learned_past
from tests.fixtures import audit
from tests.fixtures.commands import LEDGER
from tests.fixtures.traffic import Asker, Traffic

SEED = random.SystemRandom().randrange(1, 2**31)
ALL = (
    "gateway-0", "joiner-0", "shard-0", "embedder-0", "trainer-0", "inference-0", "redis-0", "kafka", "edge",
    "console", "prometheus",
)  # fmt: skip

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1_800)]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """All of it, healthy, with the ledger's spec; the test's process sees its stores."""
    made = Stack(LEDGER.parent, tmp_path, small=True, variables=EXACT)
    made.down(volumes=True)
    try:
        print(f"\nall healthy after {made.up():.1f} s")
        for name, value in made.settings(tmp_path).items():
            monkeypatch.setenv(name, value)
        yield made
    finally:
        made.keep_words(tmp_path)
        made.down(volumes=True)
        made.close()


def test_each_service_may_be_killed_and_all_go_down_and_up_again(small: Stack, tmp_path: Path) -> None:
    spec = load_spec(LEDGER)
    topics = topics_of(spec)
    log = audit.open_log(tmp_path)

    def samples() -> int:
        return sum(audit.ends_of(log, topics.samples).values())

    first = Traffic([small.gateway], SEED)
    first.start()
    wait_until("samples are trained on", lambda: sum(small.applied().values()) > 200, within_s=ON_S)
    kill_each(small, ALL, samples)
    first.stop()
    assert not first.errors

    small.down()
    print(f"down, and all healthy again after {small.up():.1f} s")
    second = Traffic([small.gateway], SEED + 1, life="again-", first_seq=1_000_000)
    asker = Asker(small.inference)
    second.start()
    asker.start()
    learned_past(small, samples() + 500, "after all")
    asker.stop()
    second.stop()
    assert not second.errors
    assert {outcome for _, _, outcome in asker.answers} == {"200"}

    impressions, actions = first.impressions | second.impressions, first.actions | second.actions
    assert_exact(small, spec, tmp_path, impressions, actions)
