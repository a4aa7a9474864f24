"""Messages that are longer than one may be go in pieces, each of them a frame of its own.

A PIECE carries the id of its message, NUMBERS (the message's length, where the piece starts in it) and BYTES.
The pieces of a message follow each other on their stream, nothing between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from freshet.rpc.frames import (
    BadFrame,
    Frame,
    Kind,
    LargeFrame,
    Part,
    decode_frame,
    encode_frame,
    encoded_bytes,
    frame_id_of,
)

__all__ = ["MOST_PIECES", "SMALLEST_LIMIT", "Whole", "check_whole", "pieces_of"]

MOST_PIECES = 64
"""What a receiver puts together at most, in messages of its limit: 4 GiB by default."""

_NUMBERS = np.zeros(2, np.int64)
_AROUND = encoded_bytes({(Part.NUMBERS, 0): _NUMBERS, (Part.BYTES, 0): np.zeros(0, np.uint8)})

SMALLEST_LIMIT = 2 * _AROUND
"""Of a message, below which pieces are mostly their own headers."""


def pieces_of(data: bytes, max_bytes: int) -> Iterator[bytes]:
    """The message as it is, if it has `max_bytes` at most; else pieces of it that have."""
    if len(data) <= max_bytes:
        yield data
        return
    if max_bytes < SMALLEST_LIMIT:
        raise ValueError(f"messages of at least {SMALLEST_LIMIT} bytes must be allowed, found {max_bytes}")
    frame_id, all_bytes = frame_id_of(data), np.frombuffer(data, np.uint8)
    room = (max_bytes - _AROUND) // 8 * 8
    for at in range(0, len(data), room):
        sections: dict[tuple[Part, int], NDArray[np.int64] | NDArray[np.uint8]] = {
            (Part.NUMBERS, 0): np.array([len(data), at], np.int64),
            (Part.BYTES, 0): all_bytes[at : at + room],
        }
        yield encode_frame(Frame(Kind.PIECE, frame_id, sections=sections))


def check_whole(size: int, max_bytes: int) -> None:
    """Raise LargeFrame if no pieces of `max_bytes` can carry a message of this many bytes."""
    if size > MOST_PIECES * max_bytes:
        raise LargeFrame(
            f"message: expected at most {MOST_PIECES * max_bytes} bytes, found {size}\n"
            f"  raise FRESHET_GRPC_MAX_MESSAGE_BYTES ({max_bytes}) to {-(-size // MOST_PIECES)} on both "
            "sides, or take fewer rows in a batch"
        )


class Whole:
    """Puts the messages of one stream together. Holds no more than what has come of one."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of a message with all its pieces."""
        self._max = max_bytes
        self._id = self.size = self._come = 0
        self._parts: list[NDArray[np.uint8]] = []
        self._dropped = False

    @property
    def begun(self) -> bool:
        """Whether some of a message is still to come; its length is `size`."""
        return self._come > 0

    def drop(self) -> None:
        """Keep nothing of the message that has begun: `take` gives its last piece back as it is."""
        self._dropped, self._parts = True, []

    def take(self, frame: Frame) -> Frame | None:
        """The next frame of the stream: what it is, or None while more of it is to come.

        Raises:
            LargeFrame: a message of which this is a piece is longer than `max_bytes`.
            BadFrame: it is no piece of what has begun, or the whole is no frame.
        """
        if frame.kind != Kind.PIECE:
            if self.begun:
                raise BadFrame(f"expected more of message {self._id}, found kind {frame.kind}", "shape")
            return frame
        size, at = frame.array(Part.NUMBERS, np.int64, (2,)).tolist()
        part = frame.array(Part.BYTES, np.uint8)
        if not self.begun:
            if size > self._max:
                raise LargeFrame(f"message: expected at most {self._max} bytes in pieces, found {size}")
            self._id, self.size, self._dropped = frame.id, size, False
        if (frame.id, size, at) != (self._id, self.size, self._come) or not 0 < len(part) <= size - at:
            raise BadFrame(
                f"piece: expected bytes of message {self._id} from {self._come} of {self.size}, found "
                f"{len(part)} of message {frame.id} from {at} of {size}",
                "shape",
            )
        self._come += len(part)
        if not self._dropped:
            self._parts.append(part)
        return self._ended(frame) if self._come == size else None

    def _ended(self, last: Frame) -> Frame:
        parts, self._parts, self._come = self._parts, [], 0
        if self._dropped:
            return last
        whole = decode_frame(b"".join(part.data for part in parts), max_bytes=self._max)
        if whole.kind == Kind.PIECE or whole.id != last.id:
            raise BadFrame(f"pieces of message {last.id} hold kind {whole.kind} of id {whole.id}", "shape")
        return whole
