"""The native call and the general path decode alike; invalid blocks take the general path."""

from __future__ import annotations

import base64
import math
import os
import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.config.avro.schema import Record, parse_schema
from freshet.embedder import block_decoder as module
from freshet.embedder.block_decoder import (
    BAD_IN_A_ROW,
    MOST_PAYLOAD_BYTES,
    BlockDecoder,
    DecodedBatch,
    RefusedSamples,
)
from freshet.errors import ConfigError, Unavailable
from freshet.features import SampleColumns, SampleDecoder
from freshet.types import BytesColumn
from tests.fixtures import feature_oracle as oracle
from tests.fixtures.blocks import encode_block
from tests.fixtures.effort import examples
from tests.fixtures.samples import LAYOUT, SAMPLE, SAMPLES, SPEC, TIMES, decoder, sample_of

BLOCKS = st.lists(st.lists(st.tuples(SAMPLES, TIMES), min_size=1, max_size=4), min_size=1, max_size=3)
LABELS = 2


def block(
    payloads: BytesColumn,
    times: list[int],
    schema_id: int = 1,
    label: int = 1,
    values: list[float] | None = None,
) -> bytes:
    n = len(payloads)
    return encode_block(
        schema_id,
        SampleColumns(
            sample_ids=np.arange(n, dtype=np.int64) - 7,
            event_times_ms=np.array(times, np.int64),
            request_ids=np.arange(n, dtype=np.uint64),
            values=np.linspace(0, 1, n, dtype=np.float32) if values is None else np.array(values, np.float32),
            weights=np.full(n, 0.5, np.float32),
            labels=np.full(n, label, np.uint8),
        ),
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
def test_one_call_decodes_blocks_of_the_last_schema_alike(
    rows: list[list[tuple[Any, int]]],
) -> None:
    blocks = blocks_of(rows)
    blocks_decoder = made()
    the_long_way = blocks_decoder.decode(blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "read_blocks", lambda _: pytest.fail("a decode in several calls"))
        again = blocks_decoder.decode(blocks)
    same(again, the_long_way)


@given(BLOCKS)
def test_invalid_sample_is_refused_after_any_schema(
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


def good_block(label: int = 1, schema_id: int = 1) -> bytes:
    return block(oracle.write(SAMPLE, [sample_of()]), [1], schema_id, label)


def flipped(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 0x40]) + record[at + 1 :]


def looking(schemas: Callable[[int], Record]) -> SampleDecoder:
    return SampleDecoder(SPEC, LAYOUT, schemas)


def schema_of(schema_id: int) -> Record:
    if schema_id == UNFIT:
        return parse_schema({"type": "record", "name": "Other", "fields": [{"name": "x", "type": "long"}]})
    if schema_id == 1:
        return SAMPLE
    raise KeyError(schema_id)


UNFIT, UNKNOWN = 7, 8
BAD_RECORDS = {
    "nothing": (b"", "damaged"),
    "no block": (b"{}", "damaged"),
    "a block cut short": (good_block()[:-3], "damaged"),
    "a changed checksum": (flipped(good_block(), 12), "damaged"),
    "a changed count": (flipped(good_block(), 11), "damaged"),
    "another version": (flipped(good_block(), 1), "damaged"),
    "a schema nobody has": (good_block(schema_id=UNKNOWN), "no_schema"),
    "a schema without the fields": (good_block(schema_id=UNFIT), "no_schema"),
    "a label the spec has not": (good_block(label=LABELS), "label"),
    "a sample of other bytes": (block(BytesColumn.of([b"\xff" * 30]), [1]), "unreadable"),
}


@pytest.mark.slow
@given(
    st.lists(
        st.one_of(BLOCKS.filter(len).map(lambda rows: rows[0]), st.sampled_from(sorted(BAD_RECORDS))),
        max_size=8,
    )
)
@settings(max_examples=examples(30))
def test_block_ends_count_the_good_samples(parts: list[Any]) -> None:
    """A run decodes its batches together: a refused sample must not shift the next batch."""
    good = [0 if isinstance(part, str) else len(part) for part in parts]
    records = [BAD_RECORDS[part][0] if isinstance(part, str) else blocks_of([part])[0] for part in parts]
    refused: list[bytes] = []
    blocks_decoder = BlockDecoder(looking(schema_of), LABELS, refused.extend)

    for _ in range(2):  # the second time the schema is known
        found = blocks_decoder.decode(BytesColumn.of(records))
        assert found.block_ends is not None
        assert found.block_ends.tolist() == np.cumsum(good, dtype=np.int64).tolist()
        assert len(found.sample_ids) == sum(good)


@pytest.mark.parametrize("kind", BAD_RECORDS)
@pytest.mark.parametrize("seen", [False, True])
def test_bad_record_is_refused_alone(kind: str, seen: bool) -> None:
    bad, why = BAD_RECORDS[kind]
    letters: list[bytes] = []
    refused = RefusedSamples(letters.extend, lambda: 0.0)
    blocks_decoder = BlockDecoder(looking(schema_of), LABELS, refused)
    if seen:
        blocks_decoder.decode(BytesColumn.of([good_block()]))
    expected = made().decode(BytesColumn.of([good_block(0), good_block(1)]))
    found = blocks_decoder.decode(
        BytesColumn.of([good_block(0), bad, good_block(1)]), ((3, np.array([10, 20, 30])),)
    )
    same(found, expected)
    assert {reason: n for reason, n in refused.counts().items() if n} == {why: 1}
    (letter,) = map(orjson.loads, letters)
    assert (letter["partition"], letter["offset"], letter["why"]) == (3, 20, why)
    assert letter["reason"]


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("value", [1e18, -0.5, math.nan, math.inf])
def test_label_value_out_of_bounds_is_refused_alone(value: float, seen: bool) -> None:
    letters: list[bytes] = []
    refused = RefusedSamples(letters.extend, lambda: 0.0)
    blocks_decoder = BlockDecoder(looking(schema_of), LABELS, refused, bounds={1: (0.0, 1.0)})
    payloads = oracle.write(SAMPLE, [sample_of()] * 3)
    if seen:
        blocks_decoder.decode(BytesColumn.of([block(payloads, [1, 2, 3])]))
    found = blocks_decoder.decode(
        BytesColumn.of([block(payloads, [1, 2, 3], values=[0.0, value, 1.0])]), ((3, np.array([10])),)
    )
    assert found.label_value.tolist() == [0.0, 1.0]
    assert refused.counts()["label_value"] == 1
    (letter,) = map(orjson.loads, letters)
    assert (letter["partition"], letter["offset"], letter["why"]) == (3, 10, "label_value")
    assert "expected a number from 0 to 1" in letter["reason"]
    other = blocks_decoder.decode(BytesColumn.of([block(payloads, [1, 2, 3], label=0, values=[0, 1e18, 1])]))
    assert len(other.label_value) == 3  # a label without bounds takes any finite number


def test_sample_with_failing_transform_is_refused_alone() -> None:
    inner = decoder()

    class Raises:
        program, decode_usual = inner.program, inner.decode_usual

        def decode(self, payloads: BytesColumn, schema_ids: Any, times: Any) -> Any:
            if 13 in times:
                raise ConfigError("spec", "features.x.dense", "mine", "a function", "it raised ValueError")
            return inner.decode(payloads, schema_ids, times)

    letters: list[bytes] = []
    blocks_decoder = BlockDecoder(Raises(), LABELS, letters.extend)  # type: ignore[arg-type]
    payloads = oracle.write(SAMPLE, [sample_of()] * 3)
    found = blocks_decoder.decode(BytesColumn.of([block(payloads, [12, 13, 14])]), ((0, np.array([5])),))
    assert found.event_times_ms.tolist() == [12, 14]
    assert [(x["offset"], x["index"], x["why"]) for x in map(orjson.loads, letters)] == [(5, 1, "transform")]


def test_unavailable_log_refuses_no_sample() -> None:
    def away(schema_id: int) -> Record:
        raise Unavailable("the log is away")

    letters: list[bytes] = []
    with pytest.raises(Unavailable):
        BlockDecoder(looking(away), LABELS, letters.extend).decode(
            BytesColumn.of([good_block()]), ((0, np.array([5])),)
        )
    assert not letters


def test_schema_registered_later_is_found() -> None:
    known: dict[int, Record] = {}
    letters: list[bytes] = []
    blocks_decoder = BlockDecoder(looking(known.__getitem__), LABELS, letters.extend)
    records, places = BytesColumn.of([good_block()]), ((0, np.array([5])),)
    assert len(blocks_decoder.decode(records, places).sample_ids) == 0
    known[1] = SAMPLE
    assert len(blocks_decoder.decode(records, places).sample_ids) == 1
    assert len(letters) == 1


def test_dead_letter_of_a_large_block_is_short() -> None:
    letters: list[bytes] = []
    damaged = good_block() + bytes(10 * MOST_PAYLOAD_BYTES)
    made(letters).decode(BytesColumn.of([damaged]), ((2, np.array([4])),))
    (letter,) = map(orjson.loads, letters)
    assert letter["size"] == len(damaged)
    assert base64.b64decode(letter["bytes"]) == damaged[:MOST_PAYLOAD_BYTES]


def test_only_consecutive_refusals_end_readiness() -> None:
    letters: list[bytes] = []
    refused = RefusedSamples(letters.extend, lambda: 0.0)
    blocks_decoder = BlockDecoder(decoder(), LABELS, refused)
    bad = block(BytesColumn.of([b"\xff" * 30] * BAD_IN_A_ROW), [1] * BAD_IN_A_ROW)
    blocks_decoder.decode(BytesColumn.of([bad]), ((0, np.array([5])),))
    assert "were all refused" in (refused.trouble() or "")
    blocks_decoder.decode(BytesColumn.of([good_block()]), ((0, np.array([6])),))
    assert refused.trouble() is None


MUTANTS = int(os.environ.get("FRESHET_TEST_POISON", "0")) * 2_000 or 5_000


def mutated(chance: random.Random, seeds: list[bytes]) -> bytes:
    """Draw a good block with changed or missing bytes, often with a corrected checksum."""
    record = bytearray(chance.choice(seeds))
    for _ in range(chance.choice([0, 1, 1, 2, 4])):
        record[chance.randrange(len(record))] = chance.randrange(256)
    if chance.random() < 0.3:
        del record[chance.randrange(len(record) + 1) :]
    if len(record) >= 16 and chance.random() < 0.7:
        record[12:16] = zlib.crc32(record[16:]).to_bytes(4, "little")
    return bytes(record)


@pytest.mark.long
def test_mutated_blocks_raise_no_error() -> None:
    """Each block is decoded, refused as a whole, or refused by samples; the counts add up."""
    chance, letters = random.Random(1), list[bytes]()
    refused = RefusedSamples(letters.extend, lambda: 0.0)
    blocks_decoder = BlockDecoder(looking(schema_of), LABELS, refused)
    seeds = [good_block(0), good_block(1), good_block(schema_id=UNFIT), b"junk"]
    learned = 0
    for start in range(0, MUTANTS, 50):
        letters.clear()
        blocks = BytesColumn.of([mutated(chance, seeds) for _ in range(50)])
        found = blocks_decoder.decode(blocks, ((0, np.arange(start, start + 50)),))
        assert found.columns.size == len(found.sample_ids)
        assert found.label_index.max(initial=0) < LABELS
        told = {orjson.loads(one)["offset"] for one in letters}
        assert len(found.sample_ids) == 50 - len(told), "a block of these holds one sample"
        learned += len(found.sample_ids)
    assert learned > MUTANTS // 20
    assert sum(refused.counts().values()) == MUTANTS - learned
