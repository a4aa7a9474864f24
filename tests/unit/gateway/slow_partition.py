"""A partition of the log that answers later than the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from freshet.log import Answered, GroupOutcome, GroupWriter
from freshet.types import Append


class SlowPartition:
    """A writer that answers groups with records for partition 1, or fails them, once they are released."""

    def __init__(self, writer: GroupWriter) -> None:
        self.writer = writer
        self.held: list[tuple[Sequence[Append], Callable[[GroupOutcome], None]]] = []
        self.released = threading.Event()
        self.error: Exception | None = None

    def append(self, groups: Sequence[Sequence[Append]], answered: Answered) -> None:
        for index, group in enumerate(groups):
            if any(append.partition == 1 for append in group):
                self.held.append((group, partial(answered, index)))
            else:
                self._append(group, partial(answered, index))

    def wait(self, within_s: float) -> None:
        if self.released.wait(within_s):
            held, self.held = self.held, []
            for group, answer in held:
                if self.error is None:
                    self._append(group, answer)
                else:
                    answer(self.error)

    def _append(self, group: Sequence[Append], answer: Callable[[GroupOutcome], None]) -> None:
        self.writer.append([group], lambda _index, outcome: answer(outcome))

    def close(self) -> None:
        self.writer.close()
