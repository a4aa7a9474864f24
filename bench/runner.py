"""Run one measurement in a process of its own, and end it with its children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from bench.report import Figures

GRACE_S = 10.0  # for a process to end its children after SIGTERM


def run_measurement(
    module: str, words: Sequence[str], limit_s: float, before: Sequence[str] = ()
) -> Figures | str:
    """Run `python -m module --json`; returns its figures, or why there are none.

    `before`: words before the command, which run it elsewhere.

    The last line of its output is the JSON; its stderr passes through. It and its children are a process
    group of their own, which is ended after `limit_s`, or when this process is interrupted.
    """
    command = [*before, sys.executable, "-m", module, "--json", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            out, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"not done after {limit_s:g} s"
        except BaseException:  # an interrupt above all: its children must not outlive this process
            _end(process)
            raise
    if process.returncode:
        return f"exit status {process.returncode}"
    last = out.strip().rpartition("\n")[2]
    try:
        figures = json.loads(last)
    except ValueError:
        figures = None
    return figures if isinstance(figures, dict) else f"the last line is not a JSON object: {last[:80]!r}"


def _end(process: subprocess.Popen[str]) -> None:
    """Terminate the process group; kill it after GRACE_S."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.communicate(timeout=wait_s)
        except subprocess.TimeoutExpired:
            continue
