"""A writer to Kafka that answers each group of records by itself, so that a partition without a leader delays
only the groups that have records for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic

from freshet.errors import FreshetError, Unavailable
from freshet.log import Answered, GroupOutcome
from freshet.log.kafka.writer import QUEUE_FULL_S, IdempotentClient, Piece, Request
from freshet.types import Append, TopicPartition


class _Group(Request):
    """A group, with the records that are sent."""

    def __init__(self, answer: Callable[[GroupOutcome], None], deadline: float) -> None:
        super().__init__(())
        self.answer, self.deadline = answer, deadline


class KafkaGroupWriter:
    """See `freshet.log.GroupWriter`. One idempotent client sends all groups, and its reports answer them.

    A record that is not acknowledged within the client's `message.timeout.ms`, 10 s unless the log's URL sets
    it, fails its group, which is then not known to be written. After an error that ends the client all
    outstanding groups fail, and a new client sends the later ones.
    """

    def __init__(
        self, client: IdempotentClient, locate: Callable[[TopicPartition], str], max_record_bytes: int
    ) -> None:
        """Create a writer.

        Args:
            client: sends the records.
            locate: returns a partition's topic as Kafka names it; raises KeyError.
            max_record_bytes: largest record with its key.
        """
        self._client, self._locate, self._max_record_bytes = client, locate, max_record_bytes
        self._using = threading.Lock()  # guards the client and all below
        self._outstanding: OrderedDict[_Group, None] = OrderedDict()  # in the order of their deadlines
        self._reported: list[_Group] = []  # have a report of each record, and no answer
        self._closed = False

    def append(self, groups: Sequence[Sequence[Append]], answered: Answered) -> None:
        """Queue copies of the groups' records; waits only for space in the client's queue, 10 s at most."""
        with self._using:
            deadline, full_until = monotonic() + self._client.wait_s, monotonic() + QUEUE_FULL_S
            for index, appends in enumerate(groups):
                group = _Group(partial(answered, index), deadline)
                try:
                    self._send(group, appends, full_until)
                except Exception as error:
                    self._outstanding.pop(group, None)  # later reports of its records change nothing
                    group.answer(error)
                    group.pieces = ()
            self._answer_reported()

    def wait(self, within_s: float) -> None:
        """Process reports until all groups are answered, for at most `within_s` seconds."""
        with self._using:
            if self._outstanding:
                self._client.flush(within_s)
            self._answer_reported()

    def close(self) -> None:
        """Drop the records that were never acknowledged, and answer all outstanding groups. Idempotent."""
        with self._using:
            if not self._closed:
                self._closed = True
                self._client.close()
                for group in list(self._outstanding):
                    self._answer(group)

    def _send(self, group: _Group, appends: Sequence[Append], full_until: float) -> None:
        """Queue the records of a group. Raises if it failed."""
        if self._closed:
            raise Unavailable("the writer was closed; nothing was written")
        on_reported = partial(self._on_reported, group)
        group.pieces = [
            Piece(a, self._locate(TopicPartition(a.topic, a.partition)), self._max_record_bytes, on_reported)
            for a in appends
        ]
        self._outstanding[group] = None
        if group.empty:
            self._reported.append(group)
        else:
            self._client.produce(group.pieces, full_until)

    def _on_reported(self, group: _Group) -> None:
        """Called by the client once all records of a piece were reported."""
        if group.empty:
            self._reported.append(group)

    def _answer_reported(self) -> None:
        """Answer groups that have all reports or are overdue; all groups if an error ended the client."""
        ended = self._client.ended
        if ended:
            self._client.flush(self._client.wait_s)
        for group in self._reported:
            self._answer(group)
        self._reported.clear()
        now = monotonic()
        while self._outstanding and (ended or next(iter(self._outstanding)).deadline < now):
            self._answer(next(iter(self._outstanding)))
        if ended:
            with suppress(FreshetError):  # groups fail until a later call has started it
                self._client.start()

    def _answer(self, group: _Group) -> None:
        """Answer a group by the reports of its records, unless it was answered before."""
        if group not in self._outstanding:
            return
        del self._outstanding[group]
        try:
            group.check(self._client.last_error)
        except Exception as error:
            group.answer(error)
        else:
            group.answer(group.first_offsets())
        group.pieces = ()  # ends a cycle of references that holds the records
