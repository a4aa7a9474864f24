"""Watermark, step by step."""

from __future__ import annotations

import pytest

from freshet.joiner.watermark import Watermark

READ, END, BEHIND = "read", "end", "behind"
Step = tuple[str, str, float, float, int | None]
"""(step, topic, first ms or monotonic s, last ms, W afterwards)"""

CASES: dict[str, list[Step]] = {
    "before the first event there is no watermark": [(END, "a", 5, 0, None), (END, "b", 5, 0, None)],
    "it is the smallest of the topics' largest times": [
        (READ, "a", 100, 500, 100),
        (READ, "b", 200, 300, 300),
        (READ, "b", 600, 700, 500),
    ],
    "it never goes back": [(READ, "a", 100, 500, 100), (READ, "b", 300, 500, 500), (READ, "b", 1, 2, 500)],
    "a topic never heard of holds it at the first moment heard of": [
        (READ, "a", 100, 500, 100),
        (READ, "a", 600, 900, 100),
    ],
    "a topic read to its end lets it go on with real time": [
        (READ, "a", 100, 100_000, 100),
        (END, "b", 10.0, 0, 100),
        (END, "b", 10.5, 0, 600),
        (END, "b", 12.0, 0, 2_100),
    ],
    "one look at an end proves no time of idleness": [(READ, "a", 100, 9_000, 100), (END, "b", 50.0, 0, 100)],
    "unread records end the idleness, however long ago it was seen": [
        (READ, "a", 100, 100_000, 100),
        (END, "b", 10.0, 0, 100),
        (BEHIND, "b", 0, 0, 100),
        (END, "b", 900.0, 0, 100),
        (END, "b", 900.5, 0, 600),
    ],
    "a record ends the idleness": [
        (READ, "a", 100, 100_000, 100),
        (END, "b", 10.0, 0, 100),
        (READ, "b", 150, 150, 150),
        (END, "b", 99.0, 0, 150),
    ],
    "fractions of a millisecond are not lost": [
        (READ, "a", 100, 100_000, 100),
        (END, "b", 10.0, 0, 100),
        (END, "b", 10.0004, 0, 100),
        (END, "b", 10.0008, 0, 100),
        (END, "b", 10.0012, 0, 101),
    ],
    "when all are idle it goes on from where it was": [
        (READ, "a", 1_000, 1_000, 1_000),
        (READ, "b", 1_200, 1_200, 1_000),
        (END, "a", 1.0, 0, 1_000),
        (END, "b", 1.0, 0, 1_000),
        (END, "a", 3.0, 0, 1_200),
        (END, "b", 3.0, 0, 3_000),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_watermark(case: str) -> None:
    w = Watermark(["a", "b"])
    for what, topic, first, last, expected in CASES[case]:
        if what == READ:
            w.observe(topic, int(first), int(last))
        elif what == END:
            w.at_end(topic, first)
        else:
            w.behind(topic)
        assert w.value == expected, (case, what, topic, first)


def test_downtime_counts_for_a_topic_without_new_records() -> None:
    w = Watermark(["a", "b"])
    w.resume(1_000, {"a": 5_000, "b": 1_000}, downtime_ms=700)
    w.at_end("b", 10.0)
    assert w.value == 1_700
    w.at_end("b", 10.25)
    assert w.value == 1_950


def test_downtime_does_not_count_for_a_topic_with_new_records() -> None:
    w = Watermark(["a", "b"])
    w.resume(1_000, {"a": 5_000, "b": 1_000}, downtime_ms=700)
    w.behind("b")
    w.at_end("b", 10.0)
    assert w.value == 1_000


def test_wall_clock_ahead_at_a_restart_makes_no_event_late() -> None:
    w = Watermark(["a", "b"])
    w.resume(1_000, {"a": 1_500, "b": 1_000}, downtime_ms=3_600_000)
    w.at_end("a", 10.0)
    w.at_end("b", 10.0)
    assert w.value == 1_500
    w.observe("a", 2_000, 2_100)
    w.at_end("b", 10.1)
    assert w.value == 2_100, "what lay in between is closed by an event, not by the clock"


def test_downtime_counts_when_the_other_topic_gets_records_later() -> None:
    w = Watermark(["a", "b"])
    w.resume(1_000, {"a": 1_000, "b": 1_000}, downtime_ms=5_000)
    w.at_end("a", 10.0)
    w.at_end("b", 10.0)
    assert w.value == 1_000
    w.observe("a", 9_000, 9_000)
    w.at_end("b", 10.0)
    assert w.value == 6_000, "no more than the time that was down"


def test_a_wall_clock_that_went_back_costs_nothing() -> None:
    w = Watermark(["a"])
    w.resume(1_000, {"a": 1_000, "gone": 5}, downtime_ms=-999)
    w.at_end("a", 1.0)
    assert w.value == 1_000
    assert w.clocks == {"a": 1_000}


def test_the_end_of_the_streams_closes_every_window() -> None:
    w = Watermark(["a", "b"])
    w.close(50)
    assert w.value is None
    w.observe("a", 100, 900)
    w.close(50)
    assert w.value == 950
