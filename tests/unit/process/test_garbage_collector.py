"""A process that answers people: what it keeps is out of the garbage collector's sight."""

from __future__ import annotations

import subprocess
import sys


def test_what_is_kept_is_frozen_and_threads_take_short_turns() -> None:
    code = (
        "import gc, sys; from freshet.process.memory import shorten_pauses;"
        "kept = [[] for _ in range(1000)];"
        "shorten_pauses();"
        "print(gc.get_freeze_count() >= 1000, gc.isenabled(), sys.getswitchinterval() < 0.005)"
    )

    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert said.split() == ["True", "True", "True"]
