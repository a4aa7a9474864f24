"""Rows that were looked up with their optimiser state, stepped by their holder as the store will step its
own."""

from __future__ import annotations

from freshet import _native
from freshet.config.spec.layout import Group
from freshet.tables.native_arguments import RowKeys, native_slots
from freshet.types import F32

__all__ = ["RowSteps"]


class RowSteps:
    """Of one store group. Any thread may use it.

    Letters: U rows, S floats of a row, T floats of its optimiser state.
    """

    def __init__(self, group: Group) -> None:
        """Values are float32 here, also of a group that holds them in bf16."""
        self._native = _native.RowSteps(native_slots(group))

    @property
    def native(self) -> _native.RowSteps:
        """What native code steps by."""
        return self._native

    @property
    def state_floats(self) -> int:
        """T."""
        return self._native.state_floats

    def step(self, mine: RowKeys, values: F32, states: F32, theirs: RowKeys, gradients: F32) -> int:
        """Step those of my rows (U, S), with states (U, T), that `gradients` (V, S) are of; returns how many.

        As a push of these gradients steps them in the store, to the bit where that holds float32; a row whose
        gradient is not finite stays as it is. Raises ValueError for arrays that do not fit each other.
        """
        return self._native.step(
            mine.keys,
            mine.tables,
            mine.bucket_starts,
            values,
            states,
            theirs.keys,
            theirs.tables,
            theirs.bucket_starts,
            gradients,
        )
