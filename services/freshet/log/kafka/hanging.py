"""Transactions that brokers left without an end.

Brokers promise that who opens a writer waits until the last transaction of its name has ended, with a marker
in each partition. Kafka 4.3.0 to 4.4.0 pass over partitions that have no leader at that moment, and call the
transaction ended (KAFKA-20734). It then hangs: nothing of the partition is read beyond it, and the next
transaction of that name that writes there ends it along with itself. A writer that had found its records
missing, and wrote them again, would so have them twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

import structlog

from freshet.errors import Unavailable
from freshet.log import EventLog
from freshet.log.kafka.admin import KafkaAdmin
from freshet.log.tail import newest
from freshet.types import TopicPartition

__all__ = ["Aborting", "end_hanging"]

_log = structlog.get_logger(__name__)

_SHOWN_S = 2.0
"""Until a marker that was acknowledged must show: what is longer in the way has none."""

_LOOK_S = 0.05


class Aborting(Protocol):
    """Aborts a transaction of the writer's name; see `Transactions.abort_in`."""

    def abort_in(self, places: Iterable[tuple[str, int]]) -> None:
        """Begin one, write into these partitions, abort it."""


def end_hanging(
    log: EventLog, admin: KafkaAdmin, writer: Aborting, owned: Mapping[TopicPartition, str]
) -> None:
    """Undo what hangs in partitions that only this writer writes to.

    Whatever a transaction of the writer has written, a record in the first of them was there before. If that
    hangs, all of the transaction that hangs is aborted: nobody has read it, unless other partitions had a
    leader when the first had none. If it has ended there and not elsewhere, its end is known, for it is the
    newest that the first partition holds: what was aborted there is aborted elsewhere, and what was committed
    is left to the next transaction, which commits it.

    Args:
        log: the log of these partitions.
        admin: by which it asks for offsets.
        writer: just opened.
        owned: partitions -> topics as Kafka names them.

    Raises:
        Unavailable: the brokers cannot be asked, or something is open there that is not this writer's.
    """
    if not (hanging := _hanging(admin, owned)):
        return
    first = next(iter(owned))
    if first not in hanging and _was_committed(log, admin, first):
        _log.warning(
            "a transaction was committed in part, the next one commits the rest", topics=_names(hanging)
        )
        return
    writer.abort_in([(owned[at], at.partition) for at in hanging])
    if still := _hanging(admin, hanging):
        raise Unavailable(
            f"a transaction without an end in {', '.join(_names(still))}: expected none, or one of this"
            " writer, which alone writes there, of this producer id\n"
            "  kafka-transactions.sh describe-producers says whose it is: end it there, or by its `abort`"
        )
    _log.warning("a transaction without an end was aborted", topics=_names(hanging))


def _hanging(admin: KafkaAdmin, places: Iterable[TopicPartition]) -> list[TopicPartition]:
    """Those in which records wait for a marker that does not come."""
    hanging, deadline = list(places), time.monotonic() + _SHOWN_S
    while hanging:
        last = time.monotonic() >= deadline
        committed = admin.ends(hanging, committed=True)  # first: nobody writes there, so it can only rise
        written = admin.ends(hanging, committed=False)
        hanging = [at for at in hanging if committed[at] < written[at]]
        if last or not hanging:
            break
        threading.Event().wait(_LOOK_S)
    return hanging


def _was_committed(log: EventLog, admin: KafkaAdmin, at: TopicPartition) -> bool:
    """Is the newest record before the last marker one that is read?"""
    end = admin.ends([at], committed=True)[at]
    return any(offset == end - 2 for offset, _ in newest(log, at, 1))


def _names(places: Iterable[TopicPartition]) -> list[str]:
    return sorted(map(str, places))
