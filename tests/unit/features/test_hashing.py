"""Keys are frozen: they equal the published hashes, and vectors that were written down once."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from freshet import _native
from freshet.config.spec.parse import parse_spec
from freshet.features import hash_text, key_of, keys_of, partition_of, row_salt, table_salt
from freshet.features.hashing import cross_seed
from freshet.types import BytesColumn, bucket_of
from tests.fixtures import feature_oracle as oracle

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
U64S = st.integers(0, 2**64 - 1)
I64S = st.integers(-(2**63), 2**63 - 1)


@given(st.binary(max_size=3000), U64S)
def test_strings_are_hashed_as_the_xxhash_library_does(data: bytes, seed: int) -> None:
    assert _native.xxh3_64(data, seed) == xxhash.xxh3_64_intdigest(data, seed)


@pytest.mark.parametrize(
    "size", [*range(260), 511, 512, 513, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 10_000]
)
def test_every_length_is_hashed_as_the_xxhash_library_does(size: int) -> None:
    data = bytes((i * 2654435761 >> 7) & 0xFF for i in range(size))
    for seed in (0, 1, 0x9E3779B97F4A7C15):
        assert _native.xxh3_64(data, seed) == xxhash.xxh3_64_intdigest(data, seed)


@given(st.lists(I64S, unique=True), U64S)
def test_integers_never_share_a_key(values: list[int], salt: int) -> None:
    keys = keys_of(np.array(values, np.int64), salt)
    assert keys.tolist() == [oracle.key(v, salt) for v in values]
    assert len(set(keys.tolist()) - {1}) >= len(values) - 1


@given(st.lists(st.floats(width=64)), U64S)
def test_numbers_are_keyed_by_their_bits_and_minus_zero_is_zero(values: list[float], salt: int) -> None:
    assert keys_of(np.array(values, np.float64), salt).tolist() == [oracle.key(v, salt) for v in values]
    assert key_of(-0.0, salt) == key_of(0.0, salt)


@given(st.lists(st.binary(max_size=40)), U64S)
def test_a_column_of_strings_has_the_keys_of_its_strings(values: list[bytes], salt: int) -> None:
    assert keys_of(BytesColumn.of(values), salt).tolist() == [oracle.key(v, salt) for v in values]


def test_null_has_the_absent_key_and_the_empty_string_has_not() -> None:
    assert key_of(None, 7) == 0
    assert key_of("", 7) != 0
    assert key_of(float("nan"), 7) == 0


def test_an_integer_and_its_decimal_string_are_different_values() -> None:
    assert key_of(5, 0) != key_of("5", 0)
    assert key_of("é", 0) == key_of("é".encode(), 0) == hash_text("é")


def test_tables_and_crosses_are_salted_apart() -> None:
    assert key_of("x", table_salt("user")) != key_of("x", table_salt("item"))
    assert cross_seed("crosses", ["a", "b"]) != cross_seed("crosses", ["a", "c"])


def test_keys_written_down_once_are_still_the_same() -> None:
    for table, value, key in VECTORS["keys"]:
        assert key_of(value, table_salt(table)) == int(key, 16), (table, value)
    for table, parts, seed in VECTORS["cross_seeds"]:
        assert cross_seed(table, parts) == int(seed, 16)
    for (table, name), salt in zip(OWN_ROWS, VECTORS["row_salts"], strict=True):
        assert row_salt(OWN, OWN.feature(name)) == int(salt, 16), (table, name)


OWN_ROWS = [("small", "device"), ("small", "hour"), ("item", "item"), ("item", "recent")]
OWN_TEXT = """
name = "shop"
[events]
served = { key = ["r", "i"], time = "ts:ms" }
action = { key = ["r", "i"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'" }
[tables]
small = {}
item = {}
[features]
device = { field = "device", table = "small" }
hour = { time = "hour", table = "small" }
item = { field = "i", table = "item" }
recent = { field = "recent", table = "item", max = 50 }
"""
OWN = parse_spec(OWN_TEXT)


def test_items_of_a_history_share_the_rows_of_the_item() -> None:
    salts = {name: row_salt(OWN, OWN.feature(name)) for _, name in OWN_ROWS}

    assert salts["item"] == salts["recent"] == table_salt("item")
    assert len({salts["device"], salts["hour"], table_salt("small")}) == 3


@given(st.integers(-(2**63), 2**63 - 1))
def test_keys_of_separate_rows_are_as_evenly_spread(value: int) -> None:
    """Both are one-to-one mixes of the same integers: a bucket, the key's upper bits, depends on each bit."""
    salts = [row_salt(OWN, OWN.feature(name)) for name in ("device", "hour")]

    assert [key_of(value, salt) for salt in salts] == [oracle.key(value, salt) for salt in salts]
    assert key_of(value, salts[0]) != key_of(value, salts[1])


def test_ids_of_one_table_fill_all_buckets_alike() -> None:
    text = "".join(f'f{i} = {{ field = "f{i}", table = "small" }}\n' for i in range(100))
    spec = parse_spec(OWN_TEXT.split("[features]", maxsplit=1)[0] + "[features]\n" + text)
    keys = np.concatenate([keys_of(np.arange(24), row_salt(spec, f)) for f in spec.features])
    counts = np.bincount(bucket_of(keys, 16), minlength=16)

    assert len(set(keys.tolist())) == 2_400
    assert counts.min() > 100  # 150 expected, sigma 12
    assert counts.max() < 200


@pytest.mark.parametrize(
    ("key", "hash_"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_kafkas(key: bytes, hash_: int) -> None:
    assert _native.murmur2(key) == hash_ & 0xFFFFFFFF


@given(st.lists(st.binary(max_size=40)), st.integers(1, 100))
def test_keys_go_to_the_partition_that_java_producers_choose(keys: list[bytes], partitions: int) -> None:
    expected = [(_native.murmur2(k) & 0x7FFFFFFF) % partitions for k in keys]
    assert partition_of(BytesColumn.of(keys), partitions).tolist() == expected


@given(st.binary(max_size=2000))
def test_the_checksum_of_blocks_is_zlibs(data: bytes) -> None:
    assert _native.block_crc32(data) == zlib.crc32(data)
