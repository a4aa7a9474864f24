"""What a figure was measured on: without it no figure means anything."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from bench.report import Figures
from freshet._native import instruction_set

__all__ = ["machine"]

ROOT = Path(__file__).parents[1]


def machine() -> Figures:
    """The processor, how busy it is now, and the code: told before anything is measured."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": instruction_set(),
        "load_before": list(os.getloadavg()),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _commit() -> str:
    """The commit's short id, with `+` behind it where tracked files differ from it; "" outside of a clone."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("diff", "HEAD", "--name-only") else "")
