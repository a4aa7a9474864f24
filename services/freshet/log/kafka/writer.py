"""Appending to Kafka: idempotent, acknowledged by all in-sync replicas; in transactions if the writer has a
name.

Appends that wait at the same time go out together: one thread sends what waits and stays for the
acknowledgements, the next one takes what has come meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from confluent_kafka import KafkaError, KafkaException, Producer

from freshet.errors import ConfigError, FreshetError, Unavailable
from freshet.log.kafka.errors import Heard, family, translated
from freshet.log.kafka.send_queue import Piece, Request, flushed
from freshet.types import Append, TopicPartition

__all__ = ["KafkaWriter", "Plainly", "Transactions"]

_ALWAYS: Mapping[str, Any] = {
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 5,  # while an append is put into the queue; who waits for it sends at once
    "queue.buffering.max.messages": 1_000_000,
}

PLAIN: Mapping[str, Any] = {**_ALWAYS, "message.timeout.ms": 10_000}
"""A record that is not acknowledged in time is given up: its append is not known to be written."""

NAMED: Mapping[str, Any] = {**_ALWAYS, "message.timeout.ms": 5000, "transaction.timeout.ms": 5000}
"""A transaction that is not ended in time is aborted by the brokers (PROTOCOL 21)."""

_SLACK_S = 5.0
"""After a record's own time-out, until its report must be there."""

_OPEN_S = 30.0
"""To open a named writer: a transaction that an earlier one left is ended first."""

_END_S = 10.0
"""To hear that a transaction ended: twice its time-out, when it is decided one way or the other."""

_CLOSE_S = 1.0


class Sender(Protocol):
    """What a writer sends by; used by one thread at a time."""

    def send(self, requests: Sequence[Request]) -> None:
        """Send these and wait; each one's `error` says if it failed."""

    def close(self) -> None:
        """Free what it holds."""


class KafkaWriter:
    """See `freshet.log.Writer`. Records' times are the brokers' in topics as we make them, in
    others those that are given, or this machine's.

    A named writer that could not learn whether its transaction was committed takes no more appends: open a
    new one, which settles it, and look what the log says.
    """

    def __init__(
        self, sender: Sender, locate: Callable[[TopicPartition], str], max_record_bytes: int
    ) -> None:
        """Make it.

        Args:
            sender: by which it sends.
            locate: a partition's topic as Kafka names it; raises KeyError.
            max_record_bytes: of a record with its key.
        """
        self._sender, self._locate, self._max_record_bytes = sender, locate, max_record_bytes
        self._waiting: list[Request] = []
        self._queue, self._sending = threading.Lock(), threading.Lock()
        self._closed = False

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        """Append all of these; return each one's first offset, once all in-sync replicas have them."""
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
        finally:
            for request in batch:
                request.done = True


class Plainly:
    """Sends for a writer without a name."""

    def __init__(self, client: Mapping[str, Any]) -> None:
        self._client = {**PLAIN, **client}
        self._wait_s = float(self._client["message.timeout.ms"]) / 1000 + _SLACK_S
        self._start()

    def send(self, requests: Sequence[Request]) -> None:
        """Send these and wait for their reports."""
        for request in requests:
            try:
                with translated("not known to be written", self._heard):
                    for piece in request.pieces:
                        piece.produce(self._producer)
            except FreshetError as error:
                request.error = error
        fatal = flushed(self._producer, self._wait_s)
        for request in requests:
            try:
                request.check(self._heard)
            except FreshetError as error:
                request.error = request.error or error
        if fatal is not None:  # the client takes no more
            self._start()

    def close(self) -> None:
        """Give up what was never acknowledged."""
        self._producer.purge()
        flushed(self._producer, _CLOSE_S)

    def _start(self) -> None:
        self._heard = Heard()
        with translated("a writer could not be made"):
            self._producer = Producer({**self._client, "error_cb": self._heard})


class Transactions:
    """Sends for a named writer: a transaction for each request."""

    def __init__(self, client: Mapping[str, Any], name: str) -> None:
        """Open it: earlier writers of the name are fenced, and what they left open is aborted."""
        self._heard, self._name = Heard(), name
        settings = {**NAMED, **client, "transactional.id": name, "error_cb": self._heard}
        self._wait_s = float(settings["message.timeout.ms"]) / 1000 + _SLACK_S
        try:
            with translated(f"writer {name} could not be opened", self._heard):
                self._producer = Producer(settings)
                self._heard.serve = lambda: self._producer.poll(0)
                _retried(self._producer.init_transactions, _OPEN_S)
        except FreshetError:
            self._heard.serve = int  # as `close` does: else its threads stay until garbage is collected
            raise
        self._open = False  # is there a transaction to be ended?
        self._over: FreshetError | None = None  # why there will be no more

    def send(self, requests: Sequence[Request]) -> None:
        """Send these and wait, one by one."""
        for request in requests:
            try:
                self._send(request)
            except FreshetError as error:
                request.error = error

    def close(self) -> None:
        """Leave an open transaction to the brokers, which abort it."""
        self._heard.serve = int  # it holds the client, and the client it
        self._producer.purge()
        flushed(self._producer, _CLOSE_S)

    def _send(self, request: Request) -> None:
        if self._open and self._over is None:
            self._abort("an earlier append failed")
        if self._over is not None:
            raise self._over
        self._begin()
        try:
            with translated("a record was refused", self._heard):
                for piece in request.pieces:
                    piece.produce(self._producer)
            if fatal := flushed(self._producer, self._wait_s):
                if fatal.code() == KafkaError._FATAL:
                    self._abort("the client was ended")  # the answer says by what
                raise self._ended_by(fatal, "nothing was written")
            request.check(self._heard)
        except FreshetError as error:
            if error is self._over:
                raise
            self._abort(str(error))  # says so if it is fenced
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
        """What is in the transaction is never read, also if this could not be done yet: then it raises
        Unavailable."""
        try:
            _retried(self._producer.abort_transaction, _END_S)
        except KafkaException as error:
            cause = error.args[0]
            if cause.retriable():
                raise Unavailable(f"nothing was written, {why}; aborting it: {cause.str()}") from error
            raise self._ended_by(cause, f"nothing was written, {why}") from error
        self._open = False

    def _ended_by(self, error: KafkaError, what: str) -> FreshetError:
        """Nothing more can be sent."""
        self._over = family(error, f"writer {self._name}: {what}", self._heard)
        return self._over


def _as_not_written(error: FreshetError) -> FreshetError:
    """The same, of a transaction that was aborted."""
    if isinstance(error, ConfigError):  # it has parts, and says what is wrong, not what was written
        return error
    known = str(error).replace("not known to be written", "nothing was written")
    return type(error)(known)


def _retried(call: Callable[[float], None], within_s: float) -> None:
    """Call until it does not fail with an error that may be tried again."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return call(max(0.1, deadline - time.monotonic()))
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() >= deadline:
                raise
