"""Combined appends of several clients, each with an outcome of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from freshet.errors import TooLarge
from freshet.types import Append

__all__ = ["append_gathered"]


def append_gathered(
    append: Callable[[Sequence[Append]], Sequence[int]], groups: Sequence[Sequence[Append]]
) -> list[Sequence[int] | TooLarge]:
    """Append the groups of several clients in one call; returns the outcome of each group.

    If a record is too large for the log, only its group fails: the call is repeated with halves of the groups
    until that group is alone. A log that checks sizes before it sends writes no record twice. Kafka checks
    later if a topic's limit was lowered after the start; then events of other groups may be written twice,
    and the joiner counts the second as duplicates.

    Args:
        append: `Writer.append` of a writer without a name.
        groups: the appends of each client.

    Returns the first offset of each append of a group, or the error for which none of the group was written.
    Raises other errors of `append`, for all groups.
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
