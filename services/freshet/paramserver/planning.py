"""Which shard should own which slice of the buckets. Pure: the leader of the shards writes what comes out as
a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

__all__ = ["next_plan"]


def next_plan(current: Sequence[str | None], seats: Sequence[str]) -> tuple[str, ...]:
    """Seats of the slices from now on: each slice has a living one, and no seat has two slices more than
    another.

    As few slices move as that allows, so that an equal set of seats changes nothing.

    Args:
        current: seat of each slice by the last plan, or by the claims; None: nobody's.
        seats: that live, in any order; at least one.
    """
    if not seats:
        raise ValueError("a plan needs a shard that lives")
    living = sorted(set(seats))
    planned = [seat if seat in living else None for seat in current]
    counts = Counter({seat: planned.count(seat) for seat in living})
    for i, seat in enumerate(planned):
        if seat is None:
            planned[i] = least = min(living, key=lambda s: (counts[s], s))
            counts[least] += 1
    while True:
        most = max(living, key=lambda s: (counts[s], s))
        least = min(living, key=lambda s: (counts[s], s))
        if counts[most] - counts[least] <= 1:
            return tuple(seat for seat in planned if seat is not None)
        last = max(i for i, seat in enumerate(planned) if seat == most)
        planned[last] = least
        counts[most] -= 1
        counts[least] += 1
