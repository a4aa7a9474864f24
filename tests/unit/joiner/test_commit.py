"""Commits, ledgers and block boundaries read back as written."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import Corrupt
from freshet.features import read_blocks
from freshet.joiner.commit import Commit, ReplayExclusions, spans, unspan
from freshet.joiner.core import Joiner, Samples, block_bounds, encode_samples
from freshet.types import BytesColumn
from tests.fixtures.join_events import label, plan_of

COMMIT = Commit(
    next={"served": 7, "action": 9},
    low={"served": 3, "action": 9},
    watermark_ms=1_234,
    clocks={"served": 1_300, "action": 1_234},
    since=41,
    start={"served": 0, "action": 0},
    log_ids={"served": "x"},
    ledger=Joiner(plan_of(label("click"), label("buy"))).ledger(refused=2),
    written_ms=99,
    began_ms=1_001,
    exclusions=ReplayExclusions({"action": [3, 4, 5, 9]}, {"served": [(4, 0), (4, 2)]}),
)


def test_a_commit_reads_back() -> None:
    assert Commit.decode(COMMIT.encode(), "here") == COMMIT


@pytest.mark.parametrize("began", ["1001", 1.5, -(2**60), [], 2**60])
def test_a_beginning_that_is_no_time_is_corrupt(began: object) -> None:
    with pytest.raises(Corrupt, match="a time"):
        Commit.decode(orjson.dumps({**WHOLE, "began_ms": began}), "here")


@given(st.binary(max_size=80))
def test_bytes_that_are_no_commit_are_corrupt(value: bytes) -> None:
    with pytest.raises(Corrupt, match="at 7"):
        Commit.decode(value, "m.joiner[0] at 7")


WHOLE = orjson.loads(COMMIT.encode())


@given(
    st.sampled_from(sorted(WHOLE)),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**53), 2**53)
        | st.text(max_size=3)
        | st.floats(allow_nan=False),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3),
    ),
)
def test_a_damaged_commit_is_corrupt_or_a_commit(field: str, value: object) -> None:
    try:
        Commit.decode(orjson.dumps({**WHOLE, field: value}), "here")
    except Corrupt as error:
        assert "here" in str(error)  # noqa: PT017 - it may also be valid


def test_a_commit_of_another_format_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="format 1"):
        Commit.decode(orjson.dumps({**WHOLE, "v": 2}), "here")


@given(st.sets(st.integers(0, 60)))
def test_offsets_fold_into_spans_and_back(offsets: set[int]) -> None:
    assert unspan(spans(list(offsets))) == sorted(offsets)


def samples(requests: list[int], schemas: list[int]) -> Samples:
    n = len(requests)
    return Samples(
        ids=np.arange(n),
        times_ms=np.arange(n) * 10,
        requests=np.array(requests, np.uint64),
        values=np.linspace(0, 1, n, dtype=np.float32),
        weights=np.ones(n, np.float32),
        labels=np.zeros(n, np.uint8),
        schemas=np.array(schemas, np.uint32),
        payloads=BytesColumn.of(f"payload {i}".encode() for i in range(n)),
    )


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 2)), max_size=12))
def test_blocks_hold_one_schema_and_never_split_a_request(runs: list[tuple[int, int]]) -> None:
    requests = [r for r, (n, _) in enumerate(runs) for _ in range(n)]
    schemas = [schema for n, schema in runs for _ in range(n)]
    made = samples(requests, schemas)
    cut = list(block_bounds(made))

    assert [start for start, _ in cut] == [0, *(stop for _, stop in cut)][: len(cut)]
    assert (cut[-1][1] if cut else 0) == len(requests)
    for start, stop in cut:
        assert len(set(schemas[start:stop])) == 1
        assert stop - start <= 256 or len(set(requests[start:stop])) == 1
        assert stop == len(requests) or requests[stop - 1] != requests[stop]
    read = read_blocks(encode_samples(made))
    assert list(read.payloads) == list(made.payloads)
    assert read.schema_ids.tolist() == schemas
    assert read.sample_ids.tolist() == made.ids.tolist()
