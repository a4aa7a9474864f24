"""Proposals survive encoding; invalid integers are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from freshet.errors import Corrupt
from freshet.trainer.process_group import (
    Proposal,
    ProposedBatch,
    decode_proposal,
    encode_proposal,
    proposal_size,
    vector_checksum,
)
from freshet.types import OffsetRange

PARTITIONS = 8
NUMBER = st.integers(0, 2**60)


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    lanes = draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(-1, lanes - 1), min_size=PARTITIONS, max_size=PARTITIONS))
    has_batch = draw(st.lists(st.booleans(), min_size=lanes, max_size=lanes))
    proposed: list[ProposedBatch | None] = []
    for lane in range(lanes):
        starts = [draw(NUMBER) for owner in owners if owner == lane]
        partitions = [p for p, owner in enumerate(owners) if owner == lane]
        ranges = [OffsetRange(p, at, at + 1 + at % 7) for p, at in zip(partitions, starts, strict=True)]
        proposed.append(ProposedBatch(tuple(ranges), draw(NUMBER)) if has_batch[lane] else None)
    flags = [draw(st.booleans()) for _ in range(4)]
    return Proposal(draw(NUMBER), draw(st.integers(0, 2**32 - 1)), tuple(proposed), *flags)


@given(proposals())
def test_proposal_survives_encoding(proposal: Proposal) -> None:
    size = proposal_size(len(proposal.lanes), PARTITIONS)

    assert decode_proposal(encode_proposal(proposal, size)) == proposal


@given(arrays.arrays(np.int64, st.integers(0, 40), elements=st.integers(-3, 12) | NUMBER))
def test_any_integers_are_a_proposal_or_are_refused(numbers: np.ndarray) -> None:
    try:
        proposal = decode_proposal(numbers)
    except Corrupt:
        return
    assert decode_proposal(encode_proposal(proposal, 1000)) == proposal


def test_proposal_with_too_many_ranges_is_refused() -> None:
    ranges = tuple(OffsetRange(p, 0, 1) for p in range(3))

    with pytest.raises(ValueError, match="3 ranges"):
        encode_proposal(Proposal(0, 0, (ProposedBatch(ranges, 1),)), proposal_size(1, 2))


def test_checksum_depends_on_offsets_and_partitions() -> None:
    checks = {vector_checksum(v) for v in ({0: 1, 1: 2}, {0: 2, 1: 1}, {0: 1}, {0: 1, 1: 3}, {})}

    assert len(checks) == 5
    assert vector_checksum({1: 2, 0: 1}) == vector_checksum({0: 1, 1: 2})
