"""How Python shares its lock and looks for garbage, beside one busy event loop and a thread that writes."""

from __future__ import annotations

import gc
import sys

__all__ = ["favour_the_loop"]

SWITCH_S = 0.5e-3
"""How long one thread keeps Python's lock while another waits for it. A commit asks for it about ten times:
at Python's own 5 ms most of a commit is waiting behind a busy loop. Shorter than this costs the loop more
than it gains."""

GC_THRESHOLDS = (20_000, 20, 50)
"""Requests under way make thousands of objects that are no garbage: with Python's own 700 they are looked
through several times each."""


def favour_the_loop() -> None:
    """Set up this process for many small requests. To be called once what lives as long as the process is
    made: no collection looks at that again."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
