"""Which partition a key belongs to: murmur2, as Java producers use (a key is always given)."""

from __future__ import annotations

import numpy as np

from freshet.types import I64, U8, U32, BytesColumn

__all__ = ["murmur2", "partition_of", "partitions_of"]

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFF_FFFF


def murmur2(key: bytes) -> int:
    """32-bit murmur2 with Kafka's seed, unsigned. Source: org.apache.kafka.common.utils.Utils.murmur2."""
    n = len(key)
    h = _SEED ^ n
    whole = n & ~3
    for i in range(0, whole, 4):
        k = (int.from_bytes(key[i : i + 4], "little") * _M) & _MASK
        k = ((k ^ (k >> 24)) * _M) & _MASK
        h = ((h * _M) & _MASK) ^ k
    if n > whole:
        h = ((h ^ int.from_bytes(key[whole:], "little")) * _M) & _MASK
    h = ((h ^ (h >> 13)) * _M) & _MASK
    return h ^ (h >> 15)


def partition_of(key: bytes, partitions: int) -> int:
    """Partition of one key: the hash without its sign bit, modulo the number of partitions."""
    return (murmur2(key) & 0x7FFF_FFFF) % partitions


def partitions_of(keys: BytesColumn, partitions: int) -> I64:
    """(N,) partition of each key; a column at a time, one numpy pass for each 4 bytes of the longest key."""
    starts, lengths = keys.starts, np.diff(keys.ends, prepend=0)
    h = np.uint32(_SEED) ^ lengths.astype(np.uint32)
    whole = lengths // 4
    for word in range(int(whole.max(initial=0))):
        rows = np.flatnonzero(whole > word)
        k = _words(keys.data, starts[rows] + 4 * word, 4) * np.uint32(_M)
        k = (k ^ (k >> np.uint32(24))) * np.uint32(_M)
        h[rows] = (h[rows] * np.uint32(_M)) ^ k
    for tail in (1, 2, 3):
        rows = np.flatnonzero(lengths % 4 == tail)
        h[rows] = (h[rows] ^ _words(keys.data, starts[rows] + 4 * whole[rows], tail)) * np.uint32(_M)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(_M)
    h ^= h >> np.uint32(15)
    return (h & np.uint32(0x7FFF_FFFF)).astype(np.int64) % partitions


def _words(data: U8, at: I64, size: int) -> U32:
    """Little-endian words of `size` bytes at these places."""
    word = np.zeros(len(at), np.uint32)
    for byte in range(size):
        word |= data[at + byte].astype(np.uint32) << np.uint32(8 * byte)
    return word
