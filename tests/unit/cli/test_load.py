"""Output of `freshet load`."""

from __future__ import annotations

from freshet.cli.load import progress_line, summary_text
from freshet.load.open_loop import Figures


def figures(came: int, failed: int) -> Figures:
    made = Figures(seconds=10.0, requests=came + failed, events=came)
    made.good_meanwhile = made.events_meanwhile = came
    for _ in range(came):
        made.latency.answered.add(0.002)
        made.service.add(0.001)
        made.late.add(0.001)
    for _ in range(failed):
        made.latency.failed.add(5.0)
        made.late.add(0.001)
    made.answers.update({"202": came, "no answer within 5 s": failed} if failed else {"202": came})
    return made


def test_percentiles_among_what_failed_are_shown_as_bounds() -> None:
    shown = summary_text({"events": figures(980, 20)}).splitlines()

    assert shown[0].split() == ["ms", "p50", "p90", "p99", "p99.9", "longest"]
    assert shown[1].split() == ["events", "latency", *2 * ["2.0"], *3 * [">=", "5,000.0"]]
    assert shown[2].split() == ["events", "of", "answers", *5 * ["2.0"]]
    assert "98.0 a second, 1,000 requests; 202: 980, no answer within 5 s: 20" in shown[5]


def test_where_all_are_answered_that_is_said_once() -> None:
    assert "of answers" not in summary_text({"events": figures(100, 0)})


def test_a_line_of_progress_shows_them_too() -> None:
    assert progress_line(5.0, {"events": figures(9, 1)}) == (
        "      5 s  events 1/s, p50 2.0 ms, p99 >= 5,000.0 ms, 1 failed"
    )


def test_the_last_line_says_that_the_generator_was_late() -> None:
    late, punctual = figures(100, 0), figures(100, 0)
    for _ in range(50):
        late.begun_late.add(0.25)
        punctual.begun_late.add(0.001)

    shown = summary_text({"events": late, "ranks": punctual}).splitlines()

    assert shown[-1].startswith("events: freshet load itself was late")
    assert "p99 250.0 ms" in shown[-1]
    assert not any(line.startswith("ranks: freshet load was late") for line in shown)
    assert "late itself" not in summary_text({"ranks": punctual})
