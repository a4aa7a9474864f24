"""Messages that are none, for listeners that must refuse them and live on."""

from __future__ import annotations

import os
import random
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

MESSAGES = int(os.environ.get("FRESHET_TEST_FRAMES", "5000"))
"""To each listener; 100,000 is what a release is tried with."""

LONGEST = 600
DEADLINE_S = 120.0
AT_ONCE = 64
_CRC_AT, _CRC_FROM = 4, 8
"""Where the checksum stands in a frame's header, and where the bytes begin that it covers."""


def hostile(good: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Random bytes, and good messages cut, changed, stretched or put together."""
    chance = random.Random(seed)
    for _ in range(count):
        data = bytearray(chance.choice(good))
        match chance.randrange(5):
            case 0:
                data = bytearray(chance.randbytes(chance.randrange(LONGEST)))
            case 1:
                del data[chance.randrange(len(data)) :]
            case 2:
                for _ in range(chance.randrange(1, 6)):
                    data[chance.randrange(len(data))] = chance.randrange(256)
            case 3:
                at = chance.randrange(len(data))
                data[at:at] = chance.randbytes(chance.randrange(1, 20))
            case 4:
                data += chance.choice(good)
        yield bytes(data)


def sealed(messages: Iterable[bytes], seed: int) -> Iterator[bytes]:
    """Half of the messages with the checksum that a frame of these bytes has, so that what lies behind is
    tried."""
    chance = random.Random(seed)
    for data in messages:
        if len(data) > _CRC_FROM and chance.random() < 0.5:
            crc = struct.pack("<I", zlib.crc32(data[_CRC_FROM:]))
            yield data[:_CRC_AT] + crc + data[_CRC_FROM:]
        else:
            yield data


def answers(
    channel: grpc.Channel,
    method: Callable[[bytes], str],
    messages: Iterable[bytes],
    metadata: Sequence[tuple[str, str]] = (),
) -> Iterator[bytes | grpc.RpcError]:
    """What each message is answered on a call of its own, some of them at once; `method` names its method."""
    waiting: deque[Any] = deque()

    def finish() -> bytes | grpc.RpcError:
        call = waiting.popleft()
        error = call.exception()
        return call.result() if error is None else error

    for message in messages:
        called = channel.unary_unary(method(message))  # on the wire a stream of one message is the same
        waiting.append(called.future(message, timeout=DEADLINE_S, metadata=metadata))
        if len(waiting) == AT_ONCE:
            yield finish()
    while waiting:
        yield finish()
