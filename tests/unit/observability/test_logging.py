"""Logs of a process: keys of a line, lines of libraries, failures that it survives."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
import structlog

from freshet.observability import logging as ours
from freshet.observability.log_keys import ALWAYS
from freshet.observability.logging import configure_logging, debug_on_signal
from freshet.release import RELEASE
from freshet.testing.clock import SettableClock
from freshet.testing.conditions import wait_until


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, usr1 = logging.getLogger(), signal.getsignal(signal.SIGUSR1)
    level, handlers = root.level, list(root.handlers)
    yield
    logging.captureWarnings(False)
    root.setLevel(level)
    root.handlers[:] = handlers
    signal.signal(signal.SIGUSR1, usr1)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_message_is_a_json_line_with_its_process(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("joiner", instance="joiner-2")

    structlog.get_logger().warning("log full", topic="samples")

    (line,) = said(capsys)
    assert list(line) == [*ALWAYS, "topic"] or set(line) == {*ALWAYS, "topic"}
    assert (line["service"], line["instance"], line["level"]) == ("joiner", "joiner-2", "warning")
    assert (line["event"], line["topic"]) == ("log full", "samples")
    assert (line["pid"], line["host"], line["release"]) == (os.getpid(), socket.gethostname(), RELEASE)


def test_lines_of_other_threads_name_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("joiner")

    thread = threading.Thread(target=lambda: structlog.get_logger().info("from a thread"))
    thread.start()
    thread.join()

    assert said(capsys)[0]["service"] == "joiner"


def test_a_message_that_cannot_be_written_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging("joiner")
    monkeypatch.setattr(sys, "stderr", FullDisk())

    structlog.get_logger().error("not written")
    logging.getLogger("redis").error("nor this")


@pytest.mark.parametrize(("no_color", "colored"), [("", True), ("1", False)])
def test_color_is_for_terminals_without_no_color(
    no_color: str, colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    configure_logging("joiner", form="text")

    structlog.get_logger().warning("log full", topic="samples")

    assert ("\x1b[" in terminal.getvalue()) is colored
    assert "log full" in terminal.getvalue()


def test_libraries_and_warnings_speak_through_the_same_writer(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logging("joiner")
        logging.getLogger("uvicorn.error").warning("%s is odd", "this")
        logging.getLogger("redis").info("not kept")
        warnings.warn("old api", DeprecationWarning, stacklevel=1)

    lines = [orjson.loads(x) for x in capsys.readouterr().err.splitlines() if x.startswith("{")]
    assert [(x["logger"], x["level"]) for x in lines] == [
        ("uvicorn.error", "warning"),
        ("py.warnings", "warning"),
    ]
    assert lines[0]["event"] == "this is odd"
    assert "old api" in lines[1]["event"]


def test_a_malformed_message_does_not_harm_a_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(logging.getLogger().handlers)
    configure_logging("joiner")
    monkeypatch.setattr(logging, "raiseExceptions", False)
    (handler,) = set(logging.getLogger().handlers) - before

    handler.emit(logging.LogRecord("odd", logging.ERROR, "x.py", 1, "%d of %d", (1,), None))


def test_an_error_of_a_library_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("joiner")
    try:
        raise KeyError("slot")
    except KeyError:
        logging.getLogger("redis").exception("gone")

    assert "KeyError: 'slot'" in said(capsys)[0]["exception"]


def test_credentials_are_hidden_in_all_parts_of_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("joiner")
    try:
        raise ConnectionError("cannot reach redis://:hunter2@box")
    except ConnectionError as error:
        structlog.get_logger().error("away redis://:hunter2@box", reason=str(error), exc_info=error)
    logging.getLogger("redis").warning("redis://:hunter2@box is slow")

    text = capsys.readouterr().err
    assert "hunter2" not in text
    assert text.count("***@box") >= 4


def test_a_repeated_message_is_ten_lines_and_a_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    configure_logging("joiner", clock=lambda: now)
    for attempt in range(1000):
        structlog.get_logger().warning("kafka", reason=f"attempt {attempt}")
        logging.getLogger("confluent_kafka").warning("broker %d is away", attempt)

    assert len(said(capsys)) == 20
    now = 10.0
    structlog.get_logger().warning("kafka", reason="still")
    assert said(capsys)[0]["left_out"] == 990
    assert ours.repeat_limit is not None
    ours.repeat_limit.report()
    assert [(x["message"], x["left_out"]) for x in said(capsys)] == [
        ("confluent_kafka: broker %d is away", 990)
    ]


def test_left_out_lines_are_reported_after_the_last_one(capsys: pytest.CaptureFixture[str]) -> None:
    clock, waiting = SettableClock(), list[tuple[float, Callable[[], None]]]()
    configure_logging("joiner", clock=clock.monotonic, later=lambda s, call: waiting.append((s, call)))

    def told() -> list[tuple[str, int]]:
        return [(x["message"], x["left_out"]) for x in said(capsys) if x["event"] == "lines were left out"]

    def storm() -> None:
        for _ in range(30):
            structlog.get_logger().warning("kafka")

    def wait() -> None:
        [(seconds, call)] = waiting
        waiting.clear()
        clock.advance(seconds)
        call()

    storm()
    assert len(waiting) == 1  # however many are left out
    clock.advance(5.0)
    for _ in range(11):
        structlog.get_logger().warning("redis")
    wait()
    assert told() == [("kafka", 20), ("redis", 1)]
    assert waiting == []  # nothing is left to report

    storm()
    clock.advance(5.0)
    structlog.get_logger().warning("redis")
    wait()
    assert told() == [("kafka", 20)]


def test_lines_left_out_of_a_new_window_are_reported_after_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, waiting = SettableClock(), list[Callable[[], None]]()
    configure_logging("joiner", clock=clock.monotonic, later=lambda _, call: waiting.append(call))
    for pause_s in (0.0, 9.0, 1.0, 9.0):
        clock.advance(pause_s)
        for _ in range(11):
            structlog.get_logger().warning("kafka")
    said(capsys)

    clock.advance(0.5)
    waiting.pop()()  # late, as timers are
    assert said(capsys) == []
    clock.advance(10.0)
    waiting.pop()()
    assert [line["left_out"] for line in said(capsys)] == [12]


def test_info_lines_are_not_limited(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("joiner", clock=lambda: 0.0)
    for version in range(50):
        structlog.get_logger().info("version served", version=version)

    assert len(said(capsys)) == 50


def test_a_signal_turns_debug_on_and_off(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("joiner", level="info")
    debug_on_signal("info")
    log = structlog.get_logger()
    found: list[dict[str, Any]] = []

    def told(level: str) -> bool:
        found.extend(said(capsys))
        return any(line.get("log_level") == level for line in found)

    log.debug("not kept")
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until("the level is told", lambda: told("debug"), within_s=10, poll_s=0.005)
    log.debug("kept")
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until("the level is told", lambda: told("info"), within_s=10, poll_s=0.005)
    log.debug("not kept either")

    found.extend(said(capsys))
    assert [line["event"] for line in found if line["level"] == "debug"] == ["kept"]
