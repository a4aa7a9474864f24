"""Handles of keys: a push names the keys of its lookup by a digest, so that they travel once.

A shard keeps the keys of the last lookups, in bounded memory. A client sends a handle once the shard has
answered the lookup of these keys. A shard that has them no more (it restarted, or kept others since) does
nothing and says so; the client then sends all pushes with their keys for a while. Links that choose their
codecs use no handles on one host: the digests cost more there than the bytes.

Letters: U keys of a group, R rows beside its lists, K lists, N occurrences in lists.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from freshet.tables.plan import KeyGroup, PooledLists
from freshet.types import U8, U64

HANDLE_BYTES = 16

MOST_LOOKUPS = 4096
MOST_BYTES = 64 << 20
"""What a shard keeps: 4,096 lookups, and of 64 MiB the newest: 7 million keys. Embedders have far fewer in
flight, since permits bound them."""

PAUSE_S = 10.0
"""How long a client sends keys after a shard has forgotten some: if its memory is too small for the lookups
in flight, most handles would cost a second trip."""


def handle_of(groups: Sequence[tuple[int, U64, U8]], lists: Mapping[int, PooledLists] | None = None) -> bytes:
    """Return the handle of (store group, keys (U,) uint64, tables (U,) uint8): 16 bytes of BLAKE2b over all.

    The digest covers the lists of each store group that has any, too. Equal handles mean equal keys and
    lists, whichever client looked them up, so no push can reach the rows of another.
    """
    digest = hashlib.blake2b(digest_size=HANDLE_BYTES)
    for group, keys, tables in groups:
        digest.update(np.array([group, len(keys)], "<u8").tobytes())
        digest.update(np.ascontiguousarray(keys, "<u8").data)
        digest.update(np.ascontiguousarray(tables).data)
    for group, of in (lists or {}).items():
        sizes = [group, len(of.rows), len(of.counts), len(of.positions)]
        digest.update(np.array(sizes, "<u8").tobytes())
        for array in (of.rows, of.counts, of.positions):
            digest.update(np.ascontiguousarray(array, "<u4").data)
    return digest.digest()


class KeysForgottenError(LookupError):
    """The keys of a push's handle are not kept: its sender must name them."""


class KeptKeys:
    """The keys of a shard's last lookups. Thread-safe."""

    def __init__(self, most_lookups: int = MOST_LOOKUPS, most_bytes: int = MOST_BYTES) -> None:
        """Keep none yet."""
        self._most_lookups, self._most_bytes = most_lookups, most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Sequence[KeyGroup]] = OrderedDict()
        self.bytes = 0

    def add(self, groups: Sequence[KeyGroup]) -> None:
        """Keep the keys of a lookup as the newest, and drop the oldest beyond the bounds."""
        lists = {g.group: g.lists for g in groups if g.lists is not None}
        handle = handle_of([(g.group, g.keys, g.tables) for g in groups], lists)
        with self._lock:
            if handle in self._kept:
                self._kept.move_to_end(handle)
                return
            self._kept[handle] = [_copied(group) for group in groups]
            self.bytes += _size(groups)
            while len(self._kept) > self._most_lookups or self.bytes > self._most_bytes:
                _, dropped = self._kept.popitem(last=False)
                self.bytes -= _size(dropped)

    def find(self, handle: bytes) -> Sequence[KeyGroup] | None:
        """Return the keys of a handle; None: they are not kept."""
        with self._lock:
            return self._kept.get(handle)

    def __len__(self) -> int:
        return len(self._kept)


class SentHandles:
    """The handles that a client believes one shard to keep. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Believe in none yet; `now` is the monotonic time in seconds."""
        self._now = now
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._again_at = 0.0

    def add(self, handle: bytes) -> None:
        """Note that the shard has answered the lookup of these keys."""
        with self._lock:
            self._known[handle] = None
            self._known.move_to_end(handle)
            if len(self._known) > MOST_LOOKUPS:
                self._known.popitem(last=False)

    def has(self, handle: bytes) -> bool:
        """Return whether a push may name this handle now."""
        with self._lock:
            return handle in self._known and self._now() >= self._again_at

    def forget(self) -> None:
        """Send keys for PAUSE_S, and believe in no handle from before: the shard did not have one."""
        with self._lock:
            self._known.clear()
            self._again_at = self._now() + PAUSE_S


def _copied(group: KeyGroup) -> KeyGroup:
    """Copy the arrays, which are views of a message: kept as they are, they would keep all of it."""
    of = group.lists
    lists = None if of is None else PooledLists(of.rows.copy(), of.positions.copy(), of.counts.copy())
    return KeyGroup(
        group.group, group.keys.copy(), group.tables.copy(), group.bucket_starts.copy(), lists=lists
    )


def _size(groups: Sequence[KeyGroup]) -> int:
    keys = sum(g.keys.nbytes + g.tables.nbytes + g.bucket_starts.nbytes for g in groups)
    return keys + sum(g.lists.nbytes for g in groups if g.lists is not None)
