"""The row store on Redis Cluster, or on one Redis: pages of rows in a hash a bucket, each flush
compare-and-set by bucket.

Layout and commands: `redis_scripts`. Connections and failovers: `redis_nodes`. Reading: `redis_reads`.
Keeping buckets small: `redis_together`. What Redis loses in a failover its owner writes again: the next flush
finds another (fence, seq) than its last, and the bucket is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import structlog
from redis.crc import key_slot

from freshet.errors import Corrupt, DataLost, Fenced, Unavailable
from freshet.rows.checks import (
    check_flush,
    check_identity,
    identity_text,
    parse_identity,
    parse_offsets,
)
from freshet.rows.redis import reads as redis_reads
from freshet.rows.redis.connection import RedisUrl, parse_url
from freshet.rows.redis.nodes import Nodes, Replies, Request
from freshet.rows.redis.reads import Reads, ahead
from freshet.rows.redis.scripts import (
    CLAIM,
    CREATE,
    META_FIELDS,
    REPLACE,
    command,
    evaluate,
)
from freshet.rows.redis.writes import (
    PIECE_BYTES,
    Keys,
    gathered,
    keys_of,
    meta_arguments,
    outcome_of,
    requests_of,
    stage_token,
)
from freshet.rows.store import Sound, StoreIdentity, StoreServer
from freshet.tables.runs import page_writes, widths_of
from freshet.types import (
    I64,
    U8,
    U32,
    U64,
    Bool,
    Bucket,
    BucketMeta,
    Fence,
    Flush,
    RowRuns,
    TimeMs,
)

__all__ = ["RedisRowStore", "Together", "open_url", "server_of"]

# --- Keeping buckets of the Redis row store small: their pages put together after a flush.
#
# Each flush adds pages; rows that were changed since stand in several. When what was added outgrows
# half of what a bucket began with, all of its pages are read, merged natively, and put in the place
# of the old ones by a script that does so only if the bucket is still at the (fence, seq) that they
# were read at. Nobody but the owner is at that fence, so nothing else can have been written under it;
# an owner that is gone, or a failover, changes it.


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


_REPLICA = re.compile(r"slave\d+")


def open_url(url: str) -> RedisRowStore:
    """Open the store of `redis://host:port,host:port/name?options`; see `redis_options`."""
    return RedisRowStore(parse_url(url))


def server_of(name: str, info: Mapping[str, Any]) -> StoreServer:
    """What a master's INFO says of it.

    `connected_slaves` counts also replicas that are not listed, as their link is just made or just broken;
    only those that are, and follow, are counted here. Memory that a managed Redis does not tell of is 0:
    without a limit it is never full.
    """
    listed = [of for field, of in info.items() if _REPLICA.fullmatch(field) and isinstance(of, Mapping)]
    return StoreServer(
        name,
        replicas=sum(of.get("state") == "online" for of in listed),
        used_bytes=int(info.get("used_memory", 0)),
        limit_bytes=int(info.get("maxmemory", 0)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """What does not change in a store's life."""

    buckets: int
    widths: U32  # (256,) bytes of a record by table id


class RedisRowStore:
    """See `freshet.rows.store.RowStore`. Do not carry it across a fork: open it in the child."""

    def __init__(self, url: RedisUrl) -> None:
        self._url = url
        self._nodes = Nodes(url)
        self._identity_key = f"{{{url.name}}}:identity".encode()
        self._known_shape: _Shape | None = None
        self._known_keys: dict[int, Keys] = {}
        self._together = Together(self._ask, self._keys, self._reads)
        self._closed = False

    def servers(self) -> Sequence[StoreServer]:
        """Every master: its replicas, and how full it is."""
        return [server_of(name, info) for name, info in self._nodes.infos().items()]

    # --- identity and metas

    def create(self, identity: StoreIdentity, starting: Mapping[Bucket, BucketMeta]) -> None:
        """Create the model's buckets with their starting offsets, or check that they are this model's.

        Raises DataLost if the store has lost part of itself: a Redis that came back empty must not pass for
        a new model.
        """
        if set(starting) != set(range(identity.buckets)):
            raise ValueError(f"starting metas must be those of buckets 0 to {identity.buckets - 1}")
        found = self.identity()
        if found is None:
            self._refuse_remains(starting)
            requests = [
                self._request(b, evaluate(CREATE, [self._keys(b).meta], meta_arguments(meta)))
                for b, meta in starting.items()
            ]
            self._ask(requests, "creating buckets", to_replicas=True)
            text = identity_text(identity).encode()
            self._ask_identity(command(b"SET", self._identity_key, text, b"NX"))  # last: now it is complete
            found = self.identity()
        if found is None:
            raise Unavailable(f"{self._url}: the store was written, and is gone again; was Redis emptied?")
        check_identity(self._url, identity, found)

    def identity(self) -> StoreIdentity | None:
        """What the store is tied to; None if it was never created."""
        text = self._ask_identity(command(b"GET", self._identity_key))
        return None if text is None else parse_identity(text, f"{self._url}: identity")

    def metas(self, buckets: Sequence[Bucket]) -> Mapping[Bucket, BucketMeta]:
        """Meta of each bucket, from its master."""
        self._check_known(buckets)
        metas = self._stored(buckets)
        lost = [bucket for bucket, meta in metas.items() if meta is None]
        if lost:
            raise Unavailable(
                f"{self._url}: {len(lost)} buckets, {lost[0]} first, have no meta: Redis lost them\n"
                "  an owner that runs writes them again with its next flush"
            )
        return {bucket: meta for bucket, meta in metas.items() if meta is not None}

    def claim(self, buckets: Sequence[Bucket], fence: Fence) -> Mapping[Bucket, BucketMeta]:
        """Write a higher fence into each bucket's meta, and return the metas as they then are.

        If none has a higher fence when it begins and another claims at the same time, the higher one has all
        in the end, and the lower one Fenced.
        """
        self._check_known(buckets)
        for bucket, before in self._stored(buckets).items():
            self._check_claim(bucket, None if before is None else before.fence, fence, "nothing was claimed")
        arguments = [b"%d" % fence]
        requests = [self._request(b, evaluate(CLAIM, [self._keys(b).meta], arguments)) for b in buckets]
        claimed = {}
        for bucket, (reply,) in zip(
            buckets, self._ask(requests, "claiming buckets", to_replicas=True), strict=True
        ):
            if isinstance(reply, list):
                claimed[bucket] = self._meta(bucket, reply)
            else:
                higher = None if reply is None else int(reply)
                self._check_claim(bucket, higher, fence, "other buckets may be claimed")
        return claimed

    # --- rows

    def scan(self, buckets: Sequence[Bucket]) -> Iterator[RowRuns]:
        """All rows of these buckets, in pieces of bounded size, each row once, newest state."""
        self._check_known(buckets)
        yield from self._reads().scan(sorted(set(buckets)))

    def scan_sound(self, bucket: Bucket) -> Sound:
        """Rows of a bucket without those of damaged pages."""
        self._check_known([bucket])
        return self._reads().sound(bucket)

    def read(self, bucket: Bucket, table: int, keys: U64) -> tuple[Bool, U8]:
        """Rows by key: (found (N,), records (N, record_bytes); zeros where not found)."""
        self._check_known([bucket])
        return self._reads().read(bucket, table, keys)

    def read_many(self, buckets: I64, tables: U8, keys: U64) -> Iterator[RowRuns]:
        """Rows by key, of many buckets and tables: those that are there, in pieces of bounded size."""
        self._check_known(buckets.tolist())
        yield from self._reads().read_many(buckets, tables, keys)

    def flush(self, flush: Flush) -> U8:
        """Write changed rows, removed keys and metas of many buckets, each by itself."""
        shape = self._shape()
        check_flush(flush, shape.buckets, shape.widths)
        outcomes = np.zeros(len(flush), np.uint8)
        crowded = np.zeros(len(flush), np.int64)  # bytes of pages that should be put together
        for first, requests in ahead(requests_of(flush, self._keys)):
            for i, replies in enumerate(self._ask(requests, "flushing", to_replicas=True), first):
                outcomes[i], crowded[i] = outcome_of(replies)
        self._together.after(flush, crowded)
        return outcomes

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        self._nodes.close()

    # --- metas

    def _stored(self, buckets: Iterable[Bucket]) -> dict[Bucket, BucketMeta | None]:
        """Meta of each bucket; None where there is none."""
        wanted = list(buckets)
        requests = [self._request(b, command(b"HMGET", self._keys(b).meta, *META_FIELDS)) for b in wanted]
        replies = self._ask(requests, "reading metas")
        return {
            b: None if reply == [None] * len(META_FIELDS) else self._meta(b, reply)
            for b, (reply,) in zip(wanted, replies, strict=True)
        }

    def _meta(self, bucket: int, reply: Sequence[Any]) -> BucketMeta:
        where = self._where(bucket)
        try:
            fence, seq, rows, rows_offset, clock_ms, fmt = (int(reply[i]) for i in (0, 1, 2, 4, 5, 6))
        except (TypeError, ValueError) as error:
            raise Corrupt(f"{where}: expected a meta of numbers, found {reply!r}") from error
        return BucketMeta(
            Fence(fence), seq, rows, parse_offsets(reply[3] or b"", where), rows_offset, TimeMs(clock_ms), fmt
        )

    def _check_claim(self, bucket: int, stored: int | None, fence: Fence, told: str) -> None:
        if stored is None:
            raise DataLost(
                f"{self._where(bucket)}: the bucket is gone: Redis came back without it\n"
                "  restore it from a copy, or empty it: rows are learned again from what the log has"
            )
        if stored > fence:
            raise Fenced(f"bucket {bucket} has fence {stored}, above {fence}; {told}")

    def _refuse_remains(self, starting: Mapping[Bucket, BucketMeta]) -> None:
        """Buckets that have been used, in a store without an identity, are what Redis did not lose."""
        for bucket, meta in self._stored(starting).items():
            if meta is not None and (meta.seq > 0 or meta.fence > starting[bucket].fence):
                raise DataLost(
                    f"{self._where(bucket)}: the bucket has been written to, but the store's identity is "
                    "gone: Redis came back without part of the store\n"
                    "  restore it from a copy, or empty it: rows are learned again from what the log has"
                )

    # --- asking

    def _ask(self, requests: Sequence[Request], doing: str, *, to_replicas: bool = False) -> list[Replies]:
        if self._closed:
            raise Unavailable(f"{self._url}: the store was closed in this process")
        return self._nodes.ask(requests, doing, to_replicas=to_replicas)

    def _ask_identity(self, one: bytes) -> Any:
        ((reply,),) = self._ask([Request(key_slot(self._identity_key), [one], 1)], "reading the identity")
        return reply

    def _request(self, bucket: int, *commands: bytes) -> Request:
        return Request(self._keys(bucket).slot, commands, len(commands))

    def _keys(self, bucket: int) -> Keys:
        keys = self._known_keys.get(bucket)
        if keys is None:
            keys = self._known_keys[bucket] = keys_of(self._url.name, bucket)
        return keys

    def _where(self, bucket: int) -> str:
        return f"{self._url}: bucket {bucket}"

    def _shape(self) -> _Shape:
        if self._known_shape is None:
            identity = self.identity()
            if identity is None:
                raise Unavailable(f"{self._url}: the store was not created yet; its first owner does that")
            self._known_shape = _Shape(identity.buckets, widths_of(identity.record_bytes))
        return self._known_shape

    def _reads(self) -> Reads:
        return Reads(self._ask, self._keys, self._where, self._shape().widths)

    def _check_known(self, buckets: Sequence[Bucket]) -> None:
        if buckets and not 0 <= min(buckets) <= max(buckets) < self._shape().buckets:
            raise KeyError(
                f"{self._url} has buckets 0 to {self._shape().buckets - 1}, asked for {max(buckets)}"
            )
