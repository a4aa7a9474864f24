"""What the native core is told: unique keys of a batch, and the slots of a row."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from freshet.config.spec.layout import Group
from freshet.types import U8, U32, U64

__all__ = ["NativeSlot", "RowKeys", "native_slots"]

NativeSlot: TypeAlias = tuple[int, int, float, str, dict[str, float]]
"""Start, width, init, name of the optimiser, its parameters."""


class RowKeys(Protocol):
    """Unique keys of a batch in one store group, in order of their buckets: `seams.rowservice.KeyGroup`."""

    @property
    def group(self) -> int:
        """Store group."""

    @property
    def keys(self) -> U64:
        """(U,) unique by (table, key), sorted by bucket."""

    @property
    def tables(self) -> U8:
        """(U,) table ids."""

    @property
    def bucket_starts(self) -> U32:
        """(buckets + 1,) where each bucket's keys start."""


def native_slots(group: Group) -> list[NativeSlot]:
    """The slots of a group's rows, in order."""
    return [
        (s.start, s.width, float(s.init), s.optimizer.name, dict(s.optimizer.parameters)) for s in group.slots
    ]
