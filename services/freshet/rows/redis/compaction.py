"""Keeping buckets of the Redis row store small: their pages put together after a flush.

Each flush adds pages; rows that were changed since stand in several. When what was added outgrows half of
what a bucket began with, all of its pages are read, merged natively, and put in the place of the old ones by
a script that does so only if the bucket is still at the (fence, seq) that they were read at. Nobody but the
owner is at that fence, so nothing else can have been written under it; an owner that is gone, or a failover,
changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import structlog

from freshet.errors import Corrupt, Unavailable
from freshet.rows.redis import reads as redis_reads
from freshet.rows.redis.nodes import Replies, Request
from freshet.rows.redis.reads import Reads
from freshet.rows.redis.scripts import REPLACE, evaluate
from freshet.rows.redis.writes import PIECE_BYTES, Keys, gathered, stage_token
from freshet.tables.pages import page_writes
from freshet.types import I64, Flush

__all__ = ["Together"]

_log = structlog.get_logger(__name__)

LEAST_BYTES, TIMES_FLUSHED = 64 << 20, 4
"""Read by one flush for putting pages together: so much, or so many times what the flush wrote. A changed
byte costs three read and two written in the long run; buckets that must wait are those whose turn comes
next."""


class Ask(Protocol):
    """Of `Nodes.ask`."""

    def __call__(
        self, requests: Sequence[Request], doing: str, *, to_replicas: bool = False
    ) -> list[Replies]:
        """Replies of each request."""


class Together:
    """Puts pages of one store together. Called by one thread at a time, that which flushes."""

    def __init__(self, ask: Ask, keys_of: Callable[[int], Keys], reads: Callable[[], Reads]) -> None:
        self._ask, self._keys_of, self._reads = ask, keys_of, reads
        self._next = 0  # the bucket whose turn it is

    def after(self, flush: Flush, crowded: I64) -> None:
        """Put pages together of some buckets of a flush that was just written, those that need it: (K,) bytes
        of their pages, 0 for the others.

        The flush is written whatever happens here; what fails is tried again by the next one.
        """
        chosen = self._in_turn(flush.buckets, crowded, max(LEAST_BYTES, TIMES_FLUSHED * len(flush.runs.body)))
        try:
            for some in _pieces(chosen, crowded):
                self._put(flush, some, large=int(crowded[some[0]]) > redis_reads.BYTES_AT_ONCE)
        except (Unavailable, Corrupt) as error:
            _log.warning("pages of rows are not put together", reason=str(error))

    def _in_turn(self, buckets: I64, crowded: I64, most_bytes: int) -> list[int]:
        """Places in the flush of buckets that need it, from the one whose turn it is on, of bounded size."""
        waiting = np.flatnonzero(crowded)
        begin = int(np.searchsorted(buckets[waiting], self._next))
        waiting = np.concatenate((waiting[begin:], waiting[:begin]))
        many = max(1, int(np.searchsorted(np.cumsum(crowded[waiting]), most_bytes, side="right")))
        chosen: list[int] = waiting[:many].tolist()
        if chosen:
            self._next = int(buckets[chosen[-1]]) + 1
        return chosen

    def _put(self, flush: Flush, some: Sequence[int], *, large: bool) -> None:
        reads, token = self._reads(), stage_token()
        numbers = flush.buckets[some].tolist()
        labels = [(b"%d" % flush.fences[i], b"%d" % flush.seqs[i]) for i in some]
        found = [reads.large(number) for number in numbers] if large else reads.labelled(numbers)
        kept = sorted(
            (int(flush.buckets[i]), int(flush.seqs[i]), label, one.items)
            for i, label, one in zip(some, labels, found, strict=True)
            if (one.fence, one.seq) == label
        )
        runs = reads.runs([(bucket, items) for bucket, _, _, items in kept])
        buckets = np.array([bucket for bucket, *_ in kept], np.int64)
        writes = page_writes(runs, buckets, np.array([seq for _, seq, *_ in kept], np.int64), whole=True)
        requests = []
        for i, (bucket, _, label, _) in enumerate(kept):
            keys = self._keys_of(bucket)
            stage = keys.stage(token)
            data = gathered(stage, writes, i)
            known = [*label, b"%d" % writes.pages_of(i), b"%d" % writes.bytes_of(i)]
            data.append(evaluate(REPLACE, [keys.meta, keys.rows, stage], known))
            requests.append(Request(keys.slot, data, len(data) // 2 + 1))
        self._ask(requests, "putting pages together")


def _pieces(chosen: Sequence[int], sizes: I64) -> list[list[int]]:
    """Groups of about PIECE_BYTES, one at least."""
    groups: list[list[int]] = []
    room = 0
    for i in chosen:
        if not groups or sizes[i] > room:
            groups.append([])
            room = PIECE_BYTES
        groups[-1].append(i)
        room -= int(sizes[i])
    return groups
