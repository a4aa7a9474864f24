"""How a line looks, what it must not hold, and how many there may be."""

from __future__ import annotations

import pytest

from freshet.observability.log_repeats import MOST_MESSAGES, Repeats
from freshet.observability.log_secrets import HIDDEN, MOST_CHARS, scrubbed
from freshet.observability.log_text import text_line

SAID = {
    "timestamp": "2026-11-22T21:04:05.123456Z",
    "level": "warning",
    "service": "joiner",
    "instance": "box",
    "host": "box",
    "pid": 7,
    "release": "1",
    "event": "events wait",
    "topics": ["a/0"],
    "reason": "no broker",
}


def test_a_line_for_people_has_time_level_service_and_message_in_columns() -> None:
    line = text_line(SAID, colors=False)

    assert line == (
        "21:04:05.123 warning joiner      events wait" + " " * 33 + ' topics=["a/0"] reason="no broker"'
    )


def test_columns_stand_below_each_other_whoever_speaks() -> None:
    other = {**SAID, "service": "paramserver", "level": "info", "event": "slices are served"}

    assert text_line(SAID, colors=False).index("topics=") == text_line(other, colors=False).index("topics=")


def test_one_of_several_says_which_it_is() -> None:
    assert " joiner joiner-2 " in text_line({**SAID, "instance": "joiner-2"}, colors=False)


def test_color_is_only_where_it_is_asked_for() -> None:
    assert "\x1b[33m" in text_line(SAID, colors=True)
    assert "\x1b" not in text_line(SAID, colors=False)


def test_what_a_value_holds_cannot_move_the_cursor_or_feign_a_line() -> None:
    line = text_line({**SAID, "reason": "a\n21:00 error joiner gone\x1b[2J"}, colors=False)

    assert "\n" not in line
    assert "\x1b" not in line


def test_a_traceback_follows_its_line() -> None:
    lines = text_line({**SAID, "exception": "Traceback\n  x\nKeyError: 1"}, colors=False).splitlines()

    assert lines[1:] == ["    Traceback", "      x", "    KeyError: 1"]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("cannot reach redis://:hunter2@box:6379/0", "hunter2"),
        ("kafka://ann:hunter2@k1:9092,k2:9092/news failed", "hunter2"),
        ("header was authorization: Bearer abc.def-123", "abc.def-123"),
        ("Basic YW5uOmh1bnRlcjI= is not taken", "YW5uOmh1bnRlcjI="),
        ("sasl.password=hunter2 is not known", "hunter2"),
        ('{"token": "hunter2", "a": 1}', "hunter2"),
        ("https://b.s3/x?X-Amz-Signature=0badcafe&y=1", "0badcafe"),
        ("FRESHET_CONSOLE_TOKEN: hunter2", "hunter2"),
    ],
)
def test_credentials_are_hidden_wherever_they_stand(text: str, secret: str) -> None:
    for place in (text, [text], {"deep": {"er": text}}):
        assert secret not in str(scrubbed("reason", place))
        assert HIDDEN in str(scrubbed("reason", place))


@pytest.mark.parametrize(
    "text",
    ["no token was sent: expected Bearer", "sqlite:/var/run/log", "http://box:7000/v1/events", "a=1, b=2"],
)
def test_what_is_no_credential_stays_as_it_is(text: str) -> None:
    assert scrubbed("reason", text) == text


def test_a_value_of_a_secret_name_is_hidden_whatever_it_is() -> None:
    assert scrubbed("sasl_password", "x") == HIDDEN
    assert scrubbed("reason", {"api_key": "x"}) == {"api_key": HIDDEN}


def test_bytes_of_events_are_told_by_their_length() -> None:
    assert scrubbed("reason", b'{"user": "ann"}') == "<15 bytes>"


def test_a_value_that_is_a_whole_body_is_cut() -> None:
    cut = scrubbed("reason", "x" * (MOST_CHARS + 5))

    assert len(cut) < MOST_CHARS + 50
    assert "5 characters left out" in cut
    assert scrubbed("exception", "x" * MOST_CHARS + "KeyError").endswith("KeyError")


def test_long_lists_are_cut_and_numbers_stay_numbers() -> None:
    assert scrubbed("partitions", list(range(60)))[-1] == "… 10 more"
    assert scrubbed("rows", 7) == 7


def test_the_first_lines_of_a_message_are_kept_and_the_rest_counted() -> None:
    repeats = Repeats(lines=2, window_s=10.0)

    assert [repeats.admit("away", t) for t in (0.0, 1.0, 2.0, 9.9)] == [0, 0, None, None]
    assert repeats.admit("other", 3.0) == 0
    assert [repeats.admit("away", t) for t in (10.0, 11.0, 12.0)] == [2, 0, None]


def test_what_was_left_out_is_told_once() -> None:
    repeats = Repeats(lines=1, window_s=10.0)
    for t in (0.0, 1.0, 2.0):
        repeats.admit("away", t)

    assert repeats.over(5.0) == []
    assert repeats.over(None) == [("away", 2)]
    assert repeats.over(None) == []


def test_messages_that_never_repeat_do_not_fill_the_memory() -> None:
    repeats = Repeats()
    for n in range(MOST_MESSAGES + 10):
        repeats.admit(n, 0.0)

    assert len(repeats._windows) == MOST_MESSAGES
