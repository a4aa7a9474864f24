"""What a rank tells the others survives the way there; what is no offer is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from freshet.errors import Corrupt
from freshet.trainer.ranks import Offer, Offered, read_offer, size_of, vector_check, write_offer
from freshet.types import OffsetRange

PARTITIONS = 8
NUMBER = st.integers(0, 2**60)


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    lanes = draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(-1, lanes - 1), min_size=PARTITIONS, max_size=PARTITIONS))
    brought = draw(st.lists(st.booleans(), min_size=lanes, max_size=lanes))
    told: list[Offered | None] = []
    for lane in range(lanes):
        starts = [draw(NUMBER) for owner in owners if owner == lane]
        partitions = [p for p, owner in enumerate(owners) if owner == lane]
        ranges = [OffsetRange(p, at, at + 1 + at % 7) for p, at in zip(partitions, starts, strict=True)]
        told.append(Offered(tuple(ranges), draw(NUMBER)) if brought[lane] else None)
    flags = [draw(st.booleans()) for _ in range(3)]
    return Offer(draw(NUMBER), draw(st.integers(0, 2**32 - 1)), tuple(told), *flags)


@given(offers())
def test_an_offer_reads_as_it_was_written(offer: Offer) -> None:
    size = size_of(len(offer.lanes), PARTITIONS)

    assert read_offer(write_offer(offer, size)) == offer


@given(arrays.arrays(np.int64, st.integers(0, 40), elements=st.integers(-3, 12) | NUMBER))
def test_any_numbers_are_an_offer_or_are_refused(numbers: np.ndarray) -> None:
    try:
        offer = read_offer(numbers)
    except Corrupt:
        return
    assert read_offer(write_offer(offer, 1000)) == offer


def test_an_offer_with_more_ranges_than_there_are_partitions_is_a_mistake() -> None:
    ranges = tuple(OffsetRange(p, 0, 1) for p in range(3))

    with pytest.raises(ValueError, match="3 ranges"):
        write_offer(Offer(0, 0, (Offered(ranges, 1),)), size_of(1, 2))


def test_the_check_of_a_vector_tells_offsets_and_partitions_apart() -> None:
    checks = {vector_check(v) for v in ({0: 1, 1: 2}, {0: 2, 1: 1}, {0: 1}, {0: 1, 1: 3}, {})}

    assert len(checks) == 5
    assert vector_check({1: 2, 0: 1}) == vector_check({0: 1, 1: 2})
