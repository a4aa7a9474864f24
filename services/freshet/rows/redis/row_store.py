"""The row store on Redis Cluster, or on one Redis: a hash of row pages per bucket; a flush compares and sets
each bucket.

Layout and commands are in `scripts`, connections and failovers in `nodes` and `connection`, pages and
reads in `pages`. If a failover loses writes of a bucket, its owner's next flush finds another (fence, seq)
than its last, and replaces the bucket.
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
from freshet.rows.redis import pages as redis_pages
from freshet.rows.redis.connection import RedisUrl, parse_url
from freshet.rows.redis.nodes import Nodes, Replies, Request
from freshet.rows.redis.pages import (
    PIECE_BYTES,
    Keys,
    Reads,
    ahead,
    keys_of,
    meta_arguments,
    outcome_of,
    requests_of,
    stage_token,
    staged,
)
from freshet.rows.redis.scripts import (
    CLAIM,
    CREATE,
    READ_FIELDS,
    REPLACE,
    command,
    evaluate,
)
from freshet.rows.store import (
    LostMetas,
    Sound,
    StoreIdentity,
    StoreServer,
    check_flush,
    check_identity,
    identity_text,
    parse_identity,
    parse_offsets,
)
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

# --- Merging of pages after a flush.
#
# Each flush adds pages; rows that change often are in several. When the added bytes exceed half of those
# that the bucket began with, all of its pages are read, merged natively, and replaced by a script, if the
# bucket is still at the (fence, seq) at which they were read. Only the owner writes under its fence, so no
# write can be lost; a new owner or a failover changes (fence, seq).


_log = structlog.get_logger(__name__)

LEAST_BYTES, TIMES_FLUSHED = 64 << 20, 4
"""Bytes of pages that a flush merges at most: LEAST_BYTES, or TIMES_FLUSHED times its own bytes. A changed
byte costs three bytes read and two written in the long run. Buckets left out are first the next time."""


class Ask(Protocol):
    """Type of `Nodes.ask`."""

    def __call__(
        self, requests: Sequence[Request], doing: str, *, to_replicas: bool = False
    ) -> list[Replies]:
        """Return the replies of each request."""


class PageMerger:
    """Merges pages of one store. Not thread-safe; the flush thread calls it."""

    def __init__(self, ask: Ask, keys_of: Callable[[int], Keys], reads: Callable[[], Reads]) -> None:
        self._ask, self._keys_of, self._reads = ask, keys_of, reads
        self._next = 0  # bucket to begin with

    def merge_after(self, flush: Flush, crowded: I64) -> None:
        """Merge pages of some buckets of a written flush.

        A failure is logged, and the next flush tries again; the flush itself is written.

        Args:
            flush: the flush, K buckets.
            crowded: (K,) int64, bytes of the pages of buckets to merge, 0 for others.
        """
        chosen = self._in_turn(flush.buckets, crowded, max(LEAST_BYTES, TIMES_FLUSHED * len(flush.runs.body)))
        try:
            for some in _pieces(chosen, crowded):
                self._merge(flush, some, large=int(crowded[some[0]]) > redis_pages.BYTES_AT_ONCE)
        except (Unavailable, Corrupt) as error:
            _log.warning("pages of rows are not merged", reason=str(error))

    def _in_turn(self, buckets: I64, crowded: I64, most_bytes: int) -> list[int]:
        """Return indices of buckets to merge, of bounded size, starting at the next bucket."""
        waiting = np.flatnonzero(crowded)
        begin = int(np.searchsorted(buckets[waiting], self._next))
        waiting = np.concatenate((waiting[begin:], waiting[:begin]))
        many = max(1, int(np.searchsorted(np.cumsum(crowded[waiting]), most_bytes, side="right")))
        chosen: list[int] = waiting[:many].tolist()
        if chosen:
            self._next = int(buckets[chosen[-1]]) + 1
        return chosen

    def _merge(self, flush: Flush, some: Sequence[int], *, large: bool) -> None:
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
            data = staged(stage, writes, i)
            known = [*label, b"%d" % writes.pages_of(i), b"%d" % writes.bytes_of(i)]
            data.append(evaluate(REPLACE, [keys.meta, keys.rows, stage], known))
            requests.append(Request(keys.slot, data, len(data) // 2 + 1))
        self._ask(requests, "merging pages")


def _pieces(chosen: Sequence[int], sizes: I64) -> list[list[int]]:
    """Split buckets into groups of about PIECE_BYTES, at least one bucket each."""
    groups: list[list[int]] = []
    left = 0
    for i in chosen:
        if not groups or sizes[i] > left:
            groups.append([])
            left = PIECE_BYTES
        groups[-1].append(i)
        left -= int(sizes[i])
    return groups


_REPLICA = re.compile(r"slave\d+")


def open_url(url: str) -> RedisRowStore:
    """Open the store of `redis://host:port,host:port/name?options`; see `RedisOptions`."""
    return RedisRowStore(parse_url(url))


def server_of(name: str, info: Mapping[str, Any]) -> StoreServer:
    """Return the figures of a master's INFO.

    Counts the listed replicas that are online: `connected_slaves` also counts those with a link that has just
    been opened or lost. Memory that a managed Redis does not report is 0.
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
    """Constants of a store."""

    buckets: int
    widths: U32  # (256,) bytes of a record by table id


class RedisRowStore:
    """Row store in Redis; see `RowStore`. Open it after a fork, in the child."""

    def __init__(self, url: RedisUrl) -> None:
        self._url = url
        self._nodes = Nodes(url)
        self._identity_key = f"{{{url.name}}}:identity".encode()
        self._known_shape: _Shape | None = None
        self._known_keys: dict[int, Keys] = {}
        self._merger = PageMerger(self._ask, self._keys, self._reads)
        self._closed = False

    def servers(self) -> Sequence[StoreServer]:
        """Return the replicas and memory of every master."""
        return [server_of(name, info) for name, info in self._nodes.infos().items()]

    # --- identity and metas

    def create(self, identity: StoreIdentity, starting: Mapping[Bucket, BucketMeta]) -> None:
        """Create the model's buckets, or check that the store is this model's; see `RowStore`.

        Raises:
            ValueError: `starting` lacks a bucket.
            Mismatch: the store belongs to another model, spec or log.
            DataLost: the store has lost a part; a Redis that came back empty is no new model.
            Unavailable: the store cannot be reached, or was emptied during the call.
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
            self._ask_identity(command(b"SET", self._identity_key, text, b"NX"))  # last: marks completion
            found = self.identity()
        if found is None:
            raise Unavailable(f"{self._url}: the store was written and is gone again; was Redis emptied?")
        check_identity(self._url, identity, found)

    def identity(self) -> StoreIdentity | None:
        """Return the identity of the store; None before `create`."""
        text = self._ask_identity(command(b"GET", self._identity_key))
        return None if text is None else parse_identity(text, f"{self._url}: identity")

    def metas(self, buckets: Sequence[Bucket]) -> Mapping[Bucket, BucketMeta]:
        """Return the meta of each bucket, from its master. Raises LostMetas if Redis lost one."""
        self._check_known(buckets)
        metas = self._stored(buckets)
        lost = [bucket for bucket, meta in metas.items() if meta is None]
        if lost:
            raise LostMetas(
                f"{self._url}: {len(lost)} buckets, {lost[0]} first, have no meta: Redis lost them\n"
                "  their owner writes them again with its next flush, if it runs",
                lost,
            )
        return {bucket: meta for bucket, meta in metas.items() if meta is not None}

    def claim(self, buckets: Sequence[Bucket], fence: Fence) -> Mapping[Bucket, BucketMeta]:
        """Write a higher fence into each bucket's meta and return the new metas.

        Raises Fenced if a bucket has a higher fence. If claims are concurrent, the highest fence gets all
        buckets; the others raise Fenced, and may have claimed some in between.
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
        """Yield all rows of these buckets; see `RowStore`."""
        self._check_known(buckets)
        yield from self._reads().scan(sorted(set(buckets)))

    def scan_sound(self, bucket: Bucket) -> Sound:
        """Return the rows of a bucket without its damaged pages."""
        self._check_known([bucket])
        return self._reads().sound(bucket)

    def read(self, bucket: Bucket, table: int, keys: U64) -> tuple[Bool, U8]:
        """Return (found (N,) bool, records (N, record_bytes) uint8) of keys (N,); zeros if absent."""
        self._check_known([bucket])
        return self._reads().read(bucket, table, keys)

    def read_many(self, buckets: I64, tables: U8, keys: U64) -> Iterator[RowRuns]:
        """Yield rows by (N,) buckets, tables and keys; see `RowStore`."""
        self._check_known(buckets.tolist())
        yield from self._reads().read_many(buckets, tables, keys)

    def flush(self, flush: Flush) -> U8:
        """Write a flush, each bucket atomically; see `RowStore`."""
        shape = self._shape()
        check_flush(flush, shape.buckets, shape.widths)
        outcomes = np.zeros(len(flush), np.uint8)
        crowded = np.zeros(len(flush), np.int64)  # bytes of pages to merge
        for first, requests in ahead(requests_of(flush, self._keys)):
            for i, replies in enumerate(self._ask(requests, "flushing", to_replicas=True), first):
                outcomes[i], crowded[i] = outcome_of(replies)
        self._merger.merge_after(flush, crowded)
        return outcomes

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        self._nodes.close()

    # --- metas

    def _stored(self, buckets: Iterable[Bucket]) -> dict[Bucket, BucketMeta | None]:
        """Return the meta of each bucket; None where absent."""
        wanted = list(buckets)
        requests = [self._request(b, command(b"HMGET", self._keys(b).meta, *READ_FIELDS)) for b in wanted]
        replies = self._ask(requests, "reading metas")
        return {
            b: None if reply == [None] * len(READ_FIELDS) else self._meta(b, reply)
            for b, (reply,) in zip(wanted, replies, strict=True)
        }

    def _meta(self, bucket: int, reply: Sequence[Any]) -> BucketMeta:
        where = self._where(bucket)
        try:
            fence, seq, rows, rows_offset, clock_ms, fmt = (int(reply[i]) for i in (0, 1, 2, 4, 5, 6))
            writer = None if reply[7] is None else Fence(int(reply[7]))
        except (TypeError, ValueError) as error:
            raise Corrupt(f"{where}: expected a meta of numbers, found {reply!r}") from error
        applied = parse_offsets(reply[3] or b"", where)
        return BucketMeta(Fence(fence), seq, rows, applied, rows_offset, TimeMs(clock_ms), fmt, writer)

    def _check_claim(self, bucket: int, stored: int | None, fence: Fence, effect: str) -> None:
        if stored is None:
            raise DataLost(
                f"{self._where(bucket)}: the bucket is gone: Redis came back without it\n"
                "  restore it from a copy, or empty it: rows are learned again from what the log has"
            )
        if stored > fence:
            raise Fenced(f"bucket {bucket} has fence {stored}, above {fence}; {effect}")

    def _refuse_remains(self, starting: Mapping[Bucket, BucketMeta]) -> None:
        """Raise DataLost if a store without an identity has used buckets: Redis lost a part of it."""
        for bucket, meta in self._stored(starting).items():
            if meta is not None and (meta.seq > 0 or meta.fence > starting[bucket].fence):
                raise DataLost(
                    f"{self._where(bucket)}: the bucket has been written to, but the store's identity is "
                    "gone: Redis came back without part of the store\n"
                    "  restore it from a copy, or empty it: rows are learned again from what the log has"
                )

    # --- requests

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
                raise Unavailable(f"{self._url}: the store does not exist yet; its first owner creates it")
            self._known_shape = _Shape(identity.buckets, widths_of(identity.record_bytes))
        return self._known_shape

    def _reads(self) -> Reads:
        return Reads(self._ask, self._keys, self._where, self._shape().widths)

    def _check_known(self, buckets: Sequence[Bucket]) -> None:
        if buckets and not 0 <= min(buckets) <= max(buckets) < self._shape().buckets:
            raise KeyError(f"{self._url} has buckets 0 to {self._shape().buckets - 1}, not {max(buckets)}")
