"""The machine and the code that a figure was measured on, and the processor time of processes."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from bench.report import Figures
from freshet._native import instruction_set

ROOT = Path(__file__).parents[1]


def machine() -> Figures:
    """Return the processor, its load and the code. Call it before anything is measured."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": instruction_set(),
        "load_before": list(os.getloadavg()),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def cpu_s(pid: int) -> float:
    """Return the seconds of processor time that a process has used, all its threads together."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _commit() -> str:
    """Return the commit's short id, with a `+` if tracked files differ from it; "" outside of a clone."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("diff", "HEAD", "--name-only") else "")
