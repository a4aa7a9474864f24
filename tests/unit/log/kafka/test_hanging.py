"""What a writer does about transactions that brokers left without an end, on offsets as brokers tell them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from freshet.errors import Unavailable
from freshet.log.kafka import hanging as kafka_hanging
from freshet.log.kafka.admin import KafkaAdmin
from freshet.log.kafka.hanging import end_hanging
from freshet.types import TopicPartition

COMMITS, SAMPLES, LATE = (TopicPartition(topic, 3) for topic in ("joiner", "samples", "late"))
OWNED = {COMMITS: "p.joiner", SAMPLES: "p.samples", LATE: "p.late"}


class Brokers:
    """Ends of partitions, (committed, written), which an aborted transaction brings together."""

    def __init__(self, ends: dict[TopicPartition, tuple[int, int]], *, ours: bool = True) -> None:
        self._ends, self._ours = ends, ours
        self.aborted: list[tuple[str, int]] = []
        self.looks_until_shown = 10**9

    def ends(self, partitions: Iterable[TopicPartition], *, committed: bool) -> dict[TopicPartition, int]:
        self.looks_until_shown -= 1
        shown = self.looks_until_shown < 0
        return {at: self._ends[at][0 if committed and not shown else 1] for at in partitions}

    def abort_in(self, places: Iterable[tuple[str, int]]) -> None:
        self.aborted = sorted(places)
        if self._ours:
            for topic, _ in self.aborted:
                at = next(at for at, name in OWNED.items() if name == topic)
                end = self._ends[at][1] + 2
                self._ends[at] = (end, end)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_hanging, "_SHOWN_S", 0.0)
    monkeypatch.setattr(kafka_hanging, "_LOOK_S", 0.0)


def ended(brokers: Brokers, monkeypatch: pytest.MonkeyPatch, newest: int | None = None) -> list[str]:
    """What is logged. `newest`: offset of the newest commit that is read."""
    found = [] if newest is None else [(newest, b"")]
    monkeypatch.setattr(kafka_hanging, "newest", lambda *_: found)
    with capture_logs() as logs:
        end_hanging(cast(Any, None), cast(KafkaAdmin, brokers), brokers, OWNED)
    return [line["event"] for line in logs]


def test_where_all_has_ended_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers({COMMITS: (10, 10), SAMPLES: (0, 0), LATE: (7, 7)})

    assert ended(brokers, monkeypatch) == []
    assert brokers.aborted == []


def test_a_marker_that_shows_a_moment_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers({COMMITS: (10, 12), SAMPLES: (0, 0), LATE: (7, 7)})
    brokers.looks_until_shown = 3
    monkeypatch.setattr(kafka_hanging, "_SHOWN_S", 30.0)

    assert ended(brokers, monkeypatch) == []
    assert brokers.aborted == []


def test_what_hangs_with_its_commit_is_aborted_and_nothing_else_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brokers = Brokers({COMMITS: (10, 11), SAMPLES: (40, 90), LATE: (7, 7)})

    assert ended(brokers, monkeypatch) == ["a transaction without an end was aborted"]
    assert brokers.aborted == [("p.joiner", 3), ("p.samples", 3)]


def test_what_hangs_though_its_commit_was_aborted_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers({COMMITS: (10, 10), SAMPLES: (40, 90), LATE: (7, 7)})

    assert ended(brokers, monkeypatch, newest=6) == [
        "a transaction without an end was aborted"
    ]  # 8 and 9 are not read
    assert brokers.aborted == [("p.samples", 3)]


def test_what_hangs_though_its_commit_is_read_is_left_to_the_next_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brokers = Brokers({COMMITS: (10, 10), SAMPLES: (40, 90), LATE: (7, 7)})

    assert ended(brokers, monkeypatch, newest=8) == [
        "a transaction was committed in part, the next one commits the rest"
    ]
    assert brokers.aborted == []


def test_what_another_has_open_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers({COMMITS: (10, 10), SAMPLES: (40, 90), LATE: (7, 7)}, ours=False)

    with pytest.raises(
        Unavailable, match=r"samples\[3\]: expected none, or one of this writer, (?s:.)*kafka-transactions"
    ):
        ended(brokers, monkeypatch)
