"""Forms that several parts of the spec share."""

from __future__ import annotations

import math
from typing import Any

from freshet.options import Text, Wrong

__all__ = ["DAY", "HOUR", "MINUTE", "NAME", "PATH", "SECOND", "Constant"]

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000  # milliseconds

NAME = Text(
    "a name of letters, digits and _, starting with a letter, at most 64 long", r"[A-Za-z]\w*", longest=64
)
PATH = Text('the path of a field, such as "user.id"', r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class Constant:
    """The form of a value of the user's own: text or a number."""

    expected = "text, an integer of 64 bits or a finite number"

    def read(self, value: Any) -> str | int | float:
        """The value."""
        if isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        raise Wrong(self.expected)
