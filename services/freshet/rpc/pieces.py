"""Messages above the size limit are sent in pieces, each a frame of its own.

A PIECE carries the id of its message, NUMBERS (the message's length, the offset of the piece) and BYTES. The
pieces of a message follow each other on their stream without other frames in between.
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

MAX_PIECES = 64
"""The longest message, in multiples of the size limit: 4 GiB by default."""

_NUMBERS = np.zeros(2, np.int64)
_OVERHEAD_BYTES = encoded_bytes({(Part.NUMBERS, 0): _NUMBERS, (Part.BYTES, 0): np.zeros(0, np.uint8)})

MIN_LIMIT_BYTES = 2 * _OVERHEAD_BYTES
"""With a smaller size limit, pieces would be mostly headers."""


def split_message(data: bytes, max_bytes: int) -> Iterator[bytes]:
    """Yield the message itself if it has at most `max_bytes`, else its pieces of at most that size.

    Raises ValueError if `max_bytes` is below `MIN_LIMIT_BYTES`.
    """
    if len(data) <= max_bytes:
        yield data
        return
    if max_bytes < MIN_LIMIT_BYTES:
        raise ValueError(f"messages of at least {MIN_LIMIT_BYTES} bytes must be allowed, found {max_bytes}")
    frame_id, all_bytes = frame_id_of(data), np.frombuffer(data, np.uint8)
    piece_bytes = (max_bytes - _OVERHEAD_BYTES) // 8 * 8
    for at in range(0, len(data), piece_bytes):
        sections: dict[tuple[Part, int], NDArray[np.int64] | NDArray[np.uint8]] = {
            (Part.NUMBERS, 0): np.array([len(data), at], np.int64),
            (Part.BYTES, 0): all_bytes[at : at + piece_bytes],
        }
        yield encode_frame(Frame(Kind.PIECE, frame_id, sections=sections))


def check_message_size(size: int, max_bytes: int) -> None:
    """Raises LargeFrame if a message of `size` bytes does not fit in `MAX_PIECES` pieces of `max_bytes`."""
    if size > MAX_PIECES * max_bytes:
        raise LargeFrame(
            f"message: expected at most {MAX_PIECES * max_bytes} bytes, found {size}\n"
            f"  raise FRESHET_GRPC_MAX_MESSAGE_BYTES ({max_bytes}) to {-(-size // MAX_PIECES)} on both "
            "sides, or take fewer rows in a batch"
        )


class MessageAssembler:
    """Assembles the messages of one stream from frames. Holds only the received pieces of one message."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: size of the longest message, all its pieces together."""
        self._max = max_bytes
        self._id = self._size = self._received = 0
        self._parts: list[NDArray[np.uint8]] = []
        self._discarded = False

    @property
    def incomplete(self) -> bool:
        """Whether more pieces of a message must follow."""
        return self._received > 0

    def discard(self) -> None:
        """Keep no piece of the incomplete message; `add_frame` will return its last piece instead of it."""
        self._discarded, self._parts = True, []

    def add_frame(self, frame: Frame) -> Frame | None:
        """Add the next frame of the stream; returns a complete message, or None while pieces are missing.

        Raises:
            LargeFrame: the message of this piece is longer than `max_bytes`.
            BadFrame: the frame does not continue the incomplete message, or the pieces are not a frame.
        """
        if frame.kind != Kind.PIECE:
            if self.incomplete:
                raise BadFrame(f"expected more of message {self._id}, found kind {frame.kind}", "shape")
            return frame
        size, at = frame.array(Part.NUMBERS, np.int64, (2,)).tolist()
        part = frame.array(Part.BYTES, np.uint8)
        if not self.incomplete:
            if size > self._max:
                raise LargeFrame(f"message: expected at most {self._max} bytes in pieces, found {size}")
            self._id, self._size, self._discarded = frame.id, size, False
        if (frame.id, size, at) != (self._id, self._size, self._received) or not 0 < len(part) <= size - at:
            raise BadFrame(
                f"piece: expected bytes of message {self._id} from {self._received} of {self._size}, found "
                f"{len(part)} of message {frame.id} from {at} of {size}",
                "shape",
            )
        self._received += len(part)
        if not self._discarded:
            self._parts.append(part)
        return self._assemble(frame) if self._received == size else None

    def _assemble(self, last: Frame) -> Frame:
        parts, self._parts, self._received = self._parts, [], 0
        if self._discarded:
            return last
        message = decode_frame(b"".join(part.data for part in parts), max_bytes=self._max)
        if message.kind == Kind.PIECE or message.id != last.id:
            raise BadFrame(
                f"pieces of message {last.id} hold kind {message.kind} of id {message.id}", "shape"
            )
        return message
