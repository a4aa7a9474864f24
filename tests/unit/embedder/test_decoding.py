"""Blocks decode alike in one native call and the long way; what is out of the ordinary goes the long way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.embedder.decoding import BlockDecoder, DecodedBatch
from freshet.errors import Corrupt
from freshet.features import encode_block
from freshet.types import BytesColumn
from tests.unit.features import oracle
from tests.unit.features.test_decoder import SAMPLE, SAMPLES, TIMES, decoder, sample_of

BLOCKS = st.lists(st.lists(st.tuples(SAMPLES, TIMES), min_size=1, max_size=4), min_size=1, max_size=3)
LABELS = 2


def block(payloads: BytesColumn, times: list[int], schema_id: int = 1, label: int = 1) -> bytes:
    n = len(payloads)
    return encode_block(
        schema_id,
        sample_ids=np.arange(n, dtype=np.int64) - 7,
        event_times_ms=np.array(times, np.int64),
        request_ids=np.arange(n, dtype=np.uint64),
        values=np.linspace(0, 1, n, dtype=np.float32),
        weights=np.full(n, 0.5, np.float32),
        labels=np.full(n, label, np.uint8),
        payloads=payloads,
    )


def blocks_of(rows: list[list[tuple[Any, int]]]) -> BytesColumn:
    return BytesColumn.of([block(oracle.write(SAMPLE, [s for s, _ in r]), [t for _, t in r]) for r in rows])


def made(refused: list[bytes] | None = None) -> BlockDecoder:
    return BlockDecoder(decoder(), LABELS, (refused if refused is not None else []).extend)


def same(found: DecodedBatch, expected: DecodedBatch) -> None:
    assert oracle.decoded_keys(found.columns) == oracle.decoded_keys(expected.columns)
    assert found.columns.dense.tobytes() == expected.columns.dense.tobytes()
    assert found.columns.explored.tolist() == expected.columns.explored.tolist()
    for name, keys in expected.columns.segments.items():
        assert found.columns.segments[name].tolist() == keys.tolist()
    for name, served in expected.columns.served.items():
        assert found.columns.served[name].tobytes() == served.tobytes()
    for name in ("sample_ids", "request_ids", "event_times_ms", "label_index", "label_value", "weight"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()


@given(BLOCKS)
def test_blocks_of_the_schema_seen_last_decode_to_the_same_in_one_call(
    rows: list[list[tuple[Any, int]]],
) -> None:
    blocks = blocks_of(rows)
    blocks_decoder = made()
    the_long_way = blocks_decoder.decode(blocks)
    assert blocks_decoder._usual(blocks) is not None
    same(blocks_decoder.decode(blocks), the_long_way)


@given(BLOCKS)
def test_a_sample_that_cannot_be_decoded_is_refused_whatever_was_seen_before(
    rows: list[list[tuple[Any, int]]],
) -> None:
    refused: list[bytes] = []
    usual, bad = blocks_of(rows), block(BytesColumn.of([b""]), [0])
    blocks_decoder = made(refused)
    before = blocks_decoder.decode(usual)
    both = BytesColumn.of([*usual, bad])
    same(blocks_decoder.decode(both, ((3, np.arange(len(both), dtype=np.int64)),)), before)
    assert len(refused) == 1
    assert b'"partition":3' in refused[0]


def test_a_damaged_block_and_an_unknown_label_are_named_whatever_was_seen_before() -> None:
    whole = block(BytesColumn.of([b""]), [0])
    blocks_decoder = made()
    blocks_decoder.decode(BytesColumn.of([whole]))
    with pytest.raises(Corrupt, match="block 1: expected the checksum"):
        blocks_decoder.decode(BytesColumn.of([whole, whole[:-1] + b"!"]))
    with pytest.raises(Corrupt, match="label 2"):
        blocks_decoder.decode(BytesColumn.of([block(oracle.write(SAMPLE, [sample_of()]), [0], label=2)]))


def test_a_batch_of_no_blocks_holds_no_samples_whatever_was_seen_before() -> None:
    """As where a cut point follows a gap in the log."""
    blocks_decoder, none = made(), BytesColumn.of([])
    first = blocks_decoder.decode(none, ((0, np.empty(0, np.int64)),))
    blocks_decoder.decode(BytesColumn.of([block(oracle.write(SAMPLE, [sample_of()]), [1])]))
    later = blocks_decoder.decode(none, ((0, np.empty(0, np.int64)),))
    for found in (first, later):
        assert found.columns.size == len(found.sample_ids) == 0
        assert [len(group.keys) for group in found.columns.groups] == [0] * len(found.columns.groups)
