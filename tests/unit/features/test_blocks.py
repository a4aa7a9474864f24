"""Blocks of samples: what is written is read, what is damaged is refused."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import Corrupt
from freshet.features import SampleColumns, encode_blocks, read_blocks
from freshet.types import BytesColumn
from tests.fixtures.blocks import encode_block


def columns(payloads: list[bytes], seed: int = 0) -> tuple[SampleColumns, BytesColumn]:
    n, rng = len(payloads), np.random.default_rng(seed)
    samples = SampleColumns(
        sample_ids=rng.integers(-(2**63), 2**63, n, np.int64),
        event_times_ms=rng.integers(0, 2**40, n),
        request_ids=rng.integers(0, 2**64, n, np.uint64),
        values=rng.normal(size=n).astype(np.float32),
        weights=rng.random(n).astype(np.float32),
        labels=rng.integers(0, 5, n).astype(np.uint8),
    )
    return samples, BytesColumn.of(payloads)


def by_the_book(schema_id: int, samples: SampleColumns, column: BytesColumn) -> bytes:
    """A block as schemas/README.md describes it, written once more with struct."""
    payloads = list(column)
    n = len(payloads)
    ends = np.cumsum([len(p) for p in payloads], dtype=np.uint32)
    head = (samples.sample_ids, samples.event_times_ms, samples.request_ids, samples.values, samples.weights)
    body = b"".join(part.tobytes() for part in head) + ends.tobytes() + samples.labels.tobytes()
    body += b"\0" * (-len(body) % 8) + b"".join(payloads)
    return struct.pack("<BBHIII", 0xB1, 1, 0, schema_id, n, zlib.crc32(body)) + body


PAYLOADS = st.lists(st.binary(max_size=30), min_size=1, max_size=20)


@given(PAYLOADS, st.integers(0, 2**32 - 1))
def test_a_block_has_the_bytes_that_the_format_says(payloads: list[bytes], schema_id: int) -> None:
    c = columns(payloads)
    assert encode_block(schema_id, *c) == by_the_book(schema_id, *c)


@given(st.lists(PAYLOADS, max_size=5))
def test_blocks_read_end_to_end_hold_what_was_written(blocks: list[list[bytes]]) -> None:
    written = [columns(payloads, seed=i) for i, payloads in enumerate(blocks)]
    read = read_blocks(BytesColumn.of([encode_block(i, *c) for i, c in enumerate(written)]))
    assert read.counts.tolist() == [len(p) for p in blocks]
    assert read.schema_ids.tolist() == [i for i, p in enumerate(blocks) for _ in p]
    assert read.block_of.tolist() == read.schema_ids.tolist()
    assert list(read.payloads) == [p for payloads in blocks for p in payloads]
    for name in SampleColumns._fields:
        assert getattr(read, name).tolist() == [v for s, _ in written for v in getattr(s, name).tolist()]


def test_many_blocks_are_cut_where_the_caller_says() -> None:
    c = columns([b"a", b"", b"ccc", b"dd"])
    blocks = encode_blocks(7, *c, np.array([1, 4]))
    assert read_blocks(blocks).counts.tolist() == [1, 3]
    assert list(read_blocks(blocks).payloads) == [b"a", b"", b"ccc", b"dd"]


@pytest.mark.parametrize("block_ends", [[], [3], [0, 4], [2, 2, 4], [5]])
def test_cuts_that_do_not_cover_the_samples_are_refused(block_ends: list[int]) -> None:
    with pytest.raises(ValueError, match="block"):
        encode_blocks(7, *columns([b"a"] * 4), np.array(block_ends, np.int64))


@given(PAYLOADS, st.data())
def test_any_changed_byte_is_noticed(payloads: list[bytes], data: st.DataObject) -> None:
    block = bytearray(encode_block(1, *columns(payloads)))
    i = data.draw(st.integers(0, len(block) - 1))
    block[i] ^= data.draw(st.integers(1, 255))
    good = BytesColumn.of([encode_block(1, *columns(payloads)), bytes(block)])
    if 4 <= i < 8:  # the schema id is not under the checksum; an unknown one is refused by the decoder
        assert read_blocks(good).schema_ids[-1] != 1
    else:
        with pytest.raises(Corrupt, match="samples block 1: expected"):
            read_blocks(good)


@given(PAYLOADS, st.data())
def test_a_block_that_is_cut_is_refused(payloads: list[bytes], data: st.DataObject) -> None:
    block = encode_block(1, *columns(payloads))
    with pytest.raises(Corrupt, match="samples block 0: expected"):
        read_blocks(BytesColumn.of([block[: data.draw(st.integers(0, len(block) - 1))]]))


@given(st.binary(max_size=100), st.integers(0, 2**32 - 1))
def test_bytes_with_a_right_checksum_are_no_block_either(body: bytes, n: int) -> None:
    head = struct.pack("<BBHIII", 0xB1, 1, 0, 1, n, zlib.crc32(body))
    try:
        read = read_blocks(BytesColumn.of([head + body]))
    except Corrupt:
        return
    assert len(read) == n


def test_no_blocks_are_no_samples() -> None:
    assert len(read_blocks(BytesColumn.of([]))) == 0
