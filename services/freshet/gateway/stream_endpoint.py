"""The door of one stream: requests in, answers out once the log has their events.

Requests wait for the next append unseen, are then checked together, in one native call, and appended
together: what a single event costs is little more than its share of that. A request with an event that is
refused is read again on its own, so that its client is told what is wrong with which event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import orjson
import structlog

from freshet.clock import Clock, latest_ms
from freshet.config.spec.model import Stream
from freshet.config.spec.time_units import unit_hint, written_in_larger_unit
from freshet.config.spec.topics import MAX_ELEMENTS, RecordLimits
from freshet.errors import BadInput, Overloaded
from freshet.features import TakenBodies, partition_of
from freshet.gateway.api import AVRO, AVRO_BATCH, AVRO_RAW
from freshet.gateway.codec import Accepted, Checked, StreamCodec
from freshet.gateway.core import (
    Entry,
    Refusal,
    answer,
    dead_letter,
    group_entries,
    offsets_of,
    split_avro_batch,
    too_far_ahead,
)
from freshet.gateway.group_commit import Committer
from freshet.http.browser_checks import require_identity, wrong_type
from freshet.http.rate_limits import Payer
from freshet.http.request import Request
from freshet.http.responses import Response, error_response, json_response
from freshet.http.routes import Reply
from freshet.log.schema_ids import frame
from freshet.observability.spans import EventSend, end_event_sends, start_event_send
from freshet.observability.tracing import Context, now_ns, traced
from freshet.types import BytesColumn

if TYPE_CHECKING:
    from freshet.observability.tracer import Tracer

__all__ = ["JSON", "JSON_LINES", "Acks", "Client", "Door", "Rules"]

log = structlog.get_logger(__name__)

JSON = "application/json"
JSON_LINES = ("application/x-ndjson", "application/jsonl")
Count = Callable[[str, int], None]  # outcome, events
Pay = Callable[[Payer | None, int], None]  # payer, events

CHECK_BYTES = 32 << 10
"""With so many bytes unseen they are checked at once, while an append is under way: about 0.2 ms of work, so
the call itself is little of it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a door lets in, and where that goes."""

    partitions: int
    refused_topic: str
    max_events: int  # of one request
    max_ahead_ms: int  # how far ahead of now an event may be dated (PROTOCOL 19)
    limits: RecordLimits  # of records that are derived from events
    labels: int  # of the spec: samples of each impression


@dataclass(frozen=True, slots=True, eq=False)
class Acks:
    """What became of a request's events, as columns."""

    partitions: Sequence[int]  # of the accepted events, in order; durable
    offsets: Sequence[int]
    refused: Sequence[Refusal]


class Client(Protocol):
    """Who asked: is told once what became of it, on the loop."""

    in_columns: bool  # whether acknowledgements are wanted as columns, not as JSON

    def acknowledged(self, body: bytes) -> None:
        """All is durable; `body` says where, as JSON. Only where not `in_columns`."""

    def told(self, acks: Acks) -> None:
        """What is durable and what was refused."""

    def failed(self, error: Exception) -> None:
        """Nothing is known to be durable."""


@dataclass(frozen=True, slots=True)
class _HttpClient:
    topic: str
    reply: Reply
    span: Context | None = None
    in_columns = False

    def acknowledged(self, body: bytes) -> None:
        self.reply(Response(202, body))

    def told(self, acks: Acks) -> None:
        places = zip(acks.partitions, acks.offsets, strict=True)
        json = [{"topic": self.topic, "partition": p, "offset": offset} for p, offset in places]
        self.reply(json_response(*answer(json, acks.refused, total=len(json) + len(acks.refused))))

    def failed(self, error: Exception) -> None:
        self.reply(error_response(error))


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A request on its way through the door."""

    body: bytes
    kind: str  # how its events stand in the body: JSON, AVRO or AVRO_BATCH
    client: Client
    payer: Payer | None  # by whom its events are paid; None: by nobody
    came_ns: int = 0  # wall clock; 0: tracing is off
    span: Context | None = None  # of its request in its client's trace


class Door:
    """Takes the requests of one stream. Lives on one event loop."""

    def __init__(
        self,
        stream: Stream,
        codec: StreamCodec,
        committer: Committer,
        rules: Rules,
        *,
        clock: Clock,
        count: Count,
        pay: Pay = lambda payer, events: None,
    ) -> None:
        """`count` is told how many events were `accepted` and `refused`, once the log has them; `pay` by whom
        how many are paid, when they go there."""
        self._pay = pay
        self._stream, self._codec, self._committer, self._rules = stream, codec, committer, rules
        self._clock, self._count = clock, count
        self._topic = orjson.dumps(stream.topic).decode()
        # Up to so many bytes an event is not looked at for the size of what is derived from it.
        self._safe_bytes = rules.limits.event_bytes[stream.role]
        if stream.role == "served":
            safe = rules.limits.safe_event_bytes(rules.labels)
            # Avro may be longer than the JSON that it is made of, such as numbers of one digit.
            self._safe_bytes = min(
                self._safe_bytes, safe // 8 if stream.format == "json" else safe, MAX_ELEMENTS
            )
        # By kind, and by how acknowledgements are wanted; what nobody has looked at yet.
        self._gathered: dict[tuple[str, bool], list[_Asked]] = {}
        self._gathered_bytes = 0

    @property
    def topic(self) -> str:
        """Where its events go."""
        return self._stream.topic

    def take(self, request: Request, reply: Reply) -> None:
        """Answer a request, later: with 202 once all its events are durable, or with what else became of it.

        Raises BadInput or HttpError for a request that is none for this door, Overloaded and Unavailable as
        `Committer.expect`.
        """
        body, kind = _events_of(request)
        self.take_body(body, kind, _HttpClient(self._stream.topic, reply), request.payer, request.span)

    def take_body(
        self, body: bytes, kind: str, client: Client, payer: Payer | None = None, span: Context | None = None
    ) -> None:
        """Take events, of whatever protocol, and tell the client later. Raises as `take` does.

        Args:
            body: the events.
            kind: how they stand in it: JSON, AVRO or AVRO_BATCH.
            client: who is told.
            payer: by whom the events are paid.
            span: of its request in its client's trace.
        """
        asked = _Asked(body, kind, client, payer, now_ns(), span)
        self._committer.expect(len(body), self._check)
        self._gathered.setdefault((kind, client.in_columns), []).append(asked)
        before = self._gathered_bytes
        self._gathered_bytes += len(asked.body)
        if before < CHECK_BYTES <= self._gathered_bytes:
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        gathered, self._gathered = self._gathered, {}
        size, self._gathered_bytes = self._gathered_bytes, 0
        self._committer.looked_at(sum(map(len, gathered.values())), size)
        for asked in gathered.values():
            try:
                self._take(asked)
            except Exception as error:
                _tell(asked, error)

    def _take(self, asked: Sequence[_Asked]) -> None:
        """Take requests of one kind."""
        taken = self._taken(asked)
        if taken is None:
            for one in asked:
                self._look_closer(one)
            return
        if len(taken.partitions):
            if self._holds_too_large(taken):
                if len(asked) > 1:
                    for one in asked:  # so that only the request that holds it is looked at event by event
                        self._take([one])
                else:
                    self._look_closer(asked[0])
                return
            try:
                self._append(asked, taken)
            except Overloaded as error:
                if len(asked) == 1:
                    raise
                self._take_singly(asked, error)
                return
        if (taken.counts < 0).any():
            for i in (taken.counts < 0).nonzero()[0].tolist():
                self._look_closer(asked[i])

    def _taken(self, asked: Sequence[_Asked]) -> TakenBodies | None:
        bodies = [one.body for one in asked]
        latest = latest_ms(self._clock) + self._rules.max_ahead_ms
        if asked[0].kind in (AVRO, AVRO_BATCH):
            return self._codec.take_avro(
                bodies,
                lengths=asked[0].kind == AVRO_BATCH,
                latest_ms=latest,
                max_events=self._rules.max_events,
            )
        return self._codec.take_json(bodies, latest_ms=latest, max_events=self._rules.max_events)

    def _holds_too_large(self, taken: TakenBodies) -> bool:
        """Whether a record derived from one of these events would exceed what its topic takes."""
        if taken.size <= self._safe_bytes:  # all of them together
            return False
        sizes = np.diff(taken.records.ends, prepend=0) + np.diff(taken.keys.ends, prepend=0)
        if int(sizes.max()) <= self._safe_bytes:
            return False
        large = np.flatnonzero(sizes > self._safe_bytes)
        return any(self._too_large(taken.records[i], len(taken.keys[i])) for i in large.tolist())

    def _too_large(self, record: bytes, key_bytes: int) -> tuple[str, str] | None:
        """(expected, found) if a record derived from this event would exceed what its topic takes."""
        limits, role = self._rules.limits, self._stream.role
        most = limits.event_bytes[role]
        if len(record) + key_bytes > most:
            return f"an event of at most {most:,} bytes, as the log takes no more", _bytes(
                len(record) + key_bytes
            )
        if role != "served":
            return None
        largest, together, elements = self._codec.sample_bytes(record)
        together *= self._rules.labels
        if elements > MAX_ELEMENTS:
            return f"an event of at most {MAX_ELEMENTS:,} elements", f"{elements:,}"
        if largest > limits.sample_bytes:
            return f"an event whose samples have at most {limits.sample_bytes:,} bytes each", _bytes(largest)
        if together > limits.expanded_bytes:
            expected = (
                f"an event whose samples have at most {limits.expanded_bytes:,} bytes together: its context "
                "is copied into one for each element and label"
            )
            return expected, _bytes(together)
        return None

    def _append(self, asked: Sequence[_Asked], taken: TakenBodies) -> None:
        events = len(taken.partitions)
        sends = _sends_of_bodies(self._codec, self.topic, taken, asked)

        def done(outcome: Sequence[int] | Exception) -> None:
            if sends:
                offsets = outcome if isinstance(outcome, Exception) else taken.offsets(outcome)
                end_event_sends(sends, offsets)
            if isinstance(outcome, Exception):
                _tell([one for one, n in zip(asked, taken.counts.tolist(), strict=True) if n >= 0], outcome)
                return
            self._count("accepted", events)
            if asked[0].client.in_columns:
                self._acknowledge_in_columns(asked, taken, outcome)
                return
            for one, body in zip(asked, taken.answers(self._topic, outcome), strict=True):
                if body:
                    try:
                        one.client.acknowledged(body)
                    except Exception as error:
                        _not_told(error)

        self._committer.submit(taken.appends(self._stream.topic), events=events, size=taken.size, done=done)
        for i, one in enumerate(asked):
            if one.payer is not None and taken.counts[i] > 0:
                self._pay(one.payer, int(taken.counts[i]))

    @staticmethod
    def _acknowledge_in_columns(asked: Sequence[_Asked], taken: TakenBodies, firsts: Sequence[int]) -> None:
        partitions, offsets = taken.partitions.tolist(), taken.offsets(firsts).tolist()
        at = 0
        for one, events in zip(asked, taken.counts.tolist(), strict=True):
            if events >= 0:
                acks = Acks(partitions[at : at + events], offsets[at : at + events], ())
                at += events
                try:
                    one.client.told(acks)
                except Exception as error:
                    _not_told(error)

    def _take_singly(self, asked: Sequence[_Asked], error: Overloaded) -> None:
        """Too much waits for all of them together: let in, of those that came first, what still fits."""
        for i, one in enumerate(asked):
            try:
                self._take([one])
            except Overloaded:
                _tell(asked[i:], error)
                return

    def _look_closer(self, asked: _Asked) -> None:
        """Take a request event by event: the good ones into the log, the others to the topic of refusals."""
        try:
            checked = self._checked(asked)
            now_ms = latest_ms(self._clock)
            taken, refused = self._in_time(checked, now_ms)
            places = partition_of(BytesColumn.of(event.key for event in taken), self._rules.partitions)
            entries = [
                Entry(self._stream.topic, partition, event.key, event.record)
                for partition, event in zip(places.tolist(), taken, strict=True)
            ]
            letters = [
                Entry(
                    self._rules.refused_topic,
                    0,
                    b"",
                    dead_letter(
                        r,
                        topic=self._stream.topic,
                        now_ms=now_ms,
                        max_bytes=self._rules.limits.refused_bytes,
                    ),
                )
                for r in refused
            ]
            self._append_entries(asked, entries, letters, refused)
        except Exception as error:
            _tell([asked], error)

    def _append_entries(
        self, asked: _Asked, entries: Sequence[Entry], letters: Sequence[Entry], refused: Sequence[Refusal]
    ) -> None:
        appends, places = group_entries([*entries, *letters])
        sends = _sends_of_entries(self._codec, self.topic, entries, asked) if entries else None

        def done(outcome: Sequence[int] | Exception) -> None:
            if isinstance(outcome, Exception):
                if sends:
                    end_event_sends(sends, outcome)
                asked.client.failed(outcome)
                return
            self._count("accepted", len(entries))
            self._count("refused", len(refused))
            offsets = offsets_of(outcome, places)[: len(entries)]  # the letters' are nobody's business
            if sends:
                end_event_sends(sends, offsets)
            asked.client.told(Acks([entry.partition for entry in entries], offsets, refused))

        size = sum(e.size for e in entries) + sum(e.size for e in letters)
        self._committer.submit(appends, events=len(places), size=size, done=done)
        self._pay(asked.payer, len(places))  # those that were refused, too: they cost as much

    def _checked(self, asked: _Asked) -> Checked:
        limit = self._rules.max_events
        if asked.kind == AVRO:
            return self._codec.from_avro([asked.body])
        if asked.kind == AVRO_BATCH:
            return self._codec.from_avro(split_avro_batch(asked.body, limit))
        return self._codec.from_json(asked.body, max_events=limit)

    def _in_time(self, checked: Checked, now_ms: int) -> tuple[list[Accepted], list[Refusal]]:
        """Events that are neither too large nor dated too far ahead, and all refusals."""
        taken: list[Accepted] = []
        refused = list(checked.bad)
        for event in checked.good:
            too_large = None
            if len(event.record) + len(event.key) > self._safe_bytes:
                too_large = self._too_large(event.record, len(event.key))
            if too_large is not None:
                refused.append(Refusal(event.index, "", *too_large, event.record))
            elif too_far_ahead(event.time_ms, now_ms, self._rules.max_ahead_ms):
                refused.append(self._ahead(event, now_ms))
            elif written_in_larger_unit(
                event.first_ms, self._stream.time.unit, now_ms + self._rules.max_ahead_ms
            ):
                refused.append(self._in_other_unit(event, now_ms))
            else:
                taken.append(event)
        return taken, refused

    def _ahead(self, event: Accepted, now_ms: int) -> Refusal:
        ahead_s = (event.time_ms - now_ms) / 1e3
        limit_s = self._rules.max_ahead_ms / 1e3
        time = self._stream.time
        return Refusal(
            event.index,
            time.path,
            f"a time at most {limit_s:g} s ahead of now (unit {time.unit})",
            f"{ahead_s:g} s ahead{unit_hint(time, self._stream.role, event.time_ms, now_ms)}",
            event.sent,
        )

    def _in_other_unit(self, event: Accepted, now_ms: int) -> Refusal:
        time = self._stream.time
        hint = unit_hint(time, self._stream.role, event.first_ms, now_ms)
        found = f"{event.first_ms} ms since 1970, in January 1970{hint}"
        return Refusal(event.index, time.path, f"a time of now (unit {time.unit})", found, event.sent)


def _bytes(count: int) -> str:
    return f"{count:,} bytes"


def _events_of(request: Request) -> tuple[bytes, str]:
    """A request's events, and how they stand, by its headers. Raises BadInput or HttpError for what is not
    taken."""
    headers = request.headers
    require_identity(request)
    kind = request.content_type
    if kind == JSON or kind in JSON_LINES:
        return request.body, JSON
    if kind in (AVRO, AVRO_BATCH):
        return request.body, kind
    if kind != AVRO_RAW:
        raise wrong_type(kind, JSON, *JSON_LINES, AVRO, AVRO_BATCH, AVRO_RAW)
    schema_id = headers.get(b"freshet-schema-id", b"")
    if not schema_id.isdigit() or len(schema_id) > 10 or int(schema_id) >= 1 << 32:
        raise BadInput(
            f"expected the schema id as a number in the header freshet-schema-id, found {schema_id[:40]!r}"
        )
    return frame(int(schema_id), request.body), AVRO


@traced
def _sends_of_bodies(
    tracer: Tracer, codec: StreamCodec, topic: str, taken: TakenBodies, asked: Sequence[_Asked]
) -> list[EventSend]:
    """Start the spans of the traced events of bodies that were taken together."""
    requests = codec.requests(taken.records)
    rows = taken.starts[:-1][taken.partitions] + taken.positions  # of each event, in the order of arrival
    bodies = np.repeat(np.arange(len(taken.counts)), np.maximum(taken.counts, 0))
    sends = []
    for at in np.flatnonzero(tracer.ids.sampled(requests[rows])).tolist():
        row, one = int(rows[at]), asked[int(bodies[at])]
        event = int(requests[row]), taken.keys[row], int(taken.partitions[at])
        sends.append((start_event_send(tracer, codec.role, topic, event, one.came_ns, one.span), at))
    return sends


@traced
def _sends_of_entries(
    tracer: Tracer, codec: StreamCodec, topic: str, entries: Sequence[Entry], asked: _Asked
) -> list[EventSend]:
    """Start the spans of the traced events of a request that was validated event by event."""
    requests = codec.requests(BytesColumn.of(entry.value for entry in entries))
    sends = []
    for at in np.flatnonzero(tracer.ids.sampled(requests)).tolist():
        event = int(requests[at]), entries[at].key, entries[at].partition
        sends.append((start_event_send(tracer, codec.role, topic, event, asked.came_ns, asked.span), at))
    return sends


def _tell(asked: Sequence[_Asked], error: Exception) -> None:
    """Answer all of them with the same error."""
    for one in asked:
        try:
            one.client.failed(error)
        except Exception as fault:
            _not_told(fault)


def _not_told(error: Exception) -> None:
    """One client's answer must not keep the others from theirs."""
    log.error("an answer could not be given", exc_info=error)
