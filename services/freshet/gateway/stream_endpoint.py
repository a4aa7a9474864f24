"""The endpoint of one stream: it appends the events of requests and answers once they are durable.

Requests are queued unparsed, validated together in one native call per append, and appended together. If a
request contains an invalid event, its events are validated one by one, for the reasons in the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import orjson
import structlog
from numpy.typing import NDArray
from prometheus_client import Counter

from freshet.clock import Clock, latest_ms
from freshet.config.spec.inputs import unit_hint, written_in_larger_unit
from freshet.config.spec.model import Stream
from freshet.config.spec.topics import RecordLimits
from freshet.errors import BadInput, Overloaded
from freshet.features import AcceptedBodies, partition_of
from freshet.gateway.api import AVRO, AVRO_BATCH, AVRO_RAW
from freshet.gateway.codec import (
    Accepted,
    Checked,
    Refusal,
    StreamCodec,
    answer,
    dead_letter,
    split_avro_batch,
    too_far_ahead,
)
from freshet.gateway.group_commit import Committer, Entry, group_entries, offsets_of
from freshet.http.app import Reply
from freshet.http.authenticator import EventAllowance
from freshet.http.messages import (
    Request,
    Response,
    error_response,
    json_response,
    require_identity,
    wrong_type,
)
from freshet.log import GroupOutcome
from freshet.log.schema_ids import frame
from freshet.observability.spans import EventSend, end_event_sends, start_event_send
from freshet.observability.tracing import Context, now_ns, traced
from freshet.types import I64, BytesColumn

if TYPE_CHECKING:
    from freshet.observability.tracer import Tracer

log = structlog.get_logger(__name__)

JSON = "application/json"
JSON_LINES = ("application/x-ndjson", "application/jsonl")
Charge = Callable[[EventAllowance | None, int], None]  # allowance, events

CHECK_BYTES = 32 << 10
"""Queued bytes that are validated at once, while an append runs: about 0.2 ms of work."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of a stream's events, and the topic of refused ones."""

    partitions: int
    refused_topic: str
    max_events: int  # per request
    max_ahead_ms: int  # how far ahead of now an event may be dated (PROTOCOL 19)
    limits: RecordLimits  # of records that are derived from events
    labels: int  # number of labels: samples of each item


@dataclass(frozen=True, slots=True, eq=False)
class Acks:
    """Places of a request's durable events in the log, in order, and its refused events."""

    partitions: Sequence[int]
    offsets: Sequence[int]
    refused: Sequence[Refusal]


class Client(Protocol):
    """Receives the outcome of one request: one of the methods is called once, on the loop."""

    in_columns: bool  # whether to acknowledge by `answered` instead of `acknowledged`

    def acknowledged(self, body: bytes) -> None:
        """All events are durable; `body` is the answer in JSON. Only if not `in_columns`."""

    def answered(self, acks: Acks) -> None:
        """Events are durable or refused."""

    def failed(self, error: Exception) -> None:
        """It is not known whether events are durable."""


@dataclass(frozen=True, slots=True)
class _HttpClient:
    topic: str
    reply: Reply
    in_columns = False

    def acknowledged(self, body: bytes) -> None:
        self.reply(Response(202, body))

    def answered(self, acks: Acks) -> None:
        places = zip(acks.partitions, acks.offsets, strict=True)
        json = [{"topic": self.topic, "partition": p, "offset": offset} for p, offset in places]
        self.reply(json_response(*answer(json, acks.refused, total=len(json) + len(acks.refused))))

    def failed(self, error: Exception) -> None:
        self.reply(error_response(error))


@dataclass(frozen=True, slots=True, eq=False)
class _Queued:
    """A request that waits for validation."""

    body: bytes
    kind: str  # encoding of the body: JSON, AVRO or AVRO_BATCH
    client: Client
    allowance: EventAllowance | None  # that its events are charged to; None: unlimited
    came_ns: int = 0  # wall clock; 0: tracing is off
    span: Context | None = None  # of the request in its client's trace


class StreamEndpoint:
    """Validates and appends the events of one stream. Methods run on one event loop."""

    def __init__(
        self,
        stream: Stream,
        codec: StreamCodec,
        committer: Committer,
        rules: Rules,
        *,
        clock: Clock,
        counter: Counter,
        charge: Charge = lambda allowance, events: None,
    ) -> None:
        """Queue no request yet.

        Args:
            counter: counts durable events, by stream and outcome (`accepted`, `refused`).
            charge: called with an allowance and a number of events as they are submitted to the log.
        """
        self._charge = charge
        self.counts = {"accepted": 0, "refused": 0}  # durable events
        self._counters = {outcome: counter.labels(stream.role, outcome) for outcome in self.counts}
        self._stream, self._codec, self._committer, self._rules = stream, codec, committer, rules
        self._clock = clock
        self._topic = orjson.dumps(stream.topic).decode()
        # No record derived from an event of at most so many bytes exceeds a limit.
        self._safe_bytes = rules.limits.event_bytes[stream.role]
        if stream.role == "served":
            safe = rules.limits.safe_event_bytes(rules.labels)
            # Avro may be longer than its JSON, for numbers of one digit.
            self._safe_bytes = min(self._safe_bytes, safe // 8 if stream.format == "json" else safe)
        self._gathered: dict[tuple[str, bool], list[_Queued]] = {}  # by kind and `in_columns`
        self._gathered_bytes = 0

    @property
    def topic(self) -> str:
        """Topic of the stream's events."""
        return self._stream.topic

    def handle(self, request: Request, reply: Reply) -> None:
        """Queue a request; it is answered with 202 once all its events are durable, else with the error.

        Raises BadInput or HttpError for wrong headers, Overloaded and Unavailable as
        `Committer.reserve_unchecked`.
        """
        body, kind = _events_of(request)
        self.submit_body(body, kind, _HttpClient(self._stream.topic, reply), request.allowance, request.span)

    def submit_body(
        self,
        body: bytes,
        kind: str,
        client: Client,
        allowance: EventAllowance | None = None,
        span: Context | None = None,
    ) -> None:
        """Queue the events of a request of any protocol. Raises as `Committer.reserve_unchecked`.

        Args:
            body: the events.
            kind: encoding of the body: JSON, AVRO or AVRO_BATCH.
            client: receives the outcome.
            allowance: allowance of the client's events.
            span: of the request in its client's trace.
        """
        queued = _Queued(body, kind, client, allowance, now_ns(), span)
        self._committer.reserve_unchecked(len(body), self._check)
        self._gathered.setdefault((kind, client.in_columns), []).append(queued)
        before = self._gathered_bytes
        self._gathered_bytes += len(body)
        if before < CHECK_BYTES <= self._gathered_bytes:
            asyncio.get_running_loop().call_soon(self._check)

    def _count(self, outcome: str, events: int) -> None:
        self.counts[outcome] += events
        self._counters[outcome].inc(events)

    def _check(self) -> None:
        gathered, self._gathered = self._gathered, {}
        size, self._gathered_bytes = self._gathered_bytes, 0
        self._committer.release_unchecked(sum(map(len, gathered.values())), size)
        for requests in gathered.values():
            try:
                self._submit(requests)
            except Exception as error:
                _fail([request.client for request in requests], error)

    def _submit(self, requests: Sequence[_Queued]) -> None:
        """Submit the events of requests of one kind."""
        accepted = self._accept(requests)
        if accepted is None:
            for request in requests:
                self._submit_by_event(request)
            return
        if len(accepted.partitions):
            if self._holds_too_large(accepted):
                if len(requests) > 1:
                    self._submit_singly(requests)  # only one that holds a too large event is read by event
                else:
                    self._submit_by_event(requests[0])
                return
            try:
                self._append(requests, accepted)
            except Overloaded:
                if len(requests) == 1:
                    raise
                self._submit_singly(requests)
                return
        if (accepted.counts < 0).any():
            for i in (accepted.counts < 0).nonzero()[0].tolist():
                self._submit_by_event(requests[i])

    def _accept(self, requests: Sequence[_Queued]) -> AcceptedBodies | None:
        bodies = [request.body for request in requests]
        latest = latest_ms(self._clock) + self._rules.max_ahead_ms
        if requests[0].kind in (AVRO, AVRO_BATCH):
            return self._codec.accept_avro(
                bodies,
                lengths=requests[0].kind == AVRO_BATCH,
                latest_ms=latest,
                max_events=self._rules.max_events,
            )
        return self._codec.accept_json(bodies, latest_ms=latest, max_events=self._rules.max_events)

    def _holds_too_large(self, accepted: AcceptedBodies) -> bool:
        """Return whether a record derived from one of these events would exceed its topic's limit."""
        if accepted.size <= self._safe_bytes:
            return False
        sizes = np.diff(accepted.records.ends, prepend=0) + np.diff(accepted.keys.ends, prepend=0)
        if int(sizes.max()) <= self._safe_bytes:
            return False
        large = np.flatnonzero(sizes > self._safe_bytes)
        return any(self._too_large(accepted.records[i], len(accepted.keys[i])) for i in large.tolist())

    def _too_large(self, record: bytes, key_bytes: int) -> tuple[str, str] | None:
        """Return (expected, found) if a record derived from this event would exceed its topic's limit."""
        limits, role = self._rules.limits, self._stream.role
        most = limits.event_bytes[role]
        if len(record) + key_bytes > most:
            return f"an event of at most {most:,} bytes, as the log takes no more", _bytes(
                len(record) + key_bytes
            )
        if role != "served":
            return None
        largest, together = self._codec.sample_bytes(record)
        together *= self._rules.labels
        if largest > limits.sample_bytes:
            return f"an event whose samples have at most {limits.sample_bytes:,} bytes each", _bytes(largest)
        if together > limits.expanded_bytes:
            expected = (
                f"an event whose samples have at most {limits.expanded_bytes:,} bytes together: its context "
                "is copied into one for each element and label"
            )
            return expected, _bytes(together)
        return None

    def _append(self, requests: Sequence[_Queued], accepted: AcceptedBodies) -> None:
        """Submit the events of accepted bodies, those of each partition as a group.

        A group may stay without an answer for long, so `done` holds no body and no record.
        """
        groups = [[append] for append in accepted.appends(self._stream.topic)]
        partitions = [append.partition for (append,) in groups]
        sends = _sends_of_bodies(self._codec, self.topic, accepted, requests) or []
        clients, events = [request.client for request in requests], accepted.without_records()
        unanswered = events.counts >= 0  # (R,)

        def end_sends(bodies: NDArray[np.bool_], offsets: I64 | Exception) -> None:
            if sends:
                chosen = np.repeat(bodies, np.maximum(events.counts, 0))  # (N,)
                end_event_sends([send for send in sends if chosen[send[1]]], offsets)

        def take_ready(outcomes: Sequence[GroupOutcome | None]) -> NDArray[np.bool_]:
            """Return (R,) the requests to acknowledge, and fail others; none has outstanding events."""
            nonlocal unanswered
            ready, unanswered = unanswered, np.zeros_like(unanswered)
            for partition, outcome in zip(partitions, outcomes, strict=True):
                if outcome is None:
                    unanswered |= ready & events.bodies_in(partition)
            ready &= ~unanswered
            for partition, outcome in zip(partitions, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    failed = ready & events.bodies_in(partition)
                    ready &= ~failed
                    end_sends(failed, outcome)
                    _fail([clients[i] for i in np.flatnonzero(failed).tolist()], outcome)
            return ready

        def done(outcomes: Sequence[GroupOutcome | None]) -> None:
            """Answer each request once all its events have an outcome."""
            firsts, all_are_durable = [0] * len(outcomes), True
            for i, outcome in enumerate(outcomes):
                if outcome is None or isinstance(outcome, Exception):
                    all_are_durable = False
                else:
                    firsts[i] = outcome[0]
            ready = unanswered if all_are_durable else take_ready(outcomes)
            if sends:
                end_sends(ready, events.offsets(firsts))
            self._count("accepted", int(events.counts @ ready))
            self._acknowledge(clients, events, firsts, ready)

        self._committer.submit(groups, done)
        for i, request in enumerate(requests):
            if request.allowance is not None and accepted.counts[i] > 0:
                self._charge(request.allowance, int(accepted.counts[i]))

    def _acknowledge(
        self,
        clients: Sequence[Client],
        accepted: AcceptedBodies,
        firsts: Sequence[int],
        ready: NDArray[np.bool_],
    ) -> None:
        """Acknowledge the `ready` ones, (R,), of R clients."""
        if clients[0].in_columns:
            self._acknowledge_in_columns(clients, accepted, firsts, ready)
            return
        answers = accepted.answers(self._topic, firsts)
        for client, body, is_ready in zip(clients, answers, ready.tolist(), strict=True):
            if is_ready:
                try:
                    client.acknowledged(body)
                except Exception as error:
                    _log_unanswered(error)

    @staticmethod
    def _acknowledge_in_columns(
        clients: Sequence[Client],
        accepted: AcceptedBodies,
        firsts: Sequence[int],
        ready: NDArray[np.bool_],
    ) -> None:
        partitions, offsets = accepted.partitions.tolist(), accepted.offsets(firsts).tolist()
        at = 0
        for client, events, is_ready in zip(clients, accepted.counts.tolist(), ready.tolist(), strict=True):
            start, at = at, at + max(events, 0)
            if is_ready:
                try:
                    client.answered(Acks(partitions[start:at], offsets[start:at], ()))
                except Exception as error:
                    _log_unanswered(error)

    def _submit_singly(self, requests: Sequence[_Queued]) -> None:
        """Submit requests in order until one does not fit the queue; fail it and the rest.

        Another error fails its request alone: those before it are submitted.
        """
        for i, request in enumerate(requests):
            try:
                self._submit([request])
            except Overloaded as error:
                _fail([request.client for request in requests[i:]], error)
                return
            except Exception as error:
                _fail([request.client], error)

    def _submit_by_event(self, request: _Queued) -> None:
        """Submit a request's valid events to the stream's topic and the others as dead letters."""
        try:
            checked = self._validate(request)
            now_ms = latest_ms(self._clock)
            accepted, refused = self._refuse_by_size_and_time(checked, now_ms)
            partitions = partition_of(BytesColumn.of(event.key for event in accepted), self._rules.partitions)
            entries = [
                Entry(self._stream.topic, partition, event.key, event.record)
                for partition, event in zip(partitions.tolist(), accepted, strict=True)
            ]
            dead_letters = [
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
            self._append_entries(request, entries, dead_letters, refused)
        except Exception as error:
            _fail([request.client], error)

    def _append_entries(
        self,
        request: _Queued,
        entries: Sequence[Entry],
        dead_letters: Sequence[Entry],
        refused: Sequence[Refusal],
    ) -> None:
        appends, places = group_entries([*entries, *dead_letters])
        sends = _sends_of_entries(self._codec, self.topic, entries, request) if entries else None

        def done(outcomes: Sequence[GroupOutcome | None]) -> None:
            (outcome,) = outcomes
            assert outcome is not None, "the only group, and this is its answer"
            if isinstance(outcome, Exception):
                if sends:
                    end_event_sends(sends, outcome)
                request.client.failed(outcome)
                return
            self._count("accepted", len(entries))
            self._count("refused", len(refused))
            offsets = offsets_of(outcome, places)[: len(entries)]
            if sends:
                end_event_sends(sends, offsets)
            request.client.answered(Acks([entry.partition for entry in entries], offsets, refused))

        self._committer.submit([appends], done)
        self._charge(request.allowance, len(places))  # refused events cost as much as accepted ones

    def _validate(self, request: _Queued) -> Checked:
        limit = self._rules.max_events
        if request.kind == AVRO:
            return self._codec.from_avro([request.body])
        if request.kind == AVRO_BATCH:
            return self._codec.from_avro(split_avro_batch(request.body, limit))
        return self._codec.from_json(request.body, max_events=limit)

    def _refuse_by_size_and_time(self, checked: Checked, now_ms: int) -> tuple[list[Accepted], list[Refusal]]:
        """Return events that are neither too large nor dated wrongly, and all refusals."""
        accepted: list[Accepted] = []
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
                accepted.append(event)
        return accepted, refused

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
        return Refusal(event.index, time.path, f"a present time (unit {time.unit})", found, event.sent)


def _bytes(count: int) -> str:
    return f"{count:,} bytes"


def _events_of(request: Request) -> tuple[bytes, str]:
    """Return a request's events and their encoding, by its headers.

    Raises BadInput or HttpError if the headers are wrong.
    """
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
    tracer: Tracer, codec: StreamCodec, topic: str, accepted: AcceptedBodies, queued: Sequence[_Queued]
) -> list[EventSend]:
    """Start the spans of the traced events of bodies that were accepted together."""
    requests = codec.requests(accepted.records)
    rows = (
        accepted.starts[:-1][accepted.partitions] + accepted.positions
    )  # of each event, in the order of arrival
    bodies = np.repeat(np.arange(len(accepted.counts)), np.maximum(accepted.counts, 0))
    sends = []
    for at in np.flatnonzero(tracer.ids.sampled(requests[rows])).tolist():
        row, one = int(rows[at]), queued[int(bodies[at])]
        event = int(requests[row]), accepted.keys[row], int(accepted.partitions[at])
        sends.append((start_event_send(tracer, codec.role, topic, event, one.came_ns, one.span), at))
    return sends


@traced
def _sends_of_entries(
    tracer: Tracer, codec: StreamCodec, topic: str, entries: Sequence[Entry], queued: _Queued
) -> list[EventSend]:
    """Start the spans of the traced events of a request that was validated event by event."""
    requests = codec.requests(BytesColumn.of(entry.value for entry in entries))
    sends = []
    for at in np.flatnonzero(tracer.ids.sampled(requests)).tolist():
        event = int(requests[at]), entries[at].key, entries[at].partition
        sends.append((start_event_send(tracer, codec.role, topic, event, queued.came_ns, queued.span), at))
    return sends


def _fail(clients: Sequence[Client], error: Exception) -> None:
    """Answer all clients with the same error."""
    for client in clients:
        try:
            client.failed(error)
        except Exception as fault:
            _log_unanswered(fault)


def _log_unanswered(error: Exception) -> None:
    """Log an exception of one client, so that the other clients are answered."""
    log.error("a request could not be answered", exc_info=error)
