import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from freshet.rpc.frames import BadFrame, Frame, Kind, Part, decode_frame, encode_frame
from freshet.rpc.indexes import (
    Sections,
    add_owned,
    add_positions,
    add_tables,
    read_owned,
    read_positions,
    read_tables,
)

ARRAYS = st.binary(max_size=40).map(lambda data: np.frombuffer(data, np.uint8))


def sent(sections: Sections) -> Frame:
    return decode_frame(encode_frame(Frame(Kind.BATCH, 1, sections=sections)), max_bytes=1 << 20)


def frame_of(part: Part, array: NDArray[np.generic]) -> Frame:
    return Frame(Kind.BATCH, 1, sections={(part, 0): array})


@given(st.integers(0, 255).flatmap(lambda most: st.lists(st.integers(0, most), max_size=60)))
def test_tables_arrive_as_they_were(ids: list[int]) -> None:
    sections: Sections = {}
    add_tables(sections, 3, np.array(ids, np.uint8))
    np.testing.assert_array_equal(read_tables(sent(sections), 3, len(ids)), np.array(ids, np.uint8))
    assert read_tables(sent(sections), 3, len(ids)).dtype == np.uint8


@pytest.mark.parametrize(
    ("ids", "size"), [([7] * 80, 2), ([0, 1] * 40, 11), ([3, 0] * 40, 21), ([15, 1] * 40, 41)]
)
def test_tables_take_few_bits(ids: list[int], size: int) -> None:
    sections: Sections = {}
    add_tables(sections, 0, np.array(ids, np.uint8))
    assert sections[Part.TABLES, 0].nbytes == size


@given(ARRAYS, st.integers(0, 320))
def test_any_tables_are_read_or_refused(packed: NDArray[np.uint8], rows: int) -> None:
    try:
        found = read_tables(frame_of(Part.TABLES, packed), 0, rows)
    except BadFrame:
        return
    bits = int(packed[0])
    assert found.shape == (rows,)
    assert bits in {0, 1, 2, 4, 8}
    for row in range(rows if bits else 0):
        at = row * bits
        assert found[row] == packed[1 + at // 8] >> at % 8 & (1 << bits) - 1


@given(
    st.integers(1, 70_000).flatmap(lambda rows: st.tuples(st.just(rows), st.lists(st.integers(-1, rows - 1))))
)
def test_positions_arrive_as_they_were(case: tuple[int, list[int]]) -> None:
    rows, positions = case
    sections: Sections = {}
    add_positions(sections, 0, np.array(positions, np.int32), rows)
    assert sections[Part.POSITIONS, 0].itemsize == (2 if rows < 65_536 else 4)
    found = read_positions(sent(sections), 0, rows)
    np.testing.assert_array_equal(found, positions)
    assert found.dtype == np.int32


@given(st.integers(0, 300), ARRAYS)
def test_any_positions_lie_within_the_rows(rows: int, data: NDArray[np.uint8]) -> None:
    short = np.ascontiguousarray(data[: len(data) // 2 * 2]).view(np.uint16)
    try:
        found = read_positions(frame_of(Part.POSITIONS, short), 0, rows)
    except BadFrame:
        assert ((short >= rows) & (short != 65535)).any()
        return
    np.testing.assert_array_equal(np.where(short == 65535, -1, short.astype(np.int64)), found)
    assert (found < rows).all()


def test_positions_of_the_other_width_are_refused() -> None:
    for rows, dtype in ((65_535, np.int32), (65_536, np.uint16)):
        with pytest.raises(BadFrame, match="POSITIONS"):
            read_positions(frame_of(Part.POSITIONS, np.zeros(3, dtype)), 0, rows)


@given(st.integers(1, 9).flatmap(lambda log: st.lists(st.booleans(), min_size=1 << log, max_size=1 << log)))
def test_owned_buckets_arrive_as_they_were(owned: list[bool]) -> None:
    sections: Sections = {}
    add_owned(sections, np.array(owned))
    np.testing.assert_array_equal(read_owned(sent(sections), len(owned)), owned)


@pytest.mark.parametrize(("slices", "size"), [(1, 1), (2, 1), (64, 8), (1024, 128)])
def test_owned_slices_take_a_bit_each(slices: int, size: int) -> None:
    sections: Sections = {}
    add_owned(sections, np.repeat(np.arange(slices) % 2 == 0, 1024 // slices))
    assert sections[Part.OWNED, 0].nbytes == size


@given(ARRAYS, st.integers(1, 12))
def test_any_owned_buckets_are_all_or_refused(packed: NDArray[np.uint8], log: int) -> None:
    try:
        owned = read_owned(frame_of(Part.OWNED, packed), 1 << log)
    except BadFrame:
        assert len(packed) not in {2**n for n in range(10)} or 8 * len(packed) > 1 << log
        return
    assert owned.shape == (1 << log,)
    assert owned.dtype == np.bool_
