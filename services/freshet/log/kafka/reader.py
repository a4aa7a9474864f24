"""Reading Kafka: messages by the thousand, flattened at once; positions, ends and topic ids checked by us."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import structlog
from confluent_kafka import Consumer
from confluent_kafka.cimpl import Message

from freshet.errors import DataLost, Unavailable
from freshet.log.kafka.admin import KafkaAdmin
from freshet.log.kafka.columns import Ahead, flatten
from freshet.log.kafka.errors import LOST, UNKNOWN, Heard, family, translated
from freshet.types import LogId, Records, TopicPartition

__all__ = ["KafkaReader"]

_log = structlog.get_logger(__name__)

_AT_ONCE = 4096
"""Messages of one `consume`: more are no faster, and hold Python's lock for longer (1 ms)."""

_AHEAD_BYTES = 8 << 20
"""Read ahead by us; the client's own queue (16 MiB, see CLIENT) waits behind it."""

_SLICE_S = 0.05
"""Longest wait in one `consume`: markers, which wake nobody, are seen by then."""

_BRIEFLY_S = 0.001
"""Between looks for an answer from the brokers."""

_TOGETHER_S = 0.25
"""For all partitions that have records to begin, so that none is read far ahead of the others."""

_ALIVE_S = 0.1
"""An answer about a partition's end is as good as a new one for so long, where the caller waits anyway."""

_ANSWER_S = 1.0
"""Without an answer, or without records that are known to be there, for so long the log is away."""

_IDS_EVERY_S = 1.0
"""How often it is asked whether the topics are still the same ones."""

CLIENT: Mapping[str, Any] = {
    "isolation.level": "read_committed",
    "enable.auto.commit": False,  # positions belong to the stores, never to a group
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",  # an offset that is not there is a loss, never a new beginning
    "fetch.queue.backoff.ms": 10,  # the default of 1 s stalls a fast reader
    "queued.max.messages.kbytes": 16 << 10,
    "fetch.message.max.bytes": 4 << 20,
    "fetch.wait.max.ms": 250,
}
"""Settings of librdkafka for a reader; the first four are not the user's to change."""


class KafkaReader:
    """See `freshet.log.Reader`. Fetching begins with the first poll after `assign`."""

    def __init__(
        self, admin: KafkaAdmin, locate: Callable[[TopicPartition], str], client: Mapping[str, Any]
    ) -> None:
        self._admin, self._locate, self._heard = admin, locate, Heard()
        self._client = {**CLIENT, **client, "error_cb": self._heard}
        self._consumer = self._new_consumer()
        self._using = threading.Lock()  # so that the log may be closed while a thread polls
        self._closed = False
        self._ids: dict[str, LogId] = {}
        self._awaited: set[TopicPartition] = set()  # have records, and have given none yet
        self._forget(Ahead({}))

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read these partitions from these offsets from now on, and no others."""
        places = list(positions)
        for at in places:
            self._locate(at)
        ids = self._admin.ids({at.topic for at in places})
        bounds = self._admin.bounds(places, committed=False)
        for at, offset in positions.items():
            if not bounds[at].start <= offset <= bounds[at].end:
                raise _lost(at, offset, bounds[at].start, bounds[at].end)
        with self._using:
            self._check_open()
            if self._fetching:  # a new one knows nothing of the old positions
                self._consumer.close()
                self._consumer = self._new_consumer()
            self._ids = {topic: log_id for topic, (log_id, _) in ids.items()}
            self._forget(Ahead(positions))
            self._awaited = {at for at, offset in positions.items() if offset < bounds[at].end}

    def poll(self, max_records: int, wait_s: float) -> Sequence[tuple[TopicPartition, Records]]:
        """Records of the partitions that have some; waits up to `wait_s` for the first.

        An empty answer says that every partition was read to its end, as of a moment after the call began or
        at most 0.1 s before its wait was over.
        """
        if max_records < 1:
            raise ValueError(f"max_records must be at least 1, found {max_records}")
        began = time.monotonic()
        until = began + wait_s
        with self._using:
            self._check_open()
            if not self._ids:
                return []
            if not self._fetching:
                self._begin(began)
            self._check_ids(began)
            if self._ahead.bytes < _AHEAD_BYTES:
                self._fetch(0.0)
            while True:
                now = time.monotonic()
                if not self._awaited or now >= self._together_until:
                    found = self._ahead.take(max_records)
                    if found:
                        return found
                    if now >= until and self._at_end(until - min(wait_s, _ALIVE_S)):
                        return []
                self._fetch(min(_SLICE_S, max(_BRIEFLY_S, until - now)))

    def close(self) -> None:
        """Leave the brokers. Idempotent."""
        with self._using:
            if not self._closed:
                self._closed = True
                self._consumer.close()

    def _new_consumer(self) -> Consumer:
        with translated("a reader could not be made"):
            return Consumer(self._client)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the reader was closed")

    def _forget(self, ahead: Ahead) -> None:
        self._ahead, self._fetching = ahead, False
        self._topics = {self._admin.name(topic): topic for topic in self._ids}
        self._awaited = set()
        self._together_until = 0.0
        self._ends: dict[TopicPartition, Future[Any]] = {}
        self._ends_asked = self._ends_known = float("-inf")
        self._silent_since: float | None = None
        self._described: dict[str, Future[Any]] = {}
        self._ids_asked = time.monotonic()

    def _begin(self, now: float) -> None:
        with translated("the partitions could not be assigned", self._heard):
            self._consumer.assign([self._admin.place(at, offset) for at, offset in self._ahead.next.items()])
        self._fetching, self._together_until = True, now + _TOGETHER_S

    def _fetch(self, wait_s: float) -> None:
        """Take in what the client has; wait so long for a first message."""
        with translated("records could not be read", self._heard):
            # `consume` of many waits until it has them all; so wait for one.
            messages = self._consumer.consume(1, wait_s) if wait_s else []
            if messages or not wait_s:
                messages += self._consumer.consume(_AT_ONCE, 0)
            if any(map(Message.error, messages)):
                messages = [message for message in messages if self._is_good(message)]
            for at, records in flatten(messages, self._topics):
                if not len(records):
                    self._ahead.moved(at, records.next_offset)
                elif again := self._ahead.add(at, records):
                    _log.warning("records came again and were passed over", partition=str(at), records=again)
                self._awaited.discard(at)
            if len(messages) < _AT_ONCE:  # nothing waits behind them: their trailing markers were passed
                self._pass_markers()
        if messages:
            self._silent_since = None

    def _pass_markers(self) -> None:
        for place in self._consumer.position([self._admin.place(at) for at in self._ahead.next]):
            if place.offset >= 0:
                self._ahead.moved(TopicPartition(self._topics[place.topic], place.partition), place.offset)

    def _is_good(self, message: Message) -> bool:
        error = message.error()
        if error is None:
            return True
        at = f"{self._topics.get(str(message.topic()), message.topic())}[{message.partition()}]"
        if error.code() in LOST:
            raise family(error, f"{at}: retention has removed what comes next, or the log has lost writes")
        if error.code() in UNKNOWN:
            self._ids_asked = float("-inf")  # deleted, perhaps
        else:
            self._heard(error)
        return False

    def _check_ids(self, now: float) -> None:
        """DataLost once a topic has become another one of the same name; asked in the background."""
        if self._described and all(future.done() for future in self._described.values()):
            asked, self._described = self._described, {}
            with suppress(Unavailable):  # asked again later; `_at_end` says when the brokers are away
                self._compare({topic: log_id for topic, (log_id, _) in self._admin.described(asked).items()})
        if not self._described and now - self._ids_asked >= _IDS_EVERY_S:
            self._described, self._ids_asked = self._admin.ask_ids(self._ids), now

    def _compare(self, found: Mapping[str, LogId]) -> None:
        for topic, log_id in self._ids.items():
            if found.get(topic) != log_id:
                raise DataLost(
                    f"topic {topic}: expected log id {log_id}, found {found.get(topic, 'no such topic')}\n"
                    "  it was deleted, or made anew: its offsets mean nothing to what was read before"
                )

    def _at_end(self, since: float) -> bool:
        """Is there nothing more, by an answer asked for after `since`? Raises Unavailable if none comes."""
        now = time.monotonic()
        if self._ends_known >= since:
            return True
        if not self._ends:
            self._ends = self._admin.ask_ends(self._ahead.next)
            self._ends_asked = now
            self._silent_since = self._silent_since or now
        if all(future.done() for future in self._ends.values()):
            asked, self._ends = self._ends, {}
            with suppress(Unavailable):  # asked again
                ends = self._admin.offsets(asked)
                if all(self._ahead.next[at] >= end for at, end in ends.items()):
                    self._ends_known, self._silent_since = self._ends_asked, None
                    return self._ends_known >= since
        if self._silent_since is not None and now - self._silent_since > _ANSWER_S:
            self._silent_since = None
            raise Unavailable(f"the brokers gave no answer, or no records, for {_ANSWER_S:g} s{self._heard}")
        return False


def _lost(at: TopicPartition, offset: int, start: int, end: int) -> DataLost:
    if offset > end:
        return DataLost(
            f"{at}: offset {offset} lies beyond the log's end, {end}:"
            " the log is another one, or has lost writes"
        )
    return DataLost(
        f"{at}: offset {offset} is no longer in the log, which starts at {start}: retention has removed it\n"
        "  what reads from there must be told to skip it, or start anew; a longer retention prevents it"
    )
