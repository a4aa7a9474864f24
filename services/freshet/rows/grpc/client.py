"""The row service over gRPC: a client of all shards of a model, with a connection to each.

Lookups go to all owners in parallel and are repeated while owners change. A push goes to every shard, even
without rows for it, in the order of the calls. The contract is in `freshet.rows.service`.

A connection (`freshet.rpc.link`) has one stream for lookups and one for pushes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from freshet.coordination.assignment import NO_OWNER, Owners
from freshet.errors import Fenced, Overloaded, Refused, Unavailable
from freshet.observability.tracing import current
from freshet.rows.grpc.frames import (
    PushedGroup,
    applied_of,
    known_of,
    lookup_frame,
    push_frame,
    pushed_of,
    rows_into,
    states_into,
)
from freshet.rows.grpc.handles import KeysForgottenError, SentHandles, handle_of
from freshet.rows.service import KeyGroup, Push, RowStates
from freshet.rpc.channel import MIB, Transport
from freshet.rpc.frames import BadFrame, Frame
from freshet.rpc.link import Link, LinkCounts, Metadata
from freshet.rpc.probe import LinkMonitor, codecs_of
from freshet.tables.changes import KnownPushes
from freshet.tables.plan import ListsOfShard, lists_of_shard
from freshet.types import F32, I64, U8, U64, Bool, OffsetRange
from freshet.wires.link_codecs import EXACT, CodecChoice, LinkCodecs
from freshet.wires.row_wire import RowWire, RowWires

SERVICE = "Rows"

_T = TypeVar("_T")

RETRY_S = 0.05
"""Time between two attempts; a lost owner is replaced within seconds."""

IN_FLIGHT_BYTES = 64 * MIB
"""Most bytes of unanswered requests on a stream to a shard: 100 batches of 256 samples."""


@dataclass(frozen=True, slots=True)
class Served:
    """Model and spec that the shards must serve, and the layout of its rows."""

    model: str
    spec_hash: str
    scalars: tuple[int, ...] = ()  # of each store group the floats of a row before its vector

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """Metadata of each call, by which a shard checks its clients."""
        return [("freshet-model", self.model), ("freshet-spec", self.spec_hash)]


class ShardLink(Link):
    """A connection to a shard, and the handles of keys that the shard keeps."""

    def __init__(
        self,
        address: str,
        transport: Transport,
        service: str,
        metadata: Metadata,
        codecs: LinkCodecs,
        *,
        in_flight_bytes: int,
    ) -> None:
        """Connect lazily; see `Link`."""
        super().__init__(address, transport, service, metadata, codecs, in_flight_bytes=in_flight_bytes)
        self.handles = SentHandles()


class RemoteRows:
    """Client of remote shards: RowService, PushesAhead, OwnersChange and PoolsLists. Thread-safe."""

    def __init__(
        self,
        served: Served,
        owners: Callable[[], Owners],
        transport: Transport,
        *,
        choice: CodecChoice = EXACT,
        deadline_s: float = 10.0,
        attempt_s: float = 5.0,
    ) -> None:
        """Connect lazily.

        Args:
            served: model and spec of the shards.
            owners: returns the current owners; cheap, called for each request.
            transport: certificates, token and limits.
            choice: encodings of rows in answers, and of gradients.
            deadline_s: time after which a lookup or `push` fails with Unavailable.
            attempt_s: longest wait for one answer, which a frozen shard costs.
        """
        self._served, self._owners, self._transport = served, owners, transport
        self.wires, self._choice = RowWires.of(served.scalars), choice
        self._monitor = LinkMonitor(self._present_links)
        self._deadline_s, self._attempt_s = deadline_s, attempt_s
        self._lock = threading.Lock()
        self._links: dict[str, ShardLink] = {}
        self._before = LinkCounts()  # of closed links
        self._closed = False

    # --- RowService

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        """Write each key's slots into `out` (U, S) float32; see `RowService`.

        States are sent as float32 in any codec. Retries until the deadline.
        """
        self._until_deadline(lambda: self._lookup_once(groups, out, create, states))

    def lookup_after(
        self,
        ranges: Sequence[OffsetRange],
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        states: RowStates | None = None,
    ) -> None:
        """Write each key's slots into `out` (U, S) float32; see `LookupsAfter`."""
        self._lookup_once(groups, out, True, states, ranges)

    def push(self, push: Push) -> bool:
        """Apply a batch's gradients; see `RowService`.

        A push of unknown outcome is repeated until the deadline. If owners change meanwhile it fails with
        Unavailable: earlier pushes may be lost, and the caller must rewind to `applied` (PROTOCOL 7).
        """
        number = self._owners().number

        def attempt() -> bool:
            if self._owners().number != number:
                raise _OwnersChanged("owners of buckets have changed; rewind to `applied`")
            try:
                return self.push_soon(push).result(self._attempt_s)
            except Late:
                why = f"no answer to a push within {self._attempt_s} s"
                with self._lock:
                    links = list(self._links.values())
                for link in links:
                    link.give_up("Push", why)
                raise Unavailable(why) from None

        return self._until_deadline(attempt)

    def applied(self) -> Mapping[int, Sequence[int]]:
        """Return {partition: the distinct offsets of all buckets}; see `RowService`.

        Raises:
            Unavailable: a bucket has no owner, or owners are changing.
            BadFrame: an answer names buckets that the model does not have.
        """
        owners = self._owners()
        owners.check_whole()
        merged: dict[int, set[int]] = {}
        held: I64 = np.zeros(len(owners.of_bucket), np.int64)
        for link in self._links_of(owners):
            offsets, buckets = applied_of(link.call("Applied", self._attempt_s))
            if len(buckets) and not 0 <= buckets.min() <= buckets.max() < len(held):
                raise BadFrame(f"{link.address}: its buckets are not all of this model", "shape")
            np.add.at(held, buckets, 1)
            for partition, distinct in offsets.items():
                merged.setdefault(partition, set()).update(distinct)
        if not (held == 1).all() or self._owners().number != owners.number:
            raise Unavailable("owners of buckets are changing; try again")
        return {partition: sorted(offsets) for partition, offsets in sorted(merged.items())}

    # --- PushesAhead, OwnersChange, PoolsLists

    def push_soon(self, push: Push) -> Future[bool]:
        """Send a push to every shard; see `PushesAhead`."""
        done: Future[bool] = Future()
        try:
            owners = self._owners()
            owners.check_whole()
            links = self._links_of(owners)
            answers = [(link, self._send_push(link, push, owners, shard)) for shard, link in enumerate(links)]
        except Exception as error:
            done.set_exception(error)
            return done
        _PushResult(answers, done)
        return done

    def ownership(self) -> int:
        """Return a number that rises with every change of owners."""
        return self._owners().number

    def pooling_shards(self) -> int:
        """Return the number of shards that own buckets."""
        return len(self._owners().addresses)

    # --- connections

    def total(self) -> LinkCounts:
        """Return the traffic of all links, including closed ones."""
        with self._lock:
            total = replace(self._before)
            for link in self._links.values():
                total.add(link.counts)
        return total

    def close(self) -> None:
        """Close the connections; open requests fail. Idempotent."""
        with self._lock:
            self._closed = True
            links, self._links = list(self._links.values()), {}
            for link in links:
                self._before.add(link.counts)
        self._monitor.stop()
        for link in links:
            link.close()

    def codecs(self) -> dict[str, dict[str, Any]]:
        """Return the codecs of each link and why it uses them: {address: LinkCodecs.status()}."""
        return {link.address: link.codecs.status() for link in self._present_links()}

    # --- internals

    def _present_links(self) -> list[ShardLink]:
        with self._lock:
            return list(self._links.values())

    def _links_of(self, owners: Owners) -> list[ShardLink]:
        """Return a connection to each owner, in their order; connections to former owners are closed."""
        with self._lock:
            if self._closed:
                raise Unavailable("the row service's client was closed")
            gone = [self._links.pop(a) for a in self._links.keys() - set(owners.addresses)]
            for link in gone:
                self._before.add(link.counts)
            for address in owners.addresses:
                if address not in self._links:
                    self._links[address] = ShardLink(
                        address,
                        self._transport,
                        SERVICE,
                        self._served.metadata,
                        codecs_of(address, self._choice),
                        in_flight_bytes=IN_FLIGHT_BYTES,
                    )
                    self._monitor.start()
            links = [self._links[address] for address in owners.addresses]
        for link in gone:
            link.close()
        return links

    def _send_push(self, link: ShardLink, push: Push, owners: Owners, shard: int) -> Future[Frame]:
        groups = [
            _pushed_part(g, gradients, _places_of(g, owners, shard))
            for g, gradients in zip(push.groups, push.gradients, strict=True)
        ]
        groups = [group for group in groups if len(group.keys)]
        known = None
        if groups and link.codecs.saves_bytes:
            lists = {g.group: g.lists for g in groups if g.lists is not None}
            handle = handle_of([(g.group, g.keys, g.tables) for g in groups], lists)
            known = handle if link.handles.has(handle) else None
        codec, owned = link.codecs.gradients, owners.of_bucket == shard
        link.codecs.count_gradients(sum(group.gradients.nbytes for group in groups))
        traced = replace(push, span=push.span or current())
        wire = self.wires.gradients
        return link.ask("Push", lambda i: push_frame(i, traced, groups, wire, codec, owned, known))

    def _lookup_once(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        create: bool,
        states: RowStates | None,
        after: Sequence[OffsetRange] = (),
    ) -> None:
        owners, span, with_states = self._owners(), current(), states is not None
        if with_states and any(g.lists is not None for g in groups):
            raise ValueError("optimiser states cannot be looked up with sums of lists")
        _check_owned(groups, owners)
        sent = []
        for shard, link in enumerate(self._links_of(owners)):
            places = {g.group: _places_of(g, owners, shard) for g in groups}
            keys = [(g.group, *_keys_of(g, places[g.group])) for g in groups]
            wanted = [part for part in keys if len(part[1])]
            there = {group for group, *_ in wanted}
            pooled = {
                g.group: lists_of_shard(g.lists, places[g.group], len(g.keys))
                for g in groups
                if g.lists is not None and g.group in there
            }
            lists = {group: of.lists for group, of in pooled.items()}
            if wanted:
                keep = create and link.codecs.saves_bytes
                encode = partial(
                    lookup_frame,
                    groups=wanted,
                    codec=link.codecs.rows,
                    create=create,
                    states=with_states,
                    keep=keep,
                    after=after,
                    span=span,
                    lists=lists,
                )
                future = link.ask("Lookup", encode)
                handle = handle_of(wanted, lists) if keep else None  # while the shard works
                parts = {group: pooled.get(group, places[group]) for group, *_ in wanted}
                sent.append((shard, link, parts, future, handle))
        deadline = time.monotonic() + self._attempt_s
        rows_of = {g.group: rows for g, rows in zip(groups, out, strict=True)}
        floats_of = {g.group: s for g, s in zip(groups, states.floats, strict=True)} if states else {}
        for g in groups:
            if g.lists is not None:
                rows_of[g.group][len(g.lists.rows) :] = 0  # sums of all shards are added up
        known = []
        for shard, link, parts, future, handle in sent:
            frame = self._answer(link, "Lookup", future, deadline)
            if handle is not None:
                link.handles.add(handle)
            for group, of in parts.items():
                rows = rows_of[group]
                if isinstance(of, ListsOfShard):
                    link.codecs.count_rows(4 * rows.shape[1] * len(of.lists))
                    _add_sums(frame, group, of, rows, self.wires.rows)
                    continue
                link.codecs.count_rows(4 * rows.shape[1] * (len(rows) if of is None else len(of)))
                _scatter(frame, group, of, rows, partial(rows_into, wire=self.wires.rows))
                if states is not None:
                    _scatter(frame, group, of, floats_of[group], states_into)
            if states is not None:
                known.append((owners.of_bucket == shard, known_of(frame, list(parts), len(owners.of_bucket))))
        if states is not None:
            states.known = _merged(list(rows_of), known)

    def _answer(self, link: Link, method: str, future: Future[Frame], deadline: float) -> Frame:
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except Late:
            link.give_up(method, f"no answer within {self._attempt_s} s")
            raise Unavailable(f"{link.address}: no answer within {self._attempt_s} s") from None

    def _until_deadline(self, attempt: Callable[[], _T]) -> _T:
        deadline = time.monotonic() + self._deadline_s
        while True:
            try:
                return attempt()
            except _OwnersChanged:
                raise
            except Unavailable as error:
                wait_s = error.retry_after_s if isinstance(error, Overloaded) else RETRY_S
                if time.monotonic() + wait_s >= deadline:
                    raise
            time.sleep(wait_s)


class _OwnersChanged(Unavailable):
    """Owners have changed, so the caller must rewind before it pushes again."""


class _PushResult:
    """Completes one future once all shards have answered a push."""

    def __init__(self, answers: Sequence[tuple[ShardLink, Future[Frame]]], done: Future[bool]) -> None:
        self._answers, self._done = answers, done
        self._missing = len(answers)
        self._lock = threading.Lock()
        for _, future in answers:
            future.add_done_callback(self._count_answer)

    def _count_answer(self, _: Future[Frame]) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
        applied, errors = False, list[BaseException]()
        for link, future in self._answers:
            try:
                applied |= pushed_of(future.result())
            except KeysForgottenError as error:  # pushed again, the link sends the keys
                link.handles.forget()
                errors.append(Unavailable(f"{link.address}: {error}"))
            except Exception as error:
                errors.append(error)
        if errors:
            self._done.set_exception(_worst(errors))
        else:
            self._done.set_result(applied)


def _worst(errors: Sequence[BaseException]) -> BaseException:
    """Return the error to act on: Fenced ends the caller, Refused rewinds it, the rest is retried."""
    refused = [error for error in errors if isinstance(error, Refused)]
    fenced = [error for error in errors if isinstance(error, Fenced)]
    if fenced or not refused:
        others = [error for error in errors if not isinstance(error, Unavailable)]
        return (fenced or others or list(errors))[0]
    applied: dict[int, int] = {}
    for error in refused:
        for partition, offset in error.applied.items():
            applied[partition] = min(offset, applied.get(partition, offset))
    return Refused(str(refused[0]), applied)


def _places_of(group: KeyGroup, owners: Owners, shard: int) -> I64 | None:
    """Return the positions of a shard's keys in a group; None if the shard owns all buckets."""
    if len(owners.addresses) == 1:
        return None
    counts: I64 = np.diff(group.bucket_starts.astype(np.int64)).astype(np.int64)
    return np.flatnonzero(np.repeat(owners.of_bucket == shard, counts))


def _keys_of(group: KeyGroup, places: I64 | None) -> tuple[U64, U8]:
    return (group.keys, group.tables) if places is None else (group.keys[places], group.tables[places])


def _pushed_part(group: KeyGroup, gradients: F32, places: I64 | None) -> PushedGroup:
    """Return a shard's part of a group's gradients, (G, S) float32, or with lists (R + K, S)."""
    keys, tables = _keys_of(group, places)
    if group.lists is None:
        return PushedGroup.of(group.group, keys, tables, gradients if places is None else gradients[places])
    part = lists_of_shard(group.lists, places, len(group.keys))
    chosen = np.concatenate([part.row_places, part.sum_places])
    return PushedGroup(group.group, keys, tables, gradients[chosen], lists=part.lists)


def _merged(groups: Sequence[int], parts: Sequence[tuple[Bool, KnownPushes]]) -> KnownPushes:
    """Merge the known pushes of several shards' answers. Raises BadFrame if their partitions differ."""
    if len({known.offsets.shape[1] for _, known in parts}) > 1:
        raise BadFrame("shards answer with different numbers of partitions", "shape")
    return KnownPushes.merged(groups, parts)


def _scatter(
    frame: Frame,
    group: int,
    places: I64 | None,
    out: F32,
    into: Callable[[Frame, Mapping[int, F32]], None],
) -> None:
    """Write an answer's rows, or states, to their positions in `out`."""
    if places is None:
        into(frame, {group: out})
        return
    rows = np.empty((len(places), out.shape[1]), np.float32)
    into(frame, {group: rows})
    out[places] = rows


def _add_sums(frame: Frame, group: int, part: ListsOfShard, out: F32, wire: RowWire) -> None:
    """Write a shard's rows into `out`, (R + K, S) float32, and add its sums of lists to the others'."""
    values = np.empty((len(part.lists), out.shape[1]), np.float32)
    rows_into(frame, {group: values}, wire)
    beside = len(part.row_places)
    out[part.row_places] = values[:beside]
    out[part.sum_places] += values[beside:]


def _check_owned(groups: Sequence[KeyGroup], owners: Owners) -> None:
    """Raise Unavailable if a key's bucket has no owner."""
    unowned = owners.of_bucket == NO_OWNER
    if unowned.any() and any(unowned[np.diff(g.bucket_starts.astype(np.int64)) > 0].any() for g in groups):
        owners.check_whole()
