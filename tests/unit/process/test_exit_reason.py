from pathlib import Path

import pytest

from freshet.process.process_info import READ_BYTES, exit_reason

JSON = '{"event": "read", "level": "info"}\n'


def log(folder: Path, text: str) -> Path:
    path = folder / "one.log"
    path.write_text(text)
    return path


def test_last_error_includes_its_hint(tmp_path: Path) -> None:
    path = log(tmp_path, JSON + "ConfigError: port = 1\n  expected a free port\n" + JSON)

    assert exit_reason(path) == "ConfigError: port = 1\n  expected a free port"


def test_traceback_yields_its_last_line(tmp_path: Path) -> None:
    path = log(tmp_path, 'Traceback (most recent call last):\n  File "x", line 1\nValueError: no\n')

    assert exit_reason(path) == "ValueError: no"


def test_output_of_earlier_process_is_ignored(tmp_path: Path) -> None:
    path = log(tmp_path, "ConfigError: before\n" + JSON)

    assert exit_reason(path, start=len("ConfigError: before\n")) == ""


def test_a_log_emptied_meanwhile_is_read_from_its_start(tmp_path: Path) -> None:
    path = log(tmp_path, JSON + "ValueError: no\n")

    assert exit_reason(path, start=1_000) == "ValueError: no"


@pytest.mark.parametrize("text", ["", JSON, "\n\n", "  indented only\n"])
def test_log_without_error_has_no_reason(tmp_path: Path, text: str) -> None:
    assert exit_reason(log(tmp_path, text)) == ""


def test_incomplete_line_is_ignored(tmp_path: Path) -> None:
    assert exit_reason(log(tmp_path, '{"event": "' + "x" * READ_BYTES + '"}\n')) == ""


def test_missing_log_has_no_reason(tmp_path: Path) -> None:
    assert exit_reason(tmp_path / "none.log") == ""


def test_control_characters_are_replaced(tmp_path: Path) -> None:
    assert exit_reason(log(tmp_path, "Error: \x1b[2Jgone\x07\n  do this\n")) == "Error: ?[2Jgone?\n  do this"
