"""Keys: hashes of values to the 64-bit ids of rows. Frozen: a change would lose the rows already learned.

- Integers (booleans count as 0 and 1): a bijective mix, so two integers of a feature never share a key.
- Strings, bytes, and enums by their symbol: XXH3-64 seeded with the salt.
- Other numbers: the bits of the double, mixed like integers.

An integer and its decimal string have different keys. Int and long of one value have the same key, and so
have a string, bytes and an enum's symbol of equal text. Null has key 0, which makes no row.

The salt derives from the table's name, and also from the feature's name where features of one table have
separate rows (`freshet.config.spec.layout`).

Letters: N values.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from freshet import _native
from freshet.config.spec.layout import has_own_rows
from freshet.config.spec.model import Feature, Spec
from freshet.types import F64, I32, I64, U64, BytesColumn


def table_salt(table: str) -> int:
    """Return the salt of a table's keys, a hash of its name."""
    return int(_native.xxh3_64(b"freshet.table:" + table.encode(), 0))


def row_salt(spec: Spec, feature: Feature) -> int:
    """Return the salt of a feature's keys: its table's, or its own if it has separate rows."""
    if feature.table is None:
        return 0
    salt = table_salt(feature.table)
    if not has_own_rows(spec, feature):
        return salt
    return int(_native.xxh3_64(b"freshet.feature:" + feature.name.encode(), salt))


def cross_seed(table: str, parts: Iterable[str]) -> int:
    """Return the seed of a cross's keys, a hash of table and parts, so crosses of one table share no rows."""
    return int(_native.xxh3_64(b"freshet.cross:" + "\x1f".join(parts).encode(), table_salt(table)))


def hash_text(text: str | bytes) -> int:
    """Return the unsalted key of a string, as in segments and text columns of events."""
    return key_of(text, 0)


def key_of(value: str | bytes | float | bool | None, salt: int) -> int:
    """Return the key of one value, hashed by its Python type as a field by its Avro type."""
    if value is None:
        return 0
    if isinstance(value, (str, bytes)):
        return int(keys_of(BytesColumn.of([value.encode() if isinstance(value, str) else value]), salt)[0])
    if isinstance(value, float):
        return int(keys_of(np.array([value], np.float64), salt)[0])
    return int(keys_of(np.array([int(value)], np.int64), salt)[0])


def keys_of(values: BytesColumn | I64 | F64, salt: int) -> U64:
    """Return the (N,) keys of N strings, int64 or float64 values (NaN is null)."""
    if isinstance(values, BytesColumn):
        return _native.keys_of_bytes(values.data, values.ends, salt)
    if values.dtype == np.float64:
        return _native.keys_of_doubles(np.ascontiguousarray(values, np.float64), salt)
    return _native.keys_of_ints(np.ascontiguousarray(values, np.int64), salt)


def partition_of(keys: BytesColumn, partitions: int) -> I32:
    """Return the (N,) partitions of N keys by Kafka's default partitioner: murmur2 without sign bit, modulo
    `partitions`."""
    return _native.partition_of(keys.data, keys.ends, partitions)
