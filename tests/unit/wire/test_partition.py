"""Partitions equal those that Java producers choose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.types import BytesColumn
from freshet.wire.partition import murmur2, partition_of, partitions_of


@pytest.mark.parametrize(
    ("key", "signed"),
    [  # vectors of Kafka's own UtilsTest.testMurmur2
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_the_hash_equals_kafkas_own_vectors(key: bytes, signed: int) -> None:
    assert murmur2(key) == signed % 2**32


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 64))
def test_a_column_goes_where_its_keys_go_one_by_one(keys: list[bytes], partitions: int) -> None:
    expected = [partition_of(key, partitions) for key in keys]

    np.testing.assert_array_equal(
        partitions_of(BytesColumn.of(keys), partitions), np.array(expected, np.int64)
    )
