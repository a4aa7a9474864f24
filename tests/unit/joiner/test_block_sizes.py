"""Blocks never exceed the log's limit for any requests and contexts, and splits lose no sample."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.spec.topics import BLOCK_BYTES, MAX_EXPANDED_BYTES, RecordLimits, block_bytes
from freshet.features.blocks import MAX_SAMPLES, read_blocks
from freshet.joiner.core import ImpressionColumns, Samples, block_bounds, encode_samples
from freshet.joiner.decoder import Refused, SampleSizes
from freshet.types import BytesColumn, Records
from tests.fixtures.join_events import Served, impressions
from tests.fixtures.joiner import limits_for


def samples_of(requests: list[tuple[int, int, int]]) -> Samples:
    """Make samples from (schema, samples, payload bytes of each) of each request."""
    schemas = [s for s, n, _ in requests for _ in range(n)]
    ids = [r for r, (_, n, _) in enumerate(requests) for _ in range(n)]
    payloads = [bytes([i % 251]) * size for i, (_, n, size) in enumerate(requests) for _ in range(n)]
    n = len(schemas)
    return Samples(
        np.arange(n),
        np.arange(n),
        np.array(ids, np.uint64),
        np.zeros(n, np.float32),
        np.ones(n, np.float32),
        np.zeros(n, np.uint8),
        np.array(schemas, np.uint32),
        BytesColumn.of(payloads),
    )


REQUESTS = st.lists(
    st.tuples(st.integers(1, 2), st.integers(1, 700), st.sampled_from([0, 1, 9, 300, 4_000])),
    min_size=1,
    max_size=8,
)


@given(REQUESTS, st.integers(5_000, 60_000))
def test_no_block_exceeds_its_limit_and_none_loses_a_sample(
    requests: list[tuple[int, int, int]], limit: int
) -> None:
    samples = samples_of(requests)
    encoded = encode_samples(samples, limit)

    assert max(len(block) for block in encoded) <= limit
    read = read_blocks(encoded)
    assert read.sample_ids.tolist() == samples.ids.tolist()
    assert list(read.payloads) == list(samples.payloads)
    assert read.schema_ids.tolist() == samples.schemas.tolist()


@given(REQUESTS, st.integers(5_000, 60_000))
def test_a_request_is_split_only_if_it_alone_is_too_large(
    requests: list[tuple[int, int, int]], limit: int
) -> None:
    samples = samples_of(requests)
    starts = [start for start, _ in block_bounds(samples, limit)][1:]

    for start in starts:
        request = int(samples.requests[start])
        if request == int(samples.requests[start - 1]):
            _, n, size = requests[request]
            assert n * (size + 40) + 16 > limit


def test_blocks_of_ordinary_requests_hold_256_samples() -> None:
    ends = [stop - start for start, stop in block_bounds(samples_of([(1, 2, 300)] * 400))]

    assert ends == [MAX_SAMPLES] * 3 + [800 - 3 * MAX_SAMPLES]


@given(st.integers(0, 5_000), st.lists(st.integers(1, 400), max_size=60), st.integers(1, 3))
def test_accepted_events_yield_records_that_fit(context: int, elements: list[int], labels: int) -> None:
    limits = RecordLimits({"served": 4_000}, 4_000 - block_bytes(1, 0), 60_000, 2_000, 2_000, 4_000)
    event = Served("r" * context, tuple("e" * size for size in elements), 7)
    columns = impressions([event])
    refused = Refused()
    kept = SampleSizes(limits, labels).refuse_too_large(columns, records_of(columns), refused)

    sizes = [context + size + len("<||7>") for size in elements]
    fits = all(size <= limits.sample_bytes for size in sizes) and sum(sizes) * labels <= 60_000
    assert len(kept) == (len(elements) if fits else 0)
    assert (refused.rows, refused.too_large) == (([], 0) if fits or not elements else ([0], 1))
    if len(kept):
        payloads = samples_of([(1, 1, size) for size in sizes for _ in range(labels)])
        assert max(map(len, encode_samples(payloads, limits.block_bytes))) <= 4_000


ENVELOPE_BYTES = 64 << 10
"""Limit on a dead letter without the bytes of its record."""


def largest_records(event_bytes: int, key_bytes: int, limits: RecordLimits) -> list[int]:
    """Return the largest records that an event can cause: itself, its block of samples, its dead letters."""
    letter = 4 * -(-event_bytes // 3) + ENVELOPE_BYTES
    return [
        event_bytes + key_bytes,
        max(BLOCK_BYTES, block_bytes(1, event_bytes)),
        min(letter, limits.dead_letter_bytes),
        min(letter, limits.refused_bytes),
    ]


@given(st.integers(1, 1 << 20), st.integers(0, 100))
def test_records_of_an_event_that_fits_fit_their_topics(event: int, key: int) -> None:
    limits = limits_for(1 << 20)
    found = largest_records(event, key, limits)

    if event + key <= limits.event_bytes["served"] and event <= limits.sample_bytes:
        assert max(found) <= 1 << 20


@given(st.integers(1, 32), st.data())
def test_an_event_of_a_safe_length_never_expands_too_far(labels: int, data: st.DataObject) -> None:
    limits = limits_for(16 << 20)
    n = limits.safe_event_bytes(labels)
    context = data.draw(st.integers(0, n))

    assert ((n - context) * context + (n - context)) * labels <= MAX_EXPANDED_BYTES


def records_of(columns: ImpressionColumns) -> Records:
    n = len(columns.offsets)
    return Records(
        columns.offsets, np.zeros(n, np.int64), BytesColumn.of([b""] * n), BytesColumn.of([b""] * n), n
    )
