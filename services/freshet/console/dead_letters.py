"""Dead letters: the newest events that were refused, by whom and why, in words."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from freshet.console.history import parsed
from freshet.console.topic_follower import newest
from freshet.log import EventLog
from freshet.types import TopicPartition

__all__ = ["Letters", "letter_of"]

SHOWN = 20
LONGEST_TEXT = 400
"""Characters of an event's text that are shown; `freshet peek` shows all."""


class Letters:
    """The topics of refused events, read again only when they have grown."""

    def __init__(self, log: EventLog, *, refused: str, dead_letters: str) -> None:
        """`refused`: of the gateway (and of the trainer, for samples); `dead_letters`: of the joiner."""
        self._log = log
        self._topics = {"gateway": TopicPartition(refused, 0), "joiner": TopicPartition(dead_letters, 0)}
        self._ends: dict[str, int] = {}
        self._newest: Sequence[Mapping[str, Any]] = ()

    def to_json(self) -> dict[str, Any]:
        """{refused: n, joiner: n, newest: [...]}: how many the log holds, and the newest first."""
        bounds = {who: self._log.bounds(at) for who, at in self._topics.items()}
        ends = {who: b.end for who, b in bounds.items()}
        if ends != self._ends:
            found = [
                letter_of(value, who)
                for who, at in self._topics.items()
                for _, value in newest(self._log, at, SHOWN)
            ]
            self._newest = sorted((x for x in found if x), key=lambda x: x["time_ms"] or 0, reverse=True)[
                :SHOWN
            ]
            self._ends = ends
        counts = {who: b.end - b.start for who, b in bounds.items()}
        return {"refused": counts["gateway"], "joiner": counts["joiner"], "newest": self._newest}


def letter_of(value: bytes, who: str) -> dict[str, Any] | None:
    """A record of a dead-letter topic for people; None if it is no such record."""
    record = parsed(value)
    if record is None:
        return None
    reason = record.get("reason")
    if reason is None and "expected" in record:
        where = f"{record['path']}: " if record.get("path") else ""
        reason = f"{where}expected {record['expected']}, found {record.get('found')}"
    time_ms = record.get("time_ms")
    return {
        "time_ms": time_ms if type(time_ms) is int else None,
        "from": "trainer" if record["kind"] in ("sample", "block") else who,
        "topic": str(record.get("topic") or ""),
        "reason": str(reason or "")[:LONGEST_TEXT],
        "text": _text(record.get("value", record.get("bytes"))),
    }


def _text(encoded: Any) -> str:
    """The event as text; binary ones as hexadecimal digits."""
    try:
        raw = base64.b64decode(encoded or "", validate=True)
    except (TypeError, ValueError, binascii.Error):
        return ""
    try:
        text = raw.decode()
        printable = text.isprintable() or all(c.isprintable() or c.isspace() for c in text)
    except UnicodeDecodeError:
        printable = False
    if not printable:
        text = f"{len(raw)} bytes: {raw[: LONGEST_TEXT // 4].hex(' ')}"
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
