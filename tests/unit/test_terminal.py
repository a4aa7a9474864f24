"""The command, started by a shell, with standard streams that are closed, full, gone or ASCII only."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from freshet.adapters import open_eventlog
from freshet.config.settings import RunFolder
from freshet.process.run_state import RunState, write_run
from freshet.terminal import say

SPEC = shlex.quote(str(Path(__file__).parents[2] / "examples" / "quickstart" / "freshet.toml"))
"""Environment of the shell."""
PYTHON = shlex.quote(sys.executable)
REST = {name: text for name, text in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command line in which `$F` is freshet."""
    run = f"{PYTHON} -m freshet"
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line.replace('$F', run)}"],
        env={**REST, **environment}, capture_output=True, timeout=120, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (f"$F check {SPEC} >&-", 0),
        (f"$F check {SPEC} 2>&- <&- >/dev/null", 0),
        (f"$F check {SPEC} >&- 2>&- <&-", 0),
        ("$F rank --url http://127.0.0.1:9 <&-", 1),
        (f"$F check {SPEC} >/dev/full", 1),
        (f"$F check {SPEC} | true", 1),
    ],
)
def test_closed_or_full_streams_cause_no_traceback(line: str, code: int) -> None:
    done = shell(line)

    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    assert done.returncode in ({0, code} if "|" in line else {code}), done.stderr


def test_output_to_a_closed_stream_reaches_no_open_file(tmp_path: Path) -> None:
    code = "import sys; from freshet.terminal import mend_streams; mend_streams(); "
    code += "file = open(sys.argv[1], 'w'); print('said'); assert file.fileno() > 2"
    done = shell(f'{PYTHON} -c "{code}" {tmp_path / "file"} >&- <&-')

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("environment", [
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C"},
])  # fmt: skip
def test_characters_that_the_encoding_lacks_are_escaped(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = RunFolder(tmp_path / "run").create()
    open_eventlog(f"sqlite:{folder.log}").close()
    service = {"pid": None, "port": 1, "since_s": 0.0, "restarts": 1, "last_exit": "größer中"}
    write_run(folder, RunState(1, {"gateway": service}, "freshet up größer中.toml", stopped_ms=1))

    text = shell(f"$F status --folder {folder.path}", **environment)
    found = shell(f"$F status --folder {folder.path} --json", **environment)

    assert text.returncode == 0, text.stderr
    assert "größer中".encode() in text.stdout or rb"er\u4e2d" in text.stdout
    assert json.loads(found.stdout)["supervisor"]["again"] == "freshet up größer中.toml"


def test_a_line_for_a_closed_terminal_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        say("a line")
        say("and another")
        monkeypatch.undo()  # and nothing is left that closing could not write
