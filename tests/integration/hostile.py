"""Messages that are none, for listeners that must refuse them and live on."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence

MESSAGES = int(os.environ.get("FRESHET_TEST_FRAMES", "5000"))
"""To each listener; 100,000 is what a release is tried with."""

LONGEST = 600


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
