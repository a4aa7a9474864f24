"""Events wait while their schema is unavailable; events of other schemas do not."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

from freshet.errors import Unavailable
from freshet.joiner.service import Intervals
from freshet.types import Records
from tests.fixtures.join_events import Action, JsonDecoder, Served, label, plan_of
from tests.fixtures.joiner import World

PLAN = plan_of(label("click", 300))
INTERVALS = Intervals(flush_interval_ms=0, commit_interval_ms=0, end_check_interval_ms=10**9, retry_ms=0)
REQUESTS = 40


class Away(JsonDecoder):
    """A decoder without a registry for events of one partition."""

    away = True

    def served(self, records: Records):
        columns, refused = super().served(records)
        if Away.away and any(b"later" in value for value in records.values):
            raise Unavailable("the schema registry did not respond")
        return columns, refused


def partition_of(request: str) -> int:
    return zlib.crc32(request.encode()) % 2


def test_events_wait_for_their_schema_while_others_are_joined(tmp_path: Path) -> None:
    world = World(tmp_path, PLAN)
    names = [f"now{i}" for i in range(REQUESTS) if partition_of(f"now{i}") == 1]
    waiting = [f"later{i}" for i in range(REQUESTS) if partition_of(f"later{i}") == 0]
    world.send([Served(name, ("x",), 1_000 + i * 100) for i, name in enumerate(waiting)])
    world.send([Served(name, ("x",), 1_000 + i * 100) for i, name in enumerate(names)])
    last = f"{names[-1]}/x"  # advances the clocks of the other partitions
    world.send([Action(last, 100_000, "watch", "1"), Served(names[-1], ("x",), 100_000)])
    joiner = world.joiner(INTERVALS, replace(world.context(), decoder=lambda: Away(PLAN)))
    Away.away = True
    joiner.open()
    for _ in range(5):
        joiner.step()
    assert {sample.partition for sample in world.samples()} == {1}

    Away.away = False
    joiner.run(until_end=True)
    assert len(world.samples()) == len(names) + len(waiting)
    assert world.values("m.dead-letters") == []
    world.close()
