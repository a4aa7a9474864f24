"""Garbage collection and thread switches of a serving process."""

from __future__ import annotations

import subprocess
import sys


def test_live_objects_are_frozen_and_switches_shorter() -> None:
    code = (
        "import gc, sys; from freshet.process.memory import shorten_pauses;"
        "kept = [[] for _ in range(1000)];"
        "shorten_pauses();"
        "print(gc.get_freeze_count() >= 1000, gc.isenabled(), sys.getswitchinterval() < 0.005)"
    )

    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert output.split() == ["True", "True", "True"]
