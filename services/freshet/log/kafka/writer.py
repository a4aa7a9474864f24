"""Writers to Kafka: idempotent, acknowledged by all in-sync replicas, and transactional if they have a name.

Concurrent appends are sent together: one thread sends all waiting requests and waits for their reports, and
the next one sends those that came meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, Protocol

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.cimpl import Message

from freshet.errors import ConfigError, FreshetError, Unavailable
from freshet.log.kafka.connection import LastError, ending, family, translated
from freshet.log.records import check_append
from freshet.types import Append, BytesColumn, TopicPartition

QUEUE_FULL_S = 10.0
"""Longest wait for space in the client's queue, which empties as brokers acknowledge."""

_MAYBE_WRITTEN = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._TRANSPORT,
        KafkaError._FATAL,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    }
)
"""Errors in reports of records that brokers may have written nevertheless."""


_TOO_LARGE_ADVICE = "\n  raise max_record_bytes in the log's URL, and max.message.bytes of topics that exist"


class Piece:
    """One Append; called by the client with the report of each record."""

    def __init__(
        self,
        append: Append,
        topic: str,
        max_record_bytes: int,
        on_reported: Callable[[], None] = lambda: None,
    ) -> None:
        """Check an append to `topic`, as Kafka names it; `on_reported` is called after the last report.

        Raises:
            ValueError: its columns have different lengths.
            TooLarge: a record exceeds `max_record_bytes`.
        """
        check_append(append, max_record_bytes, _TOO_LARGE_ADVICE)
        self.at = TopicPartition(append.topic, append.partition)
        self.topic, self.waiting, self._records = topic, len(append.values), len(append.values)
        self._last = -1  # offset of the last record
        self.error: KafkaError | None = None
        self.maybe_written = False  # a record of it
        self._append: Append | None = append  # until its records are queued
        self._on_reported = on_reported

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        """Record the report of one record."""
        if error is None:
            self.maybe_written = True
            self._last = max(self._last, message.offset() or 0)
        else:
            self.error = error
            self.maybe_written |= error.code() in _MAYBE_WRITTEN
        self.waiting -= 1
        if not self.waiting:
            self._on_reported()

    @property
    def first(self) -> int:
        """The first record's offset, if no other writer's records lie between its own; else a later one."""
        return max(self._last - self._records + 1, 0)

    def produce(self, producer: Producer, deadline: float) -> None:
        """Queue copies of its records, once. Raises KafkaException, or Unavailable if the queue stays full.

        `deadline`: by `time.monotonic`, for space in the queue.
        """
        append, self._append = self._append, None
        assert append is not None, "queued once"
        send, topic, partition = producer.produce, self.topic, self.at.partition
        keys = repeat(None) if append.keys is None else _items(append.keys)
        times = repeat(0) if append.times_ms is None else append.times_ms.tolist()
        for value, key, time_ms in zip(_items(append.values), keys, times, strict=False):
            while True:
                try:
                    send(topic, value, key or None, partition, self, None, time_ms)
                    break
                except BufferError:
                    if time.monotonic() > deadline:
                        why = f"the queue to the brokers was full for {QUEUE_FULL_S:g} s"
                        raise Unavailable(f"not known to be written: {why}") from None
                    producer.poll(0.05)


class Request:
    """One call of `append`."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.done = False
        self.error: FreshetError | None = None

    @property
    def empty(self) -> bool:
        """Whether it has no records."""
        return not any(piece.waiting for piece in self.pieces)

    def check(self, last_error: object) -> None:
        """Raise the error of a record that was not acknowledged, if any.

        Raises:
            FreshetError: one of the families of `family`; the message ends with `last_error`, and states
                whether nothing was written or this is not known. A record that is too large stays TooLarge
                if others were acknowledged: a client that repeats the request is refused again.
        """
        maybe = any(piece.maybe_written or piece.waiting for piece in self.pieces)
        for piece in sorted(self.pieces, key=lambda piece: piece.error is None):  # causes first
            if piece.error is None and piece.waiting:
                raise Unavailable(f"not known to be written: {piece.at} was not acknowledged{last_error}")
            if piece.error is not None:
                known = "not known to be written" if maybe else "nothing was written"
                raise family(piece.error, f"{known}: {piece.at}", last_error)

    def first_offsets(self) -> list[int]:
        """Return the first offset of each piece, once all are acknowledged."""
        return [piece.first for piece in self.pieces]


def flushed(producer: Producer, within_s: float) -> KafkaError | None:
    """Wait until every record was reported; returns the error that ended the client, or None.

    The remaining reports are delivered in either case.
    """
    try:
        producer.flush(within_s)
    except (KafkaException, SystemError) as error:
        fatal = ending(error)
        producer.flush(within_s)
        return fatal
    return None


def _items(column: BytesColumn) -> list[bytes]:
    data, ends = column.data.tobytes(), column.ends.tolist()
    return [data[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


_ALWAYS: Mapping[str, Any] = {
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 5,  # while an append is queued; the wait for its reports sends at once
    "queue.buffering.max.messages": 1_000_000,
}

PLAIN: Mapping[str, Any] = {**_ALWAYS, "message.timeout.ms": 10_000}
"""Settings of a nameless writer. After the time-out an append is not known to be written."""

NAMED: Mapping[str, Any] = {**_ALWAYS, "message.timeout.ms": 5000, "transaction.timeout.ms": 5000}
"""Settings of a named writer. Brokers abort a transaction that is not ended in time (PROTOCOL 21)."""

_SLACK_S = 5.0
"""Longest wait for a record's report after the record's own time-out."""

_OPEN_S = 30.0
"""Longest wait for the opening of a named writer, which first ends the transaction of an earlier one."""

_END_S = 10.0
"""Longest wait for the end of a transaction: twice its time-out, after which brokers have decided it."""

_CLOSE_S = 1.0


class Sender(Protocol):
    """Sends the requests of a writer. Used by one thread at a time."""

    def send(self, requests: Sequence[Request]) -> None:
        """Send requests and wait for their reports; a failed request gets an `error`."""

    def close(self) -> None:
        """Release the client."""


class KafkaWriter:
    """See `freshet.log.Writer`. Records have the brokers' times in topics that freshet creates; in others the
    given ones, or this machine's.

    A named writer that does not know whether its transaction was committed accepts no more appends: open a
    new one, which ends the transaction, and read the log.
    """

    def __init__(
        self, sender: Sender, locate: Callable[[TopicPartition], str], max_record_bytes: int
    ) -> None:
        """Create a writer.

        Args:
            sender: sends the requests.
            locate: returns a partition's topic as Kafka names it; raises KeyError.
            max_record_bytes: largest record with its key.
        """
        self._sender, self._locate, self._max_record_bytes = sender, locate, max_record_bytes
        self._waiting: list[Request] = []
        self._queue, self._sending = threading.Lock(), threading.Lock()
        self._closed = False

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        """Append all of these; returns the first offset of each, once all in-sync replicas have them.

        Raises:
            Unavailable: nothing was written or this is not known, as the message says; the writer was closed.
            FreshetError: other families of `family`, such as TooLarge and Fenced.
        """
        pieces = [
            Piece(a, self._locate(TopicPartition(a.topic, a.partition)), self._max_record_bytes)
            for a in appends
        ]
        request = Request(pieces)
        if self._closed:
            raise Unavailable("the writer was closed; nothing was written")
        if not request.empty:
            with self._queue:
                self._waiting.append(request)
            with self._sending:
                if not request.done:
                    self._send_waiting()
        if request.error is not None:
            raise request.error
        return request.first_offsets()

    def close(self) -> None:
        """Refuse further appends. Idempotent."""
        with self._sending:
            if not self._closed:
                self._closed = True
                self._sender.close()

    def _send_waiting(self) -> None:
        with self._queue:
            batch, self._waiting = self._waiting, []
        try:
            if self._closed:
                raise Unavailable("the writer was closed; nothing was written")
            self._sender.send(batch)
        except FreshetError as error:
            for request in batch:
                request.error = request.error or error
        except BaseException as error:  # the other threads' requests are not acknowledged either
            for request in batch:
                request.error = request.error or Unavailable(f"not known to be written: {error!r}")
            raise
        finally:
            for request in batch:
                request.done = True


class IdempotentClient:
    """A client without a name. Used by one thread at a time."""

    def __init__(self, client: Mapping[str, Any]) -> None:
        """Start it with these settings, beside those of PLAIN. Raises as `start`."""
        self._client = {**PLAIN, **client}
        self.wait_s = float(self._client["message.timeout.ms"]) / 1000 + _SLACK_S  # longest, for a report
        self.start()

    def start(self) -> None:
        """Start it, or start it anew. Raises a family of `family` if this fails."""
        self.last_error = LastError()
        with translated("a writer could not be created"):
            self._producer = Producer({**self._client, "error_cb": self.last_error})
        self.ended = False  # by an error: it accepts no more records, and must be started anew

    def produce(self, pieces: Sequence[Piece], deadline: float) -> None:
        """Queue the records of a request, which may wait for space until `deadline`, by `time.monotonic`.

        Raises a family of `family` if not all could be queued.
        """
        with translated("not known to be written", self.last_error):
            try:
                for piece in pieces:
                    piece.produce(self._producer, deadline)
            except (KafkaException, SystemError) as error:
                cause = ending(error)
                self.ended |= cause.fatal() or cause.code() == KafkaError._FATAL
                raise

    def flush(self, within_s: float) -> None:
        """Send at once, and wait for reports of all records, for at most `within_s` seconds."""
        self.ended |= flushed(self._producer, within_s) is not None

    def close(self) -> None:
        """Drop the records that were never acknowledged, and deliver their reports."""
        self._producer.purge()
        flushed(self._producer, _CLOSE_S)


class IdempotentSender:
    """Sender of a writer without a name."""

    def __init__(self, client: IdempotentClient) -> None:
        self._client = client

    def send(self, requests: Sequence[Request]) -> None:
        """Send requests together and wait for their reports."""
        client = self._client
        for request in requests:
            try:
                client.produce(request.pieces, time.monotonic() + QUEUE_FULL_S)
            except FreshetError as error:
                request.error = error
        client.flush(client.wait_s)
        for request in requests:
            try:
                request.check(client.last_error)
            except FreshetError as error:
                request.error = request.error or error
        if client.ended:
            client.start()

    def close(self) -> None:
        """Drop the records that were never acknowledged."""
        self._client.close()


class TransactionalSender:
    """Sender of a named writer: one transaction for each request."""

    def __init__(self, client: Mapping[str, Any], name: str) -> None:
        """Open the writer: earlier ones of the name are fenced, and their open transactions aborted.

        Raises ConfigError, Fenced or Unavailable.
        """
        self._last_error, self._name = LastError(), name
        settings = {**NAMED, **client, "transactional.id": name, "error_cb": self._last_error}
        self._wait_s = float(settings["message.timeout.ms"]) / 1000 + _SLACK_S
        try:
            with translated(f"writer {name} could not be opened", self._last_error):
                self._producer = Producer(settings)
                self._last_error.serve = lambda: self._producer.poll(0)
                _retried(self._producer.init_transactions, _OPEN_S)
        except FreshetError:
            self._last_error.serve = (
                int  # as in `close`: otherwise its threads live until the next garbage collection
            )
            raise
        self._open = False  # a transaction must be ended
        self._ended: FreshetError | None = None  # the error after which nothing can be sent

    def send(self, requests: Sequence[Request]) -> None:
        """Send requests one by one and wait for each."""
        for request in requests:
            try:
                self._send(request)
            except FreshetError as error:
                request.error = error

    def close(self) -> None:
        """Close the client; brokers abort an open transaction."""
        self._last_error.serve = int  # ends a cycle of references with the client
        self._producer.purge()
        flushed(self._producer, _CLOSE_S)

    def _send(self, request: Request) -> None:
        if self._open and self._ended is None:
            self._abort("an earlier append failed")
        if self._ended is not None:
            raise self._ended
        self._begin()
        try:
            with translated("a record was refused", self._last_error):
                for piece in request.pieces:
                    piece.produce(self._producer, time.monotonic() + QUEUE_FULL_S)
            if fatal := flushed(self._producer, self._wait_s):
                if fatal.code() == KafkaError._FATAL:
                    self._abort("the client was ended")  # raises the error that ended it
                raise self._ended_by(fatal, "nothing was written")
            request.check(self._last_error)
        except FreshetError as error:
            if error is self._ended:
                raise
            self._abort(str(error))  # raises Fenced if it is
            raise _as_not_written(error) from error
        self._commit()

    def _begin(self) -> None:
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            raise self._ended_by(error.args[0], "nothing was written") from error
        self._open = True

    def _commit(self) -> None:
        try:
            _retried(self._producer.commit_transaction, _END_S)
        except KafkaException as error:
            cause = error.args[0]
            if cause.txn_requires_abort():
                self._abort(cause.str())
                raise Unavailable(f"nothing was written: the transaction failed: {cause.str()}") from error
            raise self._ended_by(cause, "not known to be written") from error
        self._open = False

    def _abort(self, why: str) -> None:
        """Abort the transaction, so that its records are never read.

        Raises Unavailable if this could not be done yet: `nothing was written` holds nevertheless.
        """
        try:
            _retried(self._producer.abort_transaction, _END_S)
        except KafkaException as error:
            cause = error.args[0]
            if cause.retriable():
                raise Unavailable(f"nothing was written, {why}; aborting it: {cause.str()}") from error
            raise self._ended_by(cause, f"nothing was written, {why}") from error
        self._open = False

    def _ended_by(self, error: KafkaError, outcome: str) -> FreshetError:
        """Record, and return, the error after which nothing can be sent."""
        self._ended = family(error, f"writer {self._name}: {outcome}", self._last_error)
        return self._ended


def _as_not_written(error: FreshetError) -> FreshetError:
    """Return the error of a transaction that was aborted, hence not written."""
    if isinstance(error, ConfigError):  # its parts name a setting, not the outcome
        return error
    known = str(error).replace("not known to be written", "nothing was written")
    return type(error)(known)


def _retried(call: Callable[[float], None], within_s: float) -> None:
    """Repeat a call that fails with a retriable error, until the time-out."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return call(max(0.1, deadline - time.monotonic()))
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() >= deadline:
                raise
