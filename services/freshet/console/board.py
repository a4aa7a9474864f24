"""What open pages are shown: the newest state, and a bounded number of the newest records. Any thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import orjson

from freshet.config.spec.model import Spec, Table
from freshet.console.core import Look
from freshet.console.history import History

__all__ = ["Board", "event", "quality_of", "segments_of", "simulator_of", "tables_of"]

# --- What the page is shown of the model: quality, segments, tables, the simulated world. Pure.


def quality_of(spec: Spec, look: Look, history: History) -> dict[str, Any]:
    """Figures since the beginning, windows that are still open, and reliability curves."""
    return {
        "labels": [label.name for label in spec.labels],
        "totals": look.figure("trainer", "measures") or {},
        "open": look.figure("trainer", "open") or [],
        "reliability": history.reliability.to_json(),
    }


def segments_of(history: History, text: Callable[[str, int], str | None]) -> list[dict[str, Any]]:
    """Changes of the segments; `text`: what stands for a segment's value, if that is known."""
    return [
        {**change, "text": text(change["segment"], change["value"])} for change in history.segments.changes()
    ]


def tables_of(tables: Sequence[Table], look: Look) -> list[dict[str, Any]]:
    """Rows of each table, their bytes in memory and how many were evicted; None while the service that
    holds the rows does not report them."""
    told = {key: look.figure(look.holder, key) for key in ("rows", "row_bytes", "evicted")}
    known = {key: figures if isinstance(figures, Mapping) else {} for key, figures in told.items()}
    return [
        {
            "table": t.name,
            "rows": known["rows"].get(t.name),
            "bytes": known["row_bytes"].get(t.name),
            "evicted": known["evicted"].get(t.name),
        }
        for t in tables
    ]


def simulator_of(look: Look, history: History) -> dict[str, Any] | None:
    """The simulated world; None where there is none."""
    figures = look.roles.get("simulator")
    if figures is None:
        return None
    told = [{"time_ms": d["time_ms"], "what": d.get("what")} for d in history.drifts]
    return {
        "rate": figures.get("rate"),
        "seed": figures.get("seed"),
        "drifts": figures.get("drifts") or told,
    }


KEPT = 2_000
"""Records that a page may miss and still get one by one; beyond it, it reads the history again."""

PIECE = 500
"""Records of one piece of a stream."""

PING_S = 10.0
"""Silence after which a comment is sent, so that both sides notice a dead connection."""

RETRY_MS = 1_000


def event(name: str, data: bytes, offset: int | None = None) -> bytes:
    """One server-sent event. `data` holds no line breaks, as JSON written by machines does not."""
    head = b"" if offset is None else b"id: %d\n" % offset
    return b"%sevent: %s\ndata: %s\n\n" % (head, name.encode(), data)


class Board:
    """One writer, any number of streams. Streams keep a position each, the board nothing about them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: tuple[int, bytes] = (0, b"")
        self._records: deque[tuple[int, int, bytes]] = deque(maxlen=KEPT)  # (sequence, offset, event)
        self._sequence = 0  # of the newest record
        self._life = 0  # one more each time the log began anew
        self._next = 0  # first offset that was not read yet
        self._whole_from = 0  # every record from this offset on that pages are told is here
        self._wakers: set[Callable[[], None]] = set()

    @property
    def state(self) -> bytes:
        """The newest state as JSON; empty before the first."""
        return self._state[1]

    def show(self, state: Mapping[str, Any]) -> None:
        """Replace the state."""
        data = orjson.dumps(state, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
        with self._lock:
            self._state = (self._state[0] + 1, data)
        self._wake()

    def tell(self, offset: int, record: Mapping[str, Any]) -> None:
        """Add a record of the measures."""
        self._append(offset, event("record", _dumped(record), offset))

    def tell_version(self, what: Mapping[str, Any]) -> None:
        """Add what became of a version; it has no offset, so after a gap a page may be told of it twice."""
        self._append(-1, event("version", _dumped({"kind": "version", **what})))

    @property
    def streams(self) -> int:
        """Streams that are open."""
        return len(self._wakers)

    def seen(self, following: int) -> None:
        """The measures were read up to here, whether or not pages are told of what they hold."""
        with self._lock:
            self._next = following

    def begin(self, offset: int) -> None:
        """The measures are read from this offset on. Pages that are open must begin anew, too."""
        with self._lock:
            self._records.clear()
            self._life += 1
            self._next = self._whole_from = offset
        self._wake()

    async def stream(self, start: int | None) -> AsyncGenerator[bytes]:
        """Pieces of an event stream: the state now and whenever it changes, records from offset `start` on.

        Without `start`, only new records. The caller closes it.
        """
        loop, wake = asyncio.get_running_loop(), asyncio.Event()

        def waker() -> None:
            loop.call_soon_threadsafe(wake.set)

        with self._lock:
            self._wakers.add(waker)
            cursor, life, complete = self._begin(start)
            following = self._next
        try:
            yield b"retry: %d\n\n" % RETRY_MS
            if not complete:
                yield event("reset", _dumped({"next": following}))
            shown = 0
            while True:
                wake.clear()
                piece, cursor, life, shown = self._piece(cursor, life, shown)
                if piece:
                    yield piece
                    continue
                try:
                    # Not `wait_for`: before Python 3.12 that forgets a cancellation which comes in the moment
                    # of a wake, and the stream of a page that has gone then never ends.
                    async with asyncio.timeout(PING_S):
                        await wake.wait()
                except TimeoutError:
                    yield b": ping\n\n"
        finally:
            with self._lock:
                self._wakers.discard(waker)

    def _begin(self, start: int | None) -> tuple[int, int, bool]:
        """(sequence before the first record wanted, life, whether all wanted are at hand)."""
        if start is None:
            return self._sequence, self._life, True
        if not self._whole_from <= start <= self._next:
            return self._sequence, self._life, False
        # From behind the last record that is not wanted: what became of versions has no offset, and is told
        # again rather than missed.
        before = (sequence for sequence, offset, _ in reversed(self._records) if 0 <= offset < start)
        return next(before, self._first - 1), self._life, True

    def _piece(self, cursor: int, life: int, shown: int) -> tuple[bytes, int, int, int]:
        with self._lock:
            parts: list[bytes] = []
            if life != self._life or cursor + 1 < self._first:
                parts.append(event("reset", _dumped({"next": self._next})))
                cursor, life = self._sequence, self._life
            at = cursor + 1 - self._first
            fresh = [e for _, _, e in islice(self._records, at, at + PIECE)]
            parts += fresh
            cursor += len(fresh)
            number, data = self._state
        if number > shown and data:
            parts.append(event("state", data))
        return b"".join(parts), cursor, life, number

    @property
    def _first(self) -> int:
        """Sequence of the oldest record that is at hand; they are numbered without gaps."""
        return self._sequence + 1 - len(self._records)

    def _append(self, offset: int, data: bytes) -> None:
        with self._lock:
            self._sequence += 1
            if len(self._records) == KEPT:
                self._whole_from = max(self._whole_from, self._records[0][1] + 1)
            self._records.append((self._sequence, offset, data))
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            wakers = list(self._wakers)
        for wake in wakers:
            with contextlib.suppress(RuntimeError):  # its loop has closed: the server has stopped
                wake()


def _dumped(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
