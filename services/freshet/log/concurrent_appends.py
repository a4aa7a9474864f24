"""Appends of several clients at once, each with an outcome of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from freshet.errors import TooLarge
from freshet.types import Append

__all__ = ["append_gathered"]


def append_gathered(
    append: Callable[[Sequence[Append]], Sequence[int]], groups: Sequence[Sequence[Append]]
) -> list[Sequence[int] | TooLarge]:
    """Append the groups of several clients in one call, and say for each what came of it.

    If a record is too large for the log, only its group fails: the groups are appended in halves until it
    stands alone. A log that finds it before it sends anything writes no record twice by that. Kafka finds it
    later where a topic's limit was lowered after the start; events of other groups may then be there twice,
    which the joiner counts as repeats.

    Args:
        append: `Writer.append` of a writer without a name.
        groups: the appends of each client.

    Returns: for each group the first offset of each of its appends, or why none of it was written.
    Raises as `append` does, for all of them, whatever is not about one record.
    """
    try:
        offsets = append([one for group in groups for one in group])
    except TooLarge as error:
        if len(groups) == 1:
            return [error]
        middle = len(groups) // 2
        return [*append_gathered(append, groups[:middle]), *append_gathered(append, groups[middle:])]
    found: list[Sequence[int] | TooLarge] = []
    at = 0
    for group in groups:
        found.append(offsets[at : at + len(group)])
        at += len(group)
    return found
