"""A process ends with its exception, not with warnings of leaked native objects."""

import subprocess
import sys

HOLDS_A_PLAN = """
import threading
import numpy as np
from freshet.tables import Plan

held = threading.Event()

def hold() -> None:
    plan = Plan(tables=np.array([0], np.uint8), buckets=4)
    held.set()
    threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
raise RuntimeError("the disk is on fire")
"""


def test_an_exception_stays_the_last_line_with_native_objects() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HOLDS_A_PLAN], capture_output=True, text=True, timeout=120, check=False
    )

    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "RuntimeError: the disk is on fire"
