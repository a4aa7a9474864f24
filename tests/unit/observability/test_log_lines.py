"""Format of text lines, hidden values, and the limit of repeated messages."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
import structlog

from freshet.observability import logging as ours
from freshet.observability.logging import (
    HIDDEN,
    LINES,
    MOST_CHARS,
    MOST_MESSAGES,
    WINDOW_S,
    RepeatLimit,
    configure_logging,
    scrubbed,
)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    logging.captureWarnings(False)
    root.setLevel(level)
    root.handlers[:] = handlers
    structlog.reset_defaults()


def test_a_text_line_has_time_level_message_service_and_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("joiner", form="text")

    structlog.get_logger().warning("events wait", topics=["a/0"], reason="no broker")

    (line,) = capsys.readouterr().err.splitlines()
    time, rest = line.split(" ", 1)
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{15}Z", time)
    assert " ".join(rest.split()) == ("[warning ] events wait [joiner] topics=['a/0'] reason='no broker'")


def test_one_of_several_says_which_it_is_and_a_library_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("joiner", form="text", instance="joiner-2")

    structlog.get_logger().info("joined")
    logging.getLogger("redis").warning("slow")

    first, second = capsys.readouterr().err.splitlines()
    assert "[joiner joiner-2]" in first
    assert "[joiner joiner-2 redis]" in second


def test_no_value_moves_the_cursor_or_feigns_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("joiner", form="text")
    bad = "a\n2026-01-01T00:00:00Z [error] gone\x1b[2J\u202e"

    structlog.get_logger().warning(bad, reason=bad, topics=[bad], where={bad: bad})
    logging.getLogger("redis\nx").warning(bad)

    text = capsys.readouterr().err
    assert len(text.splitlines()) == 2
    assert not [c for c in text if not c.isprintable() and c != "\n"]


def test_a_traceback_follows_its_line_and_cannot_feign_one(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("joiner", form="text")

    try:
        raise ConnectionError("gone\n2026-01-01T00:00:00Z [error] feigned\x1b[2J")
    except ConnectionError as error:
        structlog.get_logger().error("failed", exc_info=error)

    head, *lines = capsys.readouterr().err.splitlines()
    assert "failed" in head
    assert lines[0] == "    Traceback (most recent call last):"
    assert lines[-2:] == ["    ConnectionError: gone", "    2026-01-01T00:00:00Z [error] feigned?[2J"]
    assert all(line.startswith("    ") for line in lines)


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
def test_texts_without_credentials_are_unchanged(text: str) -> None:
    assert scrubbed("reason", text) == text


def test_any_value_of_a_secret_name_is_hidden() -> None:
    assert scrubbed("sasl_password", "x") == HIDDEN
    assert scrubbed("reason", {"api_key": "x"}) == {"api_key": HIDDEN}


def test_bytes_of_events_are_shown_as_their_length() -> None:
    assert scrubbed("reason", b'{"user": "ann"}') == "<15 bytes>"


def test_a_value_that_is_a_whole_body_is_cut() -> None:
    cut = scrubbed("reason", "x" * (MOST_CHARS + 5))

    assert len(cut) < MOST_CHARS + 50
    assert "5 characters left out" in cut
    assert scrubbed("exception", "x" * MOST_CHARS + "KeyError").endswith("KeyError")


def test_long_lists_are_cut_and_numbers_stay_numbers() -> None:
    assert scrubbed("partitions", list(range(60)))[-1] == "… 10 more"
    assert scrubbed("rows", 7) == 7


class Limited:
    """A limit, and the time that it sees."""

    def __init__(self) -> None:
        self.now = 0.0
        self.limit = RepeatLimit(clock=lambda: self.now, later=lambda _, call: None)

    def passes(self, message: str, now: float) -> int | None:
        """How many lines of the message were left out before this one; None if this one is."""
        self.now = now
        try:
            line = self.limit(None, "warning", {"level": "warning", "event": message})
        except structlog.DropEvent:
            return None
        return int(line.get("left_out", 0))


def test_the_first_lines_are_kept_and_the_rest_counted() -> None:
    limited = Limited()
    kept = [limited.passes("away", n / LINES) for n in range(LINES)]

    assert kept == [0] * LINES
    assert [limited.passes("away", t) for t in (1.0, WINDOW_S - 0.1)] == [None, None]
    assert limited.passes("other", 3.0) == 0
    assert [limited.passes("away", t) for t in (WINDOW_S, WINDOW_S + 1)] == [2, 0]


def test_left_out_lines_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("joiner", clock=lambda: 0.0, later=lambda _, call: None)
    for _ in range(LINES + 2):
        structlog.get_logger().warning("away")
    capsys.readouterr()

    assert ours.repeat_limit is not None
    ours.repeat_limit.report()
    ours.repeat_limit.report()

    (line,) = capsys.readouterr().err.splitlines()
    assert '"left_out":2' in line


def test_messages_that_never_repeat_do_not_fill_the_memory() -> None:
    limited = Limited()
    for n in range(MOST_MESSAGES + 10):
        limited.passes(str(n), 0.0)

    assert len(limited.limit.windows) == MOST_MESSAGES
