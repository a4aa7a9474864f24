"""Event streams of open pages: the newest state, and a bounded number of the newest records. Thread-safe."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import orjson

from freshet.config.spec.model import Spec, Table
from freshet.console.core import Look
from freshet.console.history import History
from freshet.console.instances import number

# --- Parts of the state about the model: quality, segments, tables, the simulation. Pure.


def quality_of(spec: Spec, look: Look, history: History) -> dict[str, Any]:
    """Return the labels, measures since the model began, open windows and reliability curves."""
    return {
        "labels": [
            {"name": x.name, "kind": "truth" if x.loss == "logloss" else "number", "given": x.given}
            for x in spec.labels
        ],
        "totals": look.figure("trainer", "measures") or {},
        "open": look.figure("trainer", "open") or [],
        "reliability": history.reliability.to_json(),
    }


def segments_of(history: History, text: Callable[[str, int], str | None]) -> list[dict[str, Any]]:
    """Return the changes of segments; `text` returns the text of a segment's value, or None."""
    return [
        {**change, "text": text(change["segment"], change["value"])} for change in history.segments.changes()
    ]


def tables_of(tables: Sequence[Table], look: Look) -> list[dict[str, Any]]:
    """Return rows of each table, their bytes in memory and the number evicted; None while not reported."""
    reported = {key: look.figure(look.holder, key) for key in ("rows", "row_bytes", "evicted")}
    known = {key: figures if isinstance(figures, Mapping) else {} for key, figures in reported.items()}
    return [
        {
            "table": t.name,
            "rows": known["rows"].get(t.name),
            "bytes": known["row_bytes"].get(t.name),
            "evicted": known["evicted"].get(t.name),
        }
        for t in tables
    ]


WIRE_ENDS = ("trainer", "embedder", "paramserver")
"""Roles that count what wires carried. Both ends of a wire count it: the first of these stands for it."""


def wires_of(look: Look) -> list[dict[str, Any]]:
    """Return rows and bytes of each wire, by tables and codec, the error of the least exact process, and the
    time that both ends spent to encode and decode."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    codec_s: dict[tuple[str, ...], float] = {}
    known: set[str] = set()
    for role in WIRE_ENDS:
        here: dict[tuple[str, ...], dict[str, Any]] = {}
        for figures in look.figures_of(role).values():
            for path, counts in _leaves(figures.get("wires"), 3):
                for key in ("encode_s", "decode_s"):
                    codec_s[path] = codec_s.get(path, 0.0) + (number(counts.get(key)) or 0.0)
                if path[0] not in known:
                    one = here.setdefault(path, {"rows": 0, "bytes_raw": 0, "bytes_wire": 0, "error": None})
                    for key in ("rows", "bytes_raw", "bytes_wire"):
                        one[key] += number(counts.get(key)) or 0
                    errors = [one["error"], number(counts.get("relative_error"))]
                    one["error"] = max((e for e in errors if e is not None), default=None)
        known |= {path[0] for path in here}
        found |= here
    return [
        {"wire": path[0], "tables": path[1], "codec": path[2], **counts, "codec_s": codec_s[path]}
        for path, counts in found.items()
        if counts["rows"]
    ]


def links_of(look: Look) -> list[dict[str, Any]]:
    """Return the codec of each direction of each process's links, and why it is used."""
    return [
        {
            "service": name,
            "address": address,
            "carries": carries,
            "codec": choice.get("codec"),
            "why": choice.get("why"),
        }
        for role in WIRE_ENDS
        for name, figures in look.figures_of(role).items()
        for (address, carries), choice in _leaves(figures.get("codecs"), 2)
    ]


def _leaves(value: Any, depth: int) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield the mappings at a depth of nested ones, with their keys; what a service of another release
    reports otherwise is left out."""
    if not isinstance(value, Mapping):
        return
    if depth == 0:
        yield (), value
        return
    for key, inner in value.items():
        for path, leaf in _leaves(inner, depth - 1):
            yield (str(key), *path), leaf


def simulator_of(look: Look, history: History) -> dict[str, Any] | None:
    """Return rate, seed and drifts of the simulator; None if there is none."""
    figures = look.roles.get("simulator")
    if figures is None:
        return None
    recorded = [{"time_ms": d["time_ms"], "what": d.get("what")} for d in history.drifts]
    return {
        "rate": figures.get("rate"),
        "seed": figures.get("seed"),
        "drifts": figures.get("drifts") or recorded,
    }


KEPT = 2_000
"""Records that a page may miss and still get one by one; if it missed more, it reads the history again."""

PIECE = 500
"""Records in one piece of a stream."""

PING_S = 10.0
"""Silence after which a comment is sent, so that both sides notice a dead connection."""

RETRY_MS = 1_000


def event(name: str, data: bytes, offset: int | None = None) -> bytes:
    """Encode a server-sent event. `data` must hold no line breaks, as compact JSON does not."""
    head = b"" if offset is None else b"id: %d\n" % offset
    return b"%sevent: %s\ndata: %s\n\n" % (head, name.encode(), data)


class Board:
    """One writer, any number of streams. Each stream keeps its position; the board keeps none of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: tuple[int, bytes] = (0, b"")
        self._records: deque[tuple[int, int, bytes]] = deque(maxlen=KEPT)  # (sequence, offset, event)
        self._sequence = 0  # of the newest record
        self._generation = 0  # rises each time the log began anew
        self._next = 0  # first offset that was not read yet
        self._whole_from = 0  # offset from which on all published records are kept
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

    def publish_record(self, offset: int, record: Mapping[str, Any]) -> None:
        """Add a record of the measures."""
        self._append(offset, event("record", _dumped(record), offset))

    def publish_version(self, change: Mapping[str, Any]) -> None:
        """Add an event of a version; it has no offset, so after a gap a page may get it twice."""
        self._append(-1, event("version", _dumped({"kind": "version", **change})))

    @property
    def streams(self) -> int:
        """Number of open streams."""
        return len(self._wakers)

    def advance(self, offset: int) -> None:
        """Note that the measures below `offset` were read, also those that are not published."""
        with self._lock:
            self._next = offset

    def begin(self, offset: int) -> None:
        """Restart at this offset of the measures; open pages must start anew, too."""
        with self._lock:
            self._records.clear()
            self._generation += 1
            self._next = self._whole_from = offset
        self._wake()

    async def stream(self, start: int | None) -> AsyncGenerator[bytes]:
        """Yield pieces of an event stream: the state now and at each change, records from offset `start` on.

        Without `start`, only new records. The caller closes the generator.
        """
        loop, wake = asyncio.get_running_loop(), asyncio.Event()

        def waker() -> None:
            loop.call_soon_threadsafe(wake.set)

        with self._lock:
            self._wakers.add(waker)
            cursor, generation, complete = self._begin(start)
            following = self._next
        try:
            yield b"retry: %d\n\n" % RETRY_MS
            if not complete:
                yield event("reset", _dumped({"next": following}))
            shown = 0
            while True:
                wake.clear()
                piece, cursor, generation, shown = self._piece(cursor, generation, shown)
                if piece:
                    yield piece
                    continue
                try:
                    # Not `wait_for`: before Python 3.12 it loses a cancellation that comes at the moment of a
                    # wake, and the stream of a closed page then never ends.
                    async with asyncio.timeout(PING_S):
                        await wake.wait()
                except TimeoutError:
                    yield b": ping\n\n"
        finally:
            with self._lock:
                self._wakers.discard(waker)

    def _begin(self, start: int | None) -> tuple[int, int, bool]:
        """Return (sequence before the first requested record, generation, whether all of them are kept)."""
        if start is None:
            return self._sequence, self._generation, True
        if not self._whole_from <= start <= self._next:
            return self._sequence, self._generation, False
        # Start after the last record below `start`: events of versions have no offset, and come twice rather
        # than not at all.
        before = (sequence for sequence, offset, _ in reversed(self._records) if 0 <= offset < start)
        return next(before, self._first - 1), self._generation, True

    def _piece(self, cursor: int, generation: int, shown: int) -> tuple[bytes, int, int, int]:
        with self._lock:
            parts: list[bytes] = []
            if generation != self._generation or cursor + 1 < self._first:
                parts.append(event("reset", _dumped({"next": self._next})))
                cursor, generation = self._sequence, self._generation
            at = cursor + 1 - self._first
            fresh = [e for _, _, e in islice(self._records, at, at + PIECE)]
            parts += fresh
            cursor += len(fresh)
            number, data = self._state
        if number > shown and data:
            parts.append(event("state", data))
        return b"".join(parts), cursor, generation, number

    @property
    def _first(self) -> int:
        """Sequence of the oldest kept record; records are numbered without gaps."""
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
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
                wake()


def _dumped(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
