"""The folder of a pass that a signal ends: nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PASS = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `freshet` begins
from freshet.apps.results import pass_folder
with pass_folder(sys.argv[1] or None) as folder:
    (folder / "log").mkdir(parents=True)
    (folder / "file").write_text("half")
    print("begun", flush=True)
    while True:  # a pass works: a signal that comes right before a long wait would be seen after it
        threading.Event().wait(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
@pytest.mark.parametrize("keep", ["", "new", "empty"])
def test_a_pass_that_is_ended_leaves_nothing(tmp_path: Path, keep: str, number: signal.Signals) -> None:
    temporary, kept = tmp_path / "temporary", tmp_path / "kept"
    temporary.mkdir()
    if keep == "empty":
        kept.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", PASS, str(kept) if keep else ""],
        env={**os.environ, "TMPDIR": str(temporary)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"

    process.send_signal(number)
    _, error = process.communicate(timeout=120)

    by_python = number == signal.SIGINT  # KeyboardInterrupt, which the command ends with 130
    assert process.returncode == (-number if by_python else 128 + number), error
    assert list(temporary.iterdir()) == []
    assert kept.exists() == (keep == "empty")
    assert keep != "empty" or list(kept.iterdir()) == []
