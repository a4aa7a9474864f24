import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import BadInput, Corrupt
from freshet.log.sqlite import file as log_file
from freshet.log.sqlite.file import CHUNK_BYTES, Contents, pack, split, unpack
from freshet.types import BytesColumn

records = st.lists(
    st.tuples(st.binary(max_size=40), st.binary(max_size=10), st.integers(-(2**63), 2**63 - 1)), min_size=1
)


def contents_of(rows: list[tuple[bytes, bytes, int]]) -> Contents:
    values, keys, times = zip(*rows, strict=True)
    return Contents(BytesColumn.of(values), BytesColumn.of(keys), np.array(times, np.int64))


def rows_of(contents: Contents) -> list[tuple[bytes, bytes, int]]:
    return list(zip(contents.values, contents.keys, contents.times_ms.tolist(), strict=True))


@given(records)
def test_packed_records_are_unpacked(rows: list[tuple[bytes, bytes, int]]) -> None:
    chunk = pack(contents_of(rows))
    assert rows_of(unpack(chunk.body, chunk.min_ms, "here")) == rows
    assert (chunk.count, chunk.min_ms, chunk.max_ms) == (
        len(rows),
        min(t for *_, t in rows),
        max(t for *_, t in rows),
    )


@given(st.binary(max_size=100))
def test_any_bytes_are_a_chunk_or_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt, match="here"):
        unpack(data, 0, "here")


@given(records, st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_byte_is_corrupt(rows: list[tuple[bytes, bytes, int]], at: int, change: int) -> None:
    data = bytearray(pack(contents_of(rows)).body)
    data[at % len(data)] ^= change
    with pytest.raises(Corrupt, match="here"):
        unpack(bytes(data), 0, "here")


@given(records, st.integers(1, 10**6))
def test_a_truncated_chunk_is_corrupt(rows: list[tuple[bytes, bytes, int]], cut: int) -> None:
    data = pack(contents_of(rows)).body
    with pytest.raises(Corrupt):
        unpack(data[: -(cut % len(data)) or None][: len(data) - 1], 0, "here")


@pytest.mark.parametrize("ends", [[5, 3], [2, 9], [3, 3]])
def test_ends_out_of_bounds_are_corrupt_despite_a_correct_crc(ends: list[int]) -> None:
    values = b"abcd"
    index = struct.pack("<2I", *ends)
    head = struct.pack("<BBHII", 0xB0, 1, 0, 2, 0)
    body = head[:12] + struct.pack("<III", zlib.crc32(index, zlib.crc32(head[:12])), zlib.crc32(values), 0)
    with pytest.raises(Corrupt, match="ends"):
        unpack(body + index + values, 0, "here")


@given(st.lists(st.integers(0, 3 * 100), min_size=1, max_size=30))
def test_splitting_keeps_every_record_and_the_bound(sizes: list[int]) -> None:
    contents = contents_of([(bytes(size), b"k", 0) for size in sizes])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(log_file, "CHUNK_BYTES", 200)
        parts = list(split(contents))
    assert [row for part in parts for row in rows_of(part)] == rows_of(contents)
    for part in parts:
        assert len(part) == 1 or len(part.values.data) + len(part.keys.data) <= 200


def test_a_record_above_the_limit_is_bad_input() -> None:
    huge = BytesColumn(
        np.zeros(log_file.MAX_RECORD_BYTES + 1, np.uint8), np.array([log_file.MAX_RECORD_BYTES + 1])
    )
    contents = Contents(huge, BytesColumn.of([b""]), np.zeros(1, np.int64))
    with pytest.raises(BadInput, match="67,108,865"):
        list(split(contents))


def test_values_of_large_records_are_left_to_their_own_checksum() -> None:
    chunk = pack(contents_of([(bytes(5000), b"", 0)]))
    changed = chunk.body[:-1] + b"\x01"
    assert unpack(changed, 0, "here").values[0][-1] == 1
    assert CHUNK_BYTES > log_file.SELF_CHECKED_BYTES
