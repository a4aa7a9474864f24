"""Messages in pieces: each fits the limit, together they are the message, and others are refused."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import Corrupt, TooLarge
from freshet.rows.grpc.frames import rows_frame
from freshet.rpc.frames import BadFrame, Frame, Kind, LargeFrame, Part, decode_frame, encode_frame
from freshet.rpc.pieces import (
    MAX_PIECES,
    MIN_LIMIT_BYTES,
    MessageAssembler,
    check_message_size,
    split_message,
)
from freshet.tables import KnownPushes
from freshet.wires.codecs import RowCodec
from freshet.wires.row_wire import RowWire

LIMIT = 1 << 20


def a_message(rows: int, width: int = 3, floats: int = 6, frame_id: int = 7) -> bytes:
    """An answer to a lookup with Adam's state."""
    values = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    states = {0: np.ones((rows, floats), np.float32)}
    return rows_frame(frame_id, {0: values}, RowWire(), RowCodec.FP32, states, KnownPushes(np.array([[5]])))


def frames_of(pieces: Sequence[bytes]) -> list[Frame]:
    return [decode_frame(piece, max_bytes=LIMIT) for piece in pieces]


def put_together(whole: MessageAssembler, frames: Sequence[Frame]) -> list[Frame]:
    return [made for frame in frames if (made := whole.add_frame(frame)) is not None]


@given(rows=st.integers(0, 60), floats=st.sampled_from([0, 1, 6]), beside=st.integers(-80, 80))
def test_pieces_of_a_message_assemble_to_the_message(rows, floats, beside):
    data = a_message(rows, floats=floats)
    limit = max(MIN_LIMIT_BYTES, len(data) + beside)
    pieces = list(split_message(data, limit))

    assert max(map(len, pieces)) <= limit
    assert (len(pieces) == 1) == (len(data) <= limit)
    (made,) = put_together(MessageAssembler(len(data)), frames_of(pieces))
    assert (made.kind, made.id) == (Kind.ROWS, 7)
    assert encode_frame(made) == data


@given(rows=st.integers(20, 200), limit=st.integers(MIN_LIMIT_BYTES, 2000))
def test_messages_follow_each_other_in_pieces_of_any_length(rows, limit):
    sent = [a_message(rows, frame_id=1), a_message(0, frame_id=2), a_message(rows + 1, frame_id=3)]
    pieces = [piece for data in sent for piece in split_message(data, limit)]
    assert max(map(len, pieces)) <= limit
    made = put_together(MessageAssembler(LIMIT), frames_of(pieces))
    assert [encode_frame(one) for one in made] == sent


def test_reordered_repeated_or_lost_pieces_are_refused():
    mine = frames_of(list(split_message(a_message(50), 400)))
    other = frames_of(list(split_message(a_message(50, frame_id=8), 400)))
    plain = decode_frame(a_message(1), max_bytes=LIMIT)
    assert len(mine) > 3
    for wrong in (
        [mine[1]],
        [mine[0], mine[2]],
        [mine[0], mine[0]],
        [mine[0], other[1]],
        [mine[0], plain],
        [*mine[:-1], replace(mine[-1], sections={**mine[-1].sections, (Part.BYTES, 0): np.ones(999, "u1")})],
        [replace(mine[0], sections={**mine[0].sections, (Part.BYTES, 0): np.ones(0, "u1")})],
    ):
        with pytest.raises(BadFrame):
            put_together(MessageAssembler(LIMIT), wrong)


def test_an_assembled_message_is_checked_and_is_not_a_piece():
    inner = encode_frame(Frame(Kind.PIECE, 7, sections={(Part.BYTES, 0): np.ones(500, np.uint8)}))
    with pytest.raises(BadFrame, match="hold kind"):
        put_together(MessageAssembler(LIMIT), frames_of(list(split_message(inner, 400))))
    damaged = bytearray(a_message(50))
    damaged[-20] ^= 1
    with pytest.raises(BadFrame, match="checksum"):
        put_together(MessageAssembler(LIMIT), frames_of(list(split_message(bytes(damaged), 400))))


def test_a_too_long_message_is_refused_at_its_first_piece():
    data = a_message(50)
    first = frames_of(list(split_message(data, 400)))[0]
    with pytest.raises(LargeFrame, match=f"at most {len(data) - 1} bytes in pieces, found {len(data)}"):
        MessageAssembler(len(data) - 1).add_frame(first)


def test_a_message_beyond_all_pieces_names_the_setting():
    data = bytes(MAX_PIECES * 400 + 1)
    check_message_size(len(data) - 1, 400)
    with pytest.raises(TooLarge, match=r"FRESHET_GRPC_MAX_MESSAGE_BYTES \(400\) to 401"):
        check_message_size(len(data), 400)


def test_pieces_of_a_discarded_message_are_not_kept():
    whole, frames = MessageAssembler(LIMIT), frames_of(list(split_message(a_message(50), 400)))
    assert whole.add_frame(frames[0]) is None
    whole.discard()
    (last,) = put_together(whole, frames[1:])
    assert (last.kind, last.id, whole.incomplete) == (Kind.PIECE, 7, False)
    (made,) = put_together(whole, frames)
    assert made.kind == Kind.ROWS


def test_a_limit_below_a_header_is_refused():
    with pytest.raises(ValueError, match=f"at least {MIN_LIMIT_BYTES} bytes"):
        list(split_message(a_message(50), MIN_LIMIT_BYTES - 1))


def test_pieces_that_mean_ill_can_do_no_more_than_be_refused():
    chance = random.Random(5)
    good = [frames_of(list(split_message(a_message(n, frame_id=n), 400))) for n in (20, 50)]
    refused = made = 0
    for _ in range(3000):
        whole = MessageAssembler(LIMIT)
        frames = list(chance.choice(good))
        at = chance.randrange(len(frames))
        numbers = frames[at].array(Part.NUMBERS, np.int64, (2,)).copy()
        numbers[chance.randrange(2)] = chance.choice([0, -1, 1, 2**62, chance.randrange(5000)])
        if chance.random() < 0.7:
            frames[at] = replace(frames[at], sections={**frames[at].sections, (Part.NUMBERS, 0): numbers})
        if chance.random() < 0.3:
            chance.shuffle(frames)
        try:
            made += len(put_together(whole, frames))
        except (Corrupt, TooLarge):
            refused += 1
    assert refused > 1000
    assert made > 100
