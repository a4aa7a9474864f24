"""How fresh what is served is: rows and dense versions together, and rows alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from freshet.inference.rows import RowFollower, RowsState
from freshet.inference.scoring import ServingState
from freshet.inference.versions import VersionFollower
from freshet.log.sqlite.event_log import open_url as open_log
from freshet.rows.sqlite.row_store import open_url as open_rows
from freshet.testing.clock import SettableClock
from freshet.versions.folder import open_url as open_versions
from tests.unit.inference.row_source import TOPIC, serving_table
from tests.unit.inference.version_source import follower, put


class Served:
    """What rows have learned up to, and a dense version of event time 100 + its number."""

    def __init__(self, folder: Path) -> None:
        self.log, self.store = open_log(f"sqlite:{folder}/log"), open_rows(f"sqlite:{folder}/rows")
        self.versions = open_versions(f"file:{folder}/versions")
        self.rows = RowFollower(self.log, self.store, TOPIC, serving_table, spec_hash="s1", wait_s=0.01)
        self.follower: VersionFollower = follower(self.versions)
        self.live = ServingState(self.rows, self.follower, SettableClock(now_ms=1_000))

    def learn_rows(self, event_time_ms: int) -> None:
        self.rows.state = RowsState(None, event_time_ms)

    def serve_version(self, number: int) -> None:
        put(self.versions, number, 0.5)
        self.versions.point("stable", number)
        self.follower.poll()

    def close(self) -> None:
        self.versions.close()
        self.store.close()
        self.log.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.close()


def test_rows_that_stand_still_grow_old_while_versions_come(served: Served) -> None:
    served.learn_rows(300)
    served.serve_version(0)
    assert (served.live.freshness_ms(), served.live.rows_freshness_ms()) == (700, 700)

    served.serve_version(800)

    assert (served.live.freshness_ms(), served.live.rows_freshness_ms()) == (100, 700)


def test_an_old_version_makes_rows_no_older(served: Served) -> None:
    served.serve_version(0)
    served.learn_rows(900)

    assert (served.live.freshness_ms(), served.live.rows_freshness_ms()) == (100, 100)


def test_rows_without_events_are_as_fresh_as_the_version(served: Served) -> None:
    assert (served.live.freshness_ms(), served.live.rows_freshness_ms()) == (None, None)

    served.serve_version(0)

    assert (served.live.freshness_ms(), served.live.rows_freshness_ms()) == (900, 900)
