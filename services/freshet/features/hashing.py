"""Keys: how a value becomes the 64-bit id of a row. Frozen: rows already learned are found by these
functions.

- integers (booleans count as 0 and 1): a one-to-one mix, so two integers of a feature never share a key;
- strings, bytes, and enums by their symbol: XXH3-64 seeded with the salt;
- other numbers: their bits as a double through the integers' mix.

An integer and its decimal string are different values with different keys; int and long are the same; so
are a string, bytes and an enum's symbol of equal text. Null has key 0, which makes no row.

The salt follows from the table's name. Where features of one table have rows of their own
(`freshet.config.spec.layout`), it follows from the feature's name, too: equal ids then have other keys,
spread as evenly over the buckets.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from freshet import _native
from freshet.config.spec.layout import has_own_rows
from freshet.config.spec.model import Feature, Spec
from freshet.types import F64, I32, I64, U64, BytesColumn

__all__ = ["cross_seed", "hash_text", "key_of", "keys_of", "partition_of", "row_salt", "table_salt"]


def table_salt(table: str) -> int:
    """Salt of a table's keys; follows from its name alone."""
    return int(_native.xxh3_64(b"freshet.table:" + table.encode(), 0))


def row_salt(spec: Spec, feature: Feature) -> int:
    """Salt of a feature's keys, in training and serving alike: its table's, or one of its own there."""
    if feature.table is None:
        return 0
    salt = table_salt(feature.table)
    if not has_own_rows(spec, feature):
        return salt
    return int(_native.xxh3_64(b"freshet.feature:" + feature.name.encode(), salt))


def cross_seed(table: str, parts: Iterable[str]) -> int:
    """Seed of a cross's keys: its table and its parts' names, so crosses that share a table share no rows."""
    return int(_native.xxh3_64(b"freshet.cross:" + "\x1f".join(parts).encode(), table_salt(table)))


def hash_text(text: str | bytes) -> int:
    """Unsalted key of a string: what event columns of strings and segments hold."""
    return key_of(text, 0)


def key_of(value: str | bytes | float | bool | None, salt: int) -> int:
    """Key of one value; the type of the value decides, as the type of a field does in records."""
    if value is None:
        return 0
    if isinstance(value, (str, bytes)):
        return int(keys_of(BytesColumn.of([value.encode() if isinstance(value, str) else value]), salt)[0])
    if isinstance(value, float):
        return int(keys_of(np.array([value], np.float64), salt)[0])
    return int(keys_of(np.array([int(value)], np.int64), salt)[0])


def keys_of(values: BytesColumn | I64 | F64, salt: int) -> U64:
    """(N,) keys of a column of strings, int64 or float64 (NaN is null)."""
    if isinstance(values, BytesColumn):
        return _native.keys_of_bytes(values.data, values.ends, salt)
    if values.dtype == np.float64:
        return _native.keys_of_doubles(np.ascontiguousarray(values, np.float64), salt)
    return _native.keys_of_ints(np.ascontiguousarray(values, np.int64), salt)


def partition_of(keys: BytesColumn, partitions: int) -> I32:
    """(N,) partition of each key as Java producers choose it: murmur2 without sign bit, modulo partitions."""
    return _native.partition_of(keys.data, keys.ends, partitions)
