"""The exchange of measures between ranks, so that the leader's figures cover all of them.

Each rank sends its increments to all others every EXCHANGE_S. The last increments of a lost rank are lost
with it; only measures depend on them.
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
from freshet.trainer.ranks import ProcessGroup

__all__ = ["SharedMeasures", "pack_arrays", "unpack_arrays"]


def pack_arrays(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Encode named arrays of any shape as safetensors; no bytes for no array."""
    packed = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return safetensors.numpy.save(packed) if packed else b""


def unpack_arrays(data: bytes) -> dict[str, NDArray[Any]]:
    """Decode the bytes of `pack_arrays`. Raises Corrupt if they are not safetensors."""
    if not data:
        return {}
    try:
        return safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise Corrupt(f"expected arrays of another rank, found {len(data)} bytes: {error}") from error


LENGTH_BYTES = 8


class SharedMeasures:
    """Increments of measures between a rank's measuring thread and its lanes.

    The measuring thread prepares and merges increments; the lanes exchange them. Thread-safe.
    """

    def __init__(self, quality: Quality) -> None:
        self._quality = quality
        self._lock = threading.Lock()  # guards the fields below
        self._ready = b""  # increments to send, each after its length
        self._received: list[Sequence[bytes]] = []
        self._attempt: tuple[int, bytes] = (0, b"")  # number and sent bytes of the last exchange
        self.done = 0  # completed exchanges that the figures contain

    def begin(self, ranks: int, done: int) -> None:
        """Start a group of `ranks` ranks with figures that contain `done` exchanges.

        If they do not contain this rank's last exchange, its increments are sent again.
        """
        with self._lock:
            number, sent = self._attempt
            if number > done:
                self._ready = sent + self._ready
            self._attempt, self.done, self._received = (done, b""), done, []
            if ranks == 1:
                self._received, self._ready = [[self._ready]], b""
        self._quality.share(ranks > 1)
        self.merge_received()

    def prepare(self, *, more: bool = False) -> None:
        """Prepare an increment, unless one is waiting to be sent and `more` is False."""
        with self._lock:
            if (more or not self._ready) and (packed := pack_arrays(self._quality.increment())):
                self._ready += len(packed).to_bytes(LENGTH_BYTES, "little") + packed

    def exchange(self, group: ProcessGroup, last: bool) -> None:
        """Send the prepared increments and receive those of the others; `last` prepares one first.

        Raises RankLost: some ranks may have received the increments; the next `begin` resolves that.
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

    def merge_received(self) -> None:
        """Merge the received increments into the figures."""
        with self._lock:
            received, self._received = self._received, []
            for parts in received:
                self._quality.merge([unpack_arrays(one) for part in parts for one in _split(part)])


def _split(data: bytes) -> list[bytes]:
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
