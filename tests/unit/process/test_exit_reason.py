from pathlib import Path

import pytest

from freshet.process.process_info import READ_BYTES, last_words

JSON = '{"event": "read", "level": "info"}\n'


def log(folder: Path, text: str) -> Path:
    path = folder / "one.log"
    path.write_text(text)
    return path


def test_the_last_error_is_told_with_what_it_says_to_do(tmp_path: Path) -> None:
    path = log(tmp_path, JSON + "ConfigError: port = 1\n  expected a free port\n" + JSON)

    assert last_words(path) == "ConfigError: port = 1\n  expected a free port"


def test_of_a_traceback_the_last_line_is_told(tmp_path: Path) -> None:
    path = log(tmp_path, 'Traceback (most recent call last):\n  File "x", line 1\nValueError: no\n')

    assert last_words(path) == "ValueError: no"


def test_what_an_earlier_process_said_is_not_told(tmp_path: Path) -> None:
    path = log(tmp_path, "ConfigError: before\n" + JSON)

    assert last_words(path, start=len("ConfigError: before\n")) == ""


@pytest.mark.parametrize("text", ["", JSON, "\n\n", "  indented only\n"])
def test_a_log_without_a_message_tells_nothing(tmp_path: Path, text: str) -> None:
    assert last_words(log(tmp_path, text)) == ""


def test_a_line_that_began_before_the_part_that_is_read_is_not_told(tmp_path: Path) -> None:
    assert last_words(log(tmp_path, '{"event": "' + "x" * READ_BYTES + '"}\n')) == ""


def test_a_log_that_is_not_there_tells_nothing(tmp_path: Path) -> None:
    assert last_words(tmp_path / "none.log") == ""


def test_what_a_terminal_would_obey_is_not_told(tmp_path: Path) -> None:
    assert last_words(log(tmp_path, "Error: \x1b[2Jgone\x07\n  do this\n")) == "Error: ?[2Jgone?\n  do this"
