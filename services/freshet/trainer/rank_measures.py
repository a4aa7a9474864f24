"""Measures of several ranks: what each has counted goes to all of them now and then, so that whoever leads
tells of all.

A rank that is lost takes its last increments with it, a quarter of a second's; nothing but measures depends
on them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.trainer.quality import Quality
from freshet.trainer.ranks import RankGroup

__all__ = ["SharedMeasures", "pack_arrays", "unpack_arrays"]


def pack_arrays(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Named arrays as bytes; none for none."""
    packed = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return safetensors.numpy.save(packed) if packed else b""


def unpack_arrays(data: bytes) -> dict[str, NDArray[Any]]:
    """The arrays that `pack_arrays` packed. Raises Corrupt."""
    if not data:
        return {}
    try:
        return safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise Corrupt(f"expected arrays of another rank, found {len(data)} bytes: {error}") from error


LENGTH_BYTES = 8


class SharedMeasures:
    """Between a rank's measuring thread, which makes and takes in increments, and its lanes, which carry
    them."""

    def __init__(self, quality: Quality) -> None:
        self._quality = quality
        self._lock = threading.Lock()  # guards what follows
        self._ready = b""  # increments that are to be sent, each after its length
        self._received: list[Sequence[bytes]] = []
        self._attempt: tuple[int, bytes] = (0, b"")  # the last exchange: its number, and what this rank sent
        self.done = 0  # exchanges completed, of those that the figures of the ranks go back to

    def begin(self, ranks: int, done: int) -> None:
        """A group of so many ranks begins, with the measures of a rank that had completed `done` exchanges.

        If the last one that this rank took part in is not among them, what it sent goes out again.
        """
        with self._lock:
            number, sent = self._attempt
            if number > done:
                self._ready = sent + self._ready
            self._attempt, self.done, self._received = (done, b""), done, []
            if ranks == 1:
                self._received, self._ready = [[self._ready]], b""
        self._quality.share(ranks > 1)
        self.take_in()

    def prepare(self, *, more: bool = False) -> None:
        """Make an increment; not while one still waits, unless `more`."""
        with self._lock:
            if (more or not self._ready) and (made := pack_arrays(self._quality.increment())):
                self._ready += len(made).to_bytes(LENGTH_BYTES, "little") + made

    def exchange(self, group: RankGroup, last: bool) -> None:
        """Send what waits, and receive what others send; for the lanes. `last`: make an increment first.

        Raises RankLost: what was sent may have come to some of the others; `begin` finds that out.
        """
        if last:
            self.prepare(more=True)
        with self._lock:
            mine, self._ready = self._ready, b""
            self._attempt = self.done + 1, mine
        received = group.exchange(mine)
        with self._lock:
            self._received.append(received)
            self.done += 1

    def take_in(self) -> None:
        """Add up what was received; any thread."""
        with self._lock:
            received, self._received = self._received, []
            for parts in received:
                self._quality.merge([unpack_arrays(made) for part in parts for made in _increments(part)])


def _increments(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(data[at:start], "little")
        if at > len(data):
            raise Corrupt(
                f"expected {at - start} bytes of measures of another rank, found {len(data) - start}"
            )
        found.append(data[start:at])
    return found
